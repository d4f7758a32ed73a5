# SPDX-License-Identifier: Apache-2.0
"""The layers of each pipeline stage, and a configuration as workload and strategy of the closed forms."""

from __future__ import annotations

import re
from dataclasses import replace
from math import gcd

from megatron.formulas.strategy import Strategy, Workload
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal
from megatron.training.settings.config import Config
from megatron.training.settings.models import model_shape

LONGEST = 100_000  # letters that the repetitions in a layout may stand for


def stage_layers(config: Config) -> list[int]:
    """Number of transformer layers of each pipeline rank."""
    counts, virtual = chunk_layers(config), config.parallel.num_virtual_stages_per_pipeline_rank or 1
    return [sum(counts[first : first + virtual]) for first in range(0, len(counts), virtual)]


def chunk_layers(config: Config) -> list[int]:
    """Number of transformer layers of each virtual stage of each rank, once the number of virtual stages is known."""
    parallel, virtual = config.parallel, config.parallel.num_virtual_stages_per_pipeline_rank or 1
    if parallel.pipeline_model_parallel_layout:
        stages = _stages_of(parallel.pipeline_model_parallel_layout)
        ranks = len(stages) // virtual
        return [stage.count("t") for rank in range(ranks) for stage in stages[rank::ranks]]
    counts = [layers // virtual for layers in slots(config) for _ in range(virtual)]
    counts[0] -= parallel.account_for_embedding_in_pipeline_split
    counts[-1] -= parallel.account_for_loss_in_pipeline_split
    return counts


def stage_span(config: Config, rank: int, virtual: int = 0) -> tuple[int, int]:
    """The layers of the model, from the first to before the second, on virtual stage ``virtual`` of a pipeline rank."""
    counts, ranks = chunk_layers(config), config.parallel.pipeline_model_parallel_size
    each = len(counts) // ranks
    before = sum(
        counts[other * each + stage]
        for stage in range(virtual + 1)
        for other in range(ranks if stage < virtual else rank)
    )
    return before, before + counts[rank * each + virtual]


def _stages_of(layout: str) -> list[str]:
    """The stages of --pipeline-model-parallel-layout in the order in which a token passes them, as Megatron-LM writes
    them: ``"Et*2|(tt|)*2m|L"`` is ``["Ett", "tt", "tt", "m", "L"]``.

    Raises:
        ValueError: the repetitions stand for more than 100,000 letters.
    """
    letters = 0

    def repeated(found: re.Match) -> str:
        nonlocal letters
        letters += int(found[2]) * len(found[1])
        if letters > LONGEST:
            raise ValueError(found[0])
        return found[1] * int(found[2])

    text = layout.replace(",", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,9})", r"(.)\*(\d{1,9})"):
        text = re.sub(pattern, repeated, text)
    return text.split("|")


def _virtual_stages_of_layout(config: Config) -> int:
    """Check --pipeline-model-parallel-layout; returns its number of virtual stages."""
    parallel, model = config.parallel, config.model
    layout, size = parallel.pipeline_model_parallel_layout, parallel.pipeline_model_parallel_size
    name = f"--pipeline-model-parallel-layout {layout}"
    others = (
        "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
        "num_layers_per_virtual_pipeline_stage",
    )  # fmt: skip
    if given := [f"--{field.replace('_', '-')}" for field in others if getattr(parallel, field)]:
        raise Refusal(f"{name} and {', '.join(given)}", "both set the number of layers of stages: leave one out")
    try:
        stages = _stages_of(layout)
    except ValueError as error:
        raise Refusal(name, f"stands for more than {LONGEST} letters with {error}: write fewer layers") from None
    whole, further = "".join(stages), model.mtp_num_layers or 0
    if set(whole) - set("EtmL"):
        raise Refusal(
            name, "has other letters than E (embedding), t (layer), m (prediction further), L (loss): write Ett|ttL"
        )
    wanted = "E" + "t" * model.num_layers + "m" * further + "L"
    if whole != wanted:
        counts = f"{model.num_layers} t" + (f", {further} m" if further else "")
        raise Refusal(name, f"must hold E, {counts} and L, in this order, as --num-layers says: change it")
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    if len(stages) % size or (virtual or len(stages) // size) != len(stages) // size:
        raise Refusal(
            name,
            f"has {len(stages)} stages, for --pipeline-model-parallel-size {size}"
            + (f" and --num-virtual-stages-per-pipeline-rank {virtual}" if virtual else "")
            + ": give each rank the same number",
        )
    if "m" in "".join(stages[:-1]):
        config.notes.append(f"{name}: the layers that predict further are on the last stage here, with the same result")
    return len(stages) // size


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
    parallel, depth = config.parallel, None
    if parallel.pipeline_model_parallel_layout:
        virtual = _virtual_stages_of_layout(config)
    else:
        virtual, depth = _virtual_stages_of_flags(config)
    virtual_flags = "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank"
    if virtual > 1 and parallel.pipeline_model_parallel_size == 1:
        raise Refusal(
            "virtual pipeline stages",
            "need --pipeline-model-parallel-size above 1: raise it, or leave them out",
            Fix(drop=virtual_flags),
            about=f"--pipeline-model-parallel-size {virtual_flags}",
        )
    parallel.num_virtual_stages_per_pipeline_rank = virtual if virtual > 1 else None
    parallel.num_layers_per_virtual_pipeline_stage = depth if virtual > 1 else None
    if _counted(config) and min(chunk_layers(config)) < 0:
        raise Refusal(
            " and ".join(_counted(config)),
            ": the first or the last stage has too few layers for them: use fewer stages",
        )


def _virtual_stages_of_flags(config: Config) -> tuple[int, int | None]:
    """(virtual stages of a rank, layers of each if all have the same number) from either of the two flags."""
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
            f"--num-virtual-stages-per-pipeline-rank: give one of the two flags, with a divisor of {layers}",
        )
    virtual = layers // depth if depth else virtual or 1
    if layers % virtual:
        raise Refusal(
            f"--num-virtual-stages-per-pipeline-rank {virtual}",
            f"does not divide the {' or '.join(map(str, sorted(set(each))))} layers of a pipeline stage: use "
            f"{gcd(layers, virtual)}",
        )
    return virtual, None if uneven else layers // virtual


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
        reference=config.pairs and config.data.dpo_reference == "copy" and not config.model.reward_model,
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
        keep_attention=attention.keep_attention,
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
        muon=config.optimizer.optimizer == "muon",
        key_exchange=parallel.key_exchange,
    )
