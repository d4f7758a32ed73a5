# SPDX-License-Identifier: Apache-2.0
"""cuDNN's fused attention, through PyTorch. It supports grouped heads, but no masks.

cuDNN makes a plan on the host for each new combination of shapes and strides, and keeps it. This is cheap if tiles have
few different shapes.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import (
    AnyMask,
    Capability,
    backward_in_pieces,
    check_tile,
    forward_in_pieces,
    gpu_reason,
    is_half,
)
from megatron.context_parallel.attention.kernels.math_kernel import MathKernel
from megatron.decisions.kernel_order import SHORTER_HEADS, lacks


class CudnnKernel:
    """bf16 and fp16; reads strided tensors in place. Tiles with one query or one key use the math kernel."""

    name = "cudnn"
    supports_mask = False
    supports_dropout = False
    supports_softcap = False
    supports_value_dim = False

    def why_not(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        reason = gpu_reason(device) or self.why_not_on(torch.cuda.get_device_capability(device), dtype, head_dim)
        if reason is not None:
            return reason
        version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else 0
        if version < 90000:
            return "needs cuDNN 9 or newer"
        if head_dim > 128 and version < 91000:
            return SHORTER_HEADS
        if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0").lower() not in ("", "0", "off", "false", "no", "n"):
            return "needs TORCH_CUDNN_SDPA_AVOID_RECOMPILE unset"  # it changes the layout of lse
        return None

    def why_not_on(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        reason = lacks(self.name, capability, head_dim, half=is_half(dtype))
        if reason is None and torch.are_deterministic_algorithms_enabled():
            return "is not deterministic"
        return reason

    def forward(
        self, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, causal: bool, mask: AnyMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        check_tile(self, q_BHSD, k_BHSD, v_BHSD, causal=causal, mask=mask)
        if min(q_BHSD.shape[2], k_BHSD.shape[2]) == 1:
            return MathKernel().forward(q_BHSD, k_BHSD, v_BHSD, causal=causal, mask=None, scale=scale)

        def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse, *_ = _forward(q, k, v, None, True, 0.0, causal, scale=scale)
            return out, lse.view(q.shape[:3])

        return forward_in_pieces(call, q_BHSD, k_BHSD, v_BHSD)

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
        check_tile(self, q_BHSD, k_BHSD, v_BHSD, causal=causal, mask=mask)
        if min(q_BHSD.shape[2], k_BHSD.shape[2]) == 1:
            return MathKernel().backward(
                dout_BHSD, q_BHSD, k_BHSD, v_BHSD, out_BHSD, lse_BHS, causal=causal, mask=None, scale=scale
            )
        # The random state, which is not used without dropout.
        unused = torch.empty((), dtype=torch.int64, device=q_BHSD.device)
        four_dims = _lse_dims(q_BHSD.device, q_BHSD.dtype) == 4

        def call(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor):
            return _backward(
                dout,
                q,
                k,
                v,
                out,
                lse.unsqueeze(-1) if four_dims else lse,
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

        return backward_in_pieces(call, dout_BHSD, q_BHSD, k_BHSD, v_BHSD, out_BHSD, lse_BHS)


_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


@functools.cache
def _lse_dims(device: torch.device, dtype: torch.dtype) -> int:
    """3 or 4: PyTorch returns lse as [b, h, s] or, in some versions, [b, h, s, 1]; backward needs the same shape."""
    x = torch.zeros(1, 1, 64, 64, dtype=dtype, device=device)
    return _forward(x, x, x, None, True, 0.0, False, scale=1.0)[1].dim()
