# SPDX-License-Identifier: Apache-2.0
"""PyTorch's built-in FlashAttention-2 for CUDA. It supports grouped heads, but no masks."""

from __future__ import annotations

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
from megatron.decisions.kernel_order import lacks


class FlashKernel:
    """bf16 and fp16. Copies ``out`` and ``dout`` in backward unless they are ``[b, s, h, d]`` in memory."""

    name = "flash"
    supports_mask = False
    supports_dropout = False
    supports_softcap = False
    supports_value_dim = False

    def why_not(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        reason = gpu_reason(device) or self.why_not_on(torch.cuda.get_device_capability(device), dtype, head_dim)
        if reason is None and not torch.backends.cuda.is_flash_attention_available():
            return "this PyTorch is built without flash attention"
        return reason

    def why_not_on(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        return lacks(self.name, capability, head_dim, half=is_half(dtype))

    def forward(
        self, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, causal: bool, mask: AnyMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        check_tile(self, q_BHSD, k_BHSD, v_BHSD, causal=causal, mask=mask)

        def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse, *_ = _forward(q, k, v, 0.0, causal, scale=scale)
            return out, lse[:, :, : q.shape[2]]  # some versions pad the rows of lse

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
        # The random state, which is not used without dropout.
        seed = torch.empty(2, dtype=torch.uint64, device=q_BHSD.device)
        offset = torch.empty((), dtype=torch.uint64, device=q_BHSD.device)

        def call(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor):
            return _backward(
                dout,
                q,
                k,
                v,
                out,
                lse,
                cum_seq_q=None,
                cum_seq_k=None,
                max_q=q.shape[2],
                max_k=k.shape[2],
                dropout_p=0.0,
                is_causal=causal,
                philox_seed=seed,
                philox_offset=offset,
                scale=scale,
            )

        return backward_in_pieces(call, dout_BHSD, q_BHSD, k_BHSD, v_BHSD, out_BHSD, lse_BHS)


_forward = torch.ops.aten._scaled_dot_product_flash_attention.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
