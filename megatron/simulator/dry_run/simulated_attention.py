# SPDX-License-Identifier: Apache-2.0
"""Attention on a simulated GPU: what stands for its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels import KERNELS, select
from megatron.context_parallel.attention.kernels.base import Kernel, KernelUnavailable, tensor_reason
from megatron.context_parallel.attention.kernels.triton_kernel import LARGEST_HEAD
from megatron.context_parallel.layout.tiles import Tile
from megatron.simulator.cost import trace
from megatron.simulator.cost.seconds import TRITON
from megatron.simulator.dry_run.recorder import Recorder


def simulated_kernel(
    recorder: Recorder,
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    many_tiles: bool = False,
    **needs: bool,
) -> Kernel:
    """As `kernels.select`, of a GPU that is simulated on ``device``.

    PyTorch's flash attention stands for every fused kernel, and the machine's file says how fast the one that would run
    is. Triton's takes what the fused ones do not.

    Raises KernelUnavailable for what no GPU runs.
    """
    if name not in ("auto", *KERNELS):
        select(name, device=device, dtype=dtype, head_dim=head_dim, **needs)
    unfused = any(needs.values()) or tensor_reason(dtype, head_dim) is not None
    if name == "cpu" or (name not in ("auto", "triton", "math") and unfused):
        raise KernelUnavailable(name, "cannot run this on a GPU: use auto, or math")
    asked = name == "triton" or (name == "auto" and any(needs.values()))
    if asked and dtype != torch.float64 and head_dim <= LARGEST_HEAD:
        return SimulatedTriton(recorder)
    return KERNELS["math" if name == "math" or unfused else "flash"]


class SimulatedTriton:
    """In the place of `TritonKernel`: nothing is computed, launches are written down with the pairs that tiles hold.

    What dropout's hashes take is not priced.
    """

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
        self.recorder.price(trace.Kernel("delta", "memory", 0.0, _bytes(out, dout, total)))
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
        self.recorder.price(trace.Kernel(TRITON, "attention", flops, _bytes(*moved), shape, q.element_size(), backward))


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
