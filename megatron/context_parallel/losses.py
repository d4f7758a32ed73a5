# SPDX-License-Identifier: Apache-2.0
"""Losses of preference and reinforcement learning, from log-probabilities (``cp.log_probs`` or ``context.log_probs``).

All are pure functions of tensors. They give one value for each pair or token; a loss over ranks is a sum of these
values, divided by the number of all pairs, tokens or samples of the global batch. So it depends on no grid, micro-batch
or packing:

    values = policy_loss(scores.log_probs, old, advantages)
    weights = token_weights(response, samples, by="sample")  # from the complete batch
    loss = (values * weights).sum() / number_of_samples
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

PairLoss = Literal["sigmoid", "hinge", "ipo", "orpo", "simpo"]
KINDS = get_args(PairLoss)
REFERENCE_FREE = ("orpo", "simpo")


def pair_loss(
    kind: PairLoss,
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor | None = None,
    reference_rejected: Tensor | None = None,
    *,
    chosen_tokens: Tensor | None = None,
    rejected_tokens: Tensor | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
) -> Tensor:
    """The loss of each pair of answers, [pairs], from the sums of their log-probabilities.

    Args:
        kind: of DPO (Rafailov et al. 2023) "sigmoid" or, as in SLiC-HF, "hinge"; "ipo" (Azar et al. 2023), from means
            over tokens; "orpo" (Hong et al. 2024); "simpo" (Meng et al. 2024).
        chosen, rejected: log-probability of each answer under the model.
        reference_chosen, reference_rejected: the same under the reference model; None: without a reference, which is
            the only form of ORPO and SimPO.
        chosen_tokens, rejected_tokens: tokens of each answer; needed by "ipo", "orpo" and "simpo".
        beta: how far the model may move from the reference; of ORPO, the weight of the odds ratio.
        label_smoothing: probability that a label is wrong, only of "sigmoid".
        margin: of SimPO, between the answers' rewards.

    Raises:
        ValueError: an argument does not go with ``kind``.
    """
    if kind not in KINDS:
        raise ValueError(f"the loss {kind} is unknown: use {', '.join(KINDS)}")
    if label_smoothing and kind != "sigmoid":
        raise ValueError(f"label_smoothing={label_smoothing} is defined for the kind sigmoid, not {kind}: leave it out")
    if margin and kind != "simpo":
        raise ValueError(f"margin={margin} is defined for the kind simpo, not {kind}: leave it out")
    if kind in REFERENCE_FREE and (reference_chosen is not None or reference_rejected is not None):
        raise ValueError(f"the kind {kind} has no reference model: leave its log-probabilities out")
    if (reference_chosen is None) != (reference_rejected is None):
        raise ValueError("a reference needs log-probabilities of both answers: give both or none")
    if kind not in ("sigmoid", "hinge"):
        if chosen_tokens is None or rejected_tokens is None:
            raise ValueError(f"the kind {kind} compares means over tokens: give chosen_tokens and rejected_tokens")
        if kind == "ipo" and reference_chosen is not None:
            chosen, rejected = chosen - reference_chosen, rejected - reference_rejected
            reference_chosen = reference_rejected = None
        chosen, rejected = chosen / chosen_tokens, rejected / rejected_tokens
    ahead = chosen - rejected
    if reference_chosen is not None:
        ahead = ahead - (reference_chosen - reference_rejected)
    if kind == "sigmoid":
        smoothed = -logsigmoid(beta * ahead) * (1 - label_smoothing)
        return smoothed - logsigmoid(-beta * ahead) * label_smoothing if label_smoothing else smoothed
    if kind == "hinge":
        return relu(1 - beta * ahead)
    if kind == "ipo":
        return (ahead - 1 / (2 * beta)) ** 2
    if kind == "simpo":
        return -logsigmoid(beta * ahead - margin)
    odds = ahead - (log1mexp(chosen) - log1mexp(rejected))
    return -chosen - beta * logsigmoid(odds)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0, without cancellation (Maechler 2012)."""
    return torch.where(x > -0.6931472, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def ranking_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Bradley-Terry loss [pairs] of a reward model, from the rewards at the last token of each answer."""
    return -logsigmoid(chosen - rejected - margin)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: tuple[float, float] | None = (0.2, 0.2),
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped loss of each token (PPO, Schulman et al. 2017; GRPO, Shao et al. 2024), shaped as ``log_probs``.

    Args:
        old_log_probs: under the policy that drew the tokens.
        advantages: of each token, or in a shape that extends to one value for each token.
        clip: how far below and above 1 a ratio of probabilities counts; two different limits as in DAPO. None: not
            clipped.
        dual_clip: with a negative advantage, a ratio above this one does not count either (Ye et al. 2020).
    """
    ratio = (log_probs - old_log_probs).exp()
    loss = -ratio * advantages
    if clip is not None:
        loss = torch.maximum(loss, -ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


def kl(log_probs: Tensor, reference: Tensor, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """Estimates of the divergence from a reference at each token that the policy drew (Schulman 2020)."""
    behind = reference - log_probs
    if kind == "k1":
        return -behind
    if kind == "k2":
        return behind**2 / 2
    if kind == "k3":
        return behind.exp() - 1 - behind
    raise ValueError(f"the estimate {kind} is unknown: use k1, k2 or k3")


def group_advantages(rewards: Tensor, size: int, scale: bool = True) -> Tensor:
    """Advantages [samples] of answers in groups of ``size`` to the same prompt (GRPO); ``scale``: in deviations.

    Raises:
        ValueError: the groups are not complete.
    """
    if size < 2 or rewards.numel() % size:
        raise ValueError(f"{rewards.numel()} rewards are not complete groups of {size} (at least 2)")
    groups = rewards.view(-1, size)
    ahead = groups - groups.mean(1, keepdim=True)
    return (ahead / (groups.std(1, keepdim=True) + 1e-4) if scale else ahead).view(-1)


def token_weights(
    mask: Tensor, samples: Tensor, by: Literal["token", "sample"] = "token", longest: int | None = None
) -> Tensor:
    """The weight of each token in a sum over the complete batch, in the shape of ``mask``; 0 where the mask is.

    Args:
        mask: 1 for tokens that count, of all tokens of all samples.
        samples: the number of each token's sample.
        by: "token": each token has the same weight; divide by the number of tokens. "sample": each sample has; divide
            by the number of samples.
        longest: with "sample", each token weighs 1 / longest (Dr. GRPO) and not 1 / the tokens of its sample.
    """
    mask = mask.to(torch.get_default_dtype()) if not mask.is_floating_point() else mask
    if by == "token":
        return mask
    if by != "sample":
        raise ValueError(f"a mean by {by} is unknown: use token or sample")
    if longest is not None:
        return mask / longest
    counts = sample_sums(mask, samples, int(samples.max()) + 1)
    return mask / counts.clamp(min=1)[samples]


def sample_sums(values: Tensor, samples: Tensor, count: int) -> Tensor:
    """The sum of the values of each sample, [count]; ``samples`` has the number of each value's sample."""
    return values.new_zeros(count).index_add(0, samples.flatten(), values.flatten())
