# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel, interpreted, under every mask, scheme and backend of `test_mask_attention.py`."""

from __future__ import annotations

import importlib.util
from unittest.mock import patch

import pytest
import torch

import megatron.context_parallel as cp
from megatron.context_parallel.positions.position_dropout import Dropout, TileDropout
from megatron.decisions import block_sizes
from tests.distributed.test_mask_attention import (
    BACKENDS,
    COMBINED,
    LENGTH,
    MASKS,
    SCHEMES,
    SIZE,
    chunked,
    compare,
    make_layout,
    ranks,
)
from tests.errors import worst
from tests.pairs import also_in_full

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

EVERY_SCHEME_ON = ("one process", "Ring", "FPDT, USP")
# Cases that combine kinds of tiles, sums and positions.
USUAL = {
    "one process": ["wide values, full"],
    "Ring": ["all of these, window 50"],
    "FPDT, USP": ["dropout, documents"],
}


def compare_interpreted(schemes, backend):
    """Compare with large blocks, which take the interpreter fewer steps; test_triton.py tests small ones."""
    layout, gather = make_layout(backend), "gathered" in backend
    options = {"batch": 1, "layout": layout, "gather": gather}
    with patch.object(block_sizes, "INTERPRETED", block_sizes.Blocks(64, 64)):
        return {scheme: compare(scheme, backend, "triton", torch.float32, **options) for scheme in schemes}


def check(pool, backend, schemes):
    result = pool.run(compare_interpreted, ranks(backend), schemes, backend, timeout=240)
    errors = {scheme: worst(rank[scheme] for rank in result) for scheme in schemes}
    assert worst(errors.values()) < 2e-5, errors


@pytest.mark.parametrize("backend", ["Ring", *also_in_full("one process", "FPDT, USP")])
def test_float32_matches_dense_attention(pool, backend):
    check(pool, backend, USUAL[backend])


@pytest.mark.full
@pytest.mark.parametrize("fifth", range(5))
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_scheme(pool, backend, fifth):
    """Some schemes per job; all of them on grids with all kinds of tiles, as in test_mask_attention.py."""
    schemes = SCHEMES if backend in EVERY_SCHEME_ON else (*MASKS, *COMBINED)
    check(pool, backend, list(schemes)[fifth::5])


DROPOUT = Dropout(0.3, seed=11, stream=4, samples=(6,))


def kept(backend):
    """The weights that dropout keeps, [queries, heads, keys]: all scores are equal, and a key's value is its number."""
    layout = make_layout(backend)
    q = k = torch.zeros(LENGTH, 1, 4, SIZE)
    v = torch.eye(LENGTH)[:, None, None].expand(LENGTH, 1, 4, LENGTH)
    local = [layout.shard(x).requires_grad_() for x in (q, k, v)]
    rule = {"kernel": "triton", "dropout": DROPOUT}
    with patch.object(block_sizes, "INTERPRETED", block_sizes.Blocks(64, 64)), torch.no_grad():
        if layout.chunks > 1:
            out = chunked(*local, layout, cp.AttentionRule(cp.Full(), **rule))
        else:
            out = cp.attention(*local, layout=layout, mask=cp.Full(), **rule)
        return layout.gather(out)[:, 0] > 0.5 / LENGTH


@pytest.mark.parametrize("backend", ["one process", "Ulysses", "Ring", *also_in_full("FPDT, USP")])
@pytest.mark.usual(0)
def test_dropout_draws_the_same_bits_everywhere(pool, backend):
    spans = ((0, LENGTH),)
    expected = TileDropout(DROPOUT, 4, spans, spans, torch.device("cpu")).rows(0, LENGTH, LENGTH)[0].transpose(0, 1)
    assert abs(expected.float().mean() - 0.7) < 0.01
    for rank in pool.run(kept, ranks(backend), backend):
        assert torch.equal(rank, expected.bool())
