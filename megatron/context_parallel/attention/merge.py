# SPDX-License-Identifier: Apache-2.0
"""How the results of tiles come together, in fp32 (fp64 for fp64): outputs by their lse, gradients by addition.

What comes first for a row is written and not added: no memory is zeroed that a tile writes to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import accumulation_dtype
from megatron.context_parallel.layout.spans import Span
from megatron.context_parallel.layout.tiles import Rows, count, packed, union


class Accumulator:
    """Merges the outputs of tiles of one query block."""

    def __init__(self, q_SBHD: Tensor, out_SBHD: Tensor | None = None, lse_SBH: Tensor | None = None) -> None:
        """``out_SBHD, lse_SBH``: what an earlier accumulator for these queries had so far; they are written to."""
        self.shape, self.dtype, self.device = q_SBHD.shape, q_SBHD.dtype, q_SBHD.device
        self.sum_dtype = accumulation_dtype(q_SBHD.dtype)
        self.out_SBHD, self.lse_SBH = out_SBHD, lse_SBH

    def add(self, rows: Span, out_BHSD: Tensor, lse_BHS: Tensor) -> None:
        """Merge a tile: ``out -= sigmoid(lse_t - lse) * (out - out_t); lse = log(exp(lse) + exp(lse_t))``."""
        tile_out, tile_lse = out_BHSD.permute(2, 0, 1, 3), lse_BHS.permute(2, 0, 1)
        if self.out_SBHD is None:
            if rows == (0, self.shape[0]):
                self.out_SBHD, self.lse_SBH = tile_out, tile_lse
                return
            self._start()
        if self.out_SBHD.dtype != self.sum_dtype:
            self.out_SBHD = self.out_SBHD.to(self.sum_dtype)
        out, lse = self.out_SBHD[rows[0] : rows[1]], self.lse_SBH[rows[0] : rows[1]]
        # Where neither side has attended to anything both lse are -inf, and nothing changes.
        share = torch.sigmoid(tile_lse - lse).nan_to_num_(0.0)
        out -= share.unsqueeze(-1) * (out - tile_out)
        lse.copy_(torch.logaddexp(lse, tile_lse))

    def finish(self) -> tuple[Tensor, Tensor]:
        """out [s, b, h, d] in the inputs' dtype, lse [s, b, h]; 0 and -inf for queries without any key."""
        if self.out_SBHD is None:
            self._start()
        return self.out_SBHD.to(self.dtype), self.lse_SBH

    def _start(self) -> None:
        self.out_SBHD = torch.zeros(self.shape, dtype=self.sum_dtype, device=self.device)
        self.lse_SBH = torch.full(self.shape[:3], -torch.inf, dtype=self.sum_dtype, device=self.device)


class GradientSum:
    """Adds up the gradients that tiles give for the rows of one block.

    Args:
        like_SBHD: the block [s, b, heads, d].
        total_SBHD: the sum so far, fp32 (fp64), which is added to in place; None: nothing yet.
        written: the rows of ``total_SBHD`` that hold something; default all.
    """

    def __init__(self, like_SBHD: Tensor, total_SBHD: Tensor | None = None, written: Rows | None = None) -> None:
        self.shape, self.device = like_SBHD.shape, like_SBHD.device
        self.sum_dtype = accumulation_dtype(like_SBHD.dtype)
        self.total = total_SBHD
        everything = ((0, self.shape[0]),) if total_SBHD is not None else ()
        self.written = everything if written is None else written

    def add(self, rows: Span, grad_SBHD: Tensor) -> None:
        """Add the gradient of some rows; one that covers the block may become the sum itself."""
        if self.total is None and rows == (0, self.shape[0]):
            self.total, self.written = grad_SBHD, (rows,)  # widened only if another one comes
            return
        part, missing = self._wide()[slice(*rows)], _gaps(rows, self.written)
        if missing == [rows]:
            part.copy_(grad_SBHD)
        else:
            self._zero(missing)
            part += grad_SBHD
        if missing:
            self.written = union(self.written, (rows,))

    def finish(self) -> Tensor:
        """The sum [s, b, heads, d], 0 for rows that no tile has; a single tile's gradient keeps its dtype."""
        self._zero(_gaps((0, self.shape[0]), self.written))
        return self.total

    def _wide(self) -> Tensor:
        if self.total is None:
            self.total = torch.empty(self.shape, dtype=self.sum_dtype, device=self.device)
        elif self.total.dtype != self.sum_dtype:
            self.total = self.total.to(self.sum_dtype)
        return self.total

    def _zero(self, missing: list[Span]) -> None:
        for start, stop in missing:
            self._wide()[start:stop] = 0


class KeyGradients:
    """dk and dv of the rows of a key block that are kept: a sum each.

    Args:
        dk, dv: of the kept rows, one after another.
        rows: which they are.
    """

    def __init__(self, dk: GradientSum, dv: GradientSum, rows: Rows) -> None:
        self.dk, self.dv, self.rows = dk, dv, rows

    @classmethod
    def of(cls, k_SBHD: Tensor, v_SBHD: Tensor) -> KeyGradients:
        """Of a whole block, nothing yet."""
        return cls(GradientSum(k_SBHD), GradientSum(v_SBHD), ((0, k_SBHD.size(0)),))

    def add(self, rows: Span, dk_SBHD: Tensor, dv_SBHD: Tensor) -> None:
        """Add gradients of ``rows``, which lie within one run of the kept ones."""
        at = packed(rows, self.rows)
        self.dk.add(at, dk_SBHD)
        self.dv.add(at, dv_SBHD)

    def finish(self) -> tuple[Tensor, Tensor]:
        return self.dk.finish(), self.dv.finish()


class JointKeyGradients(KeyGradients):
    """The same side by side in one tensor, to be sent or put away.

    Args:
        k_SBHD: keys of the block; b, heads, d, dtype and device count.
        rows: the rows that are kept.
        total_S2BHD: the sum so far, fp32 (fp64) [kept rows, 2, b, heads, d]; None: nothing yet.
    """

    def __init__(self, k_SBHD: Tensor, rows: Rows, total_S2BHD: Tensor | None = None) -> None:
        self.k, self.rows, self.total_S2BHD = k_SBHD, rows, total_S2BHD
        if total_S2BHD is not None:
            self.dk, self.dv = (GradientSum(half, half) for half in total_S2BHD.unbind(1))

    def add(self, rows: Span, dk_SBHD: Tensor, dv_SBHD: Tensor) -> None:
        self._start()
        super().add(rows, dk_SBHD, dv_SBHD)

    def finish_joint(self) -> Tensor:
        """fp32 (fp64) [kept rows, 2, b, heads, d], 0 for rows that no tile has."""
        self._start()
        self.finish()
        return self.total_S2BHD

    def _start(self) -> None:
        """Memory is there from the first tile's gradients on, not while they are computed."""
        if self.total_S2BHD is None:
            shape, dtype = (count(self.rows), 2, *self.k.shape[1:]), accumulation_dtype(self.k.dtype)
            self.total_S2BHD = torch.empty(shape, dtype=dtype, device=self.k.device)
            self.dk, self.dv = (GradientSum(half, half, written=()) for half in self.total_S2BHD.unbind(1))


def _gaps(rows: Span, written: Rows) -> list[Span]:
    """The parts of ``rows`` that are not in ``written``."""
    found, first = [], rows[0]
    for start, stop in written:
        if start >= rows[1]:
            break
        if first < start:
            found.append((first, start))
        first = max(first, stop)
    if first < rows[1]:
        found.append((first, rows[1]))
    return found
