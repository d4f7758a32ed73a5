# SPDX-License-Identifier: Apache-2.0
"""A run's schedule: its phases, from flags in iterations, samples or tokens, and its stages of different lengths.

Megatron-LM's schedule counts samples. Megatron-DeepSpeed's may count tokens (--lr-decay-tokens): samples times their
length. With any such flag the complete schedule counts tokens, so that a run can continue at another --seq-length.

A stage of --seq-length-schedule is a run of its own: the flags of the run, its own length, and flags of its own. It
begins with the checkpoint at the end of the stage before.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.training.refusal import Refusal, refuse_combinations, short
from megatron.training.settings.config import Config, DataConfig, Stage

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
SCHEDULE = "--seq-length-schedule"


@dataclass(frozen=True)
class Spans:
    """Lengths in units of the schedule, counted from the start of the run."""

    unit: int  # what one sample counts: 1, or its number of tokens
    warmup: float  # length of the warm-up
    decay: float  # end of the decay
    last: float | None  # length of the last phase of WSD
    total: float  # the run, over which weight decay changes


def schedule_unit(config: Config, length: int | None = None) -> int:
    """What one sample counts in the schedule: 1, or its number of tokens if a flag is in tokens.

    Args:
        length: number of tokens of a sample that count in this step; default all.
    """
    tokens = (config.optimizer.lr_decay_tokens, config.optimizer.lr_warmup_tokens, config.run.train_tokens)
    return 1 if tokens == (None, None, None) else length or config.data.seq_length


def length_in_step(config: Config, iteration: int) -> int:
    """Number of tokens of each sample that count in a step, by --rampup-seq-length; the first iteration is 1.

    This is DeepSpeed's curriculum with ``fixed_linear`` (deepspeed/runtime/data_pipeline/curriculum_scheduler.py).
    """
    longest = config.data.seq_length
    if config.data.rampup_seq_length is None:
        return longest
    start, increment, over = config.data.rampup_seq_length
    grown = math.floor(iteration / over * (longest - start) + start)
    return min(grown - grown % increment, longest)


def spans(config: Config) -> Spans:
    """The phases of a completed configuration."""
    settings, run, unit = config.optimizer, config.run, schedule_unit(config)
    if run.train_iters is not None:
        in_samples = [
            None if count is None else samples_after(config, count)
            for count in (settings.lr_warmup_iters, settings.lr_decay_iters, run.train_iters)
        ]
        last = None
        if settings.lr_wsd_decay_iters is not None:
            end = settings.lr_decay_iters or run.train_iters
            last = samples_after(config, end) - samples_after(config, end - settings.lr_wsd_decay_iters)
    else:
        in_samples = [settings.lr_warmup_samples, settings.lr_decay_samples, run.train_samples]
        last = settings.lr_wsd_decay_samples
    warmup, decay, total = (None if samples is None else samples * unit for samples in in_samples)
    if total is None or (run.train_tokens and settings.weight_decay_incr_style == "constant"):
        total = run.train_tokens  # does not depend on --seq-length, unlike a number of samples
    decay = settings.lr_decay_tokens or decay or total
    if settings.lr_warmup_tokens is not None:
        warmup = settings.lr_warmup_tokens
    elif settings.lr_warmup_fraction is not None:
        warmup = settings.lr_warmup_fraction * decay
    return Spans(unit, warmup, decay, None if last is None else last * unit, total)


def samples_after(config: Config, iterations: int) -> int:
    """Samples that the first ``iterations`` steps consume, counting --rampup-batch-size as megatron-core does.

    With --seq-length-schedule, a step has the samples of its stage.
    """
    data = config.data
    if config.stage is not None:
        return _counted(config.stage, iterations)[0]
    if data.step_batch_size_schedule is not None:
        return _samples_by_steps(batch_steps(data), iterations)
    if data.rampup_batch_size is None:
        return iterations * data.global_batch_size
    sizes, samples = BatchSizes(data, 1), 0
    for step in range(iterations):
        if samples > data.rampup_batch_size[2]:
            return samples + (iterations - step) * data.global_batch_size
        sizes.update(samples)
        samples += sizes.current
    return samples


def _samples_by_steps(steps: Sequence[tuple[int, int]], iterations: int) -> int:
    samples = 0
    for (_, size), (end, _) in zip(steps, [*steps[1:], (None, 0)]):
        count = iterations if end is None else min(max(-(-(end - samples) // size), 0), iterations)
        samples, iterations = samples + count * size, iterations - count
    return samples


def batch_steps(data: DataConfig) -> list[tuple[int, int]]:
    """(samples, global batch size from there on) of --step-batch-size-schedule, whose thresholds are in tokens.

    Raises:
        Refusal: the text cannot be read.
    """
    flag, text = "--step-batch-size-schedule", " ".join(data.step_batch_size_schedule or [])
    steps = []
    for word in text.replace(",", " ").split():
        start, size = (_number(part) for part in word.partition(":")[::2])
        if start is None or not size:
            raise Refusal(f"{flag} {short(word)}", 'is not a pair such as 250B:1536: use "0:768 250B:1536"')
        steps.append((start // data.seq_length, size))
    if not steps or steps[0][0] != 0 or any(a >= b for (a, _), (b, _) in zip(steps, steps[1:])):
        raise Refusal(
            f"{flag} {short(text)}", "does not start at 0 and grow by samples: sort it, and begin with 0:SIZE"
        )
    return steps


def _number(text: str) -> int | None:
    """A number such as 768, 1.5K, 250B or 1T; None if the text is something else."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMBT]?)", text.strip().upper())
    return int(float(match[1]) * 1000 ** " KMBT".index(match[2] or " ")) if match else None


def tokens_in(text: str) -> int | None:
    """A number of tokens, such as 8192, 8K or 1M; None if the text is something else."""
    match = re.fullmatch(r"([0-9]{1,10})([KM]?)", text)
    return int(match[1]) * UNITS[match[2]] if match else None


def read_schedule(text: str) -> list[tuple[int, int, list[str]]]:
    """(start, tokens per sample, own flags) of each stage, from ``0:8K 1000:64K --ring-parallel-size 2``.

    Raises:
        Refusal: the text cannot be read.
    """
    stages: list[tuple[int, int, list[str]]] = []
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise Refusal(f"{SCHEDULE} {short(text)}", f"cannot be read: {error}") from None
    for word in words:
        start, colon, length = word.partition(":")
        tokens = tokens_in(length) if colon and re.fullmatch("[0-9]{1,10}", start) else None
        if tokens:
            stages.append((int(start), tokens, []))
        elif stages:
            stages[-1][2].append(word)
        else:
            break
    starts = [start for start, _, _ in stages]
    if not starts or starts[0] or starts != sorted(set(starts)):
        raise Refusal(
            f"{SCHEDULE} {short(text)}",
            'must be like "0:8K 1000:64K --ring-parallel-size 2": from 0 on, ascending iterations, each with a length '
            "and perhaps with flags",
        )
    return stages


def link_stages(configs: Sequence[Config], starts: Sequence[int]) -> list[Config]:
    """The completed configurations of all stages, each with its :class:`Stage`.

    Raises:
        Refusal: the run or a stage has a flag that the schedule does not support.
    """
    first = configs[0]
    run, data, settings = first.run, first.data, first.checkpoint
    if None in (settings.save, settings.load) or os.path.realpath(settings.save) != os.path.realpath(settings.load):
        raise Refusal(
            SCHEDULE, "hands a checkpoint from stage to stage: give --save DIR and --load with the same folder"
        )
    refuse_combinations(SCHEDULE, {
        "--train-samples": (run.train_samples, "it counts iterations; give --train-iters"),
        "--train-tokens": (run.train_tokens, "it counts iterations; give --train-iters"),
        "--lr-decay-tokens": (first.optimizer.lr_decay_tokens, "give --lr-decay-iters"),
        "--lr-warmup-tokens": (first.optimizer.lr_warmup_tokens, "give --lr-warmup-iters"),
        "--skip-train": (run.skip_train, "give --seq-length"),
        "--dry-run": (first.simulation.dry_run, "simulate each stage by its --seq-length and flags"),
        "--rampup-seq-length": (data.rampup_seq_length, "it is another schedule of lengths"),
        "--step-batch-size-schedule": (data.step_batch_size_schedule, "give each stage its --global-batch-size"),
        "--rampup-batch-size": (data.rampup_batch_size, "give each stage its --global-batch-size"),
        "--sft": (data.sft, "conversations are not cut to a length"),
        "--fim-data": (data.fim_data, "it changes samples of one length"),
        "--dataloader-type cyclic": (data.dataloader_type == "cyclic", "it repeats samples of one length"),
        "--finetune": (settings.finetune, "each stage resumes; give the weights by --pretrained-checkpoint"),
        "--reset-iteration": (settings.reset_iteration, "stages begin by iteration"),
        "--universal-checkpoint": (settings.universal_checkpoint, "convert it with tools/convert_checkpoint.py"),
        "--non-persistent-save-interval": (
            settings.non_persistent_save_interval, "its copies are of one length and grid"
        ),
        "--ckpt-step": (settings.ckpt_step is not None, "every stage would load it"),
        "--no-load-optim": (not settings.load_optim, "every stage would begin without its optimizer"),
        "--no-save-optim": (not settings.save_optim, "every stage would begin without its optimizer"),
    })  # fmt: skip
    if starts[-1] >= run.train_iters:
        raise Refusal(
            SCHEDULE, f"has a stage from iteration {starts[-1]}, and --train-iters {run.train_iters} ends before it"
        )
    lengths = tuple((at, one.data.seq_length, one.data.global_batch_size) for at, one in zip(starts, configs))
    linked = []
    for number, (config, start, end) in enumerate(zip(configs, starts, (*starts[1:], run.train_iters)), 1):
        note = (
            f"stage {number} of {len(configs)}: iterations {start + 1} to {end}, {config.data.seq_length} tokens per "
            f"sample, {config.data.global_batch_size} samples per iteration"
        )
        stage = Stage(number, start, end, lengths)
        linked.append(replace(config, stage=stage, notes=[note, *config.notes]))
    return linked


class LengthStageEnded(Exception):
    """The run goes on in another stage of --seq-length-schedule.

    Args:
        iteration: the last finished iteration of the run.
    """

    def __init__(self, iteration: int) -> None:
        super().__init__(f"iteration {iteration + 1} is in another stage")
        self.iteration = iteration


def check_stage(stage: Stage, iteration: int, samples: int, tokens: int) -> None:
    """Check that a run that has come so far goes on in this stage.

    Raises:
        LengthStageEnded: it does not.
        Refusal: by the schedule, other numbers of samples and tokens would have been consumed.
    """
    counted = _counted(stage, iteration)
    if counted != (samples, tokens):
        raise Refusal(
            SCHEDULE,
            f"gives {counted[0]} samples and {counted[1]} tokens by iteration {iteration}, but the checkpoint has "
            f"consumed {samples} and {tokens}: give the lengths and batch sizes of its run up to there",
        )
    last = stage.number == len(stage.lengths)
    if iteration < stage.start or (iteration >= stage.end and not last):
        raise LengthStageEnded(iteration)


def _counted(stage: Stage, iterations: int) -> tuple[int, int]:
    """Samples and tokens of the first ``iterations`` steps."""
    samples = tokens = 0
    for (start, length, batch), end in zip(stage.lengths, [*(one[0] for one in stage.lengths[1:]), iterations]):
        more = max(min(end, iterations) - start, 0) * batch
        samples, tokens = samples + more, tokens + more * length
    return samples, tokens


class BatchSizes:
    """The current number of micro-batches, by the settings of a completed configuration.

    Args:
        together: samples of one micro-batch of all data-parallel ranks.
    """

    def __init__(self, data: DataConfig, together: int) -> None:
        self.final, self.ramp, self.together = data.global_batch_size, data.rampup_batch_size, together
        self.steps = batch_steps(data) if data.step_batch_size_schedule is not None else ()
        self.update(0)

    def update(self, consumed_samples: int, *_: bool) -> None:
        """Choose the size of the step that follows so many samples."""
        self.current = self.final
        for start, size in self.steps:
            if consumed_samples >= start:
                self.current = size
        if self.ramp is not None and consumed_samples <= self.ramp[2]:
            first, increment, samples = self.ramp
            each = samples / ((self.final - first) // increment)
            self.current = first + int(consumed_samples / each) * increment

    def get(self) -> int:
        """Micro-batches per step."""
        return self.current // self.together

    def get_current_running_global_batch_size(self) -> int:
        """Samples per step."""
        return self.current
