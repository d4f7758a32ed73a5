# SPDX-License-Identifier: Apache-2.0
"""The flags of --dry-run, which are completed before the others are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

from megatron.training.arguments.data_paths import FILES, PATHS, WEIGHTED
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal
from megatron.training.settings.config import Config


def complete_dry_run(config: Config, started: int) -> Config:
    """Fill in the data, the duration and the learning rate of a dry run, which needs none of them.

    Args:
        started: number of processes that were started. A --world-size that a training run is given must equal it.

    Raises:
        Refusal: --gpu is given without it, or the imbalance of experts cannot be.
    """
    simulation = config.simulation
    if not simulation.dry_run:
        if simulation.world_size not in (None, started):
            number_started = "1 process was" if started == 1 else f"{started} processes were"
            raise Refusal(
                f"--world-size {simulation.world_size}",
                f", and {number_started} started: start that many, or add --dry-run, which simulates them",
                Fix("--dry-run"),
            )
        if simulation.gpu and not config.parallel.elastic:
            raise Refusal(
                "--gpu",
                "does nothing without --dry-run: add --dry-run, or --elastic, which takes the planner's grid, or leave "
                "it out",
                Fix("--dry-run"),
                LEAVE_OUT,
            )
        return config
    _check_imbalance(config)
    config = deepcopy(config)
    data, run = config.data, config.run
    if not any(getattr(data, name) for name in (*PATHS, *FILES, *WEIGHTED)):
        data.mock_data = True
    if run.train_iters is None and run.train_samples is None and run.train_tokens is None:
        run.train_iters = 1
    if config.optimizer.lr is None:
        config.optimizer.lr = max(1e-4, config.optimizer.min_lr)
    if data.micro_batch_size is None:
        data.micro_batch_size = 1
    run.skip_train = False
    return config


def _check_imbalance(config: Config) -> None:
    """Refuse an imbalance of experts that has no effect, or that would send tokens to an expert twice."""
    model, imbalance = config.model, config.simulation.dry_run_expert_imbalance
    if imbalance == 1:
        return
    flag = f"--dry-run-expert-imbalance {imbalance:g}"
    if (model.num_experts or 1) == 1 or config.parallel.expert_model_parallel_size == 1:
        raise Refusal(
            flag,
            "needs ranks with different experts: add --num-experts and --expert-model-parallel-size, or leave it out",
            LEAVE_OUT,
        )
    most = min(config.parallel.expert_model_parallel_size, model.num_experts / model.moe_router_topk)
    if not 1 <= imbalance <= most:
        raise Refusal(flag, f": give a factor from 1 to {most:g}, with which all tokens would go to these experts")


def processes(config: Config, started: int) -> int:
    """Number of processes: --world-size for a dry run, else as many as were ``started``."""
    simulation = config.simulation
    return simulation.world_size or started if simulation.dry_run else started


def notes_on_formulas(config: Config) -> list[str]:
    """Notes on what a dry run computes by formulas, or leaves out."""
    model, notes = config.model, []
    if model.fp8_format:
        notes.append(
            f"--fp8-format {model.fp8_format} is not run: megatron-core's layers stand for Transformer Engine's, "
            "and formulas give the cost of FP8 copies (of weights, inputs and gradients), casts and matrix products"
        )
    elif model.transformer_impl == "transformer_engine":
        notes.append("--transformer-impl transformer_engine: megatron-core's layers stand for Transformer Engine's")
    if model.attention_dropout and config.simulation.gpu:
        notes.append(
            f"--attention-dropout {model.attention_dropout:g}: on a GPU Triton's kernel computes it; the time "
            "of its random numbers is not counted; with --attention-dropout 0 flash attention runs "
            "(docs/inside/grid-invariance.md)"
        )
    return notes


def idle_in_dry_run(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether this process has nothing to do, because rank 0 simulates all ranks of a dry run."""
    return "--dry-run" in argv and environment.get("RANK", "0") != "0"
