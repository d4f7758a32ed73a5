# SPDX-License-Identifier: Apache-2.0
"""Checks of checkpoints on disk, and copies of the training state in the memory of the hosts."""

from __future__ import annotations

import os

from megatron.training.arguments.config import Config
from megatron.training.refusal import Refusal

ON = "--non-persistent-save-interval"


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


def check_copies(config: Config, world_size: int) -> None:
    """Refuse what would load something else than a restart needs; note what has no neighbour."""
    settings = config.checkpoint
    if settings.non_persistent_save_interval is None:
        return
    if settings.non_persistent_ckpt_type is None:
        raise Refusal(f"{ON} does nothing without --non-persistent-ckpt-type: add --non-persistent-ckpt-type local")
    if settings.non_persistent_ckpt_type != "local":
        raise Refusal(
            f"--non-persistent-ckpt-type {settings.non_persistent_ckpt_type} is not built here: use "
            "--non-persistent-ckpt-type local, whose files are in memory unless --non-persistent-local-ckpt-dir says "
            "otherwise"
        )
    if not (settings.save and settings.load) or os.path.abspath(settings.save) != os.path.abspath(settings.load):
        raise Refusal(f"{ON} is for restarts of one run: give --save DIR and --load with the same folder")
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
            raise Refusal(f"{ON} and {flag}: a restart goes on from all of the last state; leave one out")
    if not settings.replication:
        return
    if settings.replication_factor < 2:
        raise Refusal("--replication-factor 1 keeps no second copy: use --replication-factor 2")
    if world_size < settings.replication_factor:
        config.notes.append(
            f"no effect here: --replication ({settings.replication_factor} nodes need as many ranks, and here are "
            f"{world_size})"
        )
        settings.replication = False
