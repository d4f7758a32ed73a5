# SPDX-License-Identifier: Apache-2.0
"""Attention on a simulated GPU: what stands for its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels import KERNELS
from megatron.context_parallel.attention.kernels.base import Kernel
from megatron.context_parallel.attention.kernels.row_mask import PAIR_BYTES, AnyMask
from megatron.context_parallel.attention.kernels.triton_tiles import groups
from megatron.context_parallel.layout.tiles import Tile
from megatron.simulator.cost import trace
from megatron.simulator.cost.seconds import attention_named
from megatron.simulator.dry_run.recorder import Recorder
from megatron.simulator.machines.machine import Machine

FUSED = ("flash_attn", "cudnn", "flash")


def simulated_kernel(
    recorder: Recorder,
    machine: Machine,
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    many_tiles: bool = False,
    **needs: bool,
) -> Kernel:
    """As `kernels.select` on a GPU of ``machine``, which is simulated on ``device``. Raises KernelUnavailable."""
    chosen = machine.choose_attention(name, dtype, head_dim, many_tiles=many_tiles, **needs)
    if chosen == "triton":
        return SimulatedTriton(recorder)
    return SimulatedFused(recorder, chosen) if chosen in FUSED else KERNELS[chosen]


class SimulatedFused:
    """A fused kernel. PyTorch's flash attention, of which fake tensors know the shapes, stands for each of them."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def forward(
        self, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, causal: bool, mask: AnyMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        with self.recorder.calling(attention_named(self.name)):
            return KERNELS["flash"].forward(q_BHSD, k_BHSD, v_BHSD, causal=causal, mask=mask, scale=scale)

    def backward(self, *tensors: Tensor, causal: bool, mask: AnyMask, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        with self.recorder.calling(attention_named(self.name)):
            return KERNELS["flash"].backward(*tensors, causal=causal, mask=mask, scale=scale)


class SimulatedTriton:
    """In the place of `TritonKernel`: nothing is computed, launches are written down with the pairs that tiles hold.

    What dropout's hashes and a soft-cap take is not priced.
    """

    name = "triton"

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def attend(
        self, tiles: tuple[Tile, ...], q: Tensor, k: Tensor, v: Tensor, *, out_SBHD: Tensor, lse_SBH: Tensor, **_: Any
    ) -> None:
        """One launch for each of `groups`; see `kernels.base.TilesKernel`."""
        for group in groups(tiles):
            self._price(group, 4.0, q, k, moved=(q, k, v, *(out_SBHD, lse_SBH) * 2))

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
        for group in groups(tiles):
            self._price(group, 6.0, q, k, moved=(q, k, v, *final, dq, dq), backward=True)
            self._price(group, 8.0, q, k, moved=(q, k, v, *final, dk, dk, dv, dv), backward=True, asks=False)

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
        asks: bool = True,
    ) -> None:
        """``asks``: the mask about each pair of masked tiles, as the first launch of a pass does."""
        asked = asks * sum((tile.q[1] - tile.q[0]) * (tile.k[1] - tile.k[0]) for tile in tiles if tile.masked)
        if asked:
            self.recorder.price(trace.Kernel("mask_bits", "memory", 0.0, asked * PAIR_BYTES))
        rows, batch, heads, size = q.shape
        flops *= batch * heads * size * sum(tile.pairs for tile in tiles)
        shape = (rows, k.size(0), batch * heads, size)
        name = attention_named(self.name)
        self.recorder.price(trace.Kernel(name, "attention", flops, _bytes(*moved), shape, q.element_size(), backward))


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
