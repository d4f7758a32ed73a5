# SPDX-License-Identifier: Apache-2.0
"""Checks of what saves memory, recompute and ZeRO, and of the step whose memory is recorded."""

from __future__ import annotations

from math import gcd

from megatron.training.arguments.config import Config
from megatron.training.arguments.stages import chunk_layers
from megatron.training.refusal import Refusal


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
        if method == "uniform" and any(count % layers for count in stages):
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
