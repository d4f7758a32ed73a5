# SPDX-License-Identifier: Apache-2.0
"""The loss in chunks of tokens, so that the logits of the complete sequence never exist (FPDT paper, section 4.3).

The output layer and the cross-entropy are one operation. A chunk's logits are freed after its losses and gradients are
computed; memory is needed for the gradients of the hidden states and of the output layer's weight.

With chunks of a few hundred tokens most of the time would go into the weight's gradient, an fp32 sum that each chunk
reads and writes. Therefore the gradients of several chunks' logits, in the compute dtype, are collected
(:func:`pieces_together`) and added to the sum by one product.

:func:`weighted_sum` is the loop. The loss knows the weight of each token, so that its forward pass computes the
gradients. Log-probabilities (log_probs.py) get these weights in the backward pass, which then runs the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from megatron.platform.collectives import gathered, scattered
from megatron.platform.hooks import replaceable
from megatron.platform.streams import runs_triton


@dataclass(frozen=True)
class OutputRule:
    """How logits follow from hidden states, and how both are split.

    Attributes:
        vocab_size: vocabulary size without padding; logits of rows beyond it are ignored.
        chunks: number of spans of tokens; at most one for each token is used.
        tensor: the TP axis over which the vocabulary is split.
        sequence_parallel: whether tokens are split over TP between the layers.
        offload: copies a host buffer to and from the device.
        softcap: a logit x becomes ``softcap * tanh(x / softcap)``; None: no cap.
        temperature: logits are divided by it, after the cap.
    """

    vocab_size: int
    chunks: int
    tensor: Axis = Axis()
    sequence_parallel: bool = False
    offload: Offload | None = None
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def parts(self) -> int:
        """Over how many TP ranks the tokens are split."""
        return self.tensor.size if self.sequence_parallel else 1

    def real_columns(self, width: int) -> int:
        """How many of this TP rank's ``width`` columns are no padding."""
        return max(min(self.vocab_size - self.tensor.rank * width, width), 0)


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
        chunks, vocab_size, tensor, sequence_parallel, offload, softcap: see :class:`OutputRule`.

    Returns:
        The sum, a scalar in fp32 (fp64), the same on every TP rank.
    """
    refuse_transforms("the chunked loss")
    hidden, weight = autocast_inputs(hidden_SBH, weight_VH, device=weight_VH.device)
    rule = OutputRule(vocab_size, chunks, tensor, sequence_parallel, offload, softcap)
    return _ChunkedLoss.apply(hidden, weight, labels_SB, token_weights_SB, rule)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor, rule: OutputRule
    ) -> Tensor:
        total, *grads = weighted_sum(hidden, weight, None, labels, token_weights, rule, ctx.needs_input_grad[:2])
        ctx.grads = [grads]
        ctx.weight_dtype, ctx.weight = weight.dtype, None if main_grad_of(weight) is None else weight
        return total

    @staticmethod
    @once_differentiable("the chunked loss")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, _, spans = take_once(ctx.grads, "the chunked loss")  # scaled in place: they are large
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
        return hidden_part, weight_part, None, None, None


def weighted_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    token_weights: Tensor,
    rule: OutputRule,
    needs_grad: Sequence[bool],
    entropy_weights: Tensor | None = None,
    wanted: Tensor | None = None,
    weight_sum: Tensor | None = None,
) -> tuple[Tensor, HiddenStates | None, Tensor | None, Tensor | None, list[Span]]:
    """The sum of weighted losses (and entropies), and its gradients.

    Args:
        hidden, weight, labels, token_weights: see :func:`chunked_linear_cross_entropy`.
        bias: [padded vocab / TP] of the output layer.
        needs_grad: whether hidden states, weight and bias need gradients.
        entropy_weights: [s, b].
        wanted: [s, b], bool; other tokens are left out.
        weight_sum: to which the weight's gradient is added; default: a new sum.

    Returns:
        The sum, the gradients of hidden states, weight and bias, and the spans in which the first was written.
    """
    rows, wide = hidden.size(0), accumulation_dtype(hidden.dtype)
    pieces = max(1, min(rule.chunks, rows))
    rows_of_piece = ceil(rows / pieces) * rule.parts * hidden.size(1)
    together = pieces_together(rows_of_piece, hidden.size(2), hidden.element_size())
    spans = even_spans(rows, ceil(pieces / together))
    grad_hidden = grad_weight = grad_bias = None
    if any(needs_grad):
        offload = rule.offload if HiddenStates(hidden, rule.offload).offload is not None else None
        grad_hidden = HiddenStates.empty(hidden.shape, hidden.dtype, hidden.device, offload)
        if needs_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=wide) if weight_sum is None else weight_sum
        if bias is not None and needs_grad[2]:
            grad_bias = torch.zeros_like(bias, dtype=wide)
    total = torch.zeros((), dtype=wide, device=weight.device)
    for part in walk(hidden, (labels, token_weights, entropy_weights), rule, spans, wanted):
        start, stop = part.span
        if not part.tokens.size(0):
            if grad_hidden is not None:
                shape = hidden[start:stop].shape
                grad_hidden.write(part.span, torch.zeros(shape, dtype=hidden.dtype, device=weight.device))
            continue
        targets, *scales = part.values
        scales = [None if scale is None else scale.to(wide) for scale in scales]
        share = part.tokens.size(0) / ((stop - start) * rule.parts * hidden.size(1))  # 1 without ``wanted``
        cut = even_spans(part.tokens.size(0), ceil((stop - start) * pieces / rows * share))
        loss, grad_logits = loss_and_gradient(
            part.tokens, weight, bias, targets, scales[0], scales[1], rule, cut, any(needs_grad)
        )
        total += loss
        if any(needs_grad):
            grad_tokens = part.with_others(grad_logits @ weight).reshape(-1, *hidden.shape[1:])
            grad_hidden.write(part.span, _sum_over_tensor(grad_tokens, rule.tensor, rule.parts > 1))
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.t(), part.tokens)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=wide)
            del grad_logits, grad_tokens
    return total, grad_hidden, grad_weight, grad_bias, spans


@dataclass
class Rows:
    """Tokens of a span, of all TP ranks.

    Attributes:
        span: of this rank's rows.
        tokens: hidden states [tokens, h] of the wanted ones.
        values: what belongs to these tokens, each [tokens].
        chosen: the index of each among all tokens of the span; None: all are wanted.
        count: of all tokens of the span.
    """

    span: Span
    tokens: Tensor
    values: list[Tensor | None]
    chosen: Tensor | None
    count: int

    def with_others(self, x: Tensor) -> Tensor:
        """[tokens, ...] with zeros for the tokens that are not wanted."""
        if self.chosen is None:
            return x
        return x.new_zeros((self.count, *x.shape[1:])).index_copy_(0, self.chosen, x)


@replaceable
def rows_with_loss(wanted: Tensor) -> Tensor:
    """The numbers of the rows whose logits are computed. A simulation, which has no labels, takes all."""
    return wanted.nonzero().squeeze(1)


def walk(
    hidden: Tensor,
    values: Sequence[Tensor | None],
    rule: OutputRule,
    spans: Sequence[Span],
    wanted: Tensor | None = None,
) -> Iterator[Rows]:
    """The rows of each span in turn. Under TP-sp they are gathered; a span has the same rows of every TP rank.

    Args:
        values: [s, b] of all tokens of the TP group; under TP-sp rank t holds the hidden states from row t * rows on.
        wanted: as in :func:`weighted_sum`.
    """
    rows, ranks = hidden.size(0), rule.parts
    values = [None if x is None else x.reshape(ranks, rows, -1) for x in values]
    wanted = None if wanted is None else wanted.reshape(ranks, rows, -1)
    for (start, stop), part in zip(spans, HiddenStates(hidden, rule.offload).walk(spans)):
        own = [None if x is None else x[:, start:stop].reshape(-1) for x in values]
        count, chosen = (stop - start) * ranks * hidden.size(1), None
        if wanted is not None:
            chosen = rows_with_loss(wanted[:, start:stop].reshape(-1))  # the same on all TP ranks, as the labels
            if not len(chosen):
                yield Rows((start, stop), part.new_empty((0, hidden.size(-1))), [], chosen, count)
                continue
        tokens = (gathered(part, rule.tensor.group) if ranks > 1 else part).reshape(-1, hidden.size(-1))
        if chosen is not None and len(chosen) < count:
            tokens, own = tokens[chosen], [None if x is None else x[chosen] for x in own]
        else:
            chosen = None
        yield Rows((start, stop), tokens, own, chosen, count)


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
    bias: Tensor | None,
    targets: Tensor,
    scale: Tensor,
    entropy_scale: Tensor | None,
    rule: OutputRule,
    spans: list[Span],
    needs_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """The weighted sum of the losses of some tokens and the gradient of their logits, computed span by span."""
    total, grads = scale.new_zeros(()), None
    for start, stop in spans:
        scales = [None if x is None else x[start:stop] for x in (scale, entropy_scale)]
        losses, entropies, grad = row_losses(
            tokens[start:stop], weight, bias, targets[start:stop], rule, *scales, needs_grad=needs_grad
        )
        total += (losses * scales[0]).sum()
        if entropies is not None:
            total += (entropies * scales[1]).sum()
        if needs_grad:
            if len(spans) == 1:
                return total, grad
            grads = grad.new_empty((tokens.size(0), grad.size(1))) if grads is None else grads
            grads[start:stop] = grad
        del grad
    return total, grads


def row_losses(
    tokens: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rule: OutputRule,
    scale: Tensor | None = None,
    entropy_scale: Tensor | None = None,
    *,
    entropy: bool = False,
    needs_grad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses [tokens], entropies [tokens], and the gradient of the logits in the dtype of the weight.

    Args, and what is returned: see :func:`cross_entropy`.
    """
    if kernels := loss_kernels(weight):
        logits = tokens @ weight.t()
        losses, entropies = cross_entropy_by_kernel(
            kernels, logits, bias, targets, rule, scale, entropy_scale, needs_grad
        )
        return losses, entropies if entropy or entropy_scale is not None else None, logits if needs_grad else None
    wide = accumulation_dtype(tokens.dtype)
    logits, slope = logits_of_rows(tokens, weight, bias, rule, wide, needs_grad)
    losses, entropies, grad = cross_entropy(
        logits, targets, rule, scale, entropy_scale, entropy=entropy, needs_grad=needs_grad
    )
    if needs_grad:
        if slope is not None:
            grad.mul_(slope.square_().neg_().add_(1))  # the derivative of the soft-cap
        if rule.temperature != 1:
            grad.div_(rule.temperature)
        grad = grad.to(weight.dtype)
    return losses, entropies, grad


@replaceable
def loss_kernels(weight: Tensor) -> tuple[Callable, Callable] | None:
    """Triton's kernels for logits in the dtype of the weight: see loss_kernel.py. None: they cannot run."""
    if not runs_triton(weight):
        return None
    from megatron.context_parallel.fpdt.loss_kernel import row_sums, write_gradient

    return row_sums, write_gradient


def cross_entropy_by_kernel(
    kernels: tuple[Callable, Callable],
    logits_TV: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rule: OutputRule,
    scale: Tensor | None,
    entropy_scale: Tensor | None,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Losses and entropies in fp32 from logits that are not capped yet; with ``needs_grad`` their gradient replaces
    them. See :func:`cross_entropy`."""
    width, (row_sums, write_gradient) = logits_TV.size(1), kernels
    how = rule.real_columns(width), rule.tensor.rank * width, rule.softcap, rule.temperature
    largest, target, total, weighted = row_sums(logits_TV, bias, targets, *how)
    if rule.tensor.size > 1:
        own = largest.clone()
        all_reduce(largest, rule.tensor, dist.ReduceOp.MAX)
        lower = own - largest  # the sums are relative to the largest logit
        shrink = torch.where(total > 0, lower.exp(), 0.0)
        sums = torch.stack([target, shrink * total, torch.where(total > 0, shrink * (weighted + lower * total), 0.0)])
        all_reduce(sums, rule.tensor, dist.ReduceOp.SUM)
        target, total, weighted = sums
    losses, entropies = total.log() - (target - largest), total.log() - weighted / total
    if needs_grad:
        # With p = exp(z) / total and z = x - largest: d entropy / dx = -p (z - sum of p z).
        share = torch.zeros_like(total) if entropy_scale is None else entropy_scale / total
        factors = torch.stack([largest, scale / total + share * weighted / total, share, scale])
        write_gradient(logits_TV, bias, targets, factors, *how)
    return losses, entropies


def logits_of_rows(
    tokens: Tensor, weight: Tensor, bias: Tensor | None, rule: OutputRule, wide: torch.dtype, keep_slope: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Logits [tokens, vocab / TP] in ``wide``, and what the soft-cap's derivative needs. Padding has the lowest."""
    logits, slope = (tokens @ weight.t()).to(wide), None
    if bias is not None:
        logits += bias
    if rule.softcap is not None:
        logits.div_(rule.softcap).tanh_()
        slope = logits if keep_slope else None
        logits = logits * rule.softcap if keep_slope else logits.mul_(rule.softcap)
    if rule.temperature != 1:
        logits.div_(rule.temperature)
    real = rule.real_columns(logits.size(1))
    if real < logits.size(1):
        logits[:, real:] = torch.finfo(wide).min  # finite: entropies multiply it by a probability of 0
    return logits, slope


def cross_entropy(
    logits_TV: Tensor,
    targets: Tensor,
    rule: OutputRule,
    scale: Tensor | None = None,
    entropy_scale: Tensor | None = None,
    *,
    entropy: bool = False,
    needs_grad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """From logits split over TP, which are destroyed: losses [tokens], entropies [tokens], and a gradient.

    Args:
        scale, entropy_scale: [tokens], weights of the losses and the entropies.
        entropy: compute entropies without weights, too.

    Returns:
        With ``needs_grad`` the third value is the gradient of the weighted sum, [tokens, vocab / TP].
    """
    entropy = entropy or entropy_scale is not None
    largest = logits_TV.amax(1)
    all_reduce(largest, rule.tensor, dist.ReduceOp.MAX)
    logits_TV -= largest.unsqueeze(1)
    target_logit, mine, column = logits_of_targets(logits_TV, targets, rule)
    products = None
    if entropy:
        exponentials = logits_TV.exp()
        products = logits_TV.mul_(exponentials)
    else:
        exponentials = logits_TV.exp_()
    sums = torch.stack([target_logit, exponentials.sum(1), *([products.sum(1)] if entropy else [])])
    all_reduce(sums, rule.tensor, dist.ReduceOp.SUM)
    target_logit, total = sums[:2]
    losses = total.log() - target_logit
    entropies = total.log() - sums[2] / total if entropy else None
    if not needs_grad:
        return losses, entropies, None
    if entropy_scale is None:
        grad = exponentials.mul_((scale / total).unsqueeze(1))
    else:
        # With p = exponentials / total and z the logits: d entropy / dz = -p (z - sum of p z).
        share = entropy_scale / total
        grad = exponentials.mul_((scale / total + share * sums[2] / total).unsqueeze(1))
        grad.addcmul_(products, share.unsqueeze(1), value=-1)
    grad.scatter_add_(1, column, -(mine * scale).unsqueeze(1))
    return losses, entropies, grad


def logits_of_targets(logits_TV: Tensor, targets: Tensor, rule: OutputRule) -> tuple[Tensor, Tensor, Tensor]:
    """Each target's logit [tokens], 0 on all TP ranks but one; whether it is this rank's; its column [tokens, 1]."""
    first = rule.tensor.rank * logits_TV.size(1)
    mine = (targets >= first) & (targets < first + logits_TV.size(1))
    column = torch.where(mine, targets - first, 0).unsqueeze(1)
    return torch.where(mine, logits_TV.gather(1, column).squeeze(1), 0.0), mine, column


def all_reduce(x: Tensor, tensor: Axis, op: dist.ReduceOp) -> None:
    if tensor.size > 1:
        dist.all_reduce(x, op=op, group=tensor.group)


def _sum_over_tensor(grad: Tensor, tensor: Axis, scatter: bool) -> Tensor:
    """Sum of the TP ranks' gradients of the same tokens; with ``scatter`` each rank gets the sum for its own tokens."""
    if tensor.size == 1:
        return grad
    if scatter:
        return scattered(grad, tensor.group)
    grad = grad.contiguous()
    dist.all_reduce(grad, group=tensor.group)
    return grad
