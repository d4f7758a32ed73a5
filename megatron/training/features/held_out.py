# SPDX-License-Identifier: Apache-2.0
"""Evaluations during a run: the loss on validation and test data, and the tasks of ``--eval-tasks``."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from megatron.training.evaluation.eval_report import lines, write
from megatron.training.evaluation.tasks import Subject, evaluate_tasks, metrics
from megatron.training.features.feature import Step, due
from megatron.training.job import Job, batches_for, evaluations
from megatron.training.refusal import Refusal
from megatron.training.report.reporter import Reporter
from megatron.training.step import evaluate


class Evaluation:
    """The evaluations of a training run: every --eval-interval iterations, and at the end."""

    def __init__(self, job: Job, reporter: Reporter) -> None:
        self.job, self.reporter = job, reporter
        self._evaluated_at, self._loss = -1, None

    def after_step(self, step: Step) -> dict[str, float]:
        """Evaluate, if it is time; returns the fields to log."""
        values: dict[str, float] = {}
        if step.last or due(self.job.config.run.eval_interval, step.iteration):
            losses = evaluate_held_out(self.job, self.reporter, "validation")
            self._evaluated_at, self._loss = step.iteration, statistics.fmean(losses.values()) if losses else None
            values = losses | evaluate_on_tasks(self.job, self.reporter)
        if step.last:
            values |= evaluate_held_out(self.job, self.reporter, "test")
        return values

    @property
    def validation_loss(self) -> float | None:
        """Mean loss of the present weights over the validation sets; None if these weights were not evaluated."""
        return self._loss if self._evaluated_at == self.job.progress.iteration else None


def evaluate_held_out(job: Job, reporter: Reporter, kind: str) -> dict[str, float]:
    """Mean loss on the validation or the test data, as {"KIND_loss": loss}; of several sets, {"KIND_NAME_loss": loss}.

    Args:
        kind: ``validation`` or ``test``.
    """
    if sets := job.named.get(kind):
        losses: dict[str, float] = {}
        for name, dataset in sets.items():
            losses |= evaluate_on(job, reporter, f"{kind}_{name}", dataset)
        return losses
    return evaluate_on(job, reporter, kind, job.datasets[1 if kind == "validation" else 2])


def evaluate_on(job: Job, reporter: Reporter, name: str, dataset: Dataset | None) -> dict[str, float]:
    """Mean loss on one set, as {"NAME_loss": loss}. The same iteration is always evaluated on the same samples."""
    config = job.config
    has_data = torch.tensor(dataset is not None, dtype=torch.int, device=job.runtime.device)
    dist.all_reduce(has_data, op=dist.ReduceOp.MAX)  # a middle pipeline stage holds no data and cannot know
    if not has_data or not config.run.eval_iters:
        return {}
    part = 0  # which part of the validation data
    if name.startswith("validation") and config.run.eval_interval:
        part = min(job.progress.iteration // config.run.eval_interval, evaluations(config, job.iterations) - 1)
    batch = config.data.global_batch_size
    batches = batches_for(job, dataset, part * config.run.eval_iters * batch, 0)
    microbatches = batch // (config.data.micro_batch_size * job.runtime.grid.data.size)
    result = evaluate(
        job.runtime, job.model_chunks, batches, config, microbatches, config.run.eval_iters, job.objective
    )
    reporter.evaluation(job.progress.iteration, name, result.lm_loss)
    return {f"{name}_loss": result.lm_loss}


def evaluate_on_tasks(job: Job, reporter: Reporter) -> dict[str, float]:
    """Scores of --eval-tasks, as flat numbers; with --eval-output also as files."""
    if job.eval_plan is None:
        return {}
    subject, folder = Subject(job.config, job.runtime, job.model_chunks), job.config.evaluation.eval_output
    results = evaluate_tasks(job.eval_plan, subject, job.datasets[1])
    for line in lines(results):
        reporter.say(f" iteration {job.progress.iteration}: {line}")
    if folder and reporter.active:
        try:
            write(folder, {"iteration": job.progress.iteration}, results)
        except Refusal as refusal:  # a full disk: as with --log-jsonl, training continues
            reporter.say(f" WARNING: {refusal}")
    return metrics(results)
