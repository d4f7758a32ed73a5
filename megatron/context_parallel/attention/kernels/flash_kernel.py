# SPDX-License-Identifier: Apache-2.0
"""PyTorch's built-in FlashAttention-2 for CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.fused_kernel import FusedKernel


class FlashKernel(FusedKernel):
    """FlashAttention-2. Its backward pass copies ``out`` and ``dout`` unless they are ``[b, s, h, d]`` in memory."""

    name = "flash"

    def missing(self, device: torch.device, head_dim: int) -> str | None:
        built = torch.backends.cuda.is_flash_attention_available()
        return None if built else "this PyTorch is built without flash attention"

    def call(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _forward(q, k, v, 0.0, causal, scale=scale)
        return out, lse[:, :, : q.shape[2]]  # some versions pad the rows of lse

    def call_grad(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
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
            philox_seed=torch.empty(2, dtype=torch.uint64, device=q.device),  # not used without dropout
            philox_offset=torch.empty((), dtype=torch.uint64, device=q.device),
            scale=scale,
        )


_forward = torch.ops.aten._scaled_dot_product_flash_attention.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
