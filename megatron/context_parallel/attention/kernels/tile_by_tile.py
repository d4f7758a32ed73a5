# SPDX-License-Identifier: Apache-2.0
"""The adapter of kernels that compute one tile: rectangles and causal squares, [b, heads, s, d] -> (out, lse).

A tile of positions in the opposite order (anticausal) is reversed, so that a causal kernel can compute it. Masks,
biases and dropout are made for a block of rows at a time (:class:`TileScores`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import Final, Scores
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients, accumulation_dtype
from megatron.context_parallel.layout.masks import PAIR_BYTES
from megatron.context_parallel.layout.spans import positions
from megatron.context_parallel.layout.tiles import Tile, Tiles, parts
from megatron.context_parallel.positions.position_dropout import TileDropout
from megatron.platform.streams import to_device

MADE_AT_ONCE = 2048
"""Most queries, and most keys, of a tile that needs a value for each of its pairs (masks, biases, dropout)."""


@dataclass(frozen=True)
class TileScores:
    """How the weights of one tile's pairs follow from ``q @ k^T``. Masks and biases are made for a block of rows.

    Attributes:
        scale: factor on q @ k^T.
        causal: query i sees keys 0..i of a square tile.
        allowed: (first row, end row, number of keys) -> boolean [rows, keys], on any device; None allows all pairs.
        bias: same arguments -> [heads, rows, keys], in the dtype of lse, on the tile's device; None: no bias.
        heads: number of heads of ``bias``.
        dropout: which weights become 0; None: no dropout.
        softcap: see `Scores`; None: no cap.
    """

    scale: float = 1.0
    causal: bool = False
    allowed: Callable[[int, int, int], Tensor] | None = None
    bias: Callable[[int, int, int], Tensor] | None = None
    heads: int = 1
    dropout: TileDropout | None = None
    softcap: float | None = None

    @property
    def plain(self) -> bool:
        """Whether the kernels of libraries, which know only ``scale`` and ``causal``, can compute the tile."""
        return not (self.allowed or self.bias or self.dropout or self.softcap)

    def rows(
        self, start: int, end: int, keys: int, device: torch.device, *, and_causal: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """For query rows start..end and the first ``keys`` keys: which pairs are allowed [rows, keys], and the bias."""
        allowed = self.allowed and to_device(self.allowed(start, end, keys), device)
        if and_causal and self.causal:
            diagonal = torch.ones(end - start, keys, dtype=torch.bool, device=device).tril(start)
            allowed = diagonal if allowed is None else allowed & diagonal
        return allowed, self.bias and self.bias(start, end, keys)

    def bytes_per_row(self, keys: int, itemsize: int) -> int:
        """Bytes needed to compute one row."""
        made = PAIR_BYTES if self.allowed else itemsize  # of the mask, or of the distances for the bias
        return keys * (made + (self.heads if self.bias else 1) * itemsize)


class TileByTile:
    """Base of kernels that compute one tile (see `kernels.base.Kernel`).

    A subclass has ``supports_mask``, ``supports_value_dim`` and the two methods below. k and v may have fewer heads
    than q; lse is a natural logarithm ``[b, h, sq]`` in fp32 (fp64 for fp64 inputs). The methods accept strided views,
    usually of ``[s, b, h, d]`` memory, and may return any strides.

    - ``forward(q_BHSD, k_BHSD, v_BHSD, how)`` returns out and lse of the tile;
    - ``backward(dout_BHSD, q_BHSD, k_BHSD, v_BHSD, out_BHSD, lse_BHS, how)`` returns dq, dk and dv in the dtype of q;
      out and lse are the final ones, and a row whose final lse is -inf has gradient 0.
    """

    def attend(self, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, scores: Scores, result: Accumulator) -> None:
        for tile in tile_parts(tiles, scores):
            cut = _cut(tile, (q, tile.q), (k, tile.k), (v, tile.k))
            out, lse = self.forward(*cut, tile_scores(tiles, tile, q, scores))
            result.add(tile.q, *_turned(tile, out, lse))

    def attend_grad(
        self,
        tiles: Tiles,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Scores,
        final: Final,
        dq: GradientSum,
        dkv: KeyGradients,
    ) -> None:
        for tile in tile_parts(tiles, scores):
            qkv = (q, tile.q), (k, tile.k), (v, tile.k)
            cut = _cut(tile, (final.dout, tile.q), *qkv, (final.out, tile.q), (final.lse, tile.q))
            grads = _turned(tile, *self.backward(*cut, tile_scores(tiles, tile, q, scores)))
            dq_tile, dk_tile, dv_tile = (grad.permute(2, 0, 1, 3) for grad in grads)
            dq.add(tile.q, dq_tile)
            dkv.add(tile.k, dk_tile, dv_tile)

    def delta(self, out: Tensor, dout: Tensor) -> None:
        return None

    def check_tile(self, q: Tensor, k: Tensor, v: Tensor, how: TileScores) -> None:
        """Raises ValueError if the arguments do not fit, or if the kernel does not support them."""
        b, h, sq, d = q.shape
        hk, sk = k.shape[1:3]
        if k.shape != (b, hk, sk, d) or v.shape[:3] != k.shape[:3] or h % hk != 0:
            raise ValueError(f"q {list(q.shape)} does not fit k {list(k.shape)}, v {list(v.shape)} as [b, heads, s, d]")
        if v.shape[3] != d and not self.supports_value_dim:
            raise ValueError(f"the attention kernel {self.name} needs value heads of the key heads' size, {d}")
        if q.numel() == 0 or k.numel() == 0:
            raise ValueError(f"empty attention tile: q {list(q.shape)}, k {list(k.shape)}")
        if how.causal and sq != sk:
            raise ValueError(f"a causal tile must be square, this one has {sq} queries and {sk} keys")
        if not (how.plain or self.supports_mask):
            raise ValueError(f"the attention kernel {self.name} does not support masks")


def tile_parts(tiles: Tiles, scores: Scores) -> Iterator[Tile]:
    """The tiles, cut smaller if they need a value for each of their pairs."""
    for tile in tiles:
        yield from parts(tile, MADE_AT_ONCE) if _needs_pairs(tile, scores) else (tile,)


def tile_scores(tiles: Tiles, tile: Tile, q: Tensor, scores: Scores) -> TileScores:
    """What a kernel computes for ``tile``, which is one of ``tiles`` or a part of one."""
    if not _needs_pairs(tile, scores):
        return TileScores(scores.scale, tile.kind != "full", softcap=scores.softcap)
    flip, allowed, bias, dropout = tile.kind == "anticausal", None, None, None
    q_spans, k_spans = tiles.q_at(tile), tiles.k_at(tile)
    if tile.masked:
        home = torch.device("cpu") if scores.mask_in_host else q.device
        q_at, k_at = positions(q_spans, home, flip)[:, None], positions(k_spans, home, flip)[None]

        def allowed(start: int, end: int, keys: int) -> Tensor:
            return scores.mask.allowed(q_at[start:end], k_at[:, :keys])

    if scores.slopes is not None:
        wide = accumulation_dtype(q.dtype)
        slopes = -scores.slopes.to(wide)[:, None, None]
        first = k_spans[0][0]  # positions relative to the first one are exact in fp32
        q_here, k_here = ((positions(at, q.device, flip) - first).to(wide) for at in (q_spans, k_spans))

        def bias(start: int, end: int, keys: int) -> Tensor:
            return (q_here[start:end, None] - k_here[:keys]).abs_() * slopes

    if scores.dropout is not None:
        dropout = TileDropout(scores.dropout, q.size(2), q_spans, k_spans, q.device, flip=flip)
    return TileScores(scores.scale, tile.kind != "full", allowed, bias, q.size(2), dropout, scores.softcap)


def _needs_pairs(tile: Tile, scores: Scores) -> bool:
    return tile.masked or scores.slopes is not None or scores.dropout is not None


def _cut(tile: Tile, *tensors: tuple[Tensor, tuple[int, int]]) -> list[Tensor]:
    """Some rows of tensors [s, b, h, ..] as [b, h, rows, ..] views."""
    return _turned(tile, *(x[start:stop].permute(1, 2, 0, *range(3, x.dim())) for x, (start, stop) in tensors))


def _turned(tile: Tile, *tensors: Tensor) -> list[Tensor]:
    """The tensors [b, h, rows, ..], reversed if keys come after queries: the tile is then causal."""
    return [x.flip(2) for x in tensors] if tile.kind == "anticausal" else list(tensors)


def lse_for_backward(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """The final lse in ``dtype``, contiguous, with +inf for -inf, so that ``exp(score - lse)`` without keys is 0."""
    result = torch.empty(lse.shape, dtype=dtype, device=lse.device)
    return torch.nan_to_num(lse.to(dtype), nan=torch.nan, posinf=torch.inf, neginf=torch.inf, out=result)


def row_blocks(rows: int, bytes_per_row: int, limit: int) -> Iterator[tuple[int, int]]:
    """Blocks (start, end) of ``rows`` with at most ``limit`` bytes each, but at least one row."""
    step = max(1, limit // bytes_per_row)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))
