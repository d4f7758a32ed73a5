# SPDX-License-Identifier: Apache-2.0
"""What a sequence's length must be a multiple of, and which windows are too narrow for tiles."""

from __future__ import annotations

from math import lcm

NARROW = 32
"""Bands of fewer keys than this are not worth the two triangles they would be cut in: such tiles get a mask."""


def length_unit(ulysses: int, ring: int, balance: str, tensor: int = 1) -> int:
    """Sequence lengths must be multiples of this. ``tensor`` counts only under TP sequence parallelism."""
    blocks = 2 * ring if balance == "zigzag" and ring > 1 else ring
    return lcm(blocks, ulysses * ring * tensor)
