# SPDX-License-Identifier: Apache-2.0
"""The part of `validate.py` about chunks and host memory, and the numbers of chunks that follow from the flags."""

from __future__ import annotations

from math import ceil

from megatron.formulas.sizes import LOSS_ROWS
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
        chunks.ffn_chunks = 2 * attention_chunks(config)


def _unit(config: Config) -> int:
    """A ring rank's chunk is a multiple of this."""
    parallel = config.parallel
    return parallel.ulysses_parallel_size * (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)


def rows_of_a_chunk(config: Config) -> int:
    """Longest chunk of a ring rank, in units of one token a rank."""
    return config.chunks.fpdt_chunk_size // config.parallel.ring_parallel_size // _unit(config)


def attention_chunks(config: Config) -> int:
    """Chunks that FPDT cuts the sequence in (1 without FPDT), of a completed configuration."""
    if not config.chunks.fpdt:
        return 1
    units = config.data.seq_length // config.parallel.ring_parallel_size // _unit(config)
    return ceil(units / rows_of_a_chunk(config))


def loss_chunks(config: Config, vocab_size: int) -> int | None:
    """Chunks of the loss. FPDT's are the paper's 2 x vocabulary / hidden size, or more: so many that the logits of one
    are no larger than the inside of an MLP chunk, however long the sequence, but for chunks of a few tokens, which
    would spend their time on adding to the weight's gradient."""
    model, parallel, chunks = config.model, config.parallel, config.chunks
    if chunks.loss_chunks or not chunks.fpdt:
        return chunks.loss_chunks
    paper = 2 * ceil(vocab_size / model.hidden_size)
    as_mlp = chunks.ffn_chunks * ceil(vocab_size / model.ffn_hidden_size)
    rows = config.data.seq_length // parallel.ring_parallel_size // _unit(config)
    return max(paper, min(as_mlp, ceil(rows / LOSS_ROWS)))


def layers_recompute(config: Config) -> bool:
    """Whether layers recompute one by one inside FPDT, and not in units of megatron-core's."""
    attention = config.attention
    if not config.chunks.fpdt or attention.recompute_granularity != "full":
        return False
    return attention.recompute_method == "block" or attention.recompute_num_layers == 1
