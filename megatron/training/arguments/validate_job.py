# SPDX-License-Identifier: Apache-2.0
"""The part of `validate.py` about memory, batches, schedule, data, checkpoints and plain ranges of numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd

from megatron.training.arguments.config import Config, DataConfig
from megatron.training.arguments.models import vocabulary
from megatron.training.arguments.schedule import samples_after, spans
from megatron.training.arguments.stages import chunk_layers
from megatron.training.arguments.validate_attention import sees_ahead
from megatron.training.arguments.weighted_paths import WEIGHTED, weighted_groups
from megatron.training.refusal import Gather, Refusal

# Settings that count something and must be at least 1 where they are given; the rest of the numbers, at least 0.
POSITIVE = {
    "model": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
    "max_position_embeddings rotary_base make_vocab_size_divisible_by vocab_size padded_vocab_size "
    "fp8_amax_history_len yarn_original_max_position_embeddings lora_rank",
    "parallel": "tensor_model_parallel_size context_parallel_size ulysses_parallel_size ring_parallel_size "
    "hierarchical_context_parallel_sizes pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
    "num_virtual_stages_per_pipeline_rank microbatch_group_size_per_virtual_pipeline_stage "
    "ddp_bucket_size distributed_timeout_minutes",
    "attention": "recompute_num_layers",
    "chunks": "fpdt_chunk_size ffn_chunks loss_chunks",
    "optimizer": "lr_decay_iters lr_decay_samples lr_decay_tokens lr_wsd_decay_iters lr_wsd_decay_samples hysteresis",
    "data": "micro_batch_size global_batch_size gradient_accumulation_steps seq_length rampup_seq_length "
    "num_dataset_builder_threads",
    "checkpoint": "save_interval save_retain_interval keep_last_checkpoints keep_best_checkpoints "
    "non_persistent_save_interval replication_jump replication_factor",
    "logging": "log_interval tensorboard_log_interval tensorboard_queue_size profile_memory_step",
    "run": "train_iters train_samples train_tokens eval_interval exit_interval exit_duration_in_mins",
    "faults": "check_weight_hash_across_dp_replicas_interval",
    "evaluation": "eval_lengths eval_depths eval_samples eval_stride",
}
NOT_NEGATIVE = {
    "model": "init_method_std norm_epsilon yarn_mscale yarn_mscale_all_dim",
    "optimizer": "min_lr lr_warmup_iters lr_warmup_samples lr_warmup_tokens lr_warmup_init weight_decay clip_grad "
    "adam_eps sgd_momentum decoupled_min_lr",
    "data": "num_workers rampup_batch_size tiktoken_num_special_tokens",
    "checkpoint": "ckpt_step",
    "attention": "mask_cpu_threshold",
    "run": "seed manual_gc_interval",
    "faults": "skip_bad_batches iterations_to_skip",
}
ABOVE_ZERO = {
    "model": "rotary_percent rotary_seq_len_interpolation_factor rope_scaling_factor yarn_rotary_scaling_factor "
    "yarn_beta_fast yarn_beta_slow lora_alpha",
    "optimizer": "lr decoupled_lr loss_scale initial_loss_scale min_loss_scale loss_scale_window",
    "logging": "peak_tflops",
}
BELOW_ONE = {"model": "hidden_dropout attention_dropout", "optimizer": "adam_beta1 adam_beta2 lr_warmup_fraction"}
DROPOUT = {"model": "hidden_dropout attention_dropout"}


def check_ranges(config: Config) -> None:
    """Refuse single numbers that make no sense."""
    rules = (
        (POSITIVE, lambda value: value >= 1, "must be at least 1"),
        (NOT_NEGATIVE, lambda value: value >= 0, "must not be negative"),
        (ABOVE_ZERO, lambda value: value > 0, "must be above 0"),
        (BELOW_ONE, lambda value: 0 <= value < 1, "must be from 0 up to, not including, 1"),
        (
            DROPOUT,
            lambda value: value == 0 or value >= 2**-15,
            "is too small to tell from 0: use 0, or 3.1e-05 and more",
        ),
    )
    gather = Gather()
    config.run.exit_interval = config.run.exit_interval or None  # 0 is never, as in Megatron-LM
    config.checkpoint.save_interval = config.checkpoint.save_interval or None
    config.run.eval_iters = max(config.run.eval_iters, 0)  # -1 evaluates nothing, likewise

    def check(field: str, number: float | None, holds: Callable[[float], bool], text: str) -> None:
        if number is not None and not holds(number):
            raise Refusal(f"--{field.replace('_', '-')} {number:g} {text}")

    for names, holds, text in rules:
        for section, fields in names.items():
            for field in fields.split():
                value = getattr(getattr(config, section), field)
                for number in value if isinstance(value, list) else [value]:
                    gather.check(field, partial(check, field, number, holds, text))
    minutes = config.parallel.distributed_timeout_minutes
    year = 366 * 24 * 60
    gather.check(
        "timeout", lambda: check("distributed_timeout_minutes", minutes, lambda x: x <= year, f"is more than {year}")
    )
    gather.check(
        "percent", lambda: check("rotary_percent", config.model.rotary_percent, lambda x: x <= 1, "must be at most 1")
    )
    gather.finish()


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


def check_lengths(config: Config) -> None:
    """Refuse a --rampup-seq-length that grows to no length, or whose tokens see those that do not count."""
    data = config.data
    if data.rampup_seq_length is None:
        return
    start, increment, over = data.rampup_seq_length
    if not increment <= start <= data.seq_length:
        raise Refusal(
            f"--rampup-seq-length {start} {increment} {over} needs a start from its increment to --seq-length "
            f"{data.seq_length}: use such a one"
        )
    if sees_ahead(config.attention):
        raise Refusal("--rampup-seq-length needs a mask by which no token sees a later one: leave one out")
    config.notes.append(
        f"--rampup-seq-length: of each sample, tokens from {start} on begin to count over {over} iterations; all are "
        "computed, so short steps take no less time"
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


def check_data(config: Config) -> None:
    """Settle where the data and the tokenizer come from."""
    data, model = config.data, config.model
    splits = any((data.train_data_path, data.valid_data_path, data.test_data_path))
    weighted = [name for name in WEIGHTED if getattr(data, name)]
    for split in ("train", "valid", "test"):
        if getattr(data, f"{split}_weighted_split_paths"):
            weighted_groups(data, split)
    if weighted and data.split is not None:
        raise Refusal(f"--split shares out --data-path; with --{weighted[0].replace('_', '-')}, leave it out")
    files = [name for name in ("data_args_path", "data_file_list", "per_split_data_args_path") if getattr(data, name)]
    if sum((bool(data.data_path), splits, data.mock_data, bool(weighted), *(True for _ in files))) != 1:
        raise Refusal(
            "give the data once: --data-path, or --train-data-path, --valid-data-path and --test-data-path, "
            "or --train-weighted-split-paths and the like, or a file with one of them, or --mock-data"
        )
    splits = splits or bool(data.per_split_data_args_path)
    _check_fim(data)
    if splits and data.split is not None:
        raise Refusal("--split shares out --data-path; with --train-data-path and the like, leave it out")
    if data.split is not None:
        data.split = data.split.strip("'\" ")  # published launch scripts pass the quotes on
    if data.tokenizer_type is None and data.vocab_file and data.merge_file:
        data.tokenizer_type = "GPT2BPETokenizer"  # as in Megatron's pretrain_gpt.py
    if data.tokenizer_type is None and data.mock_data and (model.vocab_size or model.model):
        data.tokenizer_type = "NullTokenizer"
    if data.tokenizer_type == "NullTokenizer" and model.vocab_size is None and model.model:
        model.vocab_size = vocabulary(model.model) - 1  # the tokenizer adds one id, the end of a document


def _check_fim(data: DataConfig) -> None:
    for flag, rate in (("--fim-rate", data.fim_rate), ("--fim-spm-rate", data.fim_spm_rate),
                       ("--fim-fragment-rate", data.fim_fragment_rate)):  # fmt: skip
        if rate is not None and not 0 <= rate <= 1:
            raise Refusal(f"{flag} {rate:g} must be from 0 to 1")
    if not data.fim_data:
        return
    if data.mock_data:
        raise Refusal("--fim-data cuts texts, and --mock-data has none: leave one out")
    if data.tokenizer_type == "NullTokenizer":
        raise Refusal("--fim-data cuts texts between characters, and --tokenizer-type NullTokenizer has none")
    if (data.fim_split_sample is None) != (data.fim_fragment_rate is None):
        raise Refusal("--fim-split-sample and --fim-fragment-rate go together: give both, or none")


def check_checkpoint(config: Config) -> None:
    """Refuse what saves or loads nothing."""
    checkpoint = config.checkpoint
    save, load = checkpoint.save, checkpoint.load
    needs = (
        ("--save-retain-interval", checkpoint.save_retain_interval, save, "--save"),
        ("--save-retain-interval", checkpoint.save_retain_interval, checkpoint.save_interval, "--save-interval"),
        ("--keep-last-checkpoints", checkpoint.keep_last_checkpoints, save, "--save"),
        ("--keep-best-checkpoints", checkpoint.keep_best_checkpoints, save, "--save"),
        ("--keep-best-checkpoints", checkpoint.keep_best_checkpoints, checkpoint.save_interval, "--save-interval"),
        ("--keep-best-checkpoints", checkpoint.keep_best_checkpoints, config.run.eval_interval, "--eval-interval"),
        ("--async-save", checkpoint.async_save, save, "--save"),
        ("--universal-checkpoint", checkpoint.universal_checkpoint, load, "--load"),
        ("--skip-damaged-checkpoints", checkpoint.skip_damaged_checkpoints, load, "--load"),
        ("--ckpt-step", checkpoint.ckpt_step is not None, load, "--load"),
        ("--exit-on-missing-checkpoint", checkpoint.exit_on_missing_checkpoint, load, "--load"),
        ("--reset-iteration", checkpoint.reset_iteration, load, "--load"),
        ("--finetune", checkpoint.finetune, load or checkpoint.pretrained_checkpoint, "--load"),
        ("--manual-gc-interval", config.run.manual_gc_interval, config.run.manual_gc, "--manual-gc"),
    )
    if checkpoint.save_interval and not save:
        config.notes.append("--save-interval without --save: nothing is saved")
        checkpoint.save_interval = None
    if config.logging.log_progress and not save:
        config.notes.append("--log-progress without --save: there is no folder for progress.txt")
        config.logging.log_progress = False
    if checkpoint.ckpt_format != "torch_dist":
        config.notes.append(f"--ckpt-format {checkpoint.ckpt_format}: checkpoints are written as torch_dist")
        checkpoint.ckpt_format = "torch_dist"
    for flag, value, other, need in needs:
        if value and not other:
            raise Refusal(f"{flag} does nothing without {need}: add {need}, or leave it out")
    if checkpoint.skip_damaged_checkpoints and checkpoint.ckpt_step is not None:
        raise Refusal("--ckpt-step and --skip-damaged-checkpoints exclude each other: the first names the one to load")
    if checkpoint.save_retain_interval and checkpoint.save_retain_interval % checkpoint.save_interval:
        raise Refusal(
            f"--save-retain-interval {checkpoint.save_retain_interval} must be a multiple of --save-interval "
            f"{checkpoint.save_interval}"
        )
    if checkpoint.keep_best_checkpoints:
        if checkpoint.save_interval % config.run.eval_interval:
            raise Refusal(
                "--keep-best-checkpoints needs the validation loss of each checkpoint: --save-interval "
                f"{checkpoint.save_interval} must be a multiple of --eval-interval {config.run.eval_interval}"
            )
        if not config.run.eval_iters:
            raise Refusal("--keep-best-checkpoints and --eval-iters 0 contradict each other: leave one out")
