# SPDX-License-Identifier: Apache-2.0
"""Which experts a token goes to, and the losses that balance them: functions of the router's logits.

The formulas are Megatron-LM's (core/transformer/moe/moe_utils.py). Three things are different, so that the result does
not depend on the grid: equal scores are decided by the expert's number, the capacity of an expert is counted over the
whole micro-batch, and tokens that the loss mask leaves out do not count in any statistic. Tokens have the order
[s, b], flattened to n; E is the number of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

TINY = 1e-20  # keeps the sum of sigmoids from being 0, as in core


@dataclass(frozen=True)
class RouterRule:
    """How tokens choose experts. The names are those of Megatron-LM's flags (``--moe-router-...``).

    Attributes:
        topk: experts of a token.
        score_function: softmax, sigmoid or sqrtsoftplus (DeepSeek V4).
        pre_softmax: softmax over all experts, before the choice; otherwise over the chosen ones.
        num_groups: number of groups of experts.
        group_topk: number of groups that are chosen first; None: experts are chosen from all groups.
        topk_scaling_factor: multiplies the weights of the chosen experts.
        expert_bias: choose by score + bias; the weights are computed from the scores alone.
        sinkhorn: even the choice of a micro-batch in training, as :func:`even_choice` does; the weights are sigmoids
            for one expert, and softmax over all experts for more.
        aux_loss, seq_aux_loss: coefficients of the load-balancing losses, over a micro-batch and over a sample.
        z_loss: coefficient of the squared log-sum-exp of the logits.
        capacity_factor: most tokens of an expert, as a multiple of the mean; None: no limit.
        drop_policy: which tokens a full expert keeps: those of the largest weights (probs) or of the first positions.
        replay: layers that are recomputed take the experts of their first pass, whatever the logits are by then.
    """

    topk: int = 2
    score_function: str = "softmax"
    pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    topk_scaling_factor: float | None = None
    expert_bias: bool = False
    sinkhorn: bool = False
    aux_loss: float = 0.0
    seq_aux_loss: float = 0.0
    z_loss: float = 0.0
    capacity_factor: float | None = None
    drop_policy: str = "probs"
    replay: bool = False


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest values of each row; of equal values, those that come first."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


def choose(
    logits_nE: Tensor, rule: RouterRule, bias_E: Tensor | None = None, indices: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each token: (weights [n, E], zero for experts that were not chosen; chosen [n, E], bool).

    Args:
        bias_E: added to the scores for the choice; of Sinkhorn, the result of :func:`even_choice`.
        indices: the experts of each token, from :func:`ranking`; by default, of these logits.
    """
    if indices is None:
        indices = ranking(logits_nE, rule, bias_E)
    chosen = torch.zeros_like(logits_nE, dtype=torch.bool).scatter(1, indices, True)
    if rule.sinkhorn:
        return _sinkhorn(logits_nE, rule, chosen), chosen
    wide, scores = torch.promote_types(logits_nE.dtype, torch.float32), _scores(logits_nE, rule)
    weights = scores.gather(1, indices)
    if rule.score_function != "softmax":
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY) if rule.topk > 1 else weights
    elif not rule.pre_softmax:
        weights = torch.softmax(weights, dim=-1, dtype=wide).type_as(logits_nE)
    if rule.topk_scaling_factor:
        weights = weights * rule.topk_scaling_factor
    return torch.zeros_like(logits_nE).scatter(1, indices, weights), chosen


@torch.no_grad()
def ranking(logits_nE: Tensor, rule: RouterRule, bias_E: Tensor | None = None) -> Tensor:
    """The experts of each token, the best first: int64 [n, topk]. ``bias_E`` is as for :func:`choose`."""
    if rule.sinkhorn:
        scores = logits_nE.to(torch.promote_types(logits_nE.dtype, torch.float32))
    else:
        scores = _scores(logits_nE, rule)
    ranked = scores if bias_E is None else scores + bias_E
    return best(_best_groups_only(ranked, rule) if rule.group_topk else ranked, rule.topk)


def _scores(logits_nE: Tensor, rule: RouterRule) -> Tensor:
    if rule.score_function != "softmax":
        return _independent(logits_nE, rule).type_as(logits_nE)
    if not rule.pre_softmax:
        return logits_nE
    wide = torch.promote_types(logits_nE.dtype, torch.float32)
    return torch.softmax(logits_nE, dim=-1, dtype=wide).type_as(logits_nE)


def _independent(logits_nE: Tensor, rule: RouterRule) -> Tensor:
    """Scores of at least fp32, each of its own logit."""
    wide = logits_nE.to(torch.promote_types(logits_nE.dtype, torch.float32))
    return torch.sigmoid(wide) if rule.score_function == "sigmoid" else functional.softplus(wide).sqrt()


def _sinkhorn(logits_nE: Tensor, rule: RouterRule, chosen_nE: Tensor) -> Tensor:
    """The weights [n, E] of the chosen experts."""
    if rule.topk == 1:
        return torch.sigmoid(logits_nE) * chosen_nE
    wide = torch.promote_types(logits_nE.dtype, torch.float32)
    return torch.softmax(logits_nE, dim=-1, dtype=wide).type_as(logits_nE) * chosen_nE


@torch.no_grad()
def even_choice(logits_nE: Tensor, counted_n: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Sinkhorn's balance of a micro-batch: what to add to the logits of each expert, [E], before the best are chosen.

    Core's iteration (moe_utils.sinkhorn) scales the rows and columns of exp(logits) until all experts have the same
    sum. The scale of a row does not change which of its entries are the largest, so the columns' scales suffice.

    Args:
        counted_n: 1 for tokens that count, 0 for others.
        total: sums a tensor over the ranks that share the micro-batch.
    """
    counted = counted_n.to(torch.promote_types(logits_nE.dtype, torch.float32))
    cost = torch.exp(logits_nE.to(counted.dtype)) * counted[:, None]
    tokens, experts = total(counted.sum()).clamp(min=1), cost.size(1)
    scale, error = cost.new_ones(experts), math.inf
    while error > 1e-4:
        rows = 1 / tokens / ((scale * cost).sum(dim=1) + 1e-8)
        before, scale = scale, 1 / experts / (total((rows[:, None] * cost).sum(dim=0)) + 1e-8)
        error = float((before - scale).abs().mean())
    return scale.log()


def _best_groups_only(ranked_nE: Tensor, rule: RouterRule) -> Tensor:
    """The scores, -inf outside the best groups. A group's score is the sum of its topk / group_topk best ones."""
    groups = ranked_nE.unflatten(1, (rule.num_groups, -1))
    quality = groups.sort(dim=-1, descending=True).values[..., : rule.topk // rule.group_topk].sum(dim=-1)
    kept = torch.zeros_like(quality, dtype=torch.bool).scatter(1, best(quality, rule.group_topk), True)
    return groups.masked_fill(~kept[..., None], -math.inf).flatten(1)


def capacity(tokens: int, experts: int, rule: RouterRule) -> int:
    """The most tokens that one expert takes of a micro-batch with ``tokens`` tokens."""
    return math.ceil(tokens * rule.topk / experts * rule.capacity_factor)


def within_capacity(weights_nE: Tensor, chosen_nE: Tensor, order_n: Tensor, most: int, drop_policy: str) -> Tensor:
    """Which choices of all tokens of a micro-batch their experts keep: bool [n, E].

    Args:
        order_n: each token's index in the micro-batch; among equal weights, tokens of lower index are kept.
        most: tokens that an expert keeps.
    """
    by_place = order_n.argsort()
    chosen, weights = chosen_nE[by_place], weights_nE[by_place].masked_fill(~chosen_nE[by_place], -1.0)
    if drop_policy == "position":
        kept = chosen & (chosen.cumsum(dim=0) <= most)
    else:
        first = best(weights.t(), most).t()
        kept = chosen & torch.zeros_like(chosen).scatter(0, first, True)
    return torch.empty_like(kept).index_copy(0, by_place, kept)


def balance(logits_nE: Tensor, rule: RouterRule, counted_n: Tensor, samples: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """The sums for the load-balancing losses, for each of ``samples`` parts of the micro-batch (1: all of it).

    Returns:
        (sums of the probabilities [samples, E], choices [samples, E], counted tokens [samples]) of this rank's tokens.
    """
    scores, counted = _likelihoods(logits_nE, rule), counted_n[:, None]
    chosen = torch.zeros_like(scores).scatter(1, best(scores.detach(), rule.topk), 1.0)  # without groups and bias
    return (
        probability_sums(logits_nE, rule, counted_n, samples),
        (chosen * counted).unflatten(0, (-1, samples)).sum(dim=0),
        counted.to(scores.dtype).unflatten(0, (-1, samples)).sum(dim=0)[:, 0],
    )


def probability_sums(logits_nE: Tensor, rule: RouterRule, counted_n: Tensor, samples: int = 1) -> Tensor:
    """The first result of :func:`balance`, the only one with a gradient."""
    return (_likelihoods(logits_nE, rule) * counted_n[:, None]).unflatten(0, (-1, samples)).sum(dim=0)


def _likelihoods(logits_nE: Tensor, rule: RouterRule) -> Tensor:
    """Scores of at least fp32 that add up to 1 for each token."""
    wide = torch.promote_types(logits_nE.dtype, torch.float32)
    if rule.score_function == "softmax":
        return torch.softmax(logits_nE, dim=-1, dtype=wide)
    scores = _independent(logits_nE, rule)
    return scores / (scores.sum(dim=-1, keepdim=True) + TINY)


def balancing_loss(probabilities_sE: Tensor, choices_sE: Tensor, tokens_s: Tensor, topk: int) -> Tensor:
    """This rank's part of the load-balancing loss, times the number of counted tokens.

    The loss of T tokens is E * sum over experts of (share of choices) * (mean probability). Its sum over ranks is
    complete if ``choices_sE`` and ``tokens_s`` are those of all ranks and ``probabilities_sE`` those of this rank.
    It is multiplied by T because gradients are divided by the number of tokens of the global batch in the end.
    """
    experts = probabilities_sE.size(1)
    return ((probabilities_sE * choices_sE).sum(dim=1) * experts / (topk * tokens_s.clamp(min=1))).sum()


def z_loss(logits_nE: Tensor, counted_n: Tensor) -> Tensor:
    """Sum over the counted tokens of the squared log-sum-exp of their logits."""
    wide = torch.promote_types(logits_nE.dtype, torch.float32)
    return (torch.logsumexp(logits_nE.to(wide), dim=-1).square() * counted_n).sum()
