# SPDX-License-Identifier: Apache-2.0
"""The layers of each pipeline stage, and a configuration as workload and strategy of the closed forms."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from megatron.formulas.strategy import Strategy, Workload
from megatron.training.arguments.config import Config
from megatron.training.arguments.models import model_shape
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal


def stage_layers(config: Config) -> list[int]:
    """Number of transformer layers of each pipeline rank."""
    layers, parallel = slots(config), config.parallel
    layers[0] -= parallel.account_for_embedding_in_pipeline_split
    layers[-1] -= parallel.account_for_loss_in_pipeline_split
    return layers


def chunk_layers(config: Config) -> list[int]:
    """Number of transformer layers of each virtual stage of each rank, once the number of virtual stages is known."""
    parallel, virtual = config.parallel, config.parallel.num_virtual_stages_per_pipeline_rank or 1
    counts = [layers // virtual for layers in slots(config) for _ in range(virtual)]
    counts[0] -= parallel.account_for_embedding_in_pipeline_split
    counts[-1] -= parallel.account_for_loss_in_pipeline_split
    return counts


def slots(config: Config) -> list[int]:
    """Number of layers of each pipeline rank; with --account-for-... flags, embedding and loss count as layers.

    Raises:
        Refusal: the layers cannot be split as the flags say.
    """
    parallel, layers = config.parallel, config.model.num_layers
    stages = parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    counted = _counted(config)
    if first is None and last is None:
        layers += len(counted)
        if layers % stages:
            near = [layers // stages * stages - len(counted), (layers // stages + 1) * stages - len(counted)]
            more = f", with {' and '.join(counted)}," if counted else ""
            raise Refusal(
                f"--num-layers {config.model.num_layers}{more}",
                f"is not a multiple of --pipeline-model-parallel-size {stages}: use "
                f"{' or '.join(str(n) for n in near if n > 0)}",
            )
        return [layers // stages] * stages
    given = {"--decoder-first-pipeline-num-layers": first, "--decoder-last-pipeline-num-layers": last}
    words = " and ".join(f"{flag} {count}" for flag, count in given.items() if count is not None)
    if counted:
        raise Refusal(f"{words} and {' and '.join(counted)}", "both set the number of layers of stages: leave one out")
    if stages == 1:
        raise Refusal(words, f"needs --pipeline-model-parallel-size above 1: raise it, or leave {words} out", LEAVE_OUT)
    remaining, others = layers - (first or 0) - (last or 0), stages - (first is not None) - (last is not None)
    if (
        min(count for count in given.values() if count is not None) < 1
        or remaining < others
        or (others and remaining % others)
    ):
        raise Refusal(
            words,
            f"of --num-layers {layers} leave {remaining} layers for the other {others} of "
            f"--pipeline-model-parallel-size {stages} stages: leave each the same number, at least one",
        )
    if not others and remaining:
        raise Refusal(words, f"do not add up to --num-layers {layers}: change them")
    middle = remaining // others if others else 0
    counts = [middle] * stages
    counts[0] = middle if first is None else first
    counts[-1] = middle if last is None else last
    return counts


def complete_virtual_stages(config: Config) -> None:
    """Complete the number of virtual stages from either of its two flags.

    Raises:
        Refusal: the layers cannot be split into these stages.
    """
    parallel, each = config.parallel, slots(config)
    depth, virtual = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
    uneven = len(set(each)) > 1
    if depth and uneven:
        raise Refusal(
            f"--num-layers-per-virtual-pipeline-stage {depth}",
            f"needs stages of equal length, not of {', '.join(map(str, each))} layers: give "
            "--num-virtual-stages-per-pipeline-rank",
        )
    layers = gcd(*each)
    if depth and (layers % depth or virtual not in (None, layers // depth)):
        raise Refusal(
            f"--num-layers-per-virtual-pipeline-stage {depth}",
            f"does not divide the {layers} layers of a stage, or contradicts "
            "--num-virtual-stages-per-pipeline-rank: give one of the two flags, with a divisor of {layers}",
        )
    virtual = layers // depth if depth else virtual or 1
    if layers % virtual:
        raise Refusal(
            f"--num-virtual-stages-per-pipeline-rank {virtual}",
            f"does not divide the {' or '.join(map(str, sorted(set(each))))} layers of a pipeline stage: use "
            f"{gcd(layers, virtual)}",
        )
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if virtual > 1 and len(each) == 2 and None not in (first, last):  # core would divide by 0 middle stages
        raise Refusal(
            "virtual pipeline stages with --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers "
            "need a stage between the first and the last: leave out one of the two flags",
            about="--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers",
        )
    virtual_flags = "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank"
    if virtual > 1 and len(each) == 1:
        raise Refusal(
            "virtual pipeline stages",
            "need --pipeline-model-parallel-size above 1: raise it, or leave them out",
            Fix(drop=virtual_flags),
            about=f"--pipeline-model-parallel-size {virtual_flags}",
        )
    if min(stage_layers(config)) < 0 or (_counted(config) and min(each) // virtual < 1):
        raise Refusal(
            " and ".join(_counted(config)),
            ": the first or the last stage has too few layers for them: use fewer stages",
        )
    parallel.num_virtual_stages_per_pipeline_rank = virtual if virtual > 1 else None
    parallel.num_layers_per_virtual_pipeline_stage = layers // virtual if virtual > 1 and not uneven else None


def _counted(config: Config) -> list[str]:
    parallel = config.parallel
    given = {
        "--account-for-embedding-in-pipeline-split": parallel.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": parallel.account_for_loss_in_pipeline_split,
    }
    return [flag for flag, on in given.items() if on]


def workload_of(config: Config, vocab_size: int) -> Workload:
    """The workload of a completed configuration; every pipeline stage counts as many layers as the longest."""
    parallel = config.parallel
    layers = max(stage_layers(config)) * parallel.pipeline_model_parallel_size
    return Workload(
        replace(model_shape(config.model, vocab_size), layers=layers),
        config.data.seq_length,
        config.data.global_batch_size,
        causal=config.attention.attention_mask in ("causal", None) and parallel.context_parallel_balance != "documents",
    )


def strategy_of(config: Config) -> Strategy:
    """The strategy of a completed configuration, for one data-parallel replica."""
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
