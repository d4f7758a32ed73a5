# SPDX-License-Identifier: Apache-2.0
"""The loss's Triton kernels in the interpreter, through the chunked loss and log-probabilities, against fp64."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist

from megatron.context_parallel.fpdt import chunked_loss
from megatron.context_parallel.fpdt.chunked_loss import chunked_linear_cross_entropy
from megatron.context_parallel.fpdt.log_probs import log_probs
from megatron.context_parallel.layout.grid import Axis
from megatron.platform.hooks import replaced

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

TOKENS, WIDTH, WORDS = 7, 16, 4200  # padded words: more than a program reads at a time, and no multiple of that
REAL = 4191
CASES = {
    "plain": {},
    "soft-cap": {"softcap": 5.0},
    "temperature, soft-cap, bias, some tokens": {"temperature": 0.7, "softcap": 4.0, "bias": True, "wanted": True},
    "large logits": {"size": 60.0},
}


def numbers(size: float = 2.0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(TOKENS, 1, WIDTH, generator=draw) * size, torch.randn(WORDS, WIDTH, generator=draw)
    bias, scale = torch.randn(WORDS, generator=draw), torch.rand(TOKENS, 1, generator=draw)
    scale[1] = 0
    labels = torch.randint(REAL, (TOKENS, 1), generator=draw)
    labels[2], labels[3] = 0, REAL - 1
    return [hidden.to(dtype), weight.to(dtype), bias.to(dtype), scale.to(dtype), labels]


def exact(size: float = 2.0, dtype: torch.dtype = torch.float64, **case) -> list[torch.Tensor]:
    """Loss, log-probabilities, entropies, and the gradients of their weighted sums, by PyTorch's own functions."""
    hidden, weight, bias, scale, labels = numbers(size, dtype)
    hidden, weight, bias = (x.requires_grad_() for x in (hidden, weight, bias))

    def scores(temperature=1.0, softcap=None, bias_V=None):
        z = hidden @ weight.t() if bias_V is None else hidden @ weight.t() + bias_V
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        z = (z / temperature)[..., :REAL].log_softmax(-1)
        return z.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(z.exp() * z).sum(-1)

    loss = -(scores(softcap=case.get("softcap"))[0] * scale).sum()
    of_loss = torch.autograd.grad(loss, [hidden, weight])
    chosen, entropies = scores(case.get("temperature", 1.0), case.get("softcap"), bias if case.get("bias") else None)
    if case.get("wanted"):
        chosen, entropies = chosen * wanted(), entropies * wanted()
    inputs = [hidden, weight, bias] if case.get("bias") else [hidden, weight]
    of_scores = torch.autograd.grad((chosen * scale).sum() + 0.3 * (entropies * scale).sum(), inputs)
    return [loss.detach(), chosen.detach(), entropies.detach(), *of_loss, *of_scores]


def wanted() -> torch.Tensor:
    return (torch.arange(TOKENS) % 3 != 1)[:, None]


def by_kernels(dtype: torch.dtype, size: float = 2.0, **case) -> list[torch.Tensor]:
    """The same on the ranks of a TP group, each with its part of the vocabulary."""
    from megatron.context_parallel.fpdt.loss_kernel import row_sums, write_gradient

    calls = []

    def counted(*given):
        calls.append(1)
        return row_sums(*given)

    ranks, rank = dist.get_world_size(), dist.get_rank()
    hidden, weight, bias, scale, labels = numbers(size, dtype)
    weight, bias = (x.chunk(ranks)[rank].clone() for x in (weight, bias))
    hidden, weight, bias = (x.requires_grad_() for x in (hidden, weight, bias))
    tensor = Axis(ranks, rank, dist.group.WORLD)
    with replaced(chunked_loss.loss_kernels, lambda _: lambda _: (counted, write_gradient)):
        options = {"vocab_size": REAL, "tensor": tensor, "softcap": case.get("softcap")}
        loss = chunked_linear_cross_entropy(hidden, weight, labels, scale.float(), chunks=2, **options)
        of_loss = torch.autograd.grad(loss, [hidden, weight])
        given = bias if case.get("bias") else None
        options |= {"temperature": case.get("temperature", 1.0), "chunks": 3, "entropy": True, "bias_V": given}
        scores = log_probs(hidden, weight, labels, wanted() if case.get("wanted") else None, **options)
        inputs = [hidden, weight, bias] if case.get("bias") else [hidden, weight]
        total = (scores.log_probs * scale).sum() + 0.3 * (scores.entropy * scale).sum()
        of_scores = torch.autograd.grad(total, inputs)
    assert calls
    return [x.detach() for x in (loss, scores.log_probs, scores.entropy, *of_loss, *of_scores)]


def whole(parts: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
    """Parts of the vocabulary put together; other results are the same on all ranks."""
    if parts[0].shape == like.shape:
        assert all(part.equal(parts[0]) for part in parts)
        return parts[0]
    return torch.cat(parts)


def worst(results: list[list[torch.Tensor]], expected: list[torch.Tensor]) -> float:
    pairs = [(whole(parts, theirs), theirs) for parts, theirs in zip(zip(*results), expected, strict=True)]
    return max(float((mine - theirs).abs().max() / theirs.abs().max()) for mine, theirs in pairs)


@pytest.mark.parametrize("ranks, case", [(1, "plain"), (2, "temperature, soft-cap, bias, some tokens")])
def test_the_kernels_compute_the_loss(pool, ranks, case):
    """fp32, also where TP splits the vocabulary and its last rank has padding; another soft-cap is seen."""
    results, expected = pool.run(by_kernels, ranks, torch.float32, **CASES[case]), exact(**CASES[case])
    assert worst(results, expected) < 1e-5
    assert worst(results, exact(**CASES[case] | {"softcap": 4.1})) > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_compute_the_loss_in_every_case(pool, ranks, case):
    """Large logits are rounded in fp32; the kernels may err as PyTorch's own functions then do."""
    results, expected = pool.run(by_kernels, ranks, torch.float32, **CASES[case]), exact(**CASES[case])
    rounding = worst([exact(**CASES[case], dtype=torch.float32)], expected)
    assert worst(results, expected) < max(2e-5, 2 * rounding)
