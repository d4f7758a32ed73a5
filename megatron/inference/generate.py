# SPDX-License-Identifier: Apache-2.0
"""Generates answers to prompts, batch by batch and token by token."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.inference.decoder import Decoder
from megatron.platform.collectives import gathered_objects


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the default is greedy.

    Attributes:
        greedy: take the most likely token.
        temperature: logits are divided by it.
        top_k: only this number of the most likely tokens can be drawn; 0: all tokens.
        top_p: of those, only the most likely that together have at least this probability (nucleus sampling,
            arXiv 1904.09751); 1: all.
        seed: of the random numbers.
    """

    greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234


def choose(logits: Tensor, sampling: Sampling, numbers: Sequence[int], place: int) -> Tensor:
    """The next token of each sample, int64 [b].

    The argmax of logits plus Gumbel noise is a sample of the distribution (Gumbel 1954; arXiv 1611.01144). The noise
    depends only on seed, prompt and place, not on the grid or on other prompts. Logits that differ in their last bits
    therefore give another token only if two tokens are nearly equally likely.

    Args:
        logits: [b, vocabulary].
        numbers: of the prompts in the run.
        place: number of earlier tokens in the answers.
    """
    if sampling.greedy:
        return logits.argmax(-1)
    scores = allowed_logits(logits.double().cpu(), sampling)
    noise = torch.stack([gumbel(scores.size(1), sampling.seed, number, place) for number in numbers])
    return (scores + noise).argmax(-1).to(logits.device)


def allowed_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """The logits [b, vocabulary] after temperature, top-k and top-p, in this order; -inf for excluded tokens."""
    scores = logits / sampling.temperature
    if 0 < sampling.top_k < scores.size(1):
        least = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(descending=True, stable=True)
        shares = ordered.softmax(-1)
        before = shares.cumsum(-1) - shares  # probability of the more likely tokens; the first token always stays
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
    """The settings for all prompts.

    Attributes:
        max_new_tokens: largest number of tokens of an answer.
        stop: ids that end an answer; such an id is its last token.
        batch: prompts in one batch of a replica of the model.
    """

    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop: Collection[int] = ()
    batch: int = 8


@dataclass
class Answer:
    """Tokens that follow a prompt. ``stopped``: the last one is a stop id."""

    number: int
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False


@dataclass
class Counts:
    """Statistics of one replica, on this rank.

    Attributes:
        prompt_tokens: tokens read.
        new_tokens: tokens generated; ``first_tokens`` of them by the pass of the prompt.
        prefill_seconds, decode_seconds: for prompts and first tokens, and for the other tokens.
        cache_bytes: of the largest cache.
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
    progress: Callable[[int], object] = lambda tokens: None,
    seen: Callable[[Answer], object] = lambda answer: None,
) -> tuple[list[Answer], Counts]:
    """Answer all prompts, in their order. All ranks call it with the same arguments and get all answers.

    The batches are distributed over the replicas (DP).

    Args:
        prompts: token ids, at least one each.
        progress: called with the number of new tokens after each pass.
        seen: called with each answer of this replica after each of its tokens.
    """
    data, counts = decoder.grid.data, Counts()
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))  # similar lengths share a batch
    batches = [order[first : first + request.batch] for first in range(0, len(order), request.batch)]
    answers: list[Answer] = []
    for numbers in batches[data.rank :: data.size]:
        batch = [prompts[number] for number in numbers]
        answers += _answer_batch(decoder, numbers, batch, request, counts, progress, seen)
    if data.size > 1:
        answers = [answer for part in gathered_objects(answers, data.group) for answer in part]
    return sorted(answers, key=lambda answer: answer.number), counts


def _answer_batch(
    decoder: Decoder,
    numbers: Sequence[int],
    prompts: Sequence[Sequence[int]],
    request: Request,
    counts: Counts,
    progress: Callable[[int], object],
    seen: Callable[[Answer], object],
) -> list[Answer]:
    """Answer one batch of prompts, which are sorted by length."""
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
        unfinished = [answer for answer in answers if not answer.stopped]
        for answer, token in zip(answers, tokens.tolist()):
            if not answer.stopped:
                answer.tokens.append(token)
                answer.stopped = token in request.stop
                seen(answer)
        progress(len(unfinished))
        counts.new_tokens += len(unfinished)
        if all(answer.stopped for answer in answers) or place == request.max_new_tokens - 1:
            break
        logits = decoder.decode(tokens)
    counts.decode_seconds += time.perf_counter() - begin
    return answers


def agreed(logits: Tensor | None, sampling: Sampling, numbers: Sequence[int], place: int, decoder: Decoder) -> Tensor:
    """The next tokens [b] on all ranks of a replica. One rank chooses, so that rounding cannot make them differ.

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
