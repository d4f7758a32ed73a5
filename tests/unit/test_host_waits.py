# SPDX-License-Identifier: Apache-2.0
"""Nothing in a layer makes the host wait for a GPU: on a device without memory, no copy that waits, no number read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import megatron.context_parallel as cp
from megatron.context_parallel.attention import ulysses
from megatron.context_parallel.layout.grid import Axis, abstract_grid
from megatron.context_parallel.positions.position_dropout import drop
from megatron.context_parallel.positions.rope import LayoutRotaryEmbedding, Rope

LENGTH = 192
ENDS = (20, 90, 150, LENGTH)
META = torch.device("meta")
COPIES = ("to", "cuda", "copy_", "__setitem__")
READS = ("item", "tolist", "numpy", "__int__", "__bool__", "__float__", "__index__", "nonzero", "masked_select")


class Waits(TorchFunctionMode):
    """Collects calls for which a GPU's host would wait. ``meta`` tensors, which have no memory, stand for a GPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        result = function(*args, **kwargs)
        there = [x.device.type for x in args if isinstance(x, Tensor)]
        made_on_the_host = name in ("tensor", "as_tensor") and result.device.type == "meta"
        copied = name in COPIES and "cpu" in there and not kwargs.get("non_blocking")
        copied = copied and "meta" in (*there[1:], getattr(getattr(result, "device", None), "type", None), there[0])
        if made_on_the_host or copied or (name in READS and "meta" in there):
            self.found.append(name)
        return result


@pytest.mark.parametrize("bad", [lambda x: torch.tensor([1], device=META), lambda x: torch.ones(1).to(META)])
def test_a_wait_is_found(bad):
    with Waits() as waits:
        bad(torch.empty(3, device=META))
    assert waits.found


MASKS = {
    "window": cp.Window(50, 3, 2),
    "narrow window in documents": cp.Documents(ENDS, cp.Window(5)),
    "function in documents": cp.Documents(ENDS, cp.MaskFunction(lambda q, k: (q + k) % 3 == 0)),
    "function around documents": cp.MaskFunction(lambda q, k: (q + k) % 3 == 0, cp.Documents(ENDS)),
    "function in blocks": cp.BlockSparse(16, cp.LongformerBlocks(1), LENGTH, cp.MaskFunction(lambda q, k: q != k)),
}


@pytest.mark.parametrize("threshold", [8, 2**20])
@pytest.mark.parametrize("mask", MASKS)
def test_attention(mask, threshold):
    """With slopes from host memory, dropout and sinks, forward and backward."""
    layout = cp.SequenceLayout(LENGTH, abstract_grid())
    q, k, v = (torch.empty(LENGTH, 2, heads, 8, device=META).requires_grad_() for heads in (4, 2, 2))
    sinks = torch.empty(4, device=META).requires_grad_()
    options = {"mask": MASKS[mask], "alibi_slopes": cp.alibi_slopes(4), "softcap": 5.0, "sinks": sinks}
    options |= {"dropout": cp.Dropout(0.1, seed=3, samples=(0, 1)), "mask_cpu_threshold": threshold}
    with Waits() as waits:
        out = cp.attention(q, k, v, layout=layout, kernel="math", **options)
        grads = torch.autograd.grad(out, (q, k, v, sinks), torch.empty_like(out))
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v, sinks)] and not waits.found


def test_key_heads_in_the_all_to_all(monkeypatch):
    monkeypatch.setattr(ulysses.dist, "all_to_all_single", lambda *_, **__: None)
    q, k, v = (torch.empty(16, 1, heads, 8, device=META) for heads in (12, 6, 6))  # 3 heads a rank, groups of 2
    axis = Axis(4, 1)
    with Waits() as waits:
        found = ulysses.sequence_to_heads(q, k, v, axis)
        grads = ulysses.sequence_to_heads_grad(*found, axis, heads=12, kv_heads=6)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)] and not waits.found


def test_dropout_of_hidden_states_and_rotary_angles():
    layout = cp.SequenceLayout(LENGTH, abstract_grid())
    rotary = LayoutRotaryEmbedding(Rope(8), layout, META, restarts=True)
    x = torch.empty(LENGTH, 1, 16, device=META).requires_grad_()
    with Waits() as waits:
        y = drop(x, cp.Dropout(0.1, seed=3), layout.positions)
        torch.autograd.grad(y, x, torch.empty_like(y))
        rotary.angles([ENDS])
        rotary.of_spans(layout.local_spans, ENDS)
    assert not waits.found
