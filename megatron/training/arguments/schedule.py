# SPDX-License-Identifier: Apache-2.0
"""Lengths of the phases of a run's schedule, from flags in iterations, samples or tokens.

Megatron-LM's schedule counts samples. Megatron-DeepSpeed's may count tokens (--lr-decay-tokens): samples times their
length. With any such flag the complete schedule counts tokens, so that a run can continue at another --seq-length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.training.arguments.config import Config


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
    """Samples that the first ``iterations`` steps consume, counting --rampup-batch-size as megatron-core does."""
    data = config.data
    if data.rampup_batch_size is None:
        return iterations * data.global_batch_size
    start, increment, over = data.rampup_batch_size
    samples_per_increment = over / ((data.global_batch_size - start) // increment)
    samples = 0
    for step in range(iterations):
        if samples > over:
            return samples + (iterations - step) * data.global_batch_size
        grown = (
            start + increment * int(samples / samples_per_increment)
            if samples_per_increment
            else data.global_batch_size
        )
        samples += min(grown, data.global_batch_size)
    return samples
