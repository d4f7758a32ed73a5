# SPDX-License-Identifier: Apache-2.0
"""The loss in chunks of tokens, so that the logits of the complete sequence never exist (FPDT paper, section 4.3).

The output layer and the cross-entropy are one operation. A chunk's logits are freed after its losses and gradients are
computed; memory is needed for the gradients of the hidden states and of the output layer's weight.

With chunks of a few hundred tokens most of the time would go into the weight's gradient, an fp32 sum that each chunk
reads and writes. Therefore the gradients of several chunks' logits, in the compute dtype, are collected
(:func:`pieces_together`) and added to the sum by one product.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.fpdt.chunked_ffn import even_spans, in_main_grad, main_grad_of, take_once
from megatron.context_parallel.fpdt.host_store import HiddenStates, Offload
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.spans import Span
from megatron.decisions.division import PARTS, pieces_together
from megatron.platform.autograd import autocast_inputs, once_differentiable, refuse_transforms, without_autocast
from megatron.platform.hooks import replaceable


def chunked_linear_cross_entropy(
    hidden_SBH: Tensor,
    weight_VH: Tensor,
    labels_SB: Tensor,
    token_weights_SB: Tensor,
    *,
    chunks: int,
    vocab_size: int,
    tensor: Axis = Axis(),
    sequence_parallel: bool = False,
    offload: Offload | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Sum over all tokens of ``token weight * cross-entropy(hidden @ weight^T, label)``.

    Gradients are computed in the forward pass, so that the backward pass recomputes nothing. Softmax is in fp32 (fp64
    for fp64 inputs) and subtracts the largest logit first.

    Args:
        hidden_SBH: [s, b, h]; under ``sequence_parallel`` [s / TP, b, h], this TP rank's tokens. It may be a host
            buffer; then its gradient is a host buffer too.
        weight_VH: [padded vocab / TP, h], this TP rank's rows.
        labels_SB, token_weights_SB: [s, b], all tokens of the TP group. A weight of 0 masks a token.
        chunks: number of spans of tokens; at most one for each token is used.
        vocab_size: vocabulary size without padding; logits of rows beyond it are ignored.
        tensor: the TP axis over which the vocabulary is split.
        sequence_parallel: whether tokens are split over TP between the layers.
        offload: copies a host buffer to and from the device.
        softcap: a logit x becomes ``softcap * tanh(x / softcap)``; None: no cap.

    Returns:
        The sum, a scalar in fp32 (fp64), the same on every TP rank.
    """
    refuse_transforms("the chunked loss")
    hidden, weight = autocast_inputs(hidden_SBH, weight_VH, device=weight_VH.device)
    return _ChunkedLoss.apply(
        hidden, weight, labels_SB, token_weights_SB, chunks, vocab_size, tensor, sequence_parallel, offload, softcap
    )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_weights: Tensor,
        chunks: int,
        vocab_size: int,
        tensor: Axis,
        sequence_parallel: bool,
        offload: Offload | None,
        softcap: float | None,
    ) -> Tensor:
        gathered = sequence_parallel and tensor.size > 1
        ranks = tensor.size if gathered else 1
        rows, wide = hidden.size(0), accumulation_dtype(hidden.dtype)
        needs_grad = any(ctx.needs_input_grad[:2])
        pieces = max(1, min(chunks, rows))
        together = pieces_together(ceil(rows / pieces) * ranks * hidden.size(1), hidden.size(2), hidden.element_size())
        hidden_states, spans = HiddenStates(hidden, offload), even_spans(rows, ceil(pieces / together))
        grad_hidden = grad_weight = None
        if needs_grad:
            grad_hidden = HiddenStates.empty(hidden.shape, hidden.dtype, hidden.device, hidden_states.offload)
            grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        # Under TP-sp rank t holds rows t * rows .. of the labels; a chunk takes the same rows of every rank.
        labels, token_weights = (x.reshape(ranks, rows, -1) for x in (labels, token_weights))
        total = torch.zeros((), dtype=wide, device=weight.device)
        for (start, stop), part in zip(spans, hidden_states.walk(spans)):
            tokens = gather(part, tensor) if gathered else part
            tokens = tokens.reshape(-1, hidden.size(-1))
            targets = labels[:, start:stop].reshape(-1)
            scale = token_weights[:, start:stop].reshape(-1).to(wide)
            cut = even_spans(tokens.size(0), ceil((stop - start) * pieces / rows))
            loss, grad_logits = loss_and_gradient(
                tokens, weight, targets, scale, vocab_size, tensor, cut, needs_grad, softcap
            )
            total += loss
            if needs_grad:
                grad_tokens = (grad_logits @ weight).reshape(-1, *hidden.shape[1:])
                grad_hidden.write((start, stop), _sum_over_tensor(grad_tokens, tensor, gathered))
                if grad_weight is not None:
                    add_product(grad_weight, grad_logits.t(), tokens)
                del grad_logits, grad_tokens
        ctx.grads = [(grad_hidden, grad_weight, spans)]
        ctx.weight_dtype, ctx.weight = weight.dtype, None if main_grad_of(weight) is None else weight
        return total

    @staticmethod
    @once_differentiable("the chunked loss")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, spans = take_once(ctx.grads, "the chunked loss")  # scaled in place: they are large
        hidden_part, weight_part = None, None
        if ctx.needs_input_grad[0]:
            hidden_part = grad_hidden.x
            for span, part in zip(spans, grad_hidden.walk(spans)):
                grad_hidden.write(span, part.mul_(grad))
        if ctx.needs_input_grad[1]:
            if ctx.weight is None:
                weight_part = grad_weight.mul_(grad).to(ctx.weight_dtype)
            else:
                main_grad_of(ctx.weight).addcmul_(grad_weight, grad)
                if grad_weight.dtype != ctx.weight_dtype:
                    grad_weight = None
                weight_part = in_main_grad(ctx.weight, grad_weight)
        return hidden_part, weight_part, *[None] * 8


def add_product(total_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """``total += a @ b``, where total may have a wider dtype; fused with the product if possible."""
    if total_MN.dtype == a_MK.dtype:
        total_MN.addmm_(a_MK, b_KN)
    elif adds_wide(a_MK.device, a_MK.dtype, total_MN.dtype):
        torch.ops.aten.addmm.dtype_out(total_MN, a_MK, b_KN, total_MN.dtype, out=total_MN)
    else:  # the product is as large as the total, so it is computed in parts
        for part, a in zip(total_MN.chunk(PARTS), a_MK.chunk(PARTS)):
            part += a @ b_KN


@replaceable
@cache
def adds_wide(device: torch.device, dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Whether PyTorch can add a product of narrow matrices to a wide sum: newer versions can, on GPUs."""
    if device.type != "cuda":
        return False
    one, total = torch.ones((16, 16), dtype=dtype, device=device), torch.ones((16, 16), dtype=wide, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, one, one, wide, out=total)
    except (AttributeError, RuntimeError):  # older versions have no such kernel, or need a narrow total
        return False
    return bool(total.eq(17).all())


@replaceable
def loss_and_gradient(
    tokens: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    vocab_size: int,
    tensor: Axis,
    spans: list[Span],
    needs_grad: bool,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The weighted sum of the losses of some tokens and the gradient of their logits, computed span by span."""
    total, grads = scale.new_zeros(()), None
    for start, stop in spans:
        logits = (tokens[start:stop] @ weight.t()).to(scale.dtype)
        slope = None
        if softcap is not None:
            slope = logits.div_(softcap).tanh_()
            logits = slope * softcap
        losses, grad = cross_entropy(logits, targets[start:stop], vocab_size, tensor, needs_grad)
        if needs_grad and slope is not None:
            grad.mul_(slope.square_().neg_().add_(1))  # the derivative of the soft-cap
        total += (losses * scale[start:stop]).sum()
        if needs_grad:
            grad.mul_(scale[start:stop].unsqueeze(1))
            if len(spans) == 1:
                return total, grad.to(weight.dtype)
            grads = grad.new_empty((tokens.size(0), grad.size(1)), dtype=weight.dtype) if grads is None else grads
            grads[start:stop] = grad
        del logits, grad, slope
    return total, grads


def cross_entropy(
    logits_TV: Tensor, targets: Tensor, vocab_size: int, tensor: Axis, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses [tokens] and their gradients [tokens, vocab / TP] of logits split over TP; destroys the logits."""
    width = logits_TV.size(1)
    first = tensor.rank * width
    real = max(min(vocab_size - first, width), 0)
    if real < width:
        logits_TV[:, real:] = -torch.inf
    largest = logits_TV.amax(1)
    all_reduce(largest, tensor, dist.ReduceOp.MAX)
    logits_TV -= largest.unsqueeze(1)
    mine = (targets >= first) & (targets < first + width)
    column = torch.where(mine, targets - first, 0).unsqueeze(1)
    target_logit = torch.where(mine, logits_TV.gather(1, column).squeeze(1), 0.0)
    exponentials = logits_TV.exp_()
    total = exponentials.sum(1)
    sums = torch.stack((target_logit, total))
    all_reduce(sums, tensor, dist.ReduceOp.SUM)
    target_logit, total = sums
    losses = total.log() - target_logit
    if not needs_grad:
        return losses, None
    grad = exponentials.div_(total.unsqueeze(1))
    grad.scatter_add_(1, column, -mine.to(grad.dtype).unsqueeze(1))
    return losses, grad


def all_reduce(x: Tensor, tensor: Axis, op: dist.ReduceOp) -> None:
    if tensor.size > 1:
        dist.all_reduce(x, op=op, group=tensor.group)


def gather(part: Tensor, tensor: Axis) -> Tensor:
    """All-gather of [n, b, h] over TP along the first dimension."""
    gathered = part.new_empty((tensor.size * part.size(0), *part.shape[1:]))
    dist.all_gather_into_tensor(gathered, part.contiguous(), group=tensor.group)
    return gathered


def _sum_over_tensor(grad: Tensor, tensor: Axis, scatter: bool) -> Tensor:
    """Sum of the TP ranks' gradients of the same tokens; with ``scatter`` each rank gets the sum for its own tokens."""
    if tensor.size == 1:
        return grad
    grad = grad.contiguous()
    if not scatter:
        dist.all_reduce(grad, group=tensor.group)
        return grad
    mine = grad.new_empty((grad.size(0) // tensor.size, *grad.shape[1:]))
    dist.reduce_scatter_tensor(mine, grad, group=tensor.group)
    return mine
