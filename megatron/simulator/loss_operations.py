# SPDX-License-Identifier: Apache-2.0
"""The two ends of a model: embedding; final norm, output layer and cross-entropy over a vocabulary split over TP."""

from __future__ import annotations

from megatron.simulator.linear_operations import entering, leaving
from megatron.simulator.operations import BF16, FP32, gemm, memory
from megatron.simulator.strategy import Shape, Strategy
from megatron.simulator.stretch import Stretch

LOGIT_PASSES = 6  # reads and writes of an fp32 logit by the cross-entropy: widen, largest, subtract, exp, sum, divide


def embedding(shape: Shape, strategy: Strategy, tokens: int) -> list[Stretch]:
    lookup = memory("embedding", 2 * BF16 * tokens * shape.hidden)
    return [Stretch((lookup,)), Stretch((), leaving(strategy, shape.hidden, tokens))]


def embedding_grad(shape: Shape, strategy: Strategy, tokens: int) -> list[Stretch]:
    lookup = memory("embedding", (BF16 + 2 * FP32) * tokens * shape.hidden, backward=True)
    return [Stretch((), entering(strategy, shape.hidden, tokens)), Stretch((lookup,))]


def loss(shape: Shape, strategy: Strategy, tokens: int, pieces: int) -> list[Stretch]:
    """Forward; ``tokens`` of a TP group, in ``pieces``."""
    rows, vocab = max(1, tokens // pieces), -(-shape.vocab // strategy.tensor)
    entropy = memory("cross_entropy", (BF16 + LOGIT_PASSES * FP32) * rows * vocab)
    return [
        Stretch((memory("norm", 2 * BF16 * tokens // strategy.tensor * shape.hidden),)),
        Stretch((), entering(strategy, shape.hidden, rows), count=pieces),
        Stretch((gemm("logits", rows, vocab, shape.hidden), entropy), count=pieces),
    ]


def loss_grad(shape: Shape, strategy: Strategy, tokens: int, pieces: int) -> list[Stretch]:
    rows, vocab = max(1, tokens // pieces), -(-shape.vocab // strategy.tensor)
    entropy = memory("cross_entropy", (BF16 + 2 * FP32) * rows * vocab, backward=True)
    dgrad = gemm("logits_dgrad", rows, shape.hidden, vocab, backward=True)
    wgrad = gemm("logits_wgrad", vocab, shape.hidden, rows, backward=True)
    sums = memory("main_grad", 2 * FP32 * vocab * shape.hidden, backward=True)
    return [
        Stretch((entropy, dgrad), entering(strategy, shape.hidden, rows), count=pieces),
        Stretch((wgrad, sums), leaving(strategy, shape.hidden, rows), count=pieces),
    ]
