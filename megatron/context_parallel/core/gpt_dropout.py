# SPDX-License-Identifier: Apache-2.0
"""The dropouts of a GPT model: the random stream of each, and dropout of hidden states before the residual addition.

megatron-core's dropout uses a generator whose state depends on the grid. Ours depends on positions
(positions/position_dropout.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron.context_parallel.core.learned_positions import token_spans
from megatron.context_parallel.layout.documents import Samples
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, positions
from megatron.context_parallel.positions.position_dropout import Dropout, drop

EMBEDDING = 0
WEIGHTS, ATTENTION, FFN = range(3)  # of a layer: attention weights, output of attention, output of the FFN
STREAMS_PER_LAYER = 4


@dataclass(frozen=True)
class ModelDropout:
    """Probabilities of a model's dropouts, and the seed of the run."""

    attention: float = 0.0
    hidden: float = 0.0
    seed: int = 0

    def of_weights(self, layer: int, batch: Samples, first_head: int) -> Dropout | None:
        """Dropout of the attention weights of layer ``layer``, counted from 1 over all stages."""
        return self._draw(self.attention, STREAMS_PER_LAYER * layer + WEIGHTS, batch, first_head)

    def of_hidden(self, stream: int, batch: Samples) -> Dropout | None:
        """Dropout of hidden states. ``stream``: ``EMBEDDING`` or a result of :func:`stream_of`."""
        return self._draw(self.hidden, stream, batch)

    def _draw(self, probability: float, stream: int, batch: Samples, first_head: int = 0) -> Dropout | None:
        if not probability:
            return None
        if not batch.numbers:
            raise ValueError(
                "dropout needs the number of each sample in the run: pass "
                "layout.documents.passed_on(Samples(numbers)) in place of the attention mask"
            )
        return Dropout(probability, self.seed, stream, batch.numbers, first_head)


def stream_of(layer: int, which: int) -> int:
    """The stream of a layer's ``ATTENTION`` or ``FFN``."""
    return STREAMS_PER_LAYER * layer + which


@dataclass(frozen=True)
class HiddenDropout:
    """Dropout of the hidden states that this rank holds of a batch.

    Attributes:
        model: the probabilities.
        batch: the samples.
        layout: which rank holds which of their tokens.
        sequence_parallel: whether TP ranks hold different tokens.
    """

    model: ModelDropout
    batch: Samples
    layout: SequenceLayout
    sequence_parallel: bool

    def __call__(self, x: Tensor, stream: int, rows: Span | None = None) -> Tensor:
        """Dropout of ``x`` [s, b, h], which holds all of this rank's tokens, or only the span ``rows``."""
        dropout = self.model.of_hidden(stream, self.batch)
        if dropout is None:
            return x
        return drop(x, dropout, self._at if rows is None else self._at[rows[0] : rows[1]])

    @cached_property
    def _at(self) -> Tensor:
        spans = token_spans(self.layout, sequence_parallel=self.sequence_parallel)
        return positions(spans, torch.device("cpu"))
