# SPDX-License-Identifier: Apache-2.0
"""The mask of a tile, whole or made for a block of its rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.context_parallel.layout.to_device import to_device
from megatron.context_parallel.positions.dropout import TileDropout

ROW_MASK_BYTES = 32 * 2**20  # what the making of one block of a RowMask's rows may take
PAIR_BYTES = 24  # of one pair while its mask is made: two int64 of arithmetic on positions, and the booleans


@dataclass(frozen=True)
class RowMask:
    """What a tile does with each of its pairs, made for a block of rows at a time.

    Attributes:
        allowed: (first row, end row, number of keys) -> boolean [rows, keys], on any device; None allows all.
        bias: the same arguments -> [heads, rows, keys], in the dtype of lse, on the tile's device; None adds nothing.
        heads: that ``bias`` is for.
        dropout: which weights, of the softmax over *all* keys, become 0; None keeps all. A kernel's lse is that
            softmax's: dropout does not change it, and tiles merge as without.
        softcap: a score s becomes ``softcap * tanh(s / softcap)`` before ``bias`` is added; None leaves it.
    """

    allowed: Callable[[int, int, int], Tensor] | None = None
    bias: Callable[[int, int, int], Tensor] | None = None
    heads: int = 1
    dropout: TileDropout | None = None
    softcap: float | None = None

    def bytes_per_row(self, keys: int, itemsize: int) -> int:
        """Bytes that one row takes while it is made."""
        made = PAIR_BYTES if self.allowed else itemsize  # besides: distances
        return keys * (made + (self.heads if self.bias else 1) * itemsize)


AnyMask = Tensor | RowMask | None


def dropout_of(mask: AnyMask) -> TileDropout | None:
    """What is dropped of a tile's weights."""
    return mask.dropout if isinstance(mask, RowMask) else None


def softcap_of(mask: AnyMask) -> float | None:
    """What the scores of a tile are capped at."""
    return mask.softcap if isinstance(mask, RowMask) else None


def mask_rows(mask: AnyMask, causal: bool, start: int, end: int, keys: int, device: torch.device) -> Tensor | None:
    """The pairs that query rows start..end of a tile may attend to, among its first ``keys`` keys; None for all.

    A tensor is four-dimensional and may live elsewhere, in host memory say: only these rows move. Returns a boolean
    tensor that broadcasts to ``[b, h, end - start, keys]``.
    """
    allowed = None
    if isinstance(mask, RowMask):
        if mask.allowed is not None:
            allowed = to_device(mask.allowed(start, end, keys), device)[None, None]
    elif mask is not None:
        allowed = mask if mask.shape[2] == 1 else mask[:, :, start:end]
        allowed = to_device(allowed if mask.shape[3] == 1 else allowed[..., :keys], device)
    if causal:
        diagonal = torch.ones(end - start, keys, dtype=torch.bool, device=device).tril(start)
        allowed = diagonal.view(1, 1, end - start, keys) if allowed is None else allowed & diagonal
    return allowed


def bias_rows(mask: AnyMask, start: int, end: int, keys: int) -> Tensor | None:
    """What is added to the scores of query rows start..end and the first ``keys`` keys: [1, h, rows, keys] or None."""
    if not isinstance(mask, RowMask) or mask.bias is None:
        return None
    return mask.bias(start, end, keys)[None]


def row_blocks(rows: int, bytes_per_row: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cuts ``rows`` into (start, end) so that a block holds at most ``limit`` bytes, but always one row."""
    step = max(1, limit // bytes_per_row)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))
