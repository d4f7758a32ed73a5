# SPDX-License-Identifier: Apache-2.0
"""Attention masks, as answers about positions.

A mask never sees a rank or a backend: it is asked about two runs of consecutive positions (spans); tiles follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Span = tuple[int, int]
"""Consecutive global positions ``start .. stop - 1``, ascending."""

Kind = Literal["empty", "full", "causal"]


class Mask(Protocol):
    """Which keys a query attends to."""

    def cuts(self, q: Span, k: Span) -> list[int]:
        """Positions at which both spans must be cut so that every pair of pieces has one kind."""

    def kind(self, q: Span, k: Span) -> Kind:
        """The kind of a pair of pieces: nothing, everything, or the lower triangle of a square."""

    def diagonal(self) -> bool:
        """Whether the mask over one same set of ascending positions is the lower triangle, whatever its gaps."""


@dataclass(frozen=True)
class Causal:
    """A query attends to itself and to what came before."""

    def cuts(self, q: Span, k: Span) -> list[int]:
        return [*q, *k]

    def kind(self, q: Span, k: Span) -> Kind:
        if q == k:
            return "causal"
        return "full" if k[1] <= q[0] else "empty"

    def diagonal(self) -> bool:
        return True


@dataclass(frozen=True)
class Full:
    """Every query attends to every key."""

    def cuts(self, q: Span, k: Span) -> list[int]:
        return []

    def kind(self, q: Span, k: Span) -> Kind:
        return "full"

    def diagonal(self) -> bool:
        return False
