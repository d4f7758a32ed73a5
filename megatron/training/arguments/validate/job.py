# SPDX-License-Identifier: Apache-2.0
"""Checks of recompute, ZeRO, batches, the length of a run and its schedule."""

from __future__ import annotations

from math import gcd

from megatron.training.arguments.config import Config
from megatron.training.arguments.schedule import samples_after, spans
from megatron.training.arguments.stages import chunk_layers
from megatron.training.refusal import Refusal


def near(value: int, unit: int) -> str:
    """The multiples of ``unit`` around ``value``, as words."""
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below else f"{above}"


def check_recompute(config: Config) -> None:
    """Settle recompute."""
    attention = config.attention
    if attention.recompute_activations:
        if attention.recompute_granularity == "full":
            raise Refusal("--recompute-activations means --recompute-granularity selective, not full: leave one out")
        attention.recompute_granularity = "selective"
    method, layers = attention.recompute_method, attention.recompute_num_layers
    if attention.recompute_granularity == "full":
        if method == "uniform" and layers is None:
            layers = attention.recompute_num_layers = 1  # as in Megatron-DeepSpeed
            config.notes.append("--recompute-method uniform without --recompute-num-layers: units of one layer")
        if method is None or layers is None:
            raise Refusal(
                "--recompute-granularity full needs --recompute-method and --recompute-num-layers: "
                "for the least memory add --recompute-method uniform --recompute-num-layers 1"
            )
        stages = [count for count in chunk_layers(config) if count]
        if layers > max(stages):
            raise Refusal(
                f"--recompute-num-layers {layers} is more than the {max(stages)} layers of a stage: use at most "
                f"{max(stages)}"
            )
        if method == "uniform" and not config.chunks.fpdt and any(count % layers for count in stages):
            raise Refusal(  # megatron-core's last unit would reach beyond the stage
                f"--recompute-method uniform in units of --recompute-num-layers {layers} does not cut stages of "
                f"{' and '.join(map(str, sorted(set(stages))))} layers: use {gcd(gcd(*stages), layers)}"
            )
    elif method is not None or layers is not None:
        if attention.recompute_granularity is not None:
            raise Refusal("--recompute-method and --recompute-num-layers need --recompute-granularity full: add it")
        config.notes.append("--recompute-method and --recompute-num-layers say nothing without --recompute-granularity")
        attention.recompute_method = attention.recompute_num_layers = None


def check_zero(config: Config) -> None:
    """Settle ZeRO."""
    parallel, optimizer = config.parallel, config.optimizer
    if parallel.zero_stage is None:
        parallel.zero_stage = int(parallel.use_distributed_optimizer)
    stage = parallel.zero_stage
    if stage != 1 and parallel.use_distributed_optimizer:
        raise Refusal(f"--use-distributed-optimizer is --zero-stage 1, not {stage}: leave one out")
    if stage > 1:
        _fsdp(config)
    parallel.use_distributed_optimizer = stage == 1
    if stage == 1 and optimizer.optimizer == "sgd":
        raise Refusal("--optimizer sgd has no state to split over --zero-stage 1: use --zero-stage 0")
    if parallel.overlap_param_gather and not (stage == 1 and parallel.overlap_grad_reduce):
        raise Refusal(
            "--overlap-param-gather needs --zero-stage 1 (or --use-distributed-optimizer) and --overlap-grad-reduce: "
            "add them, or leave it out"
        )


def _fsdp(config: Config) -> None:
    """ZeRO 2 and 3 are PyTorch's FSDP2."""
    parallel = config.parallel
    zero = f"--zero-stage {parallel.zero_stage}"
    if parallel.pipeline_model_parallel_size > 1:
        raise Refusal(
            f"{zero} with --pipeline-model-parallel-size {parallel.pipeline_model_parallel_size} is not supported: "
            "use --zero-stage 1, or --pipeline-model-parallel-size 1"
        )
    if config.model.fp8_format:
        raise Refusal(f"{zero} with --fp8-format is not supported: use --bf16 alone, or --zero-stage 1")
    hints = {
        "--overlap-grad-reduce": parallel.overlap_grad_reduce,
        "--overlap-param-gather": parallel.overlap_param_gather,
        "--ddp-bucket-size": parallel.ddp_bucket_size,
    }
    given = [flag for flag, value in hints.items() if value]
    if given:
        config.notes.append(f"{', '.join(given)}: no effect with {zero}, where FSDP overlaps messages layer by layer")
    parallel.overlap_grad_reduce = parallel.overlap_param_gather = False


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


def check_duration(config: Config) -> None:
    """Refuse two lengths of the run, or none, and a schedule in the other unit."""
    run, optimizer = config.run, config.optimizer
    if run.train_iters is not None and run.train_samples is not None:
        raise Refusal("--train-iters and --train-samples are two lengths of the run: leave one out")
    if (run.train_iters, run.train_samples, run.train_tokens) == (None, None, None) and not run.skip_train:
        raise Refusal("missing: --train-iters, --train-samples or --train-tokens, or --skip-train to evaluate only")
    if run.train_samples is not None and run.train_samples < config.data.global_batch_size:
        raise Refusal(f"--train-samples {run.train_samples} is less than one --global-batch-size: use a multiple of it")
    own, other = ("samples", "iters") if run.train_iters is None else ("iters", "samples")
    for name in (f"lr_decay_{other}", f"lr_warmup_{other}", f"lr_wsd_decay_{other}"):
        if getattr(optimizer, name):
            flag = "--" + name.replace("_", "-")
            length = own if getattr(run, f"train_{own}") is not None else "tokens"
            raise Refusal(f"{flag} does not go with --train-{length}: use {flag.removesuffix(other)}{length}")
    if config.data.rampup_batch_size and run.train_iters is not None:
        config.notes.append(
            f"--train-iters {run.train_iters} with --rampup-batch-size takes {samples_after(config, run.train_iters)} "
            "samples, and each count of iterations in the schedule the samples that so many steps take"
        )


def check_schedule(config: Config) -> None:
    """Settle the learning rate's schedule; nothing where nothing is trained."""
    if config.run.skip_train:
        return
    optimizer, run = config.optimizer, config.run
    if optimizer.lr is None:
        raise Refusal("missing: --lr")
    own = "samples" if run.train_iters is None else "iters"
    for flag, low in (("--min-lr", optimizer.min_lr), ("--lr-warmup-init", optimizer.lr_warmup_init)):
        if low > optimizer.lr:
            raise Refusal(f"{flag} {low:g} is above --lr {optimizer.lr:g}: lower it")
    low, high = optimizer.decoupled_min_lr, optimizer.decoupled_lr
    if low is not None and (high is None or low > high):
        raise Refusal("--decoupled-min-lr needs a --decoupled-lr that is not below it: add it, or leave both out")
    _tokens(config, own)
    if getattr(optimizer, f"lr_decay_{own}") is None and optimizer.lr_decay_tokens is None:
        setattr(optimizer, f"lr_decay_{own}", getattr(run, f"train_{own}"))
    decay, warmup = getattr(optimizer, f"lr_decay_{own}"), getattr(optimizer, f"lr_warmup_{own}")
    if warmup and optimizer.lr_warmup_fraction is not None:
        raise Refusal(f"--lr-warmup-fraction and --lr-warmup-{own} are two lengths of warm-up: leave one out")
    phases = spans(config)
    if phases.warmup >= phases.decay:
        raise Refusal(
            f"--lr-warmup-{own} {warmup} must be below --lr-decay-{own} {decay} (default --train-{own})"
            if phases.unit == 1
            else f"the warm-up takes {phases.warmup:.0f} tokens, and the decay ends at {phases.decay:.0f}: lower "
            "--lr-warmup-tokens, or raise --lr-decay-tokens (default --train-tokens)"
        )
    if optimizer.lr_decay_style == "WSD" and (phases.last is None or phases.last > phases.decay):
        end = f"--lr-decay-{own} {decay}" if phases.unit == 1 else f"the {phases.decay:.0f} tokens of the decay"
        raise Refusal(f"--lr-decay-style WSD needs --lr-wsd-decay-{own}, at most {end}: add it")
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if optimizer.weight_decay_incr_style == "constant":
        if (start, end) != (None, None):
            raise Refusal("--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine")
    elif start is None or end is None or not 0 <= start <= end:
        raise Refusal(
            f"--weight-decay-incr-style {optimizer.weight_decay_incr_style} needs --start-weight-decay and "
            "--end-weight-decay, the end not below the start: add them"
        )
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        raise Refusal("--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other")


def _tokens(config: Config, own: str) -> None:
    """A count of tokens is the one that is read, as in Megatron-DeepSpeed."""
    optimizer = config.optimizer
    for name in ("decay", "warmup"):
        other = getattr(optimizer, f"lr_{name}_{own}")
        if getattr(optimizer, f"lr_{name}_tokens") is not None and other:
            config.notes.append(f"--lr-{name}-{own} {other} is not read beside --lr-{name}-tokens")
    share = optimizer.lr_warmup_fraction
    if share is None:
        return
    if optimizer.lr_warmup_tokens is not None:
        raise Refusal("--lr-warmup-fraction and --lr-warmup-tokens are two lengths of warm-up: leave one out")
    if optimizer.lr_decay_tokens is not None:
        raise Refusal(
            f"--lr-warmup-fraction {share:g} with --lr-decay-tokens is a share of what Megatron-DeepSpeed counts in "
            f"samples: use --lr-warmup-tokens {int(share * optimizer.lr_decay_tokens)} for a share of the tokens"
        )


def check_profile(config: Config) -> None:
    """Settle which step --profile-memory records."""
    logging = config.logging
    if logging.profile_memory is None:
        if logging.profile_memory_step is not None:
            raise Refusal("--profile-memory-step does nothing without --profile-memory: add it, or leave it out")
        return
    if config.run.skip_train:
        raise Refusal("--profile-memory records a training step, and --skip-train has none: leave one out")
    if logging.profile_memory_step is None:
        logging.profile_memory_step = 2
