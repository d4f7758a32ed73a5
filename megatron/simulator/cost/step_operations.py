# SPDX-License-Identifier: Apache-2.0
"""A step of the busiest rank: what a micro-batch does, what a pipeline and ZeRO send."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.formulas.chunks import chunks_of
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.layer_operations import beside, layer
from megatron.simulator.cost.loss_operations import embedding, embedding_grad, loss, loss_grad
from megatron.simulator.cost.operations import BF16
from megatron.simulator.cost.segment import Segment
from megatron.simulator.cost.trace import HostCopy, Transfer


@dataclass(frozen=True)
class MicroBatch:
    """Work of a micro-batch: a layer's forward and backward pass, the embedding's both, the loss' both."""

    forward: list[Segment]
    backward: list[Segment]
    first: list[Segment]
    last: list[Segment]


def micro_batch(workload: Workload, strategy: Strategy) -> MicroBatch:
    """Raises ValueError where Ulysses does not divide a TP rank's heads."""
    return MicroBatch(*layer(workload, strategy), *ends(workload, strategy))


def ends(workload: Workload, strategy: Strategy) -> tuple[list[Segment], list[Segment]]:
    """Both passes of the embedding, and of the loss.

    Streamed hidden states and their gradients leave and come here as well.
    """
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
        looked_up, summed, last = beside(looked_up, out), beside(summed, back), beside(beside(last, back), out)
    return looked_up + summed, last


def busiest_stage(strategy: Strategy) -> int:
    """The last: it has the loss."""
    return strategy.pipeline - 1


def stage_transfer(workload: Workload, strategy: Strategy) -> Transfer:
    """A step's messages of the last stage: of every virtual stage what it gets back, of all but the very last what it
    passes on."""
    sent = 2 * strategy.virtual - 1 if strategy.pipeline > 1 else 0
    hidden = BF16 * strategy.local_tokens(workload) * workload.shape.hidden
    return Transfer("p2p", "pp", strategy.group("pp"), hidden, count=sent * strategy.micro_batches(workload))
