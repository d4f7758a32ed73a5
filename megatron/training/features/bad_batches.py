# SPDX-License-Identifier: Apache-2.0
"""Steps whose numbers are bad: told apart before any weight changes, left out, written down.

Judged are the loss and the gradient norm of the whole global batch, which no grid changes: so the same batches are left
out on every grid. One that is left out counts as an iteration, and its samples as consumed; the learning-rate schedule,
which goes by what was learned, does not.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer

from megatron.training.arguments.config import Config
from megatron.training.checkpoint import checkpoint
from megatron.training.checkpoint.checksums import choose_whole
from megatron.training.checkpoint.megatron_lm.places import run_of
from megatron.training.job import Job
from megatron.training.refusal import reason, together

NAMES = ("loss", "gradient norm")
WINDOW, LEAST = 100, 10  # good steps that a spike is measured by, and without how many nothing is one


class Watch:
    """Judges each step before its update.

    Attributes:
        skips: whether the run may leave batches out.
        spikes: of steps that stood out and were taken all the same.
    """

    def __init__(self, config: Config) -> None:
        faults, optimizer = config.faults, config.optimizer
        self.skips = faults.skip_bad_batches > 0
        self.finite = optimizer.check_for_nan_in_loss_and_grad and not optimizer.fp16
        self.factor = faults.spike_factor
        self.spiky = (faults.check_for_spiky_loss, faults.check_for_large_grads)
        self.recent = [deque(maxlen=WINDOW) for _ in NAMES]
        self.spikes: list[str] = []

    def judge(self, loss: float, grad_norm: float, device: torch.device) -> str:
        """What is bad about a step; empty: nothing. The same on every rank, where the run goes on either way."""
        values = (loss, grad_norm)
        found = [self._judge_one(*one) for one in zip(NAMES, values, self.spiky, self.recent)]
        spikes = [line for line, finite in zip(found, map(math.isfinite, values)) if line and finite]
        bad = next(filter(None, found), "")
        if not self.skips and bad in spikes:
            self.spikes += spikes
            bad = ""
        elif self.skips and dist.is_initialized():
            worst = torch.tensor(bool(bad), dtype=torch.int, device=device)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # a rank that saw other numbers must not go on alone
            bad = bad or ("another rank found its numbers bad" if worst else "")
        if not bad:
            for value, recent in zip(values, self.recent):
                recent.append(value)
        return bad

    def told(self) -> list[str]:
        """Spikes since it was last asked."""
        lines, self.spikes = self.spikes, []
        return lines

    def _judge_one(self, name: str, value: float, spiky: bool, recent: deque[float]) -> str:
        if not math.isfinite(value):
            return f"the {name} is {value}" if self.finite else ""
        if not spiky or len(recent) < LEAST:
            return ""
        usual = statistics.median(recent)
        if not 0 < self.factor * usual < value:
            return ""
        return f"the {name} is {value:.6g}, {value / usual:.1f} times the {usual:.6g} of the {len(recent)} steps before"


def step_if(optimizer: MegatronOptimizer, allowed: Callable[[float], bool]) -> tuple[bool, float | None, int | None]:
    """core's ``optimizer.step()``, which changes weights and states only where ``allowed(gradient norm)``."""
    norm_of, update = optimizer.get_grad_norm, optimizer.step_with_ready_grads
    seen: list[float] = []

    def norm() -> float:
        seen.append(norm_of())
        return seen[-1]

    optimizer.get_grad_norm = norm
    optimizer.step_with_ready_grads = lambda: allowed(float(seen[-1])) and update()
    try:
        return optimizer.step()
    finally:
        del optimizer.get_grad_norm, optimizer.step_with_ready_grads


def folder_of(config: Config) -> Path | None:
    """Where bad batches are written: beside --log-jsonl, or in --save."""
    if config.logging.log_jsonl:
        return Path(config.logging.log_jsonl).absolute().parent / "bad_batches"
    return Path(config.checkpoint.save) / "bad_batches" if config.checkpoint.save else None


def write_batch(job: Job, result: Any) -> str:
    """Write the batch of a step that is not yet counted in the job's progress; returns what to say of it. Rank 0's.

    ``iter_NNNNNNN.safetensors`` holds ``tokens``, ``labels``, ``loss_mask`` [samples, seq_length] and ``numbers``
    [samples], which count the samples of the run; ``iter_NNNNNNN.json`` the reason, and the ``result`` of the step.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from megatron.training.data.batches import micro_batches

    folder, config, first = folder_of(job.config), job.config, job.progress.consumed_train_samples
    samples = job.batch_sizes.get_current_running_global_batch_size()
    if folder is None:
        return "not written, for want of --log-jsonl or --save"
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
    told: dict[str, Any] = {"iteration": job.progress.iteration + 1, "samples": [first, first + samples - 1]}
    told["reason"] = result.bad
    for name in ("lm_loss", "grad_norm"):
        value = getattr(result, name)
        told[name] = value if math.isfinite(value) else str(value)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(batch, f"{path}.safetensors")
        path.with_suffix(".json").write_text(json.dumps(told, indent=2) + "\n")
    except (OSError, SafetensorError) as error:  # the latter on a full disk
        return f"not written ({reason(error)})"
    return f"written to {path}.safetensors"


def roll_back(job: Job, say: Callable[[str], None]) -> int | None:
    """Load weights, optimizer and schedule of the last checkpoint in --save; None where there is none, else its
    iteration. The job's progress stays: the samples since then are left out.

    Args:
        say: told of a damaged checkpoint that was passed over.

    Raises:
        Refusal: on every rank; the checkpoint is damaged, and none is to be passed over.
    """
    settings = job.config.checkpoint
    again = checkpoint.CheckpointConfig(
        load=settings.save, save=settings.save, skip_damaged_checkpoints=settings.skip_damaged_checkpoints
    )
    found = together(lambda: checkpoint.find(again))
    if found is None or run_of(found) not in ("", job.progress.run):  # of a run that was left by --ckpt-step
        return None
    notes: list[str] = []
    whole = choose_whole(found, again, notes)
    for note in notes:
        say(note)
    config = replace(job.config, checkpoint=again)
    job.schedule.num_steps = 0  # core's schedule adds the steps that it loads to its own
    return checkpoint.load(whole, job.chunks, job.optimizer, job.schedule, config).iteration
