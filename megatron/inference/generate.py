# SPDX-License-Identifier: Apache-2.0
"""Answers to prompts, batch by batch and token by token."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.inference.decoder import Decoder

# Which token comes next: the likeliest, or one drawn by seed, prompt and place, the same on every grid.


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


@dataclass(frozen=True)
class Request:
    """What is asked of every prompt.

    Attributes:
        max_new_tokens: longest answer.
        sampling: how tokens are drawn.
        stop: ids that end an answer; the one that does is its last token.
        batch: prompts that are answered at once by one replica of the model.
    """

    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop: Collection[int] = ()
    batch: int = 8


@dataclass
class Answer:
    """Tokens that follow a prompt. ``stopped``: the last one is of those that end an answer."""

    number: int
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False


@dataclass
class Counts:
    """What one replica did, on this rank.

    Attributes:
        prompt_tokens: read.
        new_tokens: written; ``first_tokens`` of them right behind a prompt, which no pass of their own was for.
        prefill_seconds, decode_seconds: for prompts and first tokens, and for the rest.
        cache_bytes: the largest cache.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    first_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cache_bytes: int = 0


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    request: Request,
    tell: Callable[[int], object] = lambda tokens: None,
) -> tuple[list[Answer], Counts]:
    """Answer all prompts, in their order. All ranks call it with the same; each replica (DP) answers every so-manieth
    batch, and all hear of all.

    Args:
        prompts: token ids, at least one each.
        tell: called with the number of new tokens as they come.
    """
    data, counts = decoder.grid.data, Counts()
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))  # alike lengths share a batch
    batches = [order[first : first + request.batch] for first in range(0, len(order), request.batch)]
    found = [
        answer
        for numbers in batches[data.rank :: data.size]
        for answer in _answer_batch(decoder, numbers, [prompts[number] for number in numbers], request, counts, tell)
    ]
    if data.size > 1:
        everybodys: list = [None] * data.size
        dist.all_gather_object(everybodys, found, group=data.group)
        found = [answer for part in everybodys for answer in part]
    return sorted(found, key=lambda answer: answer.number), counts


def _answer_batch(
    decoder: Decoder,
    numbers: Sequence[int],
    prompts: Sequence[Sequence[int]],
    request: Request,
    counts: Counts,
    tell: Callable[[int], object],
) -> list[Answer]:
    """Answers to prompts, ascending by length, that go through the model together."""
    answers, begin = [Answer(number) for number in numbers], time.perf_counter()
    logits = decoder.prefill(prompts, request.max_new_tokens - 1)
    counts.cache_bytes = max(counts.cache_bytes, decoder.cache_bytes)
    counts.prompt_tokens += sum(map(len, prompts))
    counts.first_tokens += len(prompts)
    for place in range(request.max_new_tokens):
        tokens = agreed(logits, request.sampling, numbers, place, decoder)
        if place == 0:
            counts.prefill_seconds += time.perf_counter() - begin
            begin = time.perf_counter()
        going = [answer for answer in answers if not answer.stopped]
        for answer, token in zip(answers, tokens.tolist()):
            if not answer.stopped:
                answer.tokens.append(token)
                answer.stopped = token in request.stop
        tell(len(going))
        counts.new_tokens += len(going)
        if all(answer.stopped for answer in answers) or place == request.max_new_tokens - 1:
            break
        logits = decoder.decode(tokens)
    counts.decode_seconds += time.perf_counter() - begin
    return answers


def agreed(logits: Tensor | None, sampling: Sampling, numbers: Sequence[int], place: int, decoder: Decoder) -> Tensor:
    """The next tokens [b], on all ranks of a replica: one of them chooses, so that no rounding can part them.

    Args:
        logits: [b, vocabulary] on the last pipeline stage.
    """
    grid = decoder.grid
    tokens = torch.empty(len(numbers), dtype=torch.int64, device=decoder.device)
    if logits is not None:
        if grid.tensor.rank == grid.context.rank == 0:
            tokens = choose(logits, sampling, numbers, place)
        for axis in (grid.context, grid.tensor):
            if axis.size > 1:
                dist.broadcast(tokens, axis.global_rank(0), group=axis.group)
    if grid.pipeline.size > 1:
        dist.broadcast(tokens, grid.pipeline.global_rank(grid.pipeline.size - 1), group=grid.pipeline.group)
    return tokens
