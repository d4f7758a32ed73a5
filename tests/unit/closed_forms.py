# SPDX-License-Identifier: Apache-2.0
"""Closed forms that only tests need: bytes sent and copied, the busiest rank's share, numbers of parameters.

The program and the simulator compute these numbers in other ways; tests compare them with the forms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.decisions.division import goes_by_keys, head_plan
from megatron.formulas.flops import passes_of
from megatron.formulas.host_bytes import forward_loads
from megatron.formulas.kinds.expert_figures import dispatched
from megatron.formulas.kinds.state_figures import by_heads_bytes, exchange_bytes, halo_bytes, states_of
from megatron.formulas.parameters import (
    StageParameters,
    model_states,
    numel,
    rank_parameters,
    shard_numel,
    stage_parameters,
    whole_vectors,
)
from megatron.formulas.ring_work import key_blocks_by_queries, ring_blocks
from megatron.formulas.sizes import WIDE, chunks_of, sizes_of
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.cost.step_operations import LOSS_SUMS
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.models import model_shape


def count_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Number of parameters of a model whose embedding has ``vocab_size`` rows (no padding is added).

    Learned positions have ``max_position_embeddings`` rows, or none if that is not set.
    """
    return stage_parameters(model_shape(model, vocab_size), 1, 1, 0, padded=False).numel


def busiest_share(ring: int, balance: str, causal: bool) -> float:
    """Attention work of the busiest rank, as a multiple of the mean over the ring."""
    return (2 * ring - 1) / ring if causal and balance == "contiguous" else 1.0


@dataclass(frozen=True)
class CopiedBytes:
    """Bytes (to the host, to the device) of one layer, on one rank (docs/inside/host-copies.md, "What is copied")."""

    forward: tuple[int, int]
    backward: tuple[int, int]


def copied_bytes(chunks: int, *, tokens: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> CopiedBytes:
    """Bytes that FPDT copies in a forward and a backward pass, under a causal mask, without a ring, in equal chunks.

    Args:
        chunks: number of chunks.
        tokens: tokens of a chunk after its all-to-all, times the micro-batch size.
        heads, kv_heads: of a rank, after the all-to-all.
        head_dim, itemsize: size of a head, and bytes of an element; sums are in fp32.
    """
    wide = max(itemsize, 4)
    q, kv = tokens * heads * head_dim * itemsize, 2 * tokens * kv_heads * head_dim * itemsize
    dq, dkv, lse = q // itemsize * wide, kv // itemsize * wide, tokens * heads * wide
    n, pairs = chunks, chunks * (chunks - 1) // 2  # pairs of different chunks that meet
    forward = n * (2 * q + kv + lse), forward_loads(n).keys * kv
    if not goes_by_keys(heads, kv_heads, itemsize):
        return CopiedBytes(forward, (pairs * dkv, n * (2 * q + lse) + (n + pairs) * kv + pairs * dkv))
    # dq of a query chunk is written after each key chunk, and read before the next key chunk and at the end.
    moved = n + pairs
    to_host = n * q + moved * dq
    to_device = n * q + n * kv + moved * (3 * q + lse) + moved * dq
    return CopiedBytes(forward, (to_host, to_device))


# Bytes that one rank sends in a step, by axis of the grid, if no byte is sent twice. Scalars, such as the loss and the
# gradient norm, are not counted.


@lru_cache(maxsize=65536)
def _sent(workload: Workload, strategy: Strategy, itemsize: int, stage: int) -> tuple[tuple[str, int], ...]:
    parts = {
        "tp": _tensor(workload, strategy, itemsize, stage),
        "ulysses": _ulysses(workload, strategy, itemsize, stage),
        "ring": _ring(workload, strategy, itemsize, stage),
        "ep": _experts(workload, strategy, itemsize, stage),
        "dp": _data(workload, strategy, itemsize, stage),
        "pp": _pipeline(workload, strategy, itemsize, stage),
        "other": loads(workload, strategy.ranks // strategy.pipeline),
    }
    for axis, size in _states(workload, strategy, itemsize, stage).items():
        parts[axis] = parts.get(axis, 0) + size
    return tuple(parts.items())


def sent_bytes(workload: Workload, strategy: Strategy, itemsize: int = 2, *, stage: int = 0) -> dict[str, int]:
    """Bytes by axis: ``tp``, ``ulysses``, ``ring``, ``ep`` (with expert TP), ``dp`` (DP x CP) and ``pp``.

    The rank is the first on the Ulysses axis and the busiest on the ring (:func:`ring_blocks`).

    Args:
        itemsize: bytes of the compute dtype.
        stage: pipeline stage, from 0.
    """
    return dict(_sent(workload, strategy, itemsize, stage))


def _states(workload: Workload, strategy: Strategy, itemsize: int, stage: int) -> dict[str, int]:
    """Of linear-attention and SSM layers: rows of the convolution, maps or states, all-to-alls, sums of the norm."""
    linear = workload.shape.linear
    held = rank_parameters(workload.shape, strategy, stage)
    if linear is None:
        return {}
    states, forward = states_of(workload, strategy, itemsize), passes_of(workload, strategy).attention
    halo, there = halo_bytes(workload, strategy, itemsize), by_heads_bytes(states, strategy.ulysses)
    times = held.with_states * _micro_batches(workload, strategy)
    both = (forward + 1) * exchange_bytes(states) * times
    norm = 2 * linear.delta * linear.values * itemsize * (strategy.tensor - 1) // strategy.tensor
    sent = {
        "cp": (forward * halo[0] + halo[1]) * times,
        "ulysses": (forward * there[0] + there[1]) * times,
        "tp": norm * times,
    }
    axis = "ring" if states.by_heads else "cp"
    return sent | {axis: sent.get(axis, 0) + both}


def _with_keys(workload: Workload, strategy: Strategy, stage: int) -> int:
    """Layers that attend to keys."""
    return rank_parameters(workload.shape, strategy, stage).with_keys


def _micro_batches(workload: Workload, strategy: Strategy) -> int:
    return max(strategy.micro_batches(workload), 1)


def _tensor(workload: Workload, strategy: Strategy, itemsize: int, stage: int) -> int:
    """All-gathers and reduce-scatters, each (T-1)/T of the gathered hidden states; all-reduces without TP-sp."""
    tensor, shape = strategy.tensor, workload.shape
    if tensor == 1:
        return 0
    sizes, chunks = sizes_of(workload, strategy, itemsize), chunks_of(workload, strategy)
    split = strategy.sequence_parallel
    held = rank_parameters(shape, strategy, stage)
    run = passes_of(workload, strategy)
    one = sizes.whole * (tensor - 1) // tensor
    if split:  # backward mirrors forward's gather and scatter, and gathers the input for the weight's gradient
        mixer, ffn = one * (run.qkv + run.out + 3), one * (2 * run.ffn + 3)
        if shape.latent:
            mixer += _latent_columns(shape, run.qkv) * one // shape.hidden
    else:  # forward reduces after both row-parallel matrices, backward after both column-parallel ones
        mixer, ffn = 2 * one * (run.out + 1), 2 * one * (run.ffn + 1)
    ffns = held.pattern.count("-") if held.pattern else held.count - held.with_experts
    if shape.mixture and shape.mixture.shared and split:  # other experts' tokens travel over EP
        ffns += held.with_experts
    total = (held.with_keys + held.with_states) * mixer + ffns * ffn
    if shape.kv_heads < tensor:
        total += held.with_keys * (run.qkv + 1) * sizes.qkv * (tensor - 1) // tensor
    first, last = stage == 0, stage == strategy.pipeline - 1
    if first:
        total += 2 * one
    if last:
        scalars = LOSS_SUMS * 2 * WIDE * (sizes.whole // (shape.hidden * itemsize)) * (tensor - 1) // tensor
        if split:
            total += (2 if chunks.loss else 3) * one + scalars
        else:
            total += 2 * one + scalars
    total *= _micro_batches(workload, strategy)
    if split:
        shards = strategy.group("dp").size if strategy.zero > 1 else 1
        total += 2 * (WIDE * whole_vectors(shape, held) // shards) * (tensor - 1) // tensor
    return total


def _latent_columns(shape: Shape, forward: int) -> int:
    """Numbers of a token that TP sends for the latents, beyond those of a single projection of queries, keys, values.

    Both down-projections gather the input. The latents are gathered whole, and for the up-projections by token, whose
    gradients are scattered; the rotated part's gradient is summed.
    """
    latent = shape.latent
    inner = latent.queries + latent.keys
    forward_columns = shape.hidden + 2 * inner + latent.rotated
    return forward * forward_columns + 2 * shape.hidden + 3 * inner + 2 * latent.rotated


def _experts(workload: Workload, strategy: Strategy, itemsize: int, stage: int) -> int:
    """All-to-alls of tokens and weights to the experts and back, expert TP's gathers, and the counts before them."""
    mixture, ranks, split = workload.shape.mixture, strategy.expert, strategy.expert_tensor
    if mixture is None or ranks * split == 1:
        return 0
    d, forward = dispatched(workload, strategy), passes_of(workload, strategy).ffn
    arrived = d.received // split
    own = max(d.sent, arrived) // ranks
    away, back = d.sent - own, arrived - own
    token, gathered = (workload.shape.hidden + 1) * itemsize, 2 * (split - 1) * arrived
    hidden = workload.shape.hidden * itemsize
    one = away * token + back * hidden + gathered * hidden + gathered // 2 * itemsize
    other = back * token + away * hidden + gathered * hidden + gathered // 2 * itemsize
    counts = 8 * mixture.experts * (ranks * split - 1)
    layers = rank_parameters(workload.shape, strategy, stage).with_experts
    return (forward * (one + counts) + other) * layers * _micro_batches(workload, strategy)


def _ulysses(workload: Workload, strategy: Strategy, itemsize: int, stage: int) -> int:
    """One all-to-all for queries, keys and values, one for outputs, and the same for their gradients."""
    ranks, shape = strategy.ulysses, workload.shape
    if ranks == 1:
        return 0
    heads, kv_heads = shape.heads // strategy.tensor, max(shape.kv_heads // strategy.tensor, 1)
    plan = head_plan(heads, kv_heads, ranks)
    token = workload.seq_length // strategy.context * strategy.micro_batch * itemsize
    queries, pair = token * shape.head_dim * plan.q_heads * (ranks - 1), token * (shape.head_dim + shape.value_dim)
    outputs = token * shape.value_dim * plan.q_heads * (ranks - 1)
    inputs = queries + pair * sum(map(len, plan.kv_heads[1:]))
    input_grads = queries + pair * (ranks - 1) * len(plan.kv_heads[0])
    run = passes_of(workload, strategy)
    # FPDT's backward pass computes the output projection again, chunk by chunk, and sends its input again.
    outputs *= (run.out if strategy.fpdt_chunk else run.attention) + 1
    layer = inputs * run.attention + input_grads + outputs
    return layer * _with_keys(workload, strategy, stage) * _micro_batches(workload, strategy)


def _ring(workload: Workload, strategy: Strategy, itemsize: int, stage: int) -> int:
    """Keys and values once per pass (more often in forward passes by queries), in backward also fp32 gradients."""
    if strategy.ring == 1:
        return 0
    shape, blocks = workload.shape, ring_blocks(strategy.ring, strategy.balance, workload.causal)
    plan = head_plan(shape.heads // strategy.tensor, max(shape.kv_heads // strategy.tensor, 1), strategy.ulysses)
    pair = len(plan.kv_index[0]) * (shape.head_dim + shape.value_dim)
    block = pair * strategy.micro_batch * (workload.seq_length // strategy.ring)
    forward = blocks.keys
    if strategy.fpdt_chunk and strategy.fpdt_offload:
        chunks = chunks_of(workload, strategy).attention
        forward = key_blocks_by_queries(strategy.ring, strategy.balance, workload.causal, chunks)
    keys = passes_of(workload, strategy).attention * forward + blocks.keys
    layer = keys * block * itemsize + int(blocks.grads * block * WIDE)
    return layer * _with_keys(workload, strategy, stage) * _micro_batches(workload, strategy)


def _data(workload: Workload, strategy: Strategy, itemsize: int, stage: int) -> int:
    """Gradients, in fp32, summed once per step; ZeRO 1 gathers new weights; FSDP does both for each micro-batch."""
    ranks = strategy.group("dp").size
    held = rank_parameters(workload.shape, strategy, stage)
    if strategy.zero < 2:
        sent, experts = 0, StageParameters((), (), 0, (), experts=held.experts)
        for part, group in ((replace(held, experts=()), ranks), (experts, strategy.group("expert dp").size)):
            options = {"bucketed": strategy.overlap_grad_reduce, "expert_ranks": group}
            states = model_states(part, strategy.zero, group, itemsize, **options)
            whole = 2 * states.gradients if strategy.zero == 0 else states.gradients + states.parameters
            sent += whole * (group - 1) // group
        return sent
    layers = 2 if strategy.zero == 3 else 1
    every_layer, holders = held.layer * held.layers + held.routed, strategy.group("expert dp").size
    everything, layer = shard_numel(held.tensors, ranks), shard_numel(every_layer, ranks)
    sent = (itemsize * (everything + (layers - 1) * layer) + WIDE * everything) * (ranks - 1)
    sent += (itemsize * layers + WIDE) * shard_numel(held.experts, holders) * (holders - 1)
    return sent * _micro_batches(workload, strategy)


def loads(workload: Workload, ranks: int) -> int:
    """The sum over ranks of the tokens of each expert and of four losses, by layer, in fp64."""
    mixture = workload.shape.mixture
    return 2 * 8 * workload.shape.layers * (mixture.experts + 4) * (ranks - 1) // ranks if mixture else 0


def _pipeline(workload: Workload, strategy: Strategy, itemsize: int, stage: int) -> int:
    """Hidden states to the next stage, their gradients to the previous one."""
    stages, virtual = strategy.pipeline, strategy.virtual
    if stages == 1:
        return 0
    forward = virtual - (stage == stages - 1)
    backward = virtual - (stage == 0)
    hidden = sizes_of(workload, strategy, itemsize).hidden
    total = (forward + backward) * hidden * _micro_batches(workload, strategy)
    total += loads(workload, stages)
    if workload.shape.tied and stage in (0, stages - 1):  # first and last stage add up their embedding's gradient
        total += WIDE * numel(stage_parameters(workload.shape, strategy.tensor, stages, 0).embedding[:1])
    return total
