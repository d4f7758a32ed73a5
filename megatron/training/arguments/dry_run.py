# SPDX-License-Identifier: Apache-2.0
"""The flags of --dry-run, before the rest is checked."""

from __future__ import annotations

from copy import deepcopy

from megatron.training.arguments.config import Config
from megatron.training.refusal import Refusal


def settle(config: Config) -> Config:
    """A dry run needs no data, no duration and no learning rate: what was left open is filled in.

    Raises:
        Refusal: a flag that only a dry run reads is there without it, or the other way round.
    """
    simulation = config.simulation
    if not simulation.dry_run:
        given = {
            "--dry-run-json": simulation.dry_run_json,
            "--world-size": simulation.world_size,
            "--gpu": simulation.gpu,
            "--dry-run-every-layer": simulation.dry_run_every_layer,
        }
        for flag in (flag for flag, value in given.items() if value):
            raise Refusal(f"{flag} does nothing without --dry-run: add --dry-run, or leave it out")
        return config
    if simulation.world_size is not None and simulation.world_size < 1:
        raise Refusal(f"--world-size {simulation.world_size}: give the number of simulated processes, at least 1")
    config = deepcopy(config)
    data, run = config.data, config.run
    if not any((data.data_path, data.train_data_path, data.mock_data)):
        data.mock_data = True
    if run.train_iters is None and run.train_samples is None and run.train_tokens is None:
        run.train_iters = 1
    if config.optimizer.lr is None:
        config.optimizer.lr = max(1e-4, config.optimizer.min_lr)
    if data.micro_batch_size is None:
        data.micro_batch_size = 1
    run.skip_train = False
    return config


def processes(config: Config, started: int) -> int:
    """Processes of the run: those of the simulated one, or those that were ``started``."""
    simulation = config.simulation
    return simulation.world_size or 1 if simulation.dry_run else started
