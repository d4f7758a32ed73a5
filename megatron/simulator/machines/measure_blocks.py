# SPDX-License-Identifier: Apache-2.0
"""Measures the block sizes of the Triton attention kernels: each pass of causal attention with each candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch

from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Call, Launch, interpreted
from megatron.context_parallel.layout.masks import Causal
from megatron.context_parallel.layout.tiles import Tiles, tiles
from megatron.decisions.block_sizes import Blocks, Pass, blocks

HEADS = (64, 128, 256)
# Small sets, because each candidate is compiled for each head size; the sizes in use today are added to them.
CANDIDATES: dict[Pass, list[Blocks]] = {
    "forward": [
        Blocks(block, step, warps, stages, ahead=ahead)
        for block, step, warps, stages, ahead in product((64, 128), (32, 64), (4, 8), (2, 3), (False, True))
    ],
    "queries": [
        Blocks(block, step, warps, stages)
        for block, step, warps, stages in product((64, 128), (32, 64), (4, 8), (1, 2))
    ],
    "keys": [
        Blocks(block, step, warps, 2, split=split)
        for block, step, warps, split in product((64, 128), (32, 64), (4, 8), (False, True))
    ],
}


def best_blocks(
    candidates: Mapping[Pass, Sequence[Blocks]],
    timer: Callable[[list[Launch]], float],
    device: torch.device,
    *,
    heads: Sequence[int] = HEADS,
    length: int = 8192,
    count: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    advance: Callable[[str], None] = lambda text: None,
) -> dict[Pass, dict[int, Blocks]]:
    """The fastest candidate of each pass for each head size; never slower than the sizes in use without measurements.

    Args:
        timer: seconds of some launches; a candidate for which it raises Triton's error is left out.
        heads: head sizes.
        length, count: tokens and heads of the attention that is timed.
        advance: is told what comes next.
    """
    capability = None
    if not interpreted():
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
    table: dict[Pass, dict[int, Blocks]] = {which: {} for which in candidates}
    whole = tiles(((0, length),), ((0, length),), Causal())
    for head, which in product(heads, candidates):
        advance(f"blocks of {which}, heads of {head}")
        today = blocks(which, dtype.itemsize, head, capability)
        each = dict.fromkeys([today, *candidates[which]])
        q, k, v, dout = (torch.randn(length, 1, count, head, device=device).to(dtype) for _ in range(4))
        seconds = {}
        for sizes in each:
            call = Call(q, k, v, head**-0.5, measured={which: {head: sizes}})
            seconds[sizes] = _seconds(call, which, whole, dout, timer)
        table[which][head] = min(seconds, key=seconds.__getitem__)
    return table


def _seconds(
    call: Call, which: Pass, whole: Tiles, dout: torch.Tensor, timer: Callable[[list[Launch]], float]
) -> float:
    """Seconds of one pass; infinite if the kernel needs more registers or shared memory than the GPU has."""
    from triton.errors import TritonError

    rows, wide = call.q.shape[:3], {"dtype": torch.float32, "device": call.q.device}
    out, lse = torch.zeros(call.q.shape, **wide), torch.zeros(rows, **wide)
    try:
        if which == "forward":
            return timer([call.forward(whole, out, lse)])
        sums = [torch.zeros(x.shape, **wide) for x in (call.q, call.k, call.v)]
        queries, *keys = call.backward(whole, dout, lse, torch.zeros_like(lse), *sums)
        if which == "queries":
            return timer([queries])
        queries.run()  # prepares lse and delta for the others
        return timer(keys)
    except TritonError:
        return float("inf")
