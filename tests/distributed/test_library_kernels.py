# SPDX-License-Identifier: Apache-2.0
"""Kernels of libraries that take all tiles in one call, by their stand-ins, on grids against dense attention."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megatron.context_parallel.attention.kernels.interval_kernels import flash_attn_4_kernel
from tests.distributed.test_mask_attention import BACKENDS, MASKS, SCHEMES, compare, make_layout, ranks
from tests.errors import worst
from tests.library_stand_ins import FlexPlan, create_mask_plan, cudnn_flex_stand_in, flash_attn_4_stand_in
from tests.pairs import also_in_full

FLEX = [
    name for name, (_, extra) in SCHEMES.items()
    if not any(word in extra for word in ("ALiBi", "dropout", "soft-cap"))
]  # fmt: skip

FLASH_4 = [  # without masks of pairs, and windows that are too narrow for tiles
    name for name, (mask, extra) in SCHEMES.items()
    if not any(word in extra for word in ("ALiBi", "dropout")) and not MASKS[mask].fine
]  # fmt: skip


def shifted(mask_func: torch.Tensor, *args, **options) -> FlexPlan:
    """A mistake: the last interval of each query ends one key too early."""
    end = (mask_func[:, -1:] - 1).clamp(min=0)
    end = end if mask_func.size(1) == 1 else torch.maximum(end, mask_func[:, -2:-1])
    return create_mask_plan(torch.cat((mask_func[:, :-1], end), dim=1), *args, **options)


def compare_by_cudnn_flex(schemes, backend, **changed):
    with cudnn_flex_stand_in(**changed) as calls:
        errors = compared(schemes, backend, "cudnn_flex")
    assert {"plan", "forward", "backward"} <= set(calls)
    return errors


def compare_by_flash_attn_4(schemes, backend, most=8, **changed):
    with flash_attn_4_stand_in(**changed) as calls, patch.object(flash_attn_4_kernel, "MOST", most):
        errors = compared(schemes, backend, "flash_attn_4")
    return errors, set(calls)


def compared(schemes, backend, kernel):
    options = {"batch": 2, "layout": make_layout(backend), "gather": "gathered" in backend}
    return {scheme: compare(scheme, backend, kernel, torch.float64, **options) for scheme in schemes}


@pytest.mark.parametrize("backend", ["Ring", "FPDT, USP", *also_in_full(*BACKENDS)])
@pytest.mark.usual(1)
def test_cudnn_flex_on_grids(pool, backend, request):
    few = ["causal", "window and global", "documents", "bigbird both ways", "half sees nothing", "sinks, window 20"]
    schemes = FLEX if request.config.getoption("--full") else few
    result = pool.run(compare_by_cudnn_flex, ranks(backend), schemes, backend, timeout=240)
    errors = {scheme: worst(rank[scheme] for rank in result) for scheme in schemes}
    assert worst(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("backend", ["one process", "USP with TP", *also_in_full(*BACKENDS)])
@pytest.mark.usual(1)
def test_flash_attn_4_on_grids(pool, backend, request):
    few = ["causal", "window 50", "documents", "documents and window", "strided", "soft-cap, window 50"]
    schemes = FLASH_4 if request.config.getoption("--full") else few
    result = pool.run(compare_by_flash_attn_4, ranks(backend), schemes, backend, 2, timeout=240)
    errors = {scheme: worst(rank[0][scheme] for rank in result) for scheme in schemes}
    assert worst(errors.values()) < 1e-10, errors
    ways = set.union(*(calls for _, calls in result))
    assert ways | {"documents"} == {"window", "documents", "function"}
    assert "documents" in ways or "gathered" in backend  # a document's gathered keys are not next to each other


def test_a_wrong_interval_is_seen(pool):
    assert worst(rank["window 50"] for rank in pool.run(compare_with_shifted, 4)) > 1e-2


def compare_with_shifted():
    return compare_by_cudnn_flex(["window 50"], "Ring", plan=shifted)


def test_a_function_of_too_few_intervals_is_seen(pool):
    errors = [rank[0]["strided"] for rank in pool.run(compare_with_one_interval, 1)]
    assert worst(errors) > 1e-2


def compare_with_one_interval():
    def first_alone(ends):
        return lambda batch, head, query, key, lengths, tables: key < tables[0][:1, query].squeeze(0)

    with patch("tests.library_stand_ins.in_blocks", lambda lists, seen, by_keys: seen):
        return compare_by_flash_attn_4(["strided"], "one process", interval_mask=first_alone)
