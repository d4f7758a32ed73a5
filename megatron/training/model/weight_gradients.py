# SPDX-License-Identifier: Apache-2.0
"""Weight gradients of megatron-core's linear layers, added to DDP's sums by the product itself.

core calls Apex's kernel for that. Without Apex it adds each product to its sum by another kernel, which reads and
writes both: on one H200 a thirtieth of a short step. PyTorch's product can add to a wider sum.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron.context_parallel.fpdt.chunked_loss import add_product, adds_wide


class ByPyTorch:
    """The functions of Apex's ``fused_weight_gradient_mlp_cuda`` that core calls."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """``main_grad [out, in] += grad_output^T [out, tokens] @ inputs [tokens, in]``; main_grad is fp32."""
        add_product(main_grad, grad_output.t(), inputs)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32  # for sums in the dtype of the gradients


def products_add(on_gpu: bool, dtype: torch.dtype) -> bool:
    """Whether products can add to DDP's sums, in fp32: by Apex's kernel, or by PyTorch's, which core then gets."""
    if not on_gpu or layers._grad_accum_fusion_available:
        return on_gpu
    if dtype != torch.float32 and not adds_wide(torch.device("cuda"), dtype, torch.float32):
        return False
    layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = ByPyTorch, True
    return True
