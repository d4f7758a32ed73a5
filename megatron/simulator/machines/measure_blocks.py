# SPDX-License-Identifier: Apache-2.0
"""Measures the block sizes of the Triton attention kernels: each pass of causal attention with each candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch

from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Call, Launch, interpreted
from megatron.context_parallel.layout.masks import Causal
from megatron.context_parallel.layout.tiles import Tiles, tiles
from megatron.decisions.block_sizes import SPECIAL_HEAD, Blocks, Pass, blocks

HEADS = (64, 128, 256)
# Small sets, because each candidate is compiled for each head size; the sizes in use today are added to them. On an
# H200 programs of 64 rows were fastest with 4 warps, and those of 128 rows with 8.
CANDIDATES: dict[Pass, list[Blocks]] = {
    "forward": [
        Blocks(block, step, block // 16, stages)
        for block, step, stages in (*product((64, 128), (32, 64), (2, 3)), (128, 128, 2), (128, 128, 3))
    ],
    "queries": [
        *(
            Blocks(block, step, block // 16, stages)
            for block, step, stages in (*product((64, 128), (32, 64), (2, 3)), (128, 128, 2))
        ),
        Blocks(128, 64, 8, 3, described=True),
    ],
    "keys": [
        *(
            Blocks(block, step, block // 16, stages, split=split)
            for block, step, stages, split in product((64, 128), (32, 64), (2, 3), (False, True))
        ),
        Blocks(128, 64, 8, 3, described=True),
    ],
    "backward": [
        Blocks(block, step, block // 16, stages) for block, step, stages in product((64, 128), (32, 64), (1, 2, 3))
    ],
    "plain": [Blocks(128, 64, 4, 3), Blocks(128, 128, 4, 2)],
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

    One pass for all gradients, and plain ranges by their own kernel, have sizes only where they are faster.

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
    fastest: dict[tuple[Pass, int], float] = {}
    whole = tiles(((0, length),), ((0, length),), Causal())
    for head, which in product(heads, candidates):
        advance(f"blocks of {which}, heads of {head}")
        if which in ("backward", "plain") and head > SPECIAL_HEAD:
            continue
        today = [] if which == "plain" else [blocks(which, dtype.itemsize, head, capability)]
        each = dict.fromkeys([*today, *candidates[which]])
        q, k, v, dout = (torch.randn(length, 1, count, head, device=device).to(dtype) for _ in range(4))
        seconds = {}
        for sizes in each:
            call = Call(q, k, v, head**-0.5, fixed={which: sizes})
            seconds[sizes] = _seconds(call, which, whole, dout, timer)
        table[which][head] = min(seconds, key=seconds.__getitem__)
        fastest[which, head] = min(seconds.values())
        others: dict[Pass, tuple[Pass, ...]] = {"backward": ("queries", "keys"), "plain": ("forward",)}
        if which in others and fastest[which, head] >= sum(fastest[other, head] for other in others[which]):
            del table[which][head]
    return table


def _seconds(
    call: Call, which: Pass, whole: Tiles, dout: torch.Tensor, timer: Callable[[list[Launch]], float]
) -> float:
    """Seconds of one pass; infinite if the kernel does not compile or needs more memory than the GPU has."""
    from triton.errors import TritonError

    rows, wide = call.q.shape[:3], {"dtype": torch.float32, "device": call.q.device}
    out, lse = torch.zeros(call.q.shape, **wide), torch.zeros(rows, **wide)
    try:
        if which == "forward":
            return timer([call.forward(whole, out, lse)])
        if which == "plain":
            return timer(call.forward_launches(whole, out, lse)) if call.specialised(whole) else float("inf")
        sums = [torch.zeros(x.shape, **wide) for x in (call.q, call.k, call.v)]
        queries, *keys = launches = call.backward(whole, dout, lse, torch.zeros_like(lse), *sums)
        if which == "backward":
            return timer(launches)
        if which == "queries":
            return timer([queries])
        queries.run()  # prepares lse and delta for the others
        return timer(keys)
    except (TritonError, RuntimeError) as error:
        if isinstance(error, TritonError) or "PassManager" in str(error):  # the compiler failed
            return float("inf")
        raise
