# SPDX-License-Identifier: Apache-2.0
"""Kernels of libraries that take all tiles in one call, by their stand-ins, on grids against dense attention."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_mask_attention import BACKENDS, SCHEMES, compare, make_layout, ranks
from tests.errors import worst
from tests.library_stand_ins import FlexPlan, create_mask_plan, cudnn_flex_stand_in
from tests.pairs import also_in_full

FLEX = [
    name for name, (_, extra) in SCHEMES.items()
    if not any(word in extra for word in ("ALiBi", "dropout", "soft-cap"))
]  # fmt: skip


def shifted(mask_func: torch.Tensor, *args, **options) -> FlexPlan:
    """A mistake: the last end of each query is one key too early."""
    return create_mask_plan(
        torch.cat((mask_func[:, :-1], (mask_func[:, -1:] - 1).clamp(min=0)), dim=1), *args, **options
    )


def compare_by_cudnn_flex(schemes, backend, **changed):
    options = {"batch": 2, "layout": make_layout(backend), "gather": "gathered" in backend}
    with cudnn_flex_stand_in(**changed) as calls:
        errors = {scheme: compare(scheme, backend, "cudnn_flex", torch.float64, **options) for scheme in schemes}
    assert {"plan", "forward", "backward"} <= set(calls)
    return errors


@pytest.mark.parametrize("backend", ["Ring", "FPDT, USP", *also_in_full(*BACKENDS)])
@pytest.mark.usual(0, 1)
def test_cudnn_flex_on_grids(pool, backend, request):
    few = ["causal", "window and global", "documents", "bigbird both ways", "half sees nothing", "sinks, window 20"]
    schemes = FLEX if request.config.getoption("--full") else few
    result = pool.run(compare_by_cudnn_flex, ranks(backend), schemes, backend, timeout=240)
    errors = {scheme: worst(rank[scheme] for rank in result) for scheme in schemes}
    assert worst(errors.values()) < 1e-10, errors


def test_a_wrong_interval_is_seen(pool):
    result = pool.run(compare_with_shifted, 4)
    assert worst(rank["window 50"] for rank in result) > 1e-2


def compare_with_shifted():
    return compare_by_cudnn_flex(["window 50"], "Ring", plan=shifted)
