# SPDX-License-Identifier: Apache-2.0
"""The two ends of a model: embedding; final norm, output layer and cross-entropy over a vocabulary split over TP."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from megatron.decisions.chunks import pieces_together
from megatron.formulas.communication import LOSS_SUMS
from megatron.formulas.parameters import padded_vocab
from megatron.formulas.strategy import Shape, Strategy
from megatron.simulator.cost.linear_operations import entering, leaving
from megatron.simulator.cost.operations import BF16, FP32, collective, gemm, memory
from megatron.simulator.cost.segment import Segment

# Bytes of a logit that megatron-core's cross-entropy reads and writes. Forward: widen to fp32 6, largest 4, subtract 8,
# exp 12, sum 4, the label's 4, divide 8. Backward: the label's 8, scale 8, narrow 6, add to it 4.
FORWARD, BACKWARD = 46, 26


def embedding(shape: Shape, strategy: Strategy, tokens: int) -> list[Segment]:
    lookup = memory("embedding", 2 * BF16 * tokens * shape.hidden)
    return [Segment((lookup,)), Segment((), leaving(strategy, shape.hidden, tokens))]


def embedding_grad(shape: Shape, strategy: Strategy, tokens: int, pieces: int = 1) -> list[Segment]:
    """A gradient as large as the table, in each of ``pieces``, added to the main gradients, or up for FSDP."""
    table = padded_vocab(shape.vocab, strategy.tensor) // strategy.tensor * shape.hidden
    each = pieces * (2 * BF16 + 2 * FP32)
    if strategy.zero > 1 and strategy.fused:
        each = BF16 if pieces == 1 else each + 2 * BF16  # the first is made wide, the sum narrow
    lookup = memory("embedding", 2 * BF16 * tokens * shape.hidden + each * table, backward=True)
    return [Segment((), entering(strategy, shape.hidden, tokens)), Segment((lookup,))]


def loss(shape: Shape, strategy: Strategy, tokens: int, chunks: int) -> list[Segment]:
    """Forward; ``tokens`` of a TP group, in ``chunks``; 0: whole."""
    pieces, groups = chunks or 1, _groups(shape, strategy, tokens, chunks)
    rows, vocab = tokens / pieces, padded_vocab(shape.vocab, strategy.tensor) // strategy.tensor
    entropy = memory("cross_entropy", FORWARD * rows * vocab)
    sums = (collective("all_reduce", "tp", strategy.group("tp"), FP32 * rows, count=LOSS_SUMS),)
    return [
        Segment((memory("norm", 2 * BF16 * tokens // strategy.tensor * shape.hidden),)),
        Segment((), entering(strategy, shape.hidden, tokens / groups), count=groups),
        Segment((gemm("logits", rows, vocab, shape.hidden), entropy), count=pieces),
        Segment((), sums if strategy.tensor > 1 else (), count=pieces),
    ]


def loss_grad(shape: Shape, strategy: Strategy, tokens: int, chunks: int) -> list[Segment]:
    """In chunks it follows its forward pass at once, which has gathered the tokens, and nothing hides its transfer."""
    pieces, groups = chunks or 1, _groups(shape, strategy, tokens, chunks)
    rows, vocab = tokens / pieces, padded_vocab(shape.vocab, strategy.tensor) // strategy.tensor
    entropy = memory("cross_entropy", BACKWARD * rows * vocab, backward=True)
    together = tokens / groups
    dgrad = gemm("logits_dgrad", together, shape.hidden, vocab, backward=True)
    wgrad = gemm("logits_wgrad", vocab, shape.hidden, together, backward=True)
    sums = memory("main_grad", (BF16 + 2 * FP32) * vocab * shape.hidden, backward=True)
    leave = leaving(strategy, shape.hidden, together)
    if chunks:
        wide = replace(wgrad, bytes=wgrad.bytes + (2 * FP32 - BF16) * vocab * shape.hidden)
        # Their sum is scaled, for FSDP in its place and then made narrow, else into the main gradient.
        summed = (BF16 if strategy.zero > 1 else 0) + 3 * FP32
        summed *= vocab * shape.hidden * strategy.fused
        return [
            Segment((entropy,), count=pieces),
            Segment((dgrad,), count=groups),
            Segment((), leave, count=groups),
            Segment((wide,) if strategy.fused else (wgrad, sums), count=groups),
            Segment((memory("main_grad", summed, backward=True),) if summed else ()),
        ]
    added = () if strategy.zero > 1 and strategy.fused else (sums,)
    return [Segment((entropy, dgrad), entering(strategy, shape.hidden, rows)), Segment((wgrad, *added), leave)]


def _groups(shape: Shape, strategy: Strategy, tokens: int, chunks: int) -> int:
    """How often the chunks' gradients go into the weight's sum."""
    if not chunks or not strategy.fused:
        return chunks or 1
    return ceil(chunks / pieces_together(ceil(tokens / chunks), shape.hidden, BF16))
