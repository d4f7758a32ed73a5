# SPDX-License-Identifier: Apache-2.0
"""Which token comes next: the likeliest, or one drawn by seed, prompt and place, the same on every grid."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; as it stands, not at all: the likeliest is taken.

    Attributes:
        greedy: take the likeliest.
        temperature: logits are divided by it.
        top_k: then only so many, the largest, can be drawn; 0: all.
        top_p: of those, only the likeliest that together have at least this probability (nucleus sampling,
            arXiv 1904.09751); 1: all.
        seed: of the draws.
    """

    greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234


def choose(logits: Tensor, sampling: Sampling, numbers: Sequence[int], place: int) -> Tensor:
    """The next token of each sample, int64 [b].

    A draw is the largest of logits with Gumbel noise, a distribution's sample (Gumbel 1954; arXiv 1611.01144). The
    noise hangs on seed, prompt and place alone, so neither the grid nor the rest of the batch changes it, and logits
    that differ in their last bits give another token only where two are nearly level.

    Args:
        logits: [b, vocabulary].
        numbers: of the prompts, among all of the run.
        place: how many tokens the samples have been given before.
    """
    if sampling.greedy:
        return logits.argmax(-1)
    scores = kept(logits.double().cpu(), sampling)
    noise = torch.stack([gumbel(scores.size(1), sampling.seed, number, place) for number in numbers])
    return (scores + noise).argmax(-1).to(logits.device)


def kept(logits: Tensor, sampling: Sampling) -> Tensor:
    """The logits [b, vocabulary] after temperature, top-k and top-p, in this order; -inf for what cannot be drawn."""
    scores = logits / sampling.temperature
    if 0 < sampling.top_k < scores.size(1):
        least = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(descending=True, stable=True)
        shares = ordered.softmax(-1)
        before = shares.cumsum(-1) - shares  # what the likelier ones have: the first is always kept
        dropped = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, before >= sampling.top_p)
        scores = scores.masked_fill(dropped, -torch.inf)
    return scores


def gumbel(count: int, seed: int, number: int, place: int) -> Tensor:
    """Standard Gumbel noise, fp64 [count] on the CPU, of one place in the answer to one prompt."""
    digest = hashlib.sha256(f"{seed}/{number}/{place}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return -torch.empty(count, dtype=torch.float64).exponential_(generator=generator).log()
