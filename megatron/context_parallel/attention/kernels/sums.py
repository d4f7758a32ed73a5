# SPDX-License-Identifier: Apache-2.0
"""Merging the results of tiles in fp32 (fp64 for fp64): outputs by their lse, gradients by addition."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.context_parallel.layout.spans import Span
from megatron.platform.hooks import replaceable
from megatron.platform.streams import runs_triton


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and of sums: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Keys and values, or their gradients, are sent and offloaded as one tensor.


def packed(k_SBHD: Tensor, v_SBHD: Tensor) -> Tensor:
    """Keys and values as one tensor [s, b, heads, key head size + value head size]."""
    return torch.cat((k_SBHD, v_SBHD), dim=-1)


def unpacked(kv: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Views of the keys, whose head size is ``key_dim``, and of the values in the result of :func:`packed`."""
    return kv[..., :key_dim], kv[..., key_dim:]


class Accumulator:
    """Merges the outputs of tiles of one query block.

    Args:
        out_SBHD, lse_SBH: sums of an earlier accumulator for these queries, which are updated in place.
        only: one call of a kernel has all the tiles, so that it may write the output in its final dtype.
    """

    def __init__(
        self,
        q_SBHD: Tensor,
        value_dim: int,
        out_SBHD: Tensor | None = None,
        lse_SBH: Tensor | None = None,
        *,
        only: bool = False,
    ) -> None:
        self.only = only
        self.shape, self.dtype, self.device = (*q_SBHD.shape[:3], value_dim), q_SBHD.dtype, q_SBHD.device
        self.sum_dtype = accumulation_dtype(q_SBHD.dtype)
        self.out_SBHD, self.lse_SBH = out_SBHD, lse_SBH

    def add(self, rows: Span, out_BHSD: Tensor, lse_BHS: Tensor) -> None:
        """Merge a tile."""
        tile, whole = (out_BHSD.permute(2, 0, 1, 3), lse_BHS.permute(2, 0, 1)), rows == (0, self.shape[0])
        if not whole:
            merged(*(x[rows[0] : rows[1]] for x in self.sums()), *tile)
        elif self.out_SBHD is None:
            self.out_SBHD, self.lse_SBH = tile
        else:
            self.out_SBHD = merged(self.out_SBHD, self.lse_SBH, *tile)

    def sums(self) -> tuple[Tensor, Tensor]:
        """out and lse so far, in fp32 (fp64), to be updated in place; 0 and -inf at first."""
        if self.out_SBHD is None:
            self._start()
        self.out_SBHD = self.out_SBHD.to(self.sum_dtype)
        return self.out_SBHD, self.lse_SBH

    def unset(self, *, whole: bool = True) -> tuple[Tensor, Tensor] | None:
        """Memory for out and lse that the caller writes completely; None if there are sums, which it must add to.

        ``whole``: the caller writes the results of all its tiles at once.
        """
        if self.out_SBHD is not None:
            return None
        dtype = self.dtype if self.only and whole else self.sum_dtype
        self.out_SBHD = torch.empty(self.shape, dtype=dtype, device=self.device)
        self.lse_SBH = torch.empty(self.shape[:3], dtype=self.sum_dtype, device=self.device)
        return self.out_SBHD, self.lse_SBH

    def finish(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """out [s, b, h, d] in the inputs' dtype, lse [s, b, h]; 0 and -inf for queries without any key.

        Args:
            sinks: [h], one additional score for every query; see ``AttentionRule``.
        """
        if self.out_SBHD is None:
            self._start()
        out, lse = self.out_SBHD, self.lse_SBH
        if sinks is not None:
            sinks = sinks.to(lse.dtype)
            out, lse = out * torch.sigmoid(lse - sinks).unsqueeze(-1), torch.logaddexp(lse, sinks)
        return out.to(self.dtype), lse

    def _start(self) -> None:
        self.out_SBHD = torch.zeros(self.shape, dtype=self.sum_dtype, device=self.device)
        self.lse_SBH = torch.full(self.shape[:3], -torch.inf, dtype=self.sum_dtype, device=self.device)


@replaceable
def merged(out_SBHD: Tensor, lse_SBH: Tensor, tile_out_SBHD: Tensor, tile_lse_SBH: Tensor) -> Tensor:
    """``out -= sigmoid(lse_t - lse) * (out - out_t); lse = log(exp(lse) + exp(lse_t))``, in place.

    An output in a narrower dtype than fp32 stays, and a new one is returned. On a GPU with Triton this is one kernel.
    """
    if runs_triton(out_SBHD):
        from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import merge

        return merge(out_SBHD, lse_SBH, tile_out_SBHD, tile_lse_SBH)
    out = out_SBHD.to(accumulation_dtype(out_SBHD.dtype))
    # If neither side has attended to any key, both lse are -inf and the output stays as it is.
    share = torch.sigmoid(tile_lse_SBH - lse_SBH).nan_to_num_(0.0)
    out -= share.unsqueeze(-1) * (out - tile_out_SBHD)
    lse_SBH.copy_(torch.logaddexp(lse_SBH, tile_lse_SBH))
    return out


class GradientSum:
    """The sum of the tiles' gradients for the rows of one block.

    Args:
        like_SBHD: the block, for its shape, dtype and device.
        total_SBHD: the sum so far, fp32 (fp64), which is updated in place; None: nothing yet.
        only: one call of a kernel has all the tiles, so that it may write the gradient in its final dtype.
    """

    def __init__(self, like_SBHD: Tensor, total_SBHD: Tensor | None = None, *, only: bool = False) -> None:
        self.like, self.total, self.only = like_SBHD, total_SBHD, only
        self.sum_dtype = accumulation_dtype(like_SBHD.dtype)

    def add(self, rows: Span, grad_SBHD: Tensor) -> None:
        """Add the gradient of some rows. If the first gradient has all rows, it becomes the sum; nothing is zeroed."""
        if self.total is None and rows == (0, self.like.size(0)):
            self.total = grad_SBHD
        else:
            self.sum()[rows[0] : rows[1]].add_(grad_SBHD)  # += would also copy the rows onto themselves

    def sum(self) -> Tensor:
        """The sum so far, in fp32 (fp64), to be updated in place."""
        self.total = self.finish().to(self.sum_dtype)
        return self.total

    def unset(self, *, whole: bool = True) -> Tensor | None:
        """Memory that the caller writes completely; None if there is a sum. See `Accumulator.unset`."""
        if self.total is not None:
            return None
        dtype = self.like.dtype if self.only and whole else self.sum_dtype
        self.total = self.like.new_empty(self.like.shape, dtype=dtype)
        return self.total

    def finish(self) -> Tensor:
        """The sum [s, b, heads, d], 0 in rows without a tile; in the tile's dtype if only one was added."""
        if self.total is None:
            self.total = self.like.new_zeros(self.like.shape, dtype=self.sum_dtype)
        return self.total


class KeyGradients:
    """dk and dv of a key block.

    Args:
        k_SBHD, v_SBHD: its keys and values, for their shapes, dtype and device.
        total: the sum so far, fp32 (fp64), packed: [s, b, heads, sizes]; None: nothing yet.
        only: see `GradientSum`.
    """

    def __init__(self, k_SBHD: Tensor, v_SBHD: Tensor, total: Tensor | None = None, *, only: bool = False) -> None:
        self.total, self.key_dim, self.only = total, k_SBHD.size(3), only
        parts = (None, None) if total is None else unpacked(total, self.key_dim)
        self.dk, self.dv = (GradientSum(x, part, only=only) for x, part in zip((k_SBHD, v_SBHD), parts))

    def add(self, rows: Span, dk_SBHD: Tensor, dv_SBHD: Tensor) -> None:
        """Add the gradients of some rows."""
        self.dk.add(rows, dk_SBHD)
        self.dv.add(rows, dv_SBHD)

    def sums(self) -> tuple[Tensor, Tensor]:
        """dk and dv so far, in fp32 (fp64), to be updated in place."""
        return unpacked(self.packed(), self.key_dim)

    def unset(self, *, whole: bool = True) -> tuple[Tensor, Tensor] | None:
        """Memory for dk and dv that the caller writes completely; None if there are sums. See `Accumulator.unset`."""
        if self.total is not None or self.dk.total is not None:
            return None
        if self.only and whole:  # nothing is sent: separate tensors are contiguous
            return self.dk.unset(), self.dv.unset()
        self.total = self._memory()
        self.dk.total, self.dv.total = unpacked(self.total, self.key_dim)
        return self.dk.total, self.dv.total

    def _memory(self) -> Tensor:
        k, v = self.dk.like, self.dv.like
        return k.new_empty((*k.shape[:3], self.key_dim + v.size(3)), dtype=self.dk.sum_dtype)

    def packed(self) -> Tensor:
        """The sums, fp32 (fp64) [s, b, heads, sizes], to be sent or offloaded."""
        if self.total is None:
            if self.dk.total is None:
                self.total = self._memory().zero_()
            else:
                self.total = packed(self.dk.total, self.dv.total).to(self.dk.sum_dtype)
            self.dk.total, self.dv.total = unpacked(self.total, self.key_dim)
        return self.total
