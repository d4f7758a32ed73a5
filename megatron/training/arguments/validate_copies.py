# SPDX-License-Identifier: Apache-2.0
"""The part of `validate.py` about copies of the training state in the memory of the hosts."""

from __future__ import annotations

import os

from megatron.training.arguments.config import Config
from megatron.training.refusal import Refusal

ON = "--non-persistent-save-interval"


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
