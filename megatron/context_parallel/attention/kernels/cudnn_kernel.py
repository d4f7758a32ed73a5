# SPDX-License-Identifier: Apache-2.0
"""cuDNN's fused attention, through PyTorch.

cuDNN makes a plan on the host for each new combination of shapes and strides, and keeps it. This is cheap if tiles have
few different shapes.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import Capability
from megatron.context_parallel.attention.kernels.fused_kernel import FusedKernel
from megatron.context_parallel.attention.kernels.math_kernel import MathKernel
from megatron.context_parallel.attention.kernels.tile_by_tile import TileScores
from megatron.decisions.kernel_order import SHORTER_HEADS

MATH = MathKernel()


class CudnnKernel(FusedKernel):
    """cuDNN's attention. Tiles with one query or one key use the math kernel instead."""

    name = "cudnn"

    def missing(self, device: torch.device, head_dim: int) -> str | None:
        version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else 0
        if version < 90000:
            return "needs cuDNN 9 or newer"
        if head_dim > 128 and version < 91000:
            return SHORTER_HEADS
        if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0").lower() not in ("", "0", "off", "false", "no", "n"):
            return "needs TORCH_CUDNN_SDPA_AVOID_RECOMPILE unset"  # it changes the layout of lse
        return None

    def why_not_on(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        reason = super().why_not_on(capability, dtype, head_dim)
        if reason is None and torch.are_deterministic_algorithms_enabled():
            return "is not deterministic"
        return reason

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: TileScores) -> tuple[Tensor, Tensor]:
        kernel = MATH if _single(q, k) else super()
        return kernel.forward(q, k, v, how)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: TileScores
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = MATH if _single(q, k) else super()
        return kernel.backward(dout, q, k, v, out, lse, how)

    def call(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _forward(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse.view(q.shape[:3])

    def call_grad(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state of dropout
        return _backward(
            dout,
            q,
            k,
            v,
            out,
            lse.unsqueeze(-1) if _lse_dims(q.device, q.dtype) == 4 else lse,
            philox_seed=unused,
            philox_offset=unused,
            attn_bias=None,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q.shape[2],
            max_k=k.shape[2],
            dropout_p=0.0,
            is_causal=causal,
            scale=scale,
        )


_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def _single(q_BHSD: Tensor, k_BHSD: Tensor) -> bool:
    """Whether there is one query or one key."""
    return min(q_BHSD.shape[2], k_BHSD.shape[2]) == 1


@functools.cache
def _lse_dims(device: torch.device, dtype: torch.dtype) -> int:
    """3 or 4: PyTorch returns lse as [b, h, s] or, in some versions, [b, h, s, 1]; backward needs the same shape."""
    x = torch.zeros(1, 1, 64, 64, dtype=dtype, device=device)
    return _forward(x, x, x, None, True, 0.0, False, scale=1.0)[1].dim()
