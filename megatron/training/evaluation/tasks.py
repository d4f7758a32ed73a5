# SPDX-License-Identifier: Apache-2.0
"""Scores the tasks of a plan over the grid. Results are plain dicts, as in the JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from megatron.training.checkpoint.checkpoint import unwrap
from megatron.training.data.batches import Batch, micro_batches
from megatron.training.evaluation.eval_plan import EvalPlan
from megatron.training.evaluation.samples import MakeRow, Sample, micro_batches_of, pack, row_of, window, windows
from megatron.training.loss import sum_of_reports
from megatron.training.settings.config import Config
from megatron.training.setup import Runtime
from megatron.training.step import Batches, forward_step, run_schedule

# Losses and hits (right predictions) of tokens are summed by group over all ranks; the sums are the same on every grid.
# The group of each token is in the batch ("groups"), or a function computes it.
GroupsOf = Callable[[dict[str, Tensor | None]], Tensor]
Bar = Callable[[int, str], Callable[[int], Any]]  # (total, name) -> function that adds to the count
PER_CALL = 8  # micro-batches per run of the schedule, after which the progress bar is updated


@dataclass(frozen=True)
class Subject:
    """The model to evaluate."""

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
    """Sums over the tokens that ``loss_mask`` keeps, float64 [groups, 3]: losses, hits, tokens. All ranks call it.

    Args:
        batches: makes an iterator over this data-parallel rank's micro-batches, on ranks that read data.
        micro_batches: of each data-parallel rank, at least 1.
        groups_of: computes int64 [b, s_local] below ``groups`` from this rank's batch; default its "groups".
        name: for the progress bar.
    """
    config, runtime, chunks = subject.config, subject.runtime, subject.chunks
    iterators = [batches() if runtime.reads_data else None for _ in chunks]
    data_iterator = iterators if len(chunks) > 1 else iterators[0]
    group = _schedule_group(config, len(chunks))
    step = partial(forward_step, runtime, measure=partial(_sums, groups, groups_of))
    total, done = torch.zeros((groups, 3), dtype=torch.float64, device=runtime.device), 0
    count = subject.bar(micro_batches, name) if subject.bar else lambda _: None
    with _scoring(chunks):
        while done < micro_batches:
            size = min(PER_CALL * group, -(-(micro_batches - done) // group) * group)
            reports = run_schedule(step, chunks, data_iterator, config, size, forward_only=True)
            total += sum_of_reports(reports, (groups, 3), runtime)
            done += size
            count(size)
    return total.cpu()


def _schedule_group(config: Config, chunks: int) -> int:
    """The number of micro-batches in a group of an interleaved schedule; 1 for other schedules."""
    if chunks == 1:
        return 1
    parallel = config.parallel
    return parallel.microbatch_group_size_per_virtual_pipeline_stage or parallel.pipeline_model_parallel_size


def _sums(groups: int, groups_of: GroupsOf | None, batch: dict[str, Tensor | None], scores: Tensor) -> Tensor:
    """The sums [groups, 3] of this rank's log-probabilities and hits [2, b, s_local], see :func:`score`."""
    index = batch["groups"] if groups_of is None else groups_of(batch)
    counted = (batch["loss_mask"] != 0).flatten()
    losses, hits = -scores[0].flatten(), scores[-1].flatten()  # a reward model has no hits
    values = torch.stack((losses, hits, torch.ones_like(hits))).t().double()[counted]
    return values.new_zeros((groups, 3)).index_add_(0, index.flatten()[counted], values)


@contextmanager
def _scoring(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Put the model in evaluation mode, with scores of tokens as its output."""
    before = [(chunk.training, unwrap(chunk).scoring, unwrap(chunk).score_options) for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
        unwrap(chunk).scoring, unwrap(chunk).score_options = True, {"greedy": True}
    try:
        yield
    finally:
        for chunk, (training, scoring, options) in zip(chunks, before):
            chunk.train(training)
            unwrap(chunk).scoring, unwrap(chunk).score_options = scoring, options


FIRST_BUCKET = 128  # tokens; each further bucket ends at twice the position
Result = dict[str, Any]


def evaluate_tasks(plan: EvalPlan, subject: Subject, dataset: Dataset | None) -> dict[str, Result]:
    """Results by task, in order; the same on every rank and on every grid. All ranks call it.

    Args:
        dataset: held-out samples, see `check_held_out`.
    """
    results: dict[str, Result] = {}
    for task in plan.tasks:
        if task == "loss-by-position":
            results[task] = loss_by_position(plan, subject, dataset)
        elif task == "perplexity":
            results[task] = perplexity(plan, subject)
        elif task == "scores":
            results[task] = scores_of_answers(plan, subject)
        else:
            results[task] = answers(plan, subject, task)
    return results


def loss_by_position(plan: EvalPlan, subject: Subject, dataset: Dataset | None) -> Result:
    """Loss and hits of held-out tokens by their position in their document: 0-127, 128-255, 256-511, 512-1023, ..."""
    config, runtime = subject.config, subject.runtime
    ranks = runtime.grid.data.size

    def batches() -> Any:
        return micro_batches(
            dataset,
            consumed_samples=0,
            micro_batch_size=config.data.micro_batch_size,
            data_parallel_rank=runtime.grid.data.rank,
            data_parallel_size=ranks,
            eod=plan.eod if runtime.by_documents else None,
            numbers_only=not runtime.reads_tokens,
        )

    bounds = position_bounds(config.data.seq_length)
    edges = torch.tensor(bounds[1:-1], dtype=torch.int64, device=runtime.device)
    count = config.run.eval_iters * config.data.global_batch_size // (config.data.micro_batch_size * ranks)

    def groups_of(batch: dict[str, Tensor | None]) -> Tensor:
        return torch.bucketize(batch["position_ids"], edges, right=True)

    sums = score(subject, batches, count, len(bounds) - 1, groups_of, "loss-by-position")
    buckets = [
        {"from": first, "to": stop - 1, **_means(row)}
        for first, stop, row in zip(bounds, bounds[1:], sums.tolist())
        if row[2]
    ]
    return {"buckets": buckets, **_means(sums.sum(0).tolist())}


def position_bounds(length: int) -> list[int]:
    """The beginnings of the buckets of positions, and ``length``."""
    bounds, end = [0], FIRST_BUCKET
    while end < length:
        bounds.append(end)
        end *= 2
    return [*bounds, length]


def perplexity(plan: EvalPlan, subject: Subject) -> Result:
    """Perplexity of text files. Each token except a file's first is scored once, with up to --seq-length before it."""
    config = subject.config
    length = config.data.seq_length
    stride = config.evaluation.eval_stride or length
    places = [(n, start) for n, text in enumerate(plan.texts) for start in windows(text.ids.size, length, stride)]

    def make_row(number: int) -> Batch:
        group, start = places[number]
        return window(plan.texts[group].ids, start, length, stride, plan.eod, group)

    sums = _score_rows(subject, make_row, len(places), len(plan.texts), "perplexity")
    files = []
    for text, row in zip(plan.texts, sums.tolist()):
        bits = row[0] / math.log(2) / text.size
        files.append({"file": text.path, **_means(row), "bytes": text.size, "bits_per_byte": bits})
    return {"files": files, **_means(sums.sum(0).tolist())}


def scores_of_answers(plan: EvalPlan, subject: Subject) -> Result:
    """Of each conversation its reward, or the log-probability of the assistant's tokens; and means."""
    found, rewards = plan.answers, subject.config.model.reward_model
    sizes = [answer.sample.ids.size for answer in found]
    sums = _score_samples(plan, subject, sizes, lambda n: found[n].sample, "scores", last=rewards)
    scored, values = [], {"": [], "chosen": [], "rejected": []}
    for answer, (loss, _, tokens) in zip(found, sums):
        score = {"reward": -loss} if rewards else {"log_prob": -loss, "tokens": int(tokens)}
        scored.append(
            {"file": answer.path, "row": answer.row} | ({"answer": answer.name} if answer.name else {}) | score
        )
        values[answer.name].append(-loss)
    kind = "reward" if rewards else "log_prob"
    means = {f"{name}_{kind}".lstrip("_"): sum(some) / len(some) for name, some in values.items() if some}
    if values["chosen"]:
        ahead = [one > other for one, other in zip(values["chosen"], values["rejected"])]
        means["accuracy"] = sum(ahead) / len(ahead)
    return {"rows": scored, "means": means}


def answers(plan: EvalPlan, subject: Subject, task: str) -> Result:
    """Share of right answers in synthetic samples by length, for needles also by depth."""
    specs = plan.specs[task]
    sums = _score_samples(plan, subject, [spec.length for spec in specs], lambda n: plan.sample(specs[n]), task)
    cells = []
    for cell in dict.fromkeys((spec.length, spec.depth) for spec in specs):
        of_cell = [row for spec, row in zip(specs, sums) if (spec.length, spec.depth) == cell]
        depth = {} if cell[1] is None else {"depth": cell[1]}
        cells.append({"length": cell[0], **depth, **_answers(of_cell)})
    return {"cells": cells, **_answers(sums)}


def _score_samples(
    plan: EvalPlan,
    subject: Subject,
    sizes: Sequence[int],
    sample: Callable[[int], Sample],
    name: str,
    last: bool = False,
) -> list[list[float]]:
    """The sums of each sample, see :func:`score`; ``last`` as for :func:`row_of`."""
    data = subject.config.data
    together = subject.runtime.by_documents and data.reset_attention_mask and data.reset_position_ids
    rows = pack(sizes, data.seq_length, together)

    def make_row(number: int) -> Batch:
        return row_of([(n, sample(n)) for n in rows[number]], data.seq_length, plan.eod, last)

    return _score_rows(subject, make_row, len(rows), len(sizes), name).tolist()


def _score_rows(subject: Subject, make_row: MakeRow, rows: int, groups: int, name: str) -> Tensor:
    runtime, data = subject.runtime, subject.config.data
    ranks, size = runtime.grid.data.size, data.micro_batch_size
    batches = partial(
        micro_batches_of, make_row, rows, data.seq_length, size, runtime.grid.data.rank, ranks, runtime.by_documents
    )
    return score(subject, batches, -(-rows // (size * ranks)), groups, name=name)


def _means(row: list[float]) -> Result:
    """Means from (sum of losses, hits, tokens)."""
    loss, hits, tokens = row
    loss /= tokens
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "hits": hits / tokens, "tokens": int(tokens)}


def _answers(rows: list[list[float]]) -> Result:
    """From the sums of samples: shares of right tokens and of completely right answers, loss per answer token."""
    loss, hits, tokens = (sum(column) for column in zip(*rows))
    exact = sum(row[1] == row[2] for row in rows) / len(rows)
    return {"hits": hits / tokens, "exact": exact, "loss": loss / tokens, "samples": len(rows)}


def metrics(results: dict[str, Result]) -> dict[str, float]:
    """The results as flat numbers, for a training log: "needle_hits", "needle_4096_hits", ..."""
    flat: dict[str, float] = {}
    for task, result in results.items():
        name = task.replace("-", "_")
        if task == "loss-by-position":
            flat |= {f"{name}_{bucket['from']}_{bucket['to']}": bucket["loss"] for bucket in result["buckets"]}
        elif task == "perplexity":
            flat |= {f"{name}_{number}": file["perplexity"] for number, file in enumerate(result["files"])}
        elif task == "scores":
            flat |= {f"{name}_{key}": mean for key, mean in result["means"].items()}
        else:
            flat |= {f"{name}_{key}": result[key] for key in ("hits", "exact", "loss")}
            lengths = dict.fromkeys(cell["length"] for cell in result["cells"])
            for length in lengths:
                cells = [cell for cell in result["cells"] if cell["length"] == length]
                flat[f"{name}_{length}_hits"] = sum(cell["hits"] for cell in cells) / len(cells)
    return flat
