# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding at the positions that a rank holds, which the layout knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.context_parallel.layout.documents import restart
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, positions
from megatron.context_parallel.layout.to_device import to_device
from megatron.context_parallel.positions.rope import Rope, rotary_angles

Ends = tuple[int, ...]
"""One past the last token of each document packed into a sequence."""


class LayoutRotaryEmbedding:
    """RoPE at the positions this rank holds. It takes the place of megatron-core's, inside the attention core.

    core cuts its angles by a zigzag of its own, computes them in fp32 and rotates in the dtype of the heads; ours come
    from the layout, the one source of truth for positions.

    Args:
        rope: frequencies and pairs.
        layout: which positions this rank holds.
        device: where queries and keys are.
        restarts: positions start anew in each document.
    """

    def __init__(
        self, rope: Rope, layout: SequenceLayout, device: torch.device | str = "cpu", *, restarts: bool = False
    ) -> None:
        self.rope, self.layout, self.restarts = rope, layout, restarts
        self.inv_freq = rope.inverse_frequencies().to(device)
        self._known: tuple[tuple[Ends, ...], Tensor] | None = None

    def angles(self, documents: Sequence[Ends] = ()) -> Tensor:
        """Angles of this rank's tokens, fp32 [s_local, 1 or b, 1, dim / 2]; the last ones are kept, for all layers.

        Args:
            documents: of each sample; none where a sequence is one document.
        """
        varies = self.restarts or self.layout.balance == "documents"
        key = tuple(documents) if varies else ()
        key = key[:1] if len(set(key)) == 1 else key
        if self._known is None or self._known[0] != key:
            self._known = key, self._angles(key)
        return self._known[1]

    def _angles(self, documents: tuple[Ends, ...]) -> Tensor:
        layout = self.layout.of_documents(documents[0]) if documents else self.layout
        at = to_device(layout.positions, self.inv_freq.device)[:, None]
        if self.restarts and documents:
            at = torch.cat([restart(at, ends) for ends in documents], dim=1)
        return rotary_angles(at, self.inv_freq)[:, :, None]

    def of_spans(self, spans: tuple[Span, ...], document: Ends | None = None) -> Tensor:
        """Angles, fp32 [s, 1, 1, dim / 2], of any positions in a sequence; nothing is kept."""
        at = positions(spans, self.inv_freq.device)
        if self.restarts and document is not None:
            at = restart(at, document)
        return rotary_angles(at, self.inv_freq)[:, None, None]

    def rotate(self, query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [s, b, heads, d], turned by ``angles``."""
        return self.rope.rotate(query, angles), self.rope.rotate(key, angles)
