# SPDX-License-Identifier: Apache-2.0
"""Checks of chunks and host memory, and the numbers of chunks that follow from the flags."""

from __future__ import annotations

from megatron.formulas import chunks as counts
from megatron.training.arguments.config import ChunkConfig, Config
from megatron.training.refusal import Refusal


def check_chunks(config: Config) -> None:
    """Settle FPDT, chunked MLP and offloading."""
    chunks, attention, model = config.chunks, config.attention, config.model
    if chunks.fpdt:
        _fpdt(config)
    else:
        unused = {
            "--fpdt-chunk-size": chunks.fpdt_chunk_size != ChunkConfig.fpdt_chunk_size,
            "--no-fpdt-offload": not chunks.fpdt_offload,
            "--fpdt-stream-hidden": chunks.fpdt_stream_hidden,
        }
        for flag in (flag for flag, given in unused.items() if given):
            raise Refusal(f"{flag} does nothing without --fpdt: add --fpdt, or leave it out")
    if (chunks.fpdt or chunks.ffn_chunks) and model.fp8_format:
        flag = "--fpdt" if chunks.fpdt else "--ffn-chunks"
        raise Refusal(f"{flag} with --fp8-format is not supported: chunks would scale one by one; leave one out")
    if not chunks.offload_checkpoints:
        return
    if chunks.fpdt_stream_hidden:
        raise Refusal("--fpdt-stream-hidden keeps layer inputs in host memory already: leave --offload-checkpoints out")
    if attention.recompute_granularity != "full" and not chunks.fpdt:
        raise Refusal(
            "--offload-checkpoints moves the inputs of recomputed layers: add --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1 (or --fpdt), or leave it out"
        )
    if attention.recompute_method == "block" and not chunks.fpdt:
        raise Refusal(
            "--offload-checkpoints with --recompute-method block would move what the other layers keep as well: "
            "use --recompute-method uniform, where --recompute-num-layers K checkpoints every K-th layer"
        )


def _fpdt(config: Config) -> None:
    chunks, parallel = config.chunks, config.parallel
    size, length = chunks.fpdt_chunk_size, config.data.seq_length
    if size > length:
        raise Refusal(
            f"--fpdt-chunk-size {size} is more than --seq-length {length}: use at most {length}, which is one chunk"
        )
    if rows_of_a_chunk(config) < 1:
        least = parallel.ring_parallel_size * _unit(config)
        raise Refusal(
            f"--fpdt-chunk-size {size} is less than a token for each rank of Ulysses "
            f"{parallel.ulysses_parallel_size} x Ring {parallel.ring_parallel_size}"
            f"{f' x TP {parallel.tensor_model_parallel_size}' if parallel.sequence_parallel else ''}: "
            f"use at least {least}"
        )
    if config.attention.recompute_granularity == "selective":
        raise Refusal(
            "--recompute-granularity selective has nothing to save under --fpdt, which keeps chunks of q, k, v, out "
            "and lse alone: leave it out, or use --recompute-granularity full"
        )
    if chunks.fpdt_stream_hidden and not chunks.fpdt_offload:
        raise Refusal("--fpdt-stream-hidden and --no-fpdt-offload exclude each other: leave one out")
    if chunks.fpdt_stream_hidden and parallel.pipeline_model_parallel_size > 1:
        raise Refusal(
            "--fpdt-stream-hidden with --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size} is not supported: stages pass whole hidden states; use "
            "--pipeline-model-parallel-size 1, or --offload-checkpoints in its place"
        )
    if chunks.ffn_chunks is None:
        chunks.ffn_chunks = counts.ffn_chunks(attention_chunks(config))


def _unit(config: Config) -> int:
    """A ring rank's chunk is a multiple of this."""
    parallel = config.parallel
    return counts.chunk_unit(
        parallel.ulysses_parallel_size, parallel.tensor_model_parallel_size, parallel.sequence_parallel
    )


def _rows(config: Config) -> int:
    """Tokens of a rank, between the layers."""
    return config.data.seq_length // config.parallel.ring_parallel_size // _unit(config)


def rows_of_a_chunk(config: Config) -> int:
    """Longest chunk of a ring rank, in units of one token a rank."""
    return counts.chunk_rows(config.chunks.fpdt_chunk_size, config.parallel.ring_parallel_size, _unit(config))


def attention_chunks(config: Config) -> int:
    """Chunks that FPDT cuts the sequence in (1 without FPDT), of a completed configuration."""
    return counts.attention_chunks(_rows(config), rows_of_a_chunk(config)) if config.chunks.fpdt else 1


def loss_chunks(config: Config, vocab_size: int) -> int | None:
    """Chunks of the loss: as the flags say, or as FPDT derives them; None: the loss is whole."""
    model, chunks = config.model, config.chunks
    if chunks.loss_chunks or not chunks.fpdt:
        return chunks.loss_chunks
    widths = {"hidden": model.hidden_size, "ffn_hidden": model.ffn_hidden_size, "vocab": vocab_size}
    return counts.loss_chunks(_rows(config), chunks.ffn_chunks, **widths)


def layers_recompute(config: Config) -> bool:
    """Whether layers recompute one by one inside FPDT, and not in units of megatron-core's."""
    attention = config.attention
    if not config.chunks.fpdt or attention.recompute_granularity != "full":
        return False
    return attention.recompute_method == "block" or attention.recompute_num_layers == 1
