# SPDX-License-Identifier: Apache-2.0
"""What the closed forms are asked of a run: its workload, and how it is trained."""

from __future__ import annotations

from dataclasses import replace

from megatron.formulas.strategy import Strategy, Workload
from megatron.training.arguments.config import Config
from megatron.training.arguments.models import model_shape
from megatron.training.arguments.stages import stage_layers


def workload_of(config: Config, vocab_size: int) -> Workload:
    """Of a completed configuration. Every pipeline stage has as many layers as the longest one."""
    parallel = config.parallel
    layers = max(stage_layers(config)) * parallel.pipeline_model_parallel_size
    return Workload(
        replace(model_shape(config.model, vocab_size), layers=layers),
        config.data.seq_length,
        config.data.global_batch_size,
        causal=config.attention.attention_mask in ("causal", None) and parallel.context_parallel_balance != "documents",
    )


def strategy_of(config: Config) -> Strategy:
    """Of a completed configuration, as if on one data-parallel replica: how many there are, the processes say."""
    parallel, attention, chunks = config.parallel, config.attention, config.chunks
    return Strategy(
        tensor=parallel.tensor_model_parallel_size,
        ulysses=parallel.ulysses_parallel_size,
        ring=parallel.ring_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        micro_batch=config.data.micro_batch_size,
        zero=parallel.zero_stage,
        recompute=attention.recompute_granularity or "none",
        recompute_layers=attention.recompute_num_layers or 1,
        recompute_method=attention.recompute_method or "uniform",
        offload_checkpoints=chunks.offload_checkpoints,
        fpdt_chunk=chunks.fpdt_chunk_size if chunks.fpdt else 0,
        fpdt_offload=chunks.fpdt_offload,
        stream_hidden=chunks.fpdt_stream_hidden,
        ffn_chunks=chunks.ffn_chunks or 0,
        loss_chunks=chunks.loss_chunks or 0,
        balance="contiguous" if parallel.context_parallel_balance == "contiguous" else "zigzag",
        virtual=parallel.num_virtual_stages_per_pipeline_rank or 1,
        sequence_parallel=parallel.sequence_parallel,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )
