# SPDX-License-Identifier: Apache-2.0
"""One tile of attention on [s, b, heads, d] tensors: a kernel and its options (mask, bias, dropout, soft cap)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention import kernels
from megatron.context_parallel.attention.kernels.base import Kernel, RowMask, TilesKernel, accumulation_dtype
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.masks import Causal, Full, Mask, inside_tiles
from megatron.context_parallel.layout.spans import positions
from megatron.context_parallel.layout.tiles import Tile, Tiles, parts
from megatron.context_parallel.positions.position_dropout import Dropout, TileDropout
from megatron.platform.autograd import autocast_inputs, without_autocast
from megatron.platform.streams import to_device

MADE_AT_ONCE = 2048
"""Most queries, and most keys, of a tile that needs a tensor over its pairs (masks of functions, biases, dropout)."""


@dataclass(frozen=True)
class TileKernel:
    """How tiles are computed: one by one, or all tiles of a key block together if the kernel can (``at_once``).

    Attributes:
        kernel: computes rectangles and causal squares.
        scale: factor on q @ k^T.
        mask: evaluated for each pair of a masked tile; already reduced to what matters within tiles (``inside_tiles``).
        slopes: of ALiBi, fp32 [heads], for the heads in q and on their device; None without ALiBi.
        mask_in_host: masks of pairs are made in host memory, in blocks of rows, and copied to the device; otherwise
            they are made on the device, for one tile (of :meth:`parts`) at a time.
        dropout: of the attention weights, for the samples and heads in q; None: no dropout.
        softcap: upper bound of the scores; None: no bound.
    """

    kernel: Kernel | TilesKernel
    scale: float
    mask: Mask
    slopes: Tensor | None = None
    mask_in_host: bool = False
    dropout: Dropout | None = None
    softcap: float | None = None

    @property
    def at_once(self) -> bool:
        """Whether :meth:`attend` and :meth:`attend_grad` can be called."""
        return hasattr(self.kernel, "attend")

    @without_autocast
    def attend(self, computed: Tiles, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Tiles between two blocks, merged into fp32 sums: out [s, b, h, dv] and lse [s, b, h]."""
        self.kernel.attend(computed, q, k, v, out_SBHD=out, lse_SBH=lse, **self._options())

    @without_autocast
    def attend_grad(
        self,
        computed: Tiles,
        qkv: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        sums: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add the gradients of tiles to the fp32 ``sums`` for q, k, v; ``lse`` and ``delta`` are final."""
        final = {"dout": dout, "lse": lse, "delta_SBH": delta}
        into = dict(zip(("dq", "dk", "dv"), sums))
        self.kernel.attend_grad(computed, *qkv, **final, **into, **self._options())

    @without_autocast
    def delta(self, out: Tensor, dout: Tensor) -> Tensor | None:
        """Row sums of ``dout * out``, once for all tiles of these queries; None if the kernel computes them itself."""
        return self.kernel.delta(out, dout) if self.at_once else None

    def _options(self) -> dict[str, Any]:
        names = ("scale", "mask", "slopes", "softcap", "dropout")
        return {name: getattr(self, name) for name in names}

    def parts(self, computed: Iterable[Tile]) -> Iterator[Tile]:
        """The tiles for :meth:`forward` and :meth:`backward`; cut smaller if they need a tensor over their pairs."""
        for tile in computed:
            if self._needs_pairs(tile):
                yield from parts(tile, MADE_AT_ONCE)
            else:
                yield tile

    @without_autocast
    def forward(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out [b, h, sq, d] and lse [b, h, sq] of a tile; q, k, v [s, b, heads, d] are the blocks that contain it."""
        flip = _backwards if tile.kind == "anticausal" else _as_is
        qkv = (flip(x) for x in tile_of(tile, q, k, v))
        out, lse = self.kernel.forward(*qkv, causal=tile.kind != "full", mask=self._row_mask(tile, q), scale=self.scale)
        return flip(out), flip(lse)

    @without_autocast
    def backward(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor
    ) -> list[Tensor]:
        """dq, dk, dv of a tile as [s, b, h, d]; ``out`` [s, b, h, d] and ``lse`` [s, b, h] are the final results."""
        flip = _backwards if tile.kind == "anticausal" else _as_is
        rows = slice(*tile.q)
        grads = self.kernel.backward(
            flip(_heads_first(dout[rows])),
            *(flip(x) for x in tile_of(tile, q, k, v)),
            flip(_heads_first(out[rows])),
            flip(lse[rows].permute(1, 2, 0)),
            causal=tile.kind != "full",
            mask=self._row_mask(tile, q),
            scale=self.scale,
        )
        return [flip(grad).permute(2, 0, 1, 3) for grad in grads]

    def _needs_pairs(self, tile: Tile) -> bool:
        """Whether the kernel needs a value for each (query, key) pair of the tile."""
        return tile.masked or self.slopes is not None or self.dropout is not None

    def _row_mask(self, tile: Tile, q: Tensor) -> RowMask | None:
        if not self._needs_pairs(tile):
            return None if self.softcap is None else RowMask(softcap=self.softcap)
        device, flip = q.device, tile.kind == "anticausal"
        allowed = bias = dropout = None
        if tile.masked:
            home = torch.device("cpu") if self.mask_in_host else device
            q_at, k_at = positions(tile.q_at, home, flip)[:, None], positions(tile.k_at, home, flip)
            if self.mask_in_host:

                def allowed(start: int, end: int, keys: int) -> Tensor:
                    return self.mask.allowed(q_at[start:end], k_at[None, :keys])

            else:
                whole = self.mask.allowed(q_at, k_at[None])

                def allowed(start: int, end: int, keys: int) -> Tensor:
                    return whole[start:end, :keys]

        if self.slopes is not None:
            wide = accumulation_dtype(q.dtype)
            slopes = -self.slopes.to(wide)[:, None, None]
            first = tile.k_at[0][0]  # relative to it, positions are exact in fp32
            q_here = (positions(tile.q_at, device, flip) - first).to(wide)[:, None]
            k_here = (positions(tile.k_at, device, flip) - first).to(wide)

            def bias(start: int, end: int, keys: int) -> Tensor:
                return (q_here[start:end] - k_here[:keys]).abs_() * slopes

        if self.dropout is not None:
            dropout = TileDropout(self.dropout, q.size(2), tile.q_at, tile.k_at, device, flip=flip)
        return RowMask(allowed, bias, 1 if self.slopes is None else len(self.slopes), dropout, self.softcap)


@dataclass(frozen=True)
class AttentionRule:
    """What attention computes, independent of the layout.

    Attributes:
        mask: which keys a query attends to.
        kernel: ``auto``, ``flash_attn``, ``cudnn``, ``flash``, ``cpu``, ``triton`` or ``math``.
        scale: factor on q @ k^T; default ``d ** -0.5``.
        alibi_slopes: fp32 [heads], of the heads before the all-to-all: ``slope * |distance|`` is subtracted from each
            score (ALiBi, arXiv 2108.12409).
        mask_cpu_threshold: for longer sequences, masks that are evaluated for each pair (``MaskFunction``) are made in
            host memory, in blocks of rows (DeepSpeed4Science, figure 4).
        dropout: of the attention weights, by position, for the heads before the all-to-all. None or a probability of 0:
            no dropout.
        gather_keys: ring ranks all-gather the keys instead of passing them on (ring.py); not supported in chunks.
        softcap: a score s becomes ``softcap * tanh(s / softcap)``, before ALiBi (Gemma 2, arXiv 2408.00118); None: no
            cap.
        sinks: fp32 [heads], of the heads before the all-to-all: one additional score in each softmax of a head, for a
            key that every query sees and whose value is 0 (StreamingLLM, arXiv 2309.17453; learned as in gpt-oss). A
            rank's gradient contains only its own queries and heads; as for any weight that is replicated over the
            context-parallel group, the sum over the group is the complete gradient.
    """

    mask: Mask = Causal()
    kernel: str = "auto"
    scale: float | None = None
    alibi_slopes: Tensor | None = None
    mask_cpu_threshold: int = 16384
    dropout: Dropout | None = None
    gather_keys: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap} must be above 0; use None for no cap")

    def tile_kernel(self, q_SBHD: Tensor, ulysses: Axis, seq_length: int, value_dim: int | None = None) -> TileKernel:
        """The kernel and its options for queries [s, b, heads of this rank, d], after the all-to-all.

        Args:
            value_dim: size of the value heads; default d.

        Raises:
            KernelUnavailable: the kernel cannot run on this machine, or does not support this rule.
            ValueError: slopes or dropout are for another number of heads or samples.
        """
        batch, heads, size = q_SBHD.shape[1:]
        dropout = self.dropout if self.dropout is not None and self.dropout.threshold else None
        if dropout is not None:
            if len(dropout.samples) != batch:
                raise ValueError(f"dropout names {len(dropout.samples)} samples, but the batch has {batch}: name each")
            dropout = dropout.of_heads(ulysses.rank * heads)
        slopes = _of_rank(self.alibi_slopes, "alibi_slopes", heads, ulysses)
        slopes = None if slopes is None else to_device(slopes, q_SBHD.device)
        kernel = kernels.select(
            self.kernel,
            device=q_SBHD.device,
            dtype=q_SBHD.dtype,
            head_dim=max(size, value_dim or size),
            many_tiles=not isinstance(self.mask, Causal | Full),
            needs_mask=self.mask.fine or slopes is not None,
            needs_dropout=dropout is not None,
            needs_softcap=self.softcap is not None,
            needs_value_dim=value_dim not in (None, size),
        )
        scale = size**-0.5 if self.scale is None else self.scale
        in_host = seq_length > self.mask_cpu_threshold
        return TileKernel(kernel, scale, inside_tiles(self.mask), slopes, in_host, dropout, self.softcap)

    def local_sinks(self, q_SBHD: Tensor, ulysses: Axis) -> Tensor | None:
        """The sinks of the heads in queries [s, b, heads of this rank, d], after the all-to-all. Differentiable."""
        return _of_rank(self.sinks, "sinks", q_SBHD.size(2), ulysses)


def one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the dtype of the computation: cast if autocast is on.

    Raises:
        ValueError: they have different dtypes; ranks would exchange messages of the wrong size.
    """
    q, k, v = autocast_inputs(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}: cast them to one dtype")
    return q, k, v


def _of_rank(x: Tensor | None, name: str, heads: int, ulysses: Axis) -> Tensor | None:
    """The part of a tensor [all heads] for this Ulysses rank, which has ``heads`` heads."""
    if x is None:
        return None
    if x.shape != (heads * ulysses.size,):
        raise ValueError(f"{name} has shape {list(x.shape)}: give one number for each of {heads * ulysses.size} heads")
    return x[ulysses.rank * heads : (ulysses.rank + 1) * heads]


def tile_of(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's part of q, k, v [s, b, h, d], as [b, h, s, d] views."""
    keys = slice(*tile.k)
    return _heads_first(q[slice(*tile.q)]), _heads_first(k[keys]), _heads_first(v[keys])


def _heads_first(x_SBHD: Tensor) -> Tensor:
    return x_SBHD.permute(1, 2, 0, 3)


def _as_is(x: Tensor) -> Tensor:
    return x


def _backwards(x_BHSD: Tensor) -> Tensor:
    """Reverse the tokens: keys after a query become keys before it, so that a causal kernel can compute the tile."""
    return x_BHSD.flip(2)
