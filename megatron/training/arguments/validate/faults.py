# SPDX-License-Identifier: Apache-2.0
"""Checks of bad batches, replicas and stragglers."""

from __future__ import annotations

from megatron.training.arguments.config import Config
from megatron.training.refusal import Refusal


def check_faults(config: Config, world_size: int) -> None:
    """Refuse what contradicts itself; note what has nothing to look at."""
    faults, parallel = config.faults, config.parallel
    if faults.spike_factor <= 1:
        raise Refusal(f"--spike-factor {faults.spike_factor:g} makes every second step a spike: use more than 1")
    if faults.skip_bad_batches and config.optimizer.fp16:
        raise Refusal("--skip-bad-batches and --fp16: its loss scale leaves such steps out already; leave one out")
    if faults.skip_bad_batches and not config.optimizer.check_for_nan_in_loss_and_grad:
        raise Refusal("--skip-bad-batches and --no-check-for-nan-in-loss-and-grad contradict each other: leave one out")
    if faults.rollback_on_bad_batch:
        needs = (
            ("--skip-bad-batches", faults.skip_bad_batches),
            ("--save-interval", config.checkpoint.save_interval),
        )
        for flag, value in needs:
            if not value:
                raise Refusal(f"--rollback-on-bad-batch does nothing without {flag}: add {flag}, or leave it out")
        if not config.checkpoint.save_optim:
            raise Refusal("--rollback-on-bad-batch needs the optimizer in the checkpoint: leave --no-save-optim out")
    copies = parallel.tensor_model_parallel_size
    if parallel.zero_stage < 2:
        copies = world_size // parallel.pipeline_model_parallel_size
    if faults.check_weight_hash_across_dp_replicas_interval and copies == 1:
        config.notes.append(
            "no effect here: --check-weight-hash-across-dp-replicas-interval (no two ranks hold the same weights)"
        )
    if faults.log_straggler and world_size == 1:
        config.notes.append("no effect here: --log-straggler (there is one rank)")
