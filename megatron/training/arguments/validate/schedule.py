# SPDX-License-Identifier: Apache-2.0
"""Checks of the length of a run, and of the learning rate over it."""

from __future__ import annotations

from megatron.training.arguments.config import Config
from megatron.training.arguments.schedule import samples_after, spans
from megatron.training.refusal import Refusal


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
