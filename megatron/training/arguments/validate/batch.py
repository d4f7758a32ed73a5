# SPDX-License-Identifier: Apache-2.0
"""Checks of the global batch: how it is cut over ranks, micro-batches and virtual stages."""

from __future__ import annotations

from megatron.training.arguments.config import Config
from megatron.training.refusal import Refusal, near


def check_batch(config: Config, data_parallel: int) -> None:
    """Settle the global batch: a whole number of micro-batches on every data-parallel rank."""
    data, parallel = config.data, config.parallel
    unit = data.micro_batch_size * data_parallel
    if data.gradient_accumulation_steps is not None:
        wanted = unit * data.gradient_accumulation_steps
        if data.global_batch_size not in (None, wanted):
            raise Refusal(
                f"--global-batch-size {data.global_batch_size} is not --micro-batch-size {data.micro_batch_size} x "
                f"--gradient-accumulation-steps {data.gradient_accumulation_steps} x {data_parallel} data-parallel "
                f"ranks: use {wanted}, or leave one out"
            )
        data.global_batch_size = wanted
    virtual = parallel.num_virtual_stages_per_pipeline_rank is not None
    if data.global_batch_size is None:
        data.global_batch_size = unit * (parallel.pipeline_model_parallel_size if virtual else 1)
        config.notes.append(f"--global-batch-size was not given: {data.global_batch_size}")
    sizes = {"--global-batch-size": data.global_batch_size}
    if data.rampup_batch_size:
        start, step, over = data.rampup_batch_size
        if over < 1:
            raise Refusal(f"--rampup-batch-size {start} {step} {over} grows over no samples: leave it out")
        if start < 1 or step < 1 or start >= data.global_batch_size or (data.global_batch_size - start) % step:
            raise Refusal(
                f"--rampup-batch-size {start} {step} does not lead to --global-batch-size {data.global_batch_size} in "
                "whole steps: use a start below it and an increment that divides the difference"
            )
        sizes |= {"--rampup-batch-size (start)": start, "--rampup-batch-size (increment)": step}
    for flag, size in sizes.items():
        if size % unit:
            raise Refusal(
                f"{flag} {size} is no multiple of --micro-batch-size {data.micro_batch_size} x {data_parallel} "
                f"data-parallel ranks: use a multiple of {unit}, {near(size, unit)}"
            )
    if virtual:
        _groups(config, unit)
    elif parallel.microbatch_group_size_per_virtual_pipeline_stage is not None:
        config.notes.append("--microbatch-group-size-per-virtual-pipeline-stage says nothing without virtual stages")
        parallel.microbatch_group_size_per_virtual_pipeline_stage = None


def _groups(config: Config, unit: int) -> None:
    """Interleaved 1F1B takes micro-batches in groups, the last of which may be smaller, but not than the pipeline."""
    data, parallel = config.data, config.parallel
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    stages, given = parallel.pipeline_model_parallel_size, parallel.microbatch_group_size_per_virtual_pipeline_stage
    group = given or stages
    if group < stages:
        raise Refusal(f"{flag} {group} is below --pipeline-model-parallel-size {stages}: use at least {stages}")
    sizes = {"--global-batch-size": [data.global_batch_size]}
    if data.rampup_batch_size:
        start, step, _ = data.rampup_batch_size
        sizes["--rampup-batch-size"] = list(range(start, data.global_batch_size, step))
    for source, size in ((source, size) for source, running in sizes.items() for size in running):
        count = size // unit
        if count >= group and (count % group == 0 or count % group >= stages):
            continue
        if given is None:
            raise Refusal(
                f"{source} {size} is {count} micro-batches, and virtual pipeline stages need a multiple of "
                f"--pipeline-model-parallel-size {stages}: use a multiple of {unit * stages}, or give {flag}"
            )
        raise Refusal(
            f"{source} {size} is {count} micro-batches, which {flag} {group} cuts into groups of less than "
            f"--pipeline-model-parallel-size {stages}: use a multiple of {unit * group}"
        )
