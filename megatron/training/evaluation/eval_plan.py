# SPDX-License-Identifier: Apache-2.0
"""The samples and texts of --eval-tasks, the same on every rank and on every grid."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from megatron.training.data.chat_dataset import chosen_template, render
from megatron.training.data.chat_template import rows_of
from megatron.training.data.sources.answer_pairs import ANSWERS
from megatron.training.data.text_files import unit_of
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.evaluation import samples
from megatron.training.evaluation.haystack import Words, make_words, read_ids
from megatron.training.evaluation.samples import Pieces, Sample, compose, needle
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config, EvaluationConfig
from megatron.training.settings.job_settings import GENERATED

MAKERS: dict[str, Callable[[Words, np.random.Generator, int, float | None], Pieces]] = {
    "needle": needle
} | samples.TASKS
HALVINGS, SHORTEST = 4, 512  # the default lengths: --seq-length halved up to 4 times, at least 512 tokens


@dataclass(frozen=True)
class Spec:
    """A sample to make: length in tokens, depth of the needle from 0 to 1 or None, number among equal specs."""

    task: str
    length: int
    depth: float | None
    number: int


@dataclass(frozen=True)
class Text:
    """A file for the perplexity task: ``ids`` int64 [n], and its size in bytes."""

    path: str
    ids: np.ndarray
    size: int


@dataclass(frozen=True)
class Answer:
    """A conversation for the task scores: its row, and which answer of a pair it has, or ""."""

    path: str
    row: int
    name: str
    sample: Sample


@dataclass(frozen=True)
class EvalPlan:
    """The tasks of a run; see :func:`make_plan`."""

    tasks: list[str]
    seed: int
    eod: int
    words: Words | None = None
    specs: dict[str, list[Spec]] = field(default_factory=dict)
    texts: list[Text] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def sample(self, spec: Spec) -> Sample:
        """The sample of a spec; it depends only on the seed and the spec."""
        pieces, random = self._pieces(spec)
        return compose(pieces, self.words, random, spec.length)

    def check(self, spec: Spec) -> None:
        """Refuse a sample whose pieces are longer than the sample."""
        size = self._pieces(spec)[0].size
        if size > spec.length:
            raise Refusal(
                f"--eval-lengths {spec.length}: {spec.task} needs at least {size} tokens of "
                f"{self.words.tokenizer.kind} even without haystack: remove that length or that task"
            )

    def _pieces(self, spec: Spec) -> tuple[Pieces, np.random.Generator]:
        depth = 0 if spec.depth is None else round(1e6 * spec.depth)
        random = np.random.default_rng([self.seed, GENERATED.index(spec.task), spec.length, depth, spec.number])
        return MAKERS[spec.task](self.words, random, spec.length, spec.depth), random


def make_plan(config: Config, tokenizer: Tokenizer) -> EvalPlan:
    """The plan of a completed configuration.

    Raises:
        Refusal: a file cannot be read, or a task does not fit a length.
    """
    settings = config.evaluation
    tasks = list(settings.eval_tasks or ())
    made = [task for task in tasks if task in GENERATED]
    plan = EvalPlan(
        tasks,
        config.run.seed,
        tokenizer.end_for("an evaluation"),
        make_words(tokenizer, settings.eval_haystack) if made else None,
        texts=[
            Text(path, read_ids(tokenizer, path, "--eval-files"), os.path.getsize(path))
            for path in (settings.eval_files or () if "perplexity" in tasks else ())
        ],
    )
    for path in settings.eval_files or () if "scores" in tasks else ():
        plan.answers.extend(answers_in(path, config, tokenizer))
    halves = [config.data.seq_length >> power for power in range(HALVINGS, 0, -1)]
    optional = [half for half in halves if half >= SHORTEST] if settings.eval_lengths is None else []
    required = settings.eval_lengths or [config.data.seq_length]
    for task in made:
        lengths = [length for length in optional if _fits(plan, specs_of(task, [length], settings))] + required
        plan.specs[task] = specs_of(task, lengths, settings)
        for spec in plan.specs[task]:
            plan.check(spec)
    return plan


def answers_in(path: str, config: Config, tokenizer: Tokenizer) -> Iterator[Answer]:
    """The conversations of a file of chats, or of pairs of answers if its first row has "chosen".

    Raises:
        Refusal: a row is invalid, or longer than a sample.
    """
    if tokenizer.transformers is None:
        raise Refusal("--eval-tasks scores needs a chat template: use --tokenizer-type HuggingFaceTokenizer")
    if not os.path.isfile(path):
        raise Refusal(f"--eval-files {path}: no such file")
    first, _ = next(rows_of(path, "--eval-files"), ({}, ""))
    pairs, length = ANSWERS[0] in first, config.data.seq_length
    store = render(path, "--eval-files", chosen_template(config.data.sft_tokenizer_prompt_format, tokenizer), pairs)
    for number, row in enumerate(store.lines):
        span = slice(store.starts[number], store.starts[number + 1])
        ids, name = np.asarray(store.tokens[span], np.int64), ANSWERS[number % 2] if pairs else ""
        where = f"{path}, {unit_of(path)} {row}" + (f', "{name}"' if name else "")
        if ids.size > length:
            raise Refusal(f"{where}: a conversation of {ids.size} tokens, but --seq-length allows {length}: raise it")
        if not store.spoken[span][1:].any():
            raise Refusal(f"{where}: the template gives the answer no tokens")
        yield Answer(path, int(row), name, Sample(ids, np.asarray(store.spoken[span])))


def _fits(plan: EvalPlan, specs: list[Spec]) -> bool:
    try:
        for spec in specs:
            plan.check(spec)
    except Refusal:
        return False
    return True


def check_held_out(plan: EvalPlan, dataset: Dataset | None, device: torch.device) -> None:
    """Refuse loss-by-position if no rank has held-out samples. All ranks call it.

    Args:
        dataset: also None on pipeline stages that read no data.
    """
    if "loss-by-position" not in plan.tasks:
        return
    has_data = torch.tensor(dataset is not None, dtype=torch.int, device=device)
    dist.all_reduce(has_data, op=dist.ReduceOp.MAX)
    if not has_data:
        refusal = Refusal(
            "--eval-tasks loss-by-position needs validation data, and there are none: give --valid-data-path, or a "
            "share in --split"
        )
        refusal.everywhere = True
        raise refusal


def specs_of(task: str, lengths: list[int], settings: EvaluationConfig) -> list[Spec]:
    """The samples of a task: lengths x depths x samples for needles; for others the same number without depths."""
    count = settings.eval_samples
    if task != "needle":
        count, depths = count * settings.eval_depths, [None]
    else:
        depths = np.linspace(0, 1, settings.eval_depths).tolist() if settings.eval_depths > 1 else [0.5]
    return [Spec(task, length, depth, n) for length in lengths for depth in depths for n in range(count)]
