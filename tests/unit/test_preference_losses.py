# SPDX-License-Identifier: Apache-2.0
"""Losses of preference and reinforcement learning against their definitions, written down again token by token."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.context_parallel.losses import (
    group_advantages,
    kl,
    log1mexp,
    pair_loss,
    policy_loss,
    ranking_loss,
    sample_sums,
    token_weights,
)


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clipped(new: float, old: float, advantage: float, low: float, high: float, most: float | None) -> float:
    ratio = math.exp(new - old)
    gain = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return -(max(gain, most * advantage) if most is not None and advantage < 0 else gain)


@pytest.mark.parametrize("low, high, most", [(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.3, 1.5)])
def test_policy_loss(low: float, high: float, most: float | None) -> None:
    new, old, advantages = draw(3, 7), draw(3, 7, seed=2), draw(3, 1, seed=3)
    loss = policy_loss(new, old, advantages, clip=(low, high), dual_clip=most)
    for row in range(3):
        for at in range(7):
            expected = clipped(float(new[row, at]), float(old[row, at]), float(advantages[row]), low, high, most)
            assert float(loss[row, at]) == pytest.approx(expected, rel=1e-12)
    plain = policy_loss(new, old, advantages, clip=None)
    assert torch.allclose(plain, -(new - old).exp() * advantages)


def test_no_gradient_where_the_ratio_is_clipped() -> None:
    new = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    policy_loss(new, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0])).sum().backward()
    assert (new.grad != 0).tolist() == [False, True, True, False]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_divergences_have_the_right_mean(kind: str) -> None:
    """Their mean over the policy's distribution; k2 only has it up to third order."""
    policy, reference = (draw(6, seed=seed).mul(0.05).log_softmax(0) for seed in (1, 2))
    exact = float((policy.exp() * (policy - reference)).sum())
    assert float((policy.exp() * kl(policy, reference, kind)).sum()) == pytest.approx(exact, rel=0.1)
    with pytest.raises(ValueError, match="k4 is unknown"):
        kl(policy, reference, "k4")


def test_advantages_within_groups() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 5.0])
    scaled, plain = group_advantages(rewards, 4), group_advantages(rewards, 4, scale=False)
    assert plain.tolist() == [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]
    assert torch.allclose(scaled[:4], plain[:4] / (rewards[:4].std() + 1e-4)) and not scaled[4:].any()
    with pytest.raises(ValueError, match="7 rewards are not complete groups of 4"):
        group_advantages(rewards[:7], 4)


def test_sums_do_not_depend_on_how_tokens_are_cut_and_packed() -> None:
    """The mean by sample of some tokens, in any order and in any parts."""
    values, samples = draw(40), torch.randint(0, 5, (40,), generator=torch.Generator().manual_seed(4))
    mask = torch.rand(40, generator=torch.Generator().manual_seed(5)) > 0.3
    weights = {by: token_weights(mask, samples, by) for by in ("token", "sample")}
    expected = torch.stack([values[mask & (samples == n)].mean() for n in range(5)]).mean()
    assert float((values * weights["sample"]).sum() / 5) == pytest.approx(float(expected), rel=1e-6)
    assert float((values * weights["token"]).sum() / mask.sum()) == pytest.approx(float(values[mask].mean()), rel=1e-6)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(6))
    parts = [(values * weights["sample"])[part].sum() for part in order.split(7)]
    assert float(sum(parts) / 5) == pytest.approx(float(expected), rel=1e-6)
    assert torch.allclose(token_weights(mask, samples, "sample", longest=8), mask / 8)
    assert torch.allclose(sample_sums(values, samples, 5)[2], values[samples == 2].sum())


def test_mean_by_rank_would_differ() -> None:
    """The control: means of two parts with different numbers of tokens."""
    values, mask = draw(8), torch.tensor([1, 1, 1, 1, 1, 0, 0, 0]).bool()
    by_rank = torch.stack([values[part][mask[part]].mean() for part in (slice(4), slice(4, 8))]).mean()
    assert abs(float(by_rank - values[mask].mean())) > 1e-3


def test_ranking_loss() -> None:
    good, bad = draw(5), draw(5, seed=2)
    assert torch.allclose(ranking_loss(good, bad, 0.5), (1 + (-(good - bad - 0.5)).exp()).log())


def test_log1mexp_has_no_cancellation() -> None:
    x = torch.tensor([-1e-12, -0.5, -0.69, -0.7, -3.0, -50.0], dtype=torch.float64, requires_grad=True)
    log1mexp(x).sum().backward()
    exact = [math.log(-math.expm1(float(one))) for one in x[:5].detach()]
    assert log1mexp(x)[:5].tolist() == pytest.approx(exact, rel=1e-14) and bool(x.grad.isfinite().all())


WRONG = [
    ({"kind": "hinge", "label_smoothing": 0.1}, "label_smoothing=0.1"),
    ({"kind": "ipo", "margin": 1.0}, "margin=1.0"),
    ({"kind": "orpo", "reference_chosen": torch.zeros(1), "reference_rejected": torch.zeros(1)}, "no reference model"),
    ({"kind": "sigmoid", "reference_chosen": torch.zeros(1)}, "both answers"),
    ({"kind": "simpo"}, "give chosen_tokens"),
    ({"kind": "kto"}, "kto"),
]


@pytest.mark.parametrize("given, message", WRONG)
def test_arguments_that_do_not_go_together(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair_loss(given.pop("kind"), torch.zeros(1), torch.zeros(1), **given)
