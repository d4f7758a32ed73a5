# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel, interpreted, under every mask, scheme and backend of `test_mask_attention.py`."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.distributed.test_mask_attention import BACKENDS, SCHEMES, compare_schemes, ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# Where kinds of tiles, of sums and of positions meet.
USUAL = {
    "one process": ["all of these, window 50", "function both ways"],
    "Ring contiguous": ["window and global", "half sees nothing"],
    "USP beside TP": ["sinks, documents", "wide values, full"],
    "USP gathered": ["dropout, documents"],
    "FPDT": ["dropout and ALiBi, window both sides", "soft-cap, function"],
    "FPDT, USP": ["all of these, window 50", "documents and window"],
}


@pytest.mark.parametrize("backend", USUAL)
def test_float32_matches_dense_attention(pool, backend):
    check(pool.run(compare_schemes, ranks(backend), USUAL[backend], backend, "triton", torch.float32, timeout=120))


@pytest.mark.full
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_scheme(pool, backend, scheme):
    check(pool.run(compare_schemes, ranks(backend), [scheme], backend, "triton", torch.float32, timeout=120))


def check(found):
    worst = {scheme: max(max(rank[scheme]) for rank in found) for scheme in found[0]}
    assert max(worst.values()) < 2e-5, worst
