# SPDX-License-Identifier: Apache-2.0
"""The two ends of a model: embedding; final norm, output layer and cross-entropy over a vocabulary split over TP."""

from __future__ import annotations

from megatron.formulas.strategy import Shape, Strategy
from megatron.simulator.cost.linear_operations import entering, leaving
from megatron.simulator.cost.operations import BF16, FP32, gemm, memory
from megatron.simulator.cost.segment import Segment

# Bytes of a logit that megatron-core's cross-entropy reads and writes. Forward: widen to fp32 6, largest 4, subtract 8,
# exp 12, sum 4, the label's 4, divide 8. Backward: the label's 8, scale 8, narrow 6, add to it 4.
FORWARD, BACKWARD = 46, 26


def embedding(shape: Shape, strategy: Strategy, tokens: int) -> list[Segment]:
    lookup = memory("embedding", 2 * BF16 * tokens * shape.hidden)
    return [Segment((lookup,)), Segment((), leaving(strategy, shape.hidden, tokens))]


def embedding_grad(shape: Shape, strategy: Strategy, tokens: int) -> list[Segment]:
    """A gradient as large as the table, added to the main gradients."""
    table = -(-shape.vocab // strategy.tensor) * shape.hidden
    lookup = memory("embedding", 2 * BF16 * tokens * shape.hidden + (2 * BF16 + 2 * FP32) * table, backward=True)
    return [Segment((), entering(strategy, shape.hidden, tokens)), Segment((lookup,))]


def loss(shape: Shape, strategy: Strategy, tokens: int, pieces: int) -> list[Segment]:
    """Forward; ``tokens`` of a TP group, in ``pieces``."""
    rows, vocab = max(1, tokens // pieces), -(-shape.vocab // strategy.tensor)
    entropy = memory("cross_entropy", FORWARD * rows * vocab)
    return [
        Segment((memory("norm", 2 * BF16 * tokens // strategy.tensor * shape.hidden),)),
        Segment((), entering(strategy, shape.hidden, rows), count=pieces),
        Segment((gemm("logits", rows, vocab, shape.hidden), entropy), count=pieces),
    ]


def loss_grad(shape: Shape, strategy: Strategy, tokens: int, pieces: int) -> list[Segment]:
    rows, vocab = max(1, tokens // pieces), -(-shape.vocab // strategy.tensor)
    entropy = memory("cross_entropy", BACKWARD * rows * vocab, backward=True)
    dgrad = gemm("logits_dgrad", rows, shape.hidden, vocab, backward=True)
    wgrad = gemm("logits_wgrad", vocab, shape.hidden, rows, backward=True)
    sums = memory("main_grad", (BF16 + 2 * FP32) * vocab * shape.hidden, backward=True)
    return [
        Segment((entropy, dgrad), entering(strategy, shape.hidden, rows), count=pieces),
        Segment((wgrad, sums), leaving(strategy, shape.hidden, rows), count=pieces),
    ]
