# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of given tokens, and entropies, from hidden states: the logits exist for a few tokens at a time.

Preference and reinforcement learning weight log-probabilities by what all of a sample's tokens add up to. The weights
are therefore known in the backward pass only, which computes the logits again; it is that of the loss in chunks
(chunked_loss.py) with these weights.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.fpdt.chunked_ffn import even_spans, in_main_grad, main_grad_of
from megatron.context_parallel.fpdt.chunked_loss import (
    OutputRule,
    all_reduce,
    cross_entropy,
    logits_of_rows,
    logits_of_targets,
    row_losses,
    walk,
    weighted_sum,
)
from megatron.context_parallel.fpdt.host_store import Offload
from megatron.context_parallel.layout.grid import Axis
from megatron.platform.autograd import autocast_inputs, once_differentiable, refuse_transforms, without_autocast

LOGITS = 2**24
"""Default limit of the logits that exist at once on a rank."""


class TokenScores(NamedTuple):
    """Of each token, in fp32 (fp64 for fp64 inputs), the same on every TP rank. Tokens that are not wanted have 0.

    Attributes:
        log_probs: of the given tokens.
        entropy: of the distribution over the vocabulary; None unless asked for.
        greedy: 1 if greedy decoding would choose the given token, not differentiable; None unless asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    greedy: Tensor | None = None


def log_probs(
    hidden_SBH: Tensor,
    weight_VH: Tensor,
    tokens_SB: Tensor,
    wanted_SB: Tensor | None = None,
    *,
    bias_V: Tensor | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    greedy: bool = False,
    chunks: int | None = None,
    tensor: Axis = Axis(),
    sequence_parallel: bool = False,
    offload: Offload | None = None,
) -> TokenScores:
    """Log-probabilities of ``tokens`` under softmax((hidden @ weight^T + bias) / temperature). Differentiable.

    Softmax and sums are in fp32 (fp64 for fp64 inputs). The backward pass computes the logits again.

    Args:
        hidden_SBH: [s, b, h]; under ``sequence_parallel`` [s / TP, b, h], this TP rank's tokens. It may be a host
            buffer; then its gradient is a host buffer too.
        weight_VH: [padded vocab / TP, h], this TP rank's rows.
        tokens_SB: [s, b], the token after each position, of all tokens of the TP group.
        wanted_SB: [s, b]; where it is 0 nothing is computed. Default: all.
        bias_V: [padded vocab / TP].
        vocab_size: without padding; default: all rows are real.
        temperature, softcap, tensor, sequence_parallel, offload: see
            :class:`~megatron.context_parallel.fpdt.chunked_loss.OutputRule`.
        entropy, greedy: compute these, too. If logits are equal, greedy decoding chooses the lowest id.
        chunks: number of spans of tokens; default: a span has at most :data:`LOGITS` logits.

    Returns:
        Tensors [s, b] of all tokens of the TP group.

    Raises:
        ValueError: the temperature is not positive.
    """
    refuse_transforms("log_probs")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} is not above 0: use the temperature that samples were drawn with")
    given = (hidden_SBH, weight_VH) if bias_V is None else (hidden_SBH, weight_VH, bias_V)
    hidden, weight, *bias = autocast_inputs(*given, device=weight_VH.device)
    if chunks is None:
        tokens = hidden.size(0) * hidden.size(1) * (tensor.size if sequence_parallel else 1)
        chunks = ceil(tokens * weight.size(0) / LOGITS)
    vocab_size = weight.size(0) * tensor.size if vocab_size is None else vocab_size
    rule = OutputRule(vocab_size, chunks, tensor, sequence_parallel, offload, softcap, temperature)
    wanted = None if wanted_SB is None else wanted_SB != 0
    scores = _LogProbs.apply(hidden, weight, *(bias or [None]), tokens_SB, wanted, rule, entropy, greedy)
    return TokenScores(scores[0], scores[1] if entropy else None, scores[-1].detach() if greedy else None)


class _LogProbs(torch.autograd.Function):
    """[log-probabilities, entropies if wanted, greedy choices if wanted]."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        wanted: Tensor | None,
        rule: OutputRule,
        entropy: bool,
        greedy: bool,
    ) -> Tensor:
        rows, wide = hidden.size(0), accumulation_dtype(hidden.dtype)
        shape = (1 + entropy + greedy, rule.parts, rows, hidden.size(1))
        scores = torch.zeros(shape, dtype=wide, device=weight.device)
        for part in walk(hidden, (tokens,), rule, even_spans(rows, rule.chunks), wanted):
            if not part.tokens.size(0):
                continue
            (targets,) = part.values
            if greedy:
                logits, _ = logits_of_rows(part.tokens, weight, bias, rule, wide)
                chosen = _greedy(logits, targets, rule)
                losses, entropies, _ = cross_entropy(logits, targets, rule, entropy=entropy)
                chosen = (chosen & losses.isfinite()).to(wide)  # NaN is never exceeded, so it would count as chosen
                del logits
            else:
                losses, entropies, _ = row_losses(part.tokens, weight, bias, targets, rule, entropy=entropy)
                chosen = None
            every = torch.stack([x for x in (-losses, entropies, chosen) if x is not None], dim=1)
            start, stop = part.span
            scores[:, :, start:stop] = part.with_others(every).t().reshape(-1, rule.parts, stop - start, shape[-1])
        ctx.save_for_backward(hidden, weight, bias, tokens, wanted)
        ctx.rule, ctx.entropy = rule, entropy
        return scores.view(-1, rule.parts * rows, shape[-1])

    @staticmethod
    @once_differentiable("log_probs")
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, wanted = ctx.saved_tensors
        main = main_grad_of(weight) if ctx.needs_input_grad[1] else None
        _, grad_hidden, grad_weight, grad_bias, _ = weighted_sum(
            hidden,
            weight,
            bias,
            tokens,
            -grad[0],
            ctx.rule,
            ctx.needs_input_grad[:3],
            entropy_weights=grad[1] if ctx.entropy else None,
            wanted=wanted,
            weight_sum=main,
        )
        if grad_weight is not None:
            grad_weight = in_main_grad(weight) if main is not None else grad_weight.to(weight.dtype)
        hidden_part = grad_hidden.x if ctx.needs_input_grad[0] else None
        return hidden_part, grad_weight, None if grad_bias is None else grad_bias.to(bias.dtype), *[None] * 5


def _greedy(logits_TV: Tensor, targets: Tensor, rule: OutputRule) -> Tensor:
    """Whether no other token has a larger logit, or an equal one and a lower id; logits are split over TP."""
    width = logits_TV.size(1)
    first = rule.tensor.rank * width
    target, *_ = logits_of_targets(logits_TV, targets, rule)
    all_reduce(target, rule.tensor, dist.ReduceOp.SUM)
    target = target.unsqueeze(1)
    ahead = (logits_TV > target).sum(1)  # a count, so that one sum over TP is enough
    ids = torch.arange(first, first + width, device=targets.device)
    ahead += ((logits_TV == target) & (ids < targets.unsqueeze(1))).sum(1)
    all_reduce(ahead, rule.tensor, dist.ReduceOp.SUM)
    return ahead == 0
