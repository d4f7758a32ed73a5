# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank sends in a step, by axis of the grid, if each piece goes the shortest way.

Left out: scalars, such as the loss and the gradient norm.
"""

from __future__ import annotations

from functools import lru_cache

from megatron.context_parallel.attention.ring_plan import ring_plan
from megatron.context_parallel.attention.ulysses import head_plan
from megatron.context_parallel.layout.grid import Axis, Grid
from megatron.context_parallel.layout.masks import Causal, Full
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.tiles import count
from megatron.formulas.chunks import chunks_of
from megatron.formulas.parameters import model_states, numel, stage_parameters
from megatron.formulas.sizes import WIDE, sizes_of
from megatron.formulas.strategy import Strategy, Workload


@lru_cache(maxsize=65536)
def _sent(workload: Workload, strategy: Strategy, itemsize: int, stage: int) -> tuple[tuple[str, int], ...]:
    parts = {
        "tp": _tensor(workload, strategy, itemsize, stage),
        "ulysses": _ulysses(workload, strategy, itemsize),
        "ring": _ring(workload, strategy, itemsize),
        "dp": _data(workload, strategy, itemsize, stage),
        "pp": _pipeline(workload, strategy, itemsize, stage),
    }
    return tuple(parts.items())


def sent_bytes(workload: Workload, strategy: Strategy, itemsize: int = 2, *, stage: int = 0) -> dict[str, int]:
    """By axis: ``tp``, ``ulysses``, ``ring``, ``dp`` (DP x CP) and ``pp``.

    Args:
        itemsize: bytes of the compute dtype.
        stage: pipeline stage. Of Ulysses ranks it is the first, of a ring the one that sends most.
    """
    return dict(_sent(workload, strategy, itemsize, stage))


def _micro_batches(workload: Workload, strategy: Strategy) -> int:
    return max(strategy.micro_batches(workload), 1)


def _passes(strategy: Strategy, ffn_chunks: int) -> tuple[int, int, int]:
    """How often in a micro-batch the forward pass of (QKV projection, output projection, FFN) runs."""
    full = strategy.recompute == "full"
    if strategy.fpdt_chunk:  # backward computes each piece again; the whole unit before, or attention alone
        unit = full and strategy.recompute_layers > 1
        return 2 + full, 2 + unit, 2 + unit
    return 1 + full, 1 + full, 1 + full + bool(ffn_chunks)


def _tensor(workload: Workload, strategy: Strategy, itemsize: int, stage: int) -> int:
    """All-gathers and reduce-scatters, each (T-1)/T of the gathered hidden states; without TP-sp all-reduces."""
    tensor, shape = strategy.tensor, workload.shape
    if tensor == 1:
        return 0
    sizes, chunks = sizes_of(workload, strategy, itemsize), chunks_of(workload, strategy)
    split = strategy.sequence_parallel
    held = stage_parameters(shape, tensor, strategy.pipeline, stage)
    qkv, out, ffn = _passes(strategy, chunks.ffn)
    one = sizes.whole * (tensor - 1) // tensor
    if split:  # forward: gather, scatter; backward: the same mirrored, and the input gathered for the weight's gradient
        layer = one * (qkv + out + 2 * ffn + 6)
    else:  # forward: after both row-parallel matrices; backward: after both column-parallel ones
        layer = 2 * one * (out + ffn + 2)
    if shape.kv_heads < tensor:
        layer += (qkv + 1) * sizes.qkv * (tensor - 1) // tensor
    total = held.layers * layer
    first, last = stage == 0, stage == strategy.pipeline - 1
    if first:
        total += 2 * one
    if last:
        scalars = 2 * 3 * WIDE * (sizes.whole // (shape.hidden * itemsize)) * (tensor - 1) // tensor
        if split:
            total += (2 if chunks.loss else 3) * one + scalars
        else:
            total += 2 * one + scalars
    total *= _micro_batches(workload, strategy)
    if split:  # gradients of what every TP rank applies to tokens of its own: norms, biases after row-parallel matrices
        vectors = sum(rows for rows, columns in held.layer if columns == 1 and rows == shape.hidden) * held.layers
        if last:
            vectors += numel(tuple(x for x in held.final if x[1] == 1))
        total += 2 * WIDE * vectors * (tensor - 1) // tensor
    return total


def _ulysses(workload: Workload, strategy: Strategy, itemsize: int) -> int:
    """All-to-alls of queries, keys and values in one, and of outputs, there and back."""
    ranks, shape = strategy.ulysses, workload.shape
    if ranks == 1:
        return 0
    heads, kv_heads = shape.heads // strategy.tensor, max(shape.kv_heads // strategy.tensor, 1)
    plan = head_plan(heads, kv_heads, ranks)
    token = workload.seq_length // strategy.context * strategy.micro_batch * shape.head_dim * itemsize
    outputs = token * plan.q_heads * (ranks - 1)
    there = outputs + 2 * token * sum(map(len, plan.kv_heads[1:]))
    back = outputs + 2 * token * (ranks - 1) * len(plan.kv_heads[0])
    if strategy.fpdt_chunk:
        unit = strategy.recompute == "full" and strategy.recompute_layers > 1
        layer = there * (1 + (strategy.recompute == "full")) + back + outputs * (3 + unit)
    else:
        again = strategy.recompute != "none"
        layer = there * (1 + again) + back + outputs * (2 + again)
    return layer * (shape.layers // strategy.pipeline) * _micro_batches(workload, strategy)


@lru_cache(maxsize=1024)
def _ring_rows(seq_length: int, ring: int, unit: int, balance: str, chunks: int, causal: bool) -> tuple[int, int]:
    """Rows of (keys, their gradients) that the busiest ring rank sends in a pass."""
    ranks = range(ring) if ring <= 8 else (0, ring // 2, ring - 2, ring - 1)
    found = []
    for rank in ranks:
        grid = Grid(ulysses=Axis(unit), ring=Axis(ring, rank), context=Axis(unit * ring))
        layout = SequenceLayout(seq_length, grid, balance, chunks=chunks)
        mask = Causal() if causal else Full()
        plans = [ring_plan(layout, mask, chunk=chunk if chunks > 1 else None) for chunk in range(chunks)]
        hops = [hop for plan in plans for hop in plan.hops]
        found.append((sum(count(hop.forward) for hop in hops), sum(count(hop.grads_out) for hop in hops)))
    return max(found)


def _ring(workload: Workload, strategy: Strategy, itemsize: int) -> int:
    """Keys and values that travel on, once a pass; in the backward pass with their fp32 gradients."""
    if strategy.ring == 1:
        return 0
    shape, chunks = workload.shape, chunks_of(workload, strategy)
    keys, grads = _ring_rows(
        workload.seq_length,
        strategy.ring,
        strategy.ulysses,
        strategy.balance,
        chunks.attention if strategy.fpdt_chunk else 1,
        workload.causal,
    )
    plan = head_plan(shape.heads // strategy.tensor, max(shape.kv_heads // strategy.tensor, 1), strategy.ulysses)
    row = 2 * len(plan.kv_index[0]) * shape.head_dim * strategy.micro_batch
    passes = 2 + (strategy.recompute != "none")
    layer = row * (passes * keys * itemsize + grads * WIDE)
    return layer * (shape.layers // strategy.pipeline) * _micro_batches(workload, strategy)


def _data(workload: Workload, strategy: Strategy, itemsize: int, stage: int) -> int:
    """Gradients, in fp32, summed once a step; ZeRO 1 gathers new weights; FSDP does both for each micro-batch."""
    ranks = strategy.group("dp").size
    if ranks == 1:
        return 0
    held = stage_parameters(workload.shape, strategy.tensor, strategy.pipeline, stage)
    if strategy.zero < 2:
        states = model_states(held, strategy.zero, ranks, itemsize, bucketed=strategy.overlap_grad_reduce)
        sent = 2 * states.gradients if strategy.zero == 0 else states.gradients + states.parameters
        return sent * (ranks - 1) // ranks
    layers = 2 if strategy.zero == 3 else 1

    def padded(tensors: tuple[tuple[int, int], ...]) -> int:
        return sum(-(-rows // ranks) * columns for rows, columns in tensors)

    everything, layer = padded(held.tensors), padded(held.layer) * held.layers
    sent = itemsize * (everything + (layers - 1) * layer) + WIDE * everything
    return sent * (ranks - 1) * _micro_batches(workload, strategy)


def _pipeline(workload: Workload, strategy: Strategy, itemsize: int, stage: int) -> int:
    """Hidden states to the next stage, their gradients to the one before."""
    stages, virtual = strategy.pipeline, strategy.virtual
    if stages == 1:
        return 0
    there = virtual - (stage == stages - 1)
    back = virtual - (stage == 0)
    hidden = sizes_of(workload, strategy, itemsize).hidden
    total = (there + back) * hidden * _micro_batches(workload, strategy)
    if workload.shape.tied and stage in (0, stages - 1):  # first and last stage add up their embedding's gradient
        total += WIDE * numel(stage_parameters(workload.shape, strategy.tensor, stages, 0).embedding[:1])
    return total
