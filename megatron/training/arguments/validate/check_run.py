# SPDX-License-Identifier: Apache-2.0
"""Checks of checkpoints, faults, the length of the run, the learning rate, and ranges of numbers."""

from __future__ import annotations

import os

from megatron.training.arguments.schedule import samples_after, spans
from megatron.training.refusal import Fix, Refusal, needs_flag
from megatron.training.settings.config import Config

COPY_INTERVAL = "--non-persistent-save-interval"


def complete_checkpoint(config: Config) -> None:
    """Refuse flags of saving and loading that contradict each other; switch off those without effect."""
    checkpoint = config.checkpoint
    save = checkpoint.save
    if checkpoint.save_interval and not save:
        config.notes.append("--save-interval without --save: nothing is saved")
        checkpoint.save_interval = None
    if config.logging.log_progress and not save:
        config.notes.append("--log-progress needs --save, the folder of progress.txt: ignored")
        config.logging.log_progress = False
    if checkpoint.ckpt_format != "torch_dist":
        config.notes.append(f"--ckpt-format {checkpoint.ckpt_format}: checkpoints are written as torch_dist")
        checkpoint.ckpt_format = "torch_dist"
    if checkpoint.finetune and not (checkpoint.load or checkpoint.pretrained_checkpoint):
        raise needs_flag("--finetune", "--load")
    if checkpoint.skip_damaged_checkpoints and checkpoint.ckpt_step is not None:
        raise Refusal("--ckpt-step and --skip-damaged-checkpoints", "exclude each other: leave one out")
    if checkpoint.save_retain_interval and checkpoint.save_retain_interval % checkpoint.save_interval:
        raise Refusal(
            f"--save-retain-interval {checkpoint.save_retain_interval}",
            f"must be a multiple of --save-interval {checkpoint.save_interval}",
        )
    if checkpoint.keep_best_checkpoints:
        if checkpoint.save_interval % config.run.eval_interval:
            raise Refusal(
                "--keep-best-checkpoints",
                f"needs the validation loss of each checkpoint: --save-interval {checkpoint.save_interval} must "
                f"be a multiple of --eval-interval {config.run.eval_interval}",
            )
        if not config.run.eval_iters:
            raise Refusal("--keep-best-checkpoints and --eval-iters 0", "contradict each other: leave one out")


def complete_copies(config: Config, world_size: int) -> None:
    """Refuse flags that make copies in memory useless for a restart; switch off replication without other nodes."""
    settings = config.checkpoint
    if settings.non_persistent_save_interval is None:
        return
    if settings.non_persistent_ckpt_type is None:
        raise Refusal(
            COPY_INTERVAL,
            "does nothing without --non-persistent-ckpt-type: add --non-persistent-ckpt-type local",
            Fix("--non-persistent-ckpt-type local"),
        )
    if settings.non_persistent_ckpt_type != "local":
        raise Refusal(
            f"--non-persistent-ckpt-type {settings.non_persistent_ckpt_type}",
            "is not supported: use --non-persistent-ckpt-type local, whose files are in memory unless "
            "--non-persistent-local-ckpt-dir says otherwise",
            Fix("--non-persistent-ckpt-type local"),
        )
    if not (settings.save and settings.load) or os.path.abspath(settings.save) != os.path.abspath(settings.load):
        raise Refusal(
            COPY_INTERVAL, "needs checkpoints of the same run: give --save DIR and --load with the same folder"
        )
    others = (
        ("--finetune", settings.finetune),
        ("--ckpt-step", settings.ckpt_step is not None),
        ("--reset-iteration", settings.reset_iteration),
        ("--universal-checkpoint", settings.universal_checkpoint),
        ("--no-load-optim", not settings.load_optim),
        ("--no-load-rng", not settings.load_rng),
        ("--skip-train", config.run.skip_train),
    )
    for flag, given in others:
        if given:
            raise Refusal(
                f"{COPY_INTERVAL} and {flag}", ": a restart continues from the complete last state; leave one out"
            )
    if not settings.replication:
        return
    if settings.replication_factor < 2:
        raise Refusal(
            "--replication-factor 1", "keeps no second copy: use --replication-factor 2", Fix("--replication-factor 2")
        )
    if world_size < settings.replication_factor:
        config.notes.append(
            f"no effect here: --replication (it needs {settings.replication_factor} nodes, and the number of ranks "
            f"is {world_size})"
        )
        settings.replication = False


def check_faults(config: Config, world_size: int) -> None:
    """Refuse contradicting flags about faults; note those without effect on this grid."""
    faults, parallel = config.faults, config.parallel
    if faults.spike_factor <= 1:
        raise Refusal(f"--spike-factor {faults.spike_factor:g}", "counts ordinary steps as spikes: use more than 1")
    if faults.skip_bad_batches and config.optimizer.fp16:
        raise Refusal("--skip-bad-batches and --fp16", ": loss scaling skips such steps already; leave one out")
    if faults.skip_bad_batches and not config.optimizer.check_for_nan_in_loss_and_grad:
        raise Refusal(
            "--skip-bad-batches and --no-check-for-nan-in-loss-and-grad", "contradict each other: leave one out"
        )
    if faults.rollback_on_bad_batch:
        needs = (("--skip-bad-batches", faults.skip_bad_batches), ("--save-interval", config.checkpoint.save_interval))
        for flag, value in needs:
            if not value:
                raise needs_flag("--rollback-on-bad-batch", flag)
        if not config.checkpoint.save_optim:
            raise Refusal(
                "--rollback-on-bad-batch",
                "needs the optimizer in the checkpoint: leave --no-save-optim out",
                Fix(drop="--no-save-optim"),
            )
    holders = parallel.tensor_model_parallel_size
    if parallel.zero_stage < 2:
        holders = world_size // parallel.pipeline_model_parallel_size
    if faults.check_weight_hash_across_dp_replicas_interval and holders == 1:
        config.notes.append(
            "no effect here: --check-weight-hash-across-dp-replicas-interval (no two ranks hold the same weights)"
        )
    if faults.log_straggler and world_size == 1:
        config.notes.append("no effect here: --log-straggler (there is one rank)")


def check_duration(config: Config) -> None:
    """Refuse a run without a length or with two, and a schedule in another unit than the length."""
    run, optimizer = config.run, config.optimizer
    if run.train_iters is not None and run.train_samples is not None:
        raise Refusal("--train-iters and --train-samples", "are two lengths of the run: leave one out")
    if (run.train_iters, run.train_samples, run.train_tokens) == (None, None, None) and not run.skip_train:
        raise Refusal(
            "missing: --train-iters, --train-samples or --train-tokens, or --skip-train to evaluate only",
            about="--train-iters --train-samples --train-tokens --skip-train",
        )
    if run.train_samples is not None and run.train_samples < config.data.global_batch_size:
        raise Refusal(
            f"--train-samples {run.train_samples}", "is less than one --global-batch-size: use a multiple of it"
        )
    own, other = ("samples", "iters") if run.train_iters is None else ("iters", "samples")
    for name in (f"lr_decay_{other}", f"lr_warmup_{other}", f"lr_wsd_decay_{other}"):
        if getattr(optimizer, name):
            flag = "--" + name.replace("_", "-")
            length = own if getattr(run, f"train_{own}") is not None else "tokens"
            name = flag.removesuffix(other) + length
            raise Refusal(flag, f"cannot be used with --train-{length}: use {name}", Fix(rename=(flag, name)))
    grows = "--rampup-batch-size" if config.data.rampup_batch_size else "--step-batch-size-schedule"
    if (config.data.rampup_batch_size or config.data.step_batch_size_schedule) and run.train_iters is not None:
        config.notes.append(
            f"--train-iters {run.train_iters} with {grows} takes {samples_after(config, run.train_iters)} "
            "samples; iterations of the schedule are converted to samples in the same way"
        )


def complete_schedule(config: Config) -> None:
    """Complete the schedule of the learning rate, unless nothing is trained."""
    if config.run.skip_train:
        return
    optimizer, run = config.optimizer, config.run
    if optimizer.lr is None:
        raise Refusal("missing: --lr", about="--lr")
    own = "samples" if run.train_iters is None else "iters"
    for flag, low in (("--min-lr", optimizer.min_lr), ("--lr-warmup-init", optimizer.lr_warmup_init)):
        if low > optimizer.lr:
            raise Refusal(f"{flag} {low:g}", f"is above --lr {optimizer.lr:g}: lower it")
    low, high = optimizer.decoupled_min_lr, optimizer.decoupled_lr
    if low is not None and (high is None or low > high):
        raise Refusal("--decoupled-min-lr", "needs a --decoupled-lr that is not below it: add it, or leave both out")
    _tokens(config, own)
    if getattr(optimizer, f"lr_decay_{own}") is None and optimizer.lr_decay_tokens is None:
        setattr(optimizer, f"lr_decay_{own}", getattr(run, f"train_{own}"))
    decay, warmup = getattr(optimizer, f"lr_decay_{own}"), getattr(optimizer, f"lr_warmup_{own}")
    if warmup and optimizer.lr_warmup_fraction is not None:
        raise Refusal(f"--lr-warmup-fraction and --lr-warmup-{own}", "are two lengths of warm-up: leave one out")
    phases = spans(config)
    if phases.warmup >= phases.decay:
        raise Refusal(
            f"--lr-warmup-{own} {warmup} must be below --lr-decay-{own} {decay} (default --train-{own})"
            if phases.unit == 1
            else f"the warm-up takes {phases.warmup:.0f} tokens, and the decay ends at {phases.decay:.0f}: lower "
            "--lr-warmup-tokens, or raise --lr-decay-tokens (default --train-tokens)",
            about=f"--lr-warmup-{own} --lr-decay-{own}",
        )
    if optimizer.lr_decay_style == "WSD" and (phases.last is None or phases.last > phases.decay):
        end = f"--lr-decay-{own} {decay}" if phases.unit == 1 else f"the {phases.decay:.0f} tokens of the decay"
        raise Refusal("--lr-decay-style WSD", f"needs --lr-wsd-decay-{own}, at most {end}: add it")
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if optimizer.weight_decay_incr_style == "constant":
        if (start, end) != (None, None):
            raise Refusal(
                "--start-weight-decay and --end-weight-decay", "need --weight-decay-incr-style linear or cosine"
            )
    elif start is None or end is None or not 0 <= start <= end:
        raise Refusal(
            f"--weight-decay-incr-style {optimizer.weight_decay_incr_style}",
            "needs --start-weight-decay and --end-weight-decay, the end not below the start: add them",
        )
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        raise Refusal(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler", "differ: leave one out"
        )


def _tokens(config: Config, own: str) -> None:
    """Let counts of tokens win over counts of iterations or samples, as in Megatron-DeepSpeed."""
    optimizer = config.optimizer
    for name in ("decay", "warmup"):
        other = getattr(optimizer, f"lr_{name}_{own}")
        if getattr(optimizer, f"lr_{name}_tokens") is not None and other:
            config.notes.append(f"--lr-{name}-{own} {other} is ignored, because --lr-{name}-tokens is given")
    share = optimizer.lr_warmup_fraction
    if share is None:
        return
    if optimizer.lr_warmup_tokens is not None:
        raise Refusal("--lr-warmup-fraction and --lr-warmup-tokens", "are two lengths of warm-up: leave one out")
    if optimizer.lr_decay_tokens is not None:
        raise Refusal(
            f"--lr-warmup-fraction {share:g} with --lr-decay-tokens",
            "is a share of samples in Megatron-DeepSpeed: use --lr-warmup-tokens "
            f"{int(share * optimizer.lr_decay_tokens)} for a share of the tokens",
        )


def complete_intervals(config: Config) -> None:
    """Read numbers that mean "never", as Megatron-LM does: intervals of 0, and -1 batches of validation."""
    config.run.exit_interval = config.run.exit_interval or None
    config.checkpoint.save_interval = config.checkpoint.save_interval or None
    config.run.eval_iters = max(config.run.eval_iters, 0)
