# SPDX-License-Identifier: Apache-2.0
"""A step of the busiest rank: the work of a micro-batch, and transfers of the pipeline and of ZeRO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from megatron.decisions.division import pieces_together
from megatron.formulas.parameters import (
    model_states,
    numel,
    padded_vocab,
    rank_parameters,
    shard_numel,
    stage_parameters,
    whole_vectors,
)
from megatron.formulas.sizes import chunks_of
from megatron.formulas.strategy import Axis, Group, Shape, Strategy, Workload
from megatron.simulator.cost.layer_operations import spread_evenly
from megatron.simulator.cost.operations import BF16, FP32, Segment, collective, gemm, memory
from megatron.simulator.cost.row_operations import all_gather_tokens, reduce_tokens
from megatron.simulator.cost.trace import HostCopy, Kernel, Transfer

# --- embedding; final norm, output layer and cross-entropy over a vocabulary that TP splits ---

# Bytes per logit that megatron-core's cross-entropy reads and writes. Forward: cast to fp32 6, largest 4, subtract 8,
# exp 12, sum 4, the label's 4, divide 8. Backward: the label's 8, scale 8, cast to bf16 6, add to it 4.
FORWARD, BACKWARD = 46, 26
# In chunks, of this program's two kernels (fpdt/loss_kernel.py), and of the copy that collects the gradients of chunks.
CHUNK_FORWARD, CHUNK_BACKWARD, COLLECTED = 2, 4, 4
LOSS_SUMS = 3  # numbers per token that it reduces over TP: largest logit, label's logit, sum of exponentials


def embedding(shape: Shape, strategy: Strategy, tokens: int) -> list[Segment]:
    """Forward pass of the embedding for ``tokens`` of a TP group."""
    lookup = memory("embedding", 2 * BF16 * tokens * shape.hidden)
    return [Segment((lookup,)), Segment((), reduce_tokens(strategy, shape.hidden, tokens))]


def embedding_grad(shape: Shape, strategy: Strategy, tokens: int, pieces: int = 1) -> list[Segment]:
    """Backward pass in ``pieces``: each makes a gradient as large as the table and adds it to an fp32 sum."""
    table = padded_vocab(shape.vocab, strategy.tensor) // strategy.tensor * shape.hidden
    each = pieces * (2 * BF16 + 2 * FP32)
    if strategy.zero > 1 and strategy.fused:
        each = BF16 if pieces == 1 else each + 2 * BF16  # FSDP casts the first gradient up and the sum down
    lookup = memory("embedding", 2 * BF16 * tokens * shape.hidden + each * table, backward=True)
    return [Segment((), all_gather_tokens(strategy, shape.hidden, tokens)), Segment((lookup,))]


def loss(shape: Shape, strategy: Strategy, tokens: int, chunks: int) -> list[Segment]:
    """Forward pass of the loss for ``tokens`` of a TP group in ``chunks`` (0: not cut)."""
    pieces, groups = chunks or 1, _groups(shape, strategy, tokens, chunks)
    rows, vocab = tokens / pieces, padded_vocab(shape.vocab, strategy.tensor) // strategy.tensor
    entropy = memory("cross_entropy", (CHUNK_FORWARD if chunks and strategy.fused else FORWARD) * rows * vocab)
    sums = (collective("all_reduce", "tp", strategy.group("tp"), FP32 * rows, count=LOSS_SUMS),)
    return [
        Segment((memory("norm", 2 * BF16 * tokens // strategy.tensor * shape.hidden),)),
        Segment((), all_gather_tokens(strategy, shape.hidden, tokens / groups), count=groups),
        Segment((gemm("logits", rows, vocab, shape.hidden), entropy), count=pieces),
        Segment((), sums if strategy.tensor > 1 else (), count=pieces),
    ]


def loss_grad(shape: Shape, strategy: Strategy, tokens: int, chunks: int) -> list[Segment]:
    """Backward pass of the loss. A chunk's pass directly follows its forward pass, and overlaps no gather of tokens."""
    pieces, groups = chunks or 1, _groups(shape, strategy, tokens, chunks)
    rows, vocab = tokens / pieces, padded_vocab(shape.vocab, strategy.tensor) // strategy.tensor
    by_kernel = CHUNK_BACKWARD + COLLECTED * (groups < pieces)
    entropy = memory(
        "cross_entropy", (by_kernel if chunks and strategy.fused else BACKWARD) * rows * vocab, backward=True
    )
    together = tokens / groups
    dgrad = gemm("logits_dgrad", together, shape.hidden, vocab, backward=True)
    wgrad = gemm("logits_wgrad", vocab, shape.hidden, together, backward=True)
    sums = memory("main_grad", (BF16 + 2 * FP32) * vocab * shape.hidden, backward=True)
    leave = reduce_tokens(strategy, shape.hidden, together)
    wide = replace(wgrad, bytes=wgrad.bytes + (2 * FP32 - BF16) * vocab * shape.hidden)  # adds to a sum
    if chunks:
        # The sum is scaled: with FSDP in place and then cast down, otherwise while it is added to the main gradient.
        summed = (BF16 if strategy.zero > 1 else 0) + 3 * FP32
        summed *= vocab * shape.hidden * strategy.fused
        return [
            Segment((entropy,), count=pieces),
            Segment((dgrad,), count=groups),
            Segment((), leave, count=groups),
            Segment((wide,) if strategy.fused else (wgrad, sums), count=groups),
            Segment((memory("main_grad", summed, backward=True),) if summed else ()),
        ]
    added = ((wide,) if strategy.zero < 2 else (wgrad,)) if strategy.fused else (wgrad, sums)
    return [Segment((entropy, dgrad), all_gather_tokens(strategy, shape.hidden, rows)), Segment(added, leave)]


def _groups(shape: Shape, strategy: Strategy, tokens: int, chunks: int) -> int:
    """Number of matrix products that add the chunks' gradients to the weight's sum."""
    if not chunks or not strategy.fused:
        return chunks or 1
    return ceil(chunks / pieces_together(ceil(tokens / chunks), shape.hidden, BF16))


# --- weights, gradients and optimizer states over DP x CP: sent once per step (DDP, ZeRO 1) or per layer (2, 3) ---

# Bytes per parameter. The gradient is read for its norm. An Adam step reads gradient, weight and two moments and writes
# three of these; then weights are read in fp32 and written in bf16. The gradient is clipped in place by a pass of its
# own, in the papers' programs and with ZeRO 2 and 3; otherwise Adam clips it as it reads it.
ADAM_BYTES, CLIPPED_IN_PLACE = FP32 + 7 * FP32 + FP32 + BF16, 2 * FP32


@dataclass(frozen=True)
class States:
    """Numbers of parameters of a pipeline stage on one TP rank, before ZeRO splits them, with its padding."""

    layer: int  # of each of `layers` layers
    layers: int
    ends: int  # outside the layers
    table: int  # of an embedding
    all: int  # of the stage
    vectors: int  # of norms and biases, whose gradients TP-sp sums over TP
    experts: int = 0  # of all experts, which are not in `all`
    experts_share: float = 0.0  # share of layers with experts


def states(shape: Shape, strategy: Strategy, stage: int) -> States:
    """Parameters of a pipeline stage. Raises ValueError if the stages do not divide the layers."""
    if (shape.layers + strategy.first_less + strategy.last_less) % strategy.pipeline:
        raise ValueError(f"{strategy.pipeline} pipeline stages do not divide {shape.layers} layers")
    holders = strategy.group("expert dp").size if shape.mixture else 1
    return _states(shape, stage, strategy.but(**_UNREAD), strategy.group("dp").size, holders)


# Fields that `_states` does not read, so that strategies that differ in them share a cache entry.
_UNREAD = {
    "ulysses": 1, "ring": 1, "data": 1, "micro_batch": 1, "recompute": "none", "recompute_method": "uniform",
    "recompute_layers": 1, "keep_attention": False, "offload_checkpoints": False, "fpdt_chunk": 0,
    "fpdt_offload": True, "stream_hidden": False, "ffn_chunks": 0, "loss_chunks": 0, "virtual": 1, "balance": "zigzag",
}  # fmt: skip


@lru_cache(maxsize=4096)
def _states(shape: Shape, stage: int, strategy: Strategy, ranks: int, holders: int) -> States:
    whole = rank_parameters(shape, strategy, stage)
    tensor, zero, bucketed = strategy.tensor, strategy.zero, strategy.overlap_grad_reduce
    held = replace(whole, experts=())
    layers = held.count
    table = numel(stage_parameters(shape, tensor, 1, 0).embedding[:1])
    if zero < 2:
        every, layer = model_states(held, zero, ranks, BF16, bucketed=bucketed).gradients // FP32, held.layer_numel
    else:
        every = ranks * shard_numel(held.tensors, ranks)
        layer = ranks * shard_numel(held.layer * held.layers + held.routed, ranks) // layers  # on average
    vectors = whole_vectors(shape, held)
    if not whole.with_experts:
        return States(layer, layers, every - layer * layers, table, every, vectors)
    if zero < 2 and not held.mixed:
        layer = (held.layers * layer + numel(held.routed)) // layers
    return States(
        layer,
        layers,
        every - layer * layers,
        table,
        every,
        vectors,
        holders * shard_numel(whole.experts, holders) if zero > 1 else numel(whole.experts),
        whole.with_experts / layers,
    )


def last_bucket(strategy: Strategy, held: States, *, ours: bool = True) -> int:
    """Parameters in the last bucket of the layers under DDP (core/distributed/distributed_data_parallel.py).

    It is unknown for the papers' programs; a layer's parameters are assumed for them.
    """
    return (
        min(held.layer, max(40_000_000, 1_000_000 * strategy.group("dp").size))
        if strategy.fused and ours
        else held.layer
    )


def reduce_gradients(strategy: Strategy, parameters: int, itemsize: int = FP32, over: Axis = "dp") -> Transfer:
    """Reduce-scatter, with ZeRO 0 all-reduce. ``itemsize``: bytes of a number in the transfer."""
    kind = "reduce_scatter" if strategy.zero else "all_reduce"
    return collective(kind, "dp", strategy.group(over), itemsize * parameters)


def gather_parameters(strategy: Strategy, parameters: int, over: Axis = "dp") -> Transfer:
    """All-gather of the shards in bf16."""
    return collective("all_gather", "dp", strategy.group(over), BF16 * parameters)


def sum_shared_gradients(shape: Shape, strategy: Strategy, held: States) -> list[Transfer]:
    """All-reduces of a step: for vectors that TP does not split, and a tied embedding on the first and last stage."""
    transfers = []
    if strategy.tensor > 1 and strategy.sequence_parallel:
        shards = strategy.group("dp").size if strategy.zero > 1 else 1
        transfers.append(collective("all_reduce", "tp", strategy.group("tp"), FP32 * held.vectors // shards))
    if shape.tied and strategy.pipeline > 1:
        stages = strategy.group("pp")
        ends = Group(2, stages.stride * (stages.size - 1))
        transfers.append(collective("all_reduce", "pp", ends, FP32 * held.table))
    return transfers


def optimizer_step(strategy: Strategy, parameters: int, *, ours: bool = True, over: Axis = "dp") -> Kernel:
    """Adam on this rank's shard, and the zeroing of its gradients (a shard of them with ZeRO 2 and 3)."""
    share = strategy.group(over).size if strategy.zero else 1
    each = ADAM_BYTES + (0 if ours and strategy.zero < 2 else CLIPPED_IN_PLACE)
    return memory("optimizer", each * parameters / share + FP32 * parameters / (share if strategy.zero > 1 else 1))


def split_and_join(strategy: Strategy, parameters: int) -> Kernel:
    """FSDP's copies of gathered weights into their tensors, and of gradients into an fp32 buffer."""
    gathers = 2 if strategy.zero == 3 else 1
    return memory("shards", (gathers * 2 * BF16 + BF16 + FP32) * parameters)


def ends(workload: Workload, strategy: Strategy) -> tuple[list[Segment], list[Segment]]:
    """(both passes of the embedding, both passes of the loss), with the copies of streamed hidden states."""
    shape, chunks = workload.shape, chunks_of(workload, strategy)
    tokens = workload.seq_length * strategy.micro_batch // strategy.context
    looked_up, summed = (
        embedding(shape, strategy, tokens),
        embedding_grad(shape, strategy, tokens, chunks.ffn if strategy.stream_hidden else 1),
    )
    last = loss(shape, strategy, tokens, chunks.loss) + loss_grad(shape, strategy, tokens, chunks.loss)
    if strategy.stream_hidden:
        state = BF16 * strategy.local_tokens(workload) * shape.hidden
        out, back = HostCopy("to_host", state), HostCopy("to_device", state)
        looked_up, summed, last = (
            spread_evenly(looked_up, out),
            spread_evenly(summed, back),
            spread_evenly(spread_evenly(last, back), out),
        )
    return looked_up + summed, last


def stage_transfer(workload: Workload, strategy: Strategy) -> Transfer:
    """Messages of the last stage in a step: one per virtual stage in backward, one less in forward."""
    sent = 2 * strategy.virtual - 1 if strategy.pipeline > 1 else 0
    hidden = BF16 * strategy.local_tokens(workload) * workload.shape.hidden
    return Transfer("p2p", "pp", strategy.group("pp"), hidden, count=sent * strategy.micro_batches(workload))
