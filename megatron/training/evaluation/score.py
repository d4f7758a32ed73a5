# SPDX-License-Identifier: Apache-2.0
"""Losses and hits of tokens, summed by group over all ranks of a grid: every rank has the same sums, on every grid.

Groups are numbers that a batch brings along for its tokens ("groups"), or what a function makes of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.training.arguments.config import Config
from megatron.training.checkpoint.checkpoint import unwrap
from megatron.training.setup import Runtime
from megatron.training.step import Batches, forward_step, run_schedule, sum_of_reports

GroupsOf = Callable[[dict[str, Tensor | None]], Tensor]
Bar = Callable[[int, str], Callable[[int], Any]]  # (total, name) -> counts so many
A_CALL = 8  # micro-batches of one run of the schedule, between two moves of the bar


@dataclass(frozen=True)
class Subject:
    """What is evaluated, and where."""

    config: Config
    runtime: Runtime
    chunks: Sequence[nn.Module]
    bar: Bar | None = None


@torch.no_grad()
def score(
    subject: Subject,
    batches: Callable[[], Batches],
    micro_batches: int,
    groups: int,
    groups_of: GroupsOf | None = None,
    name: str = "",
) -> Tensor:
    """Sums of the tokens that ``loss_mask`` leaves, float64 [groups, 3]: losses, hits, tokens. All ranks call it.

    Args:
        batches: makes an iterator over this data-parallel rank's micro-batches; called where data are read.
        micro_batches: of each data-parallel rank, at least 1.
        groups_of: from this rank's batch, int64 [b, s_local] below ``groups``; default the batch's own "groups".
        name: for the bar.
    """
    config, runtime, chunks = subject.config, subject.runtime, subject.chunks
    iterators = [batches() if runtime.reads_data else None for _ in chunks]
    whose = iterators if len(chunks) > 1 else iterators[0]
    together = _together(config, len(chunks))
    step = partial(forward_step, runtime, measure=partial(_sums, groups, groups_of))
    total, done = torch.zeros((groups, 3), dtype=torch.float64, device=runtime.device), 0
    count = subject.bar(micro_batches, name) if subject.bar else lambda _: None
    with _scoring(chunks):
        while done < micro_batches:
            now = min(A_CALL * together, -(-(micro_batches - done) // together) * together)
            reports = run_schedule(step, chunks, whose, config, now, forward_only=True)
            total += sum_of_reports(reports, (groups, 3), runtime)
            done += now
            count(now)
    return total.cpu()


def _together(config: Config, chunks: int) -> int:
    """Micro-batches that a schedule takes together: interleaved ones take groups."""
    if chunks == 1:
        return 1
    parallel = config.parallel
    return parallel.microbatch_group_size_per_virtual_pipeline_stage or parallel.pipeline_model_parallel_size


def _sums(groups: int, groups_of: GroupsOf | None, batch: dict[str, Tensor | None], scores: Tensor) -> Tensor:
    """[groups, 3] of this rank's scores [2, b, s_local]."""
    index = batch["groups"] if groups_of is None else groups_of(batch)
    counted = (batch["loss_mask"] != 0).flatten()
    values = torch.cat((scores.flatten(1), torch.ones_like(scores[:1]).flatten(1))).t().double()[counted]
    return values.new_zeros((groups, 3)).index_add_(0, index.flatten()[counted], values)


@contextmanager
def _scoring(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Models in evaluation mode whose output are scores of tokens."""
    was = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
        unwrap(chunk).scores_tokens = True
    try:
        yield
    finally:
        for chunk, training in zip(chunks, was):
            chunk.train(training)
            unwrap(chunk).scores_tokens = False
