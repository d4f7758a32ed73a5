# SPDX-License-Identifier: Apache-2.0
"""Batches that training leaves out: those of --iterations-to-skip, and bad ones under --skip-bad-batches.

A step is judged by the loss and the gradient norm of the global batch, which do not depend on the grid; so every
grid leaves out the same batches. A batch that is left out counts as an iteration, and its samples as consumed. The
learning-rate schedule does not count it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.system.whole_file import replace_file
from megatron.training.checkpoint import checkpoint
from megatron.training.checkpoint.checksums import choose_whole
from megatron.training.checkpoint.megatron_lm.places import run_of
from megatron.training.data.read_tokens import DataError
from megatron.training.features.feature import Feature, Step
from megatron.training.job import Job
from megatron.training.refusal import reason, refuse_together
from megatron.training.report.reporter import Reporter
from megatron.training.settings.config import Config
from megatron.training.step import Batches, Diverged, StepResult
from megatron.training.watch import Watch


class BadBatches(Feature):
    """Leaves out steps that its ``watch`` finds bad, and reports spikes that were trained on."""

    def __init__(self, job: Job, reporter: Reporter) -> None:
        self.job, self.reporter, self.watch, self.count = job, reporter, Watch(job.config), 0

    def leave_out(self, result: StepResult) -> None:
        """Go on without a bad batch, with the weights before it or those of the last checkpoint.

        Raises:
            Diverged: too many batches are bad, or there is no checkpoint to load.
        """
        self.count += 1
        job, faults, since = self.job, self.job.config.faults, ""
        if self.count > faults.skip_bad_batches:
            raise Diverged(result)
        where = write_batch(job, result) if self.reporter.active else ""
        if faults.rollback_on_bad_batch:
            iteration = roll_back(job, self.reporter.say)
            if iteration is None:
                raise Diverged(result)
            since = f", with all batches since iteration {iteration}, whose weights were loaded"
        self.reporter.say(
            f" WARNING: {result.bad} at iteration {job.progress.iteration + 1}: its batch is left out{since} "
            f"({self.count} of {faults.skip_bad_batches}); {where}"
        )

    def after_log(self, step: Step) -> None:
        for line in self.watch.take_spikes():
            self.reporter.say(f" WARNING: iteration {step.iteration}: {line}")


def skip_batch(job: Job, reporter: Reporter, batches: Batches | list[Batches] | None) -> None:
    """Leave out the batch of the next step, as --iterations-to-skip asks."""
    skip_micro_batches(batches, job.batch_sizes.get())
    reporter.say(f" > iteration {job.progress.iteration + 1}: its batch is left out, as --iterations-to-skip says")


def skip_micro_batches(batches: Batches | list[Batches] | None, microbatches: int) -> None:
    """Read and drop the micro-batches of a step. An unreadable one is no error: users skip such steps."""
    for iterator in batches if isinstance(batches, list) else [batches]:
        for _ in range(microbatches if iterator is not None else 0):
            with suppress(DataError):
                next(iterator)


def folder_of(config: Config) -> Path | None:
    """Where bad batches are written: next to the file of --log-jsonl, or in --save."""
    if config.logging.log_jsonl:
        return Path(config.logging.log_jsonl).absolute().parent / "bad_batches"
    return Path(config.checkpoint.save) / "bad_batches" if config.checkpoint.save else None


def write_batch(job: Job, result: StepResult) -> str:
    """Write the batch of a step that the job's progress does not count yet; rank 0 calls it.

    ``iter_NNNNNNN.safetensors`` holds ``tokens``, ``labels``, ``loss_mask`` [samples, seq_length] and ``numbers``
    [samples], the samples' places in the run; ``iter_NNNNNNN.json`` holds the reason and the ``result`` of the step.

    Returns:
        where the batch was written, or why it was not: a part of a log line.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from megatron.training.data.batches import micro_batches

    folder, config, first = folder_of(job.config), job.config, job.progress.consumed_train_samples
    samples = job.batch_sizes.get_current_running_global_batch_size()
    if folder is None:
        return "not written without --log-jsonl or --save"
    batch = next(
        micro_batches(
            job.datasets[0],
            consumed_samples=first,
            micro_batch_size=samples,
            data_parallel_rank=0,
            data_parallel_size=1,
            dataloader_type=config.data.dataloader_type,
            seed=config.run.seed,
        )
    )
    path = folder / f"iter_{job.progress.iteration + 1:07d}"
    record: dict[str, Any] = {"iteration": job.progress.iteration + 1, "samples": [first, first + samples - 1]}
    record["reason"] = result.bad
    for name in ("lm_loss", "grad_norm"):
        value = getattr(result, name)
        record[name] = value if math.isfinite(value) else str(value)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(batch, f"{path}.safetensors")
        replace_file(path.with_suffix(".json"), json.dumps(record, indent=2) + "\n")
    except (OSError, SafetensorError) as error:  # the latter on a full disk
        return f"not written ({reason(error)})"
    return f"written to {path}.safetensors"


def roll_back(job: Job, say: Callable[[str], None]) -> int | None:
    """Load weights, optimizer and schedule of the last checkpoint in --save; returns its iteration, or None.

    The job's progress stays: the samples since that checkpoint are left out.

    Args:
        say: prints a line about each damaged checkpoint that was skipped.

    Raises:
        Refusal: on every rank; the checkpoint is damaged, and --skip-damaged-checkpoints is not set.
    """
    settings = job.config.checkpoint
    reload = checkpoint.CheckpointConfig(
        load=settings.save, save=settings.save, skip_damaged_checkpoints=settings.skip_damaged_checkpoints
    )
    last = refuse_together(lambda: checkpoint.find(reload))
    # A checkpoint of another run is one from which this run branched off by --ckpt-step.
    if last is None or run_of(last) not in ("", job.progress.run):
        return None
    notes: list[str] = []
    undamaged = choose_whole(last, reload, notes)
    for note in notes:
        say(note)
    config = replace(job.config, checkpoint=reload)
    job.schedule.num_steps = 0  # core's schedule adds the steps that it loads to its own
    return checkpoint.load(undamaged, job.model_chunks, job.optimizer, job.schedule, config).iteration
