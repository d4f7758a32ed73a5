# SPDX-License-Identifier: Apache-2.0
"""Checks of settings that save memory (chunks, host memory, recompute, ZeRO), and the numbers of chunks."""

from __future__ import annotations

from math import gcd

from megatron.formulas import sizes as counts
from megatron.training.arguments.stages import chunk_layers
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal, needs_flag
from megatron.training.settings.config import Config

NO_HISTORY = "--record-memory-history: no effect on a CPU; --profile-memory shows its memory"


def complete_chunks(config: Config) -> None:
    """Complete FPDT, the chunked MLP and offloading."""
    chunks, attention, model = config.chunks, config.attention, config.model
    if chunks.fpdt:
        _fpdt(config)
    if (chunks.fpdt or chunks.ffn_chunks) and model.fp8_format:
        flag = "--fpdt" if chunks.fpdt else "--ffn-chunks"
        raise Refusal(
            f"{flag} with --fp8-format", "is not supported: each chunk would have its own scale; leave one out"
        )
    if not chunks.offload_checkpoints:
        return
    if chunks.fpdt_stream_hidden:
        raise Refusal(
            "--fpdt-stream-hidden",
            "keeps layer inputs in host memory already: leave --offload-checkpoints out",
            Fix(drop="--offload-checkpoints"),
        )
    if attention.recompute_granularity != "full" and not chunks.fpdt:
        raise Refusal(
            "--offload-checkpoints",
            "moves the inputs of recomputed layers: add --recompute-granularity full --recompute-method "
            "uniform --recompute-num-layers 1 (or --fpdt), or leave it out",
            Fix("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
            LEAVE_OUT,
        )
    if attention.recompute_method == "block" and not chunks.fpdt:
        raise Refusal(
            "--offload-checkpoints with --recompute-method block",
            "would also move what layers without recompute keep: use --recompute-method uniform, where "
            "--recompute-num-layers K checkpoints every K-th layer",
            Fix("--recompute-method uniform"),
        )


def _fpdt(config: Config) -> None:
    chunks, parallel = config.chunks, config.parallel
    size, length = chunks.fpdt_chunk_size, config.data.seq_length
    if size > length:
        raise Refusal(
            f"--fpdt-chunk-size {size}",
            f"is more than --seq-length {length}: use at most {length}, which is one chunk",
            Fix(f"--fpdt-chunk-size {length}"),
        )
    if rows_of_a_chunk(config) < 1:
        least = parallel.ring_parallel_size * _unit(config)
        raise Refusal(
            f"--fpdt-chunk-size {size}",
            f"is less than a token for each rank of Ulysses {parallel.ulysses_parallel_size} x Ring "
            f"{parallel.ring_parallel_size}"
            f"{f' x TP {parallel.tensor_model_parallel_size}' if parallel.sequence_parallel else ''}: "
            f"use at least {least}",
            Fix(f"--fpdt-chunk-size {least}"),
        )
    if config.attention.recompute_granularity == "selective":
        raise Refusal(
            "--recompute-granularity selective",
            "saves no memory with --fpdt, which keeps only chunks of q, k, v, out and lse: leave it out, "
            "or use --recompute-granularity full",
            LEAVE_OUT,
            Fix("--recompute-granularity full"),
        )
    if chunks.fpdt_stream_hidden and not chunks.fpdt_offload:
        raise Refusal("--fpdt-stream-hidden and --no-fpdt-offload", "exclude each other: leave one out")
    if chunks.fpdt_stream_hidden and parallel.pipeline_model_parallel_size > 1:
        raise Refusal(
            f"--fpdt-stream-hidden with --pipeline-model-parallel-size {parallel.pipeline_model_parallel_size}",
            "is not supported: stages pass complete hidden states; use --pipeline-model-parallel-size 1, or "
            "--offload-checkpoints instead",
        )
    if chunks.ffn_chunks is None:
        chunks.ffn_chunks = counts.ffn_chunks(attention_chunks(config))


def _unit(config: Config) -> int:
    """Number of tokens of which a ring rank's chunk is a multiple."""
    parallel = config.parallel
    return counts.chunk_unit(
        parallel.ulysses_parallel_size, parallel.tensor_model_parallel_size, parallel.sequence_parallel
    )


def _rows(config: Config) -> int:
    """Number of tokens that each rank holds between the layers."""
    return config.data.seq_length // config.parallel.ring_parallel_size // _unit(config)


def rows_of_a_chunk(config: Config) -> int:
    """Longest chunk of a ring rank, in units of one token per rank."""
    return counts.chunk_rows(config.chunks.fpdt_chunk_size, config.parallel.ring_parallel_size, _unit(config))


def attention_chunks(config: Config) -> int:
    """Number of chunks that FPDT cuts the sequence into (1 without FPDT), of a completed configuration."""
    return counts.attention_chunks(_rows(config), rows_of_a_chunk(config)) if config.chunks.fpdt else 1


def loss_chunks(config: Config, vocab_size: int) -> int | None:
    """Number of chunks of the loss, given or derived by FPDT; None: the loss is not cut."""
    model, chunks = config.model, config.chunks
    if chunks.loss_chunks or not chunks.fpdt:
        return chunks.loss_chunks
    widths = {"hidden": model.hidden_size, "ffn_hidden": model.ffn_hidden_size, "vocab": vocab_size}
    return counts.loss_chunks(_rows(config), chunks.ffn_chunks, **widths)


def layers_recompute(config: Config) -> bool:
    """Whether each FPDT layer recomputes itself. Otherwise megatron-core recomputes units of layers, if any."""
    attention = config.attention
    if not config.chunks.fpdt or attention.recompute_granularity != "full":
        return False
    return attention.recompute_method == "block" or attention.recompute_num_layers == 1


def complete_recompute(config: Config) -> None:
    """Complete the settings of recompute."""
    attention = config.attention
    if attention.recompute_activations:
        if attention.recompute_granularity == "full":
            raise Refusal(
                "--recompute-activations",
                "means --recompute-granularity selective, not full: leave one out",
                about="--recompute-granularity",
            )
        attention.recompute_granularity = "selective"
    method, layers = attention.recompute_method, attention.recompute_num_layers
    if attention.recompute_granularity == "full":
        if method == "uniform" and layers is None:
            layers = attention.recompute_num_layers = 1  # as in Megatron-DeepSpeed
            config.notes.append("--recompute-method uniform without --recompute-num-layers: units of one layer")
        if method is None or layers is None:
            raise Refusal(
                "--recompute-granularity full",
                "needs --recompute-method and --recompute-num-layers: for the least memory add "
                "--recompute-method uniform --recompute-num-layers 1",
                Fix("--recompute-method uniform --recompute-num-layers 1"),
            )
        stages = [count for count in chunk_layers(config) if count]
        if layers > max(stages):
            raise Refusal(
                f"--recompute-num-layers {layers}",
                f"is more than the {max(stages)} layers of a stage: use at most {max(stages)}",
                Fix(f"--recompute-num-layers {max(stages)}"),
            )
        if method == "uniform" and any(count % layers for count in stages):
            raise Refusal(  # megatron-core's last unit would reach beyond the stage
                "--recompute-method uniform",
                f"in units of --recompute-num-layers {layers} does not cut stages of "
                f"{' and '.join(map(str, sorted(set(stages))))} layers: use {gcd(gcd(*stages), layers)}",
            )
    elif method is not None or layers is not None:
        if attention.recompute_granularity is not None:
            raise Refusal(
                "--recompute-method and --recompute-num-layers",
                "need --recompute-granularity full: add it",
                Fix("--recompute-granularity full"),
            )
        config.notes.append("no effect without --recompute-granularity: --recompute-method and --recompute-num-layers")
        attention.recompute_method = attention.recompute_num_layers = None
    if attention.keep_attention:
        _keeps_attention(config)
    recomputes = attention.recompute_granularity == "full" and not layers_recompute(config)
    if config.model.moe_enable_routing_replay and not (config.model.num_experts and recomputes):
        config.notes.append(
            "no effect here: --moe-enable-routing-replay (read only with --num-experts and --recompute-granularity "
            "full, without --fpdt)"
        )
        config.model.moe_enable_routing_replay = False


def _keeps_attention(config: Config) -> None:
    attention = config.attention
    if attention.recompute_granularity != "full":
        raise needs_flag("--keep-attention", "--recompute-granularity full", switch=True)
    if config.chunks.fpdt:
        raise Refusal("--keep-attention", "is what --fpdt does without it: leave it out", LEAVE_OUT)
    if attention.recompute_method == "uniform" and attention.recompute_num_layers > 1:
        raise Refusal(
            f"--keep-attention with --recompute-num-layers {attention.recompute_num_layers}",
            "would keep more for each layer than the layer's input: use --recompute-num-layers 1",
            Fix("--recompute-num-layers 1"),
        )


def complete_zero(config: Config) -> None:
    """Complete the settings of ZeRO."""
    parallel, optimizer = config.parallel, config.optimizer
    if parallel.zero_stage is None:
        parallel.zero_stage = int(parallel.use_distributed_optimizer)
    stage = parallel.zero_stage
    if stage != 1 and parallel.use_distributed_optimizer:
        raise Refusal("--use-distributed-optimizer", f"is --zero-stage 1, not {stage}: leave one out")
    if stage > 1:
        _fsdp(config)
    parallel.use_distributed_optimizer = stage == 1
    if stage == 1 and optimizer.optimizer == "sgd":
        raise Refusal(
            "--optimizer sgd", "has no state to split over --zero-stage 1: use --zero-stage 0", Fix("--zero-stage 0")
        )
    if parallel.overlap_param_gather and not (stage == 1 and parallel.overlap_grad_reduce):
        raise Refusal(
            "--overlap-param-gather",
            "needs --zero-stage 1 (or --use-distributed-optimizer) and --overlap-grad-reduce: add them, or "
            "leave it out",
            LEAVE_OUT,
        )


def _fsdp(config: Config) -> None:
    """Refuse what ZeRO 2 and 3, which are PyTorch's FSDP2, cannot run with."""
    parallel = config.parallel
    zero = f"--zero-stage {parallel.zero_stage}"
    if parallel.pipeline_model_parallel_size > 1:
        raise Refusal(
            f"{zero} with --pipeline-model-parallel-size {parallel.pipeline_model_parallel_size}",
            "is not supported: use --zero-stage 1, or --pipeline-model-parallel-size 1",
            Fix("--zero-stage 1"),
        )
    if config.model.fp8_format:
        raise Refusal(f"{zero} with --fp8-format", "is not supported: use --bf16 alone, or --zero-stage 1")
    hints = {
        "--overlap-grad-reduce": parallel.overlap_grad_reduce,
        "--overlap-param-gather": parallel.overlap_param_gather,
        "--ddp-bucket-size": parallel.ddp_bucket_size,
    }
    given = [flag for flag, value in hints.items() if value]
    if given:
        config.notes.append(f"{', '.join(given)}: no effect with {zero}, where FSDP overlaps messages layer by layer")
    parallel.overlap_grad_reduce = parallel.overlap_param_gather = False


def _traces(config: Config, world_size: int) -> None:
    """Check --profile and --record-memory-history. Without them, other flags get a note: see their fields."""
    logging, on_cpu = config.logging, config.run.device == "cpu"
    if not (logging.profile or logging.record_memory_history):
        return
    if logging.profile_step_end <= logging.profile_step_start:
        raise Refusal(
            f"--profile-step-end {logging.profile_step_end}",
            f"is not after --profile-step-start {logging.profile_step_start}: use {logging.profile_step_start + 2}",
        )
    if beyond := [str(rank) for rank in logging.profile_ranks if rank >= world_size]:
        ranks = f"the last rank is {world_size - 1}"
        config.notes.append(f"no effect here: --profile-ranks {' '.join(beyond)} ({ranks})")
    if logging.use_pytorch_profiler and logging.tensorboard_dir is None:
        raise Refusal("--use-pytorch-profiler", "writes its traces to --tensorboard-dir: add --tensorboard-dir DIR")
    if logging.record_memory_history and on_cpu:
        config.notes.append(NO_HISTORY)
    if logging.profile and not logging.use_pytorch_profiler and on_cpu:
        config.notes.append("--profile without --use-pytorch-profiler: no effect on a CPU, which nsys does not record")


def complete_profile(config: Config, world_size: int) -> None:
    """Complete --profile-memory-step, the step that --profile-memory records."""
    logging = config.logging
    _traces(config, world_size)
    if logging.profile_memory is None:
        return
    if config.run.skip_train:
        raise Refusal("--profile-memory", "records a training step, and --skip-train has none: leave one out")
    if logging.profile_memory_step is None:
        logging.profile_memory_step = 2
