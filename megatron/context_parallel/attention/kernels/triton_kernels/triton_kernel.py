# SPDX-License-Identifier: Apache-2.0
"""The Triton backend: all tiles of a key block in one launch, with any mask, ALiBi, soft-cap, dropout and strides."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import AnyMask, Capability, check_tile, gpu_reason
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import (
    attend_tiles,
    attend_tiles_grad,
    delta,
    interpreted,
)
from megatron.context_parallel.layout.tiles import Tile, Tiles
from megatron.decisions.kernel_order import LARGEST_HEAD, too_old

OLDEST = (3, 4)


class TritonKernel:
    """fp32, bf16 and fp16 on NVIDIA GPUs of compute capability 8.0 or newer; head sizes up to 256."""

    name = "triton"
    supports_mask = True
    supports_dropout = True
    supports_softcap = True
    supports_value_dim = True

    def why_not(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """``head_dim``: the larger head size of keys and values."""
        missing = missing_triton()
        if missing is not None:
            return missing
        reason = _tensor_reason(dtype, head_dim)
        if reason is not None:
            return reason
        if device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
            return "needs a GPU"  # without importing Triton, which takes a second
        if interpreted():
            return None if device.type == "cpu" else "is interpreted (TRITON_INTERPRET), which needs tensors on the CPU"
        return gpu_reason(device) or too_old(torch.cuda.get_device_capability(device))

    def why_not_on(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        return _tensor_reason(dtype, head_dim) or too_old(capability)

    attend = staticmethod(attend_tiles)
    attend_grad = staticmethod(attend_tiles_grad)
    delta = staticmethod(delta)

    def forward(
        self, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, causal: bool, mask: AnyMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        _check_plain(self, q_BHSD, k_BHSD, v_BHSD, causal=causal, mask=mask)
        q, k, v = (x.permute(2, 0, 1, 3) for x in (q_BHSD, k_BHSD, v_BHSD))
        out = torch.zeros(*q.shape[:3], v.size(3), dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
        attend_tiles(_one_tile(q, k, causal), q, k, v, scale=scale, out_SBHD=out, lse_SBH=lse)
        return out.to(q.dtype).permute(1, 2, 0, 3), lse.permute(1, 2, 0)

    def backward(
        self,
        dout_BHSD: Tensor,
        q_BHSD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        out_BHSD: Tensor,
        lse_BHS: Tensor,
        *,
        causal: bool,
        mask: AnyMask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        _check_plain(self, q_BHSD, k_BHSD, v_BHSD, causal=causal, mask=mask)
        dout, q, k, v, out = (x.permute(2, 0, 1, 3) for x in (dout_BHSD, q_BHSD, k_BHSD, v_BHSD, out_BHSD))
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
        attend_tiles_grad(
            _one_tile(q, k, causal),
            q,
            k,
            v,
            dout=dout,
            lse=lse_BHS.permute(2, 0, 1),
            delta_SBH=delta(out, dout),
            scale=scale,
            **dict(zip(("dq", "dk", "dv"), sums)),
        )
        return tuple(total.to(x.dtype).permute(1, 2, 0, 3) for total, x in zip(sums, (q, k, v)))


def _tensor_reason(dtype: torch.dtype, head_dim: int) -> str | None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "needs fp32, bf16 or fp16"
    return f"needs a head dimension of at most {LARGEST_HEAD}" if head_dim > LARGEST_HEAD else None


def _check_plain(kernel: TritonKernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: AnyMask) -> None:
    check_tile(kernel, q, k, v, causal=causal, mask=mask)
    if mask is not None:
        raise ValueError("the attention kernel triton supports masks in attend(), not in forward(): use attend()")


def _one_tile(q_SBHD: Tensor, k_SBHD: Tensor, causal: bool) -> Tiles:
    rows = (0, q_SBHD.size(0)), (0, k_SBHD.size(0))
    return Tiles([Tile(*rows, "causal" if causal else "full", False, *((span,) for span in rows))])


@functools.cache
def missing_triton() -> str | None:
    """Why there is no Triton that can compile these kernels, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    version = importlib.metadata.version("triton")
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        return f"needs triton {'.'.join(map(str, OLDEST))} or newer, not {version}"
    return None
