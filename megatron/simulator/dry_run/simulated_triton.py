# SPDX-License-Identifier: Apache-2.0
"""Triton's attention on a simulated GPU: nothing is computed, its launches are written down."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.triton_kernel import LARGEST_HEAD
from megatron.context_parallel.layout.tiles import Tile
from megatron.simulator.cost.seconds import TRITON
from megatron.simulator.cost.trace import Kernel
from megatron.simulator.dry_run.recorder import Recorder


def runs(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a GPU's Triton kernel takes such tensors."""
    return dtype != torch.float64 and head_dim <= LARGEST_HEAD


class SimulatedTriton:
    """In the place of `TritonKernel`, with the pairs that tiles hold; what dropout's hashes take is not priced."""

    name = "triton"

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def attend(
        self, tiles: tuple[Tile, ...], q: Tensor, k: Tensor, v: Tensor, *, out_SBHD: Tensor, lse_SBH: Tensor, **_: Any
    ) -> None:
        """One launch; see `kernels.base.TilesKernel`."""
        self._price(tiles, 4.0, q, k, moved=(q, k, v, *(out_SBHD, lse_SBH) * 2))

    def attend_grad(
        self,
        tiles: tuple[Tile, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dout: Tensor,
        lse: Tensor,
        delta_SBH: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        **_: Any,
    ) -> None:
        """Two launches, each of which computes scores and their gradients: 6 and 8 of the 10 FLOPs of one kernel."""
        final = (dout, lse, delta_SBH)
        self._price(tiles, 6.0, q, k, moved=(q, k, v, *final, dq, dq), backward=True)
        self._price(tiles, 8.0, q, k, moved=(q, k, v, *final, dk, dk, dv, dv), backward=True)

    def delta(self, out: Tensor, dout: Tensor) -> Tensor:
        """Row sums of ``dout * out``, fp32 [s, b, h]."""
        total = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
        self.recorder.price(Kernel("delta", "memory", 0.0, _bytes(out, dout, total)))
        return total

    def _price(
        self,
        tiles: tuple[Tile, ...],
        flops: float,
        q: Tensor,
        k: Tensor,
        *,
        moved: tuple[Tensor, ...],
        backward: bool = False,
    ) -> None:
        rows, batch, heads, size = q.shape
        flops *= batch * heads * size * sum(tile.pairs for tile in tiles)
        shape = (rows, k.size(0), batch * heads, size)
        self.recorder.price(Kernel(TRITON, "attention", flops, _bytes(*moved), shape, q.element_size(), backward))


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
