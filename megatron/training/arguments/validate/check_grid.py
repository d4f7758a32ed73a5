# SPDX-License-Identifier: Apache-2.0
"""Checks of the grid: its sizes, the number of processes, and the heads, tokens and samples that it splits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import gcd

from megatron.decisions.division import length_unit, uneven_heads
from megatron.decisions.key_exchange import KEY_EXCHANGES, PASSED_ON
from megatron.training.arguments.schedule import batch_steps
from megatron.training.arguments.stages import stage_span
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal, near, refuse_combinations
from megatron.training.settings.config import Config
from megatron.training.settings.kinds import kinds_in


def complete_context(config: Config) -> None:
    """Complete Ulysses, Ring and their product, the context-parallel size, from those that were given."""
    parallel, model = config.parallel, config.model
    total, ulysses, ring = parallel.context_parallel_size, parallel.ulysses_parallel_size, parallel.ring_parallel_size
    if sizes := parallel.hierarchical_context_parallel_sizes:
        if len(sizes) != 2 or ulysses not in (None, sizes[0]) or ring not in (None, sizes[1]):
            raise Refusal(
                f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}",
                "must be two sizes, Ulysses then Ring, and agree with --ulysses-parallel-size and "
                "--ring-parallel-size: give only one spelling",
            )
        ulysses, ring = sizes
    given = (ulysses or 1) * (ring or 1)
    if total == 1 and given > 1:  # 1 is Megatron-LM's default, which many scripts give
        config.notes.append("--context-parallel-size 1 is ignored: the sizes of Ulysses and Ring set it")
        total = None
    if parallel.cp_comm_type:
        ulysses, ring = _by_comm_type(config, total, ulysses, ring)
        if parallel.key_exchange == PASSED_ON:
            parallel.cp_comm_type = None  # from here on only the sizes are read
        given = (ulysses or 1) * (ring or 1)
    if total is not None and (total % given or (ulysses and ring and total != given)):
        sizes = {"--ulysses-parallel-size": ulysses, "--ring-parallel-size": ring}
        product = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size)
        relation = "not" if ulysses and ring else "no multiple of"
        raise Refusal(f"--context-parallel-size {total}", f"is {relation} {product}: leave one out, or make them agree")
    if total is not None and ulysses is None and ring is None:
        ulysses = _choose_ulysses(total, config)
        if total > 1:
            config.notes.append(
                f"--context-parallel-size {total} is split into Ulysses {ulysses} x Ring {total // ulysses}, the "
                f"largest Ulysses that divides {model.num_attention_heads} query and {model.num_query_groups} "
                f"key/value heads over TP {parallel.tensor_model_parallel_size}; --ulysses-parallel-size overrides it"
            )
    if ulysses is None:
        ulysses = (total or ring or 1) // (ring or 1)
    if ring is None:
        ring = (total or ulysses) // ulysses
    parallel.ulysses_parallel_size, parallel.ring_parallel_size = ulysses, ring
    parallel.context_parallel_size = ulysses * ring


def _by_comm_type(config: Config, total: int | None, ulysses: int | None, ring: int | None) -> tuple:
    """The sizes of Ulysses and Ring by --cp-comm-type, which has no effect without --context-parallel-size."""
    kinds = set(config.parallel.cp_comm_type)
    words = f"--cp-comm-type {' '.join(config.parallel.cp_comm_type)}"
    *known, last = dict.fromkeys([PASSED_ON, "a2a", "a2a+p2p", *KEY_EXCHANGES])
    if unknown := kinds - {*known, last}:
        raise Refusal(words, f": {sorted(unknown)[0]} is unknown; use {', '.join(known)} or {last}")
    if len(kinds) > 1:
        raise Refusal(words, ": different types for different layers are not supported: give one type")
    (kind,) = kinds
    if config.parallel.key_exchange != PASSED_ON and (ring or total or 1) > 1:
        if config.chunks.fpdt and not KEY_EXCHANGES[kind].in_chunks:
            raise Refusal(
                f"{words} and --fpdt",
                f"cannot be combined, because FPDT sends keys chunk by chunk: use --cp-comm-type {PASSED_ON}",
                Fix(f"--cp-comm-type {PASSED_ON}"),
            )
        return (ulysses, ring) if ulysses or ring else (1, total)
    if total in (None, 1):
        config.notes.append(f"{words} has no effect without --context-parallel-size above 1")
        return ulysses, ring
    if kind == "a2a+p2p":
        if ulysses is None and ring is None:
            raise Refusal(words, "needs the sizes of both: add --hierarchical-context-parallel-sizes ULYSSES RING")
        return ulysses, ring
    wanted = (total, 1) if kind == "a2a" else (1, total)
    for flag, size, other in zip(("--ulysses-parallel-size", "--ring-parallel-size"), wanted, (ulysses, ring)):
        if other not in (None, size):
            raise Refusal(
                f"{words} with --context-parallel-size {total}", f"is {flag} {size}, not {other}: leave one out"
            )
    return wanted


def _choose_ulysses(total: int, config: Config) -> int:
    """The largest degree that divides ``total`` and a TP rank's query and key/value heads."""
    tensor = config.parallel.tensor_model_parallel_size
    heads = config.model.num_attention_heads // tensor
    kv_heads = max(config.model.num_query_groups // tensor, 1)
    return max(gcd(total, gcd(heads, kv_heads)), 1)


def check_grid(config: Config, world_size: int) -> None:
    """Refuse a number of processes that is not a multiple of the grid."""
    parallel = config.parallel
    sizes = {
        "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        "--ulysses-parallel-size": parallel.ulysses_parallel_size,
        "--ring-parallel-size": parallel.ring_parallel_size,
        "--pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
    }
    ranks = 1
    for size in sizes.values():
        ranks *= size
    if world_size < 1 or world_size % ranks:
        grid = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
        verb = "is larger than" if ranks > world_size else "does not divide"
        raise Refusal(
            grid, f"= {ranks} ranks {verb} the {world_size} processes: start a multiple of {ranks}, or lower a size"
        )


def check_heads(config: Config, world_size: int) -> None:
    """Refuse numbers of heads and MLP widths that TP and Ulysses do not divide."""
    model, parallel = config.model, config.parallel
    heads, groups, tensor = model.num_attention_heads, model.num_query_groups, parallel.tensor_model_parallel_size
    if heads % tensor:
        raise Refusal(
            f"--num-attention-heads {heads}",
            f"is not a multiple of --tensor-model-parallel-size {tensor}: use --tensor-model-parallel-size "
            f"{gcd(heads, tensor)}",
            Fix(f"--tensor-model-parallel-size {gcd(heads, tensor)}"),
            about="--tensor-model-parallel-size",
        )
    if groups % tensor and tensor % groups:
        raise Refusal(
            f"--num-query-groups {groups}",
            f"is neither multiple nor divisor of --tensor-model-parallel-size {tensor}: use "
            f"--tensor-model-parallel-size {gcd(heads, gcd(groups, tensor))}",
            Fix(f"--tensor-model-parallel-size {gcd(heads, gcd(groups, tensor))}"),
            about="--tensor-model-parallel-size",
        )
    if model.attention_output_gate and groups < tensor:
        raise Refusal(
            f"--attention-output-gate with --tensor-model-parallel-size {tensor}",
            f"and --num-query-groups {groups} is not supported: megatron-core does not split the gate of a key/value "
            f"head; use --tensor-model-parallel-size {groups}",
            Fix(f"--tensor-model-parallel-size {groups}"),
        )
    if model.ffn_hidden_size % tensor:
        raise Refusal(
            f"--ffn-hidden-size {model.ffn_hidden_size}",
            f"is not a multiple of --tensor-model-parallel-size {tensor}: use {near(model.ffn_hidden_size, tensor)}",
            about="--tensor-model-parallel-size",
        )
    ulysses, ring = parallel.ulysses_parallel_size, parallel.ring_parallel_size
    local = heads // tensor
    if local % ulysses:
        fits = gcd(local, ulysses)
        advice = f"--ulysses-parallel-size {fits} --ring-parallel-size {ring * ulysses // fits}"
        others = tensor * ring * parallel.pipeline_model_parallel_size
        if world_size > others * ulysses and world_size % (others * ulysses):  # as many ranks do not divide it either
            common = gcd(local, world_size // others)
            advice = f"--ulysses-parallel-size {max(size for size in range(1, ulysses) if common % size == 0)}"
        raise Refusal(
            f"--ulysses-parallel-size {ulysses}",
            f"does not divide the {local} query heads of a TP rank (--num-attention-heads {heads}, TP {tensor}): use "
            f"{advice}; with unequal shares, attention would take {uneven_heads(local, ulysses):.0%} longer",
            Fix(advice),
        )


def complete_sequence(config: Config) -> None:
    """Refuse a sequence length that the grid cannot split, or that is beyond the learned positions."""
    model, parallel, length = config.model, config.parallel, config.data.seq_length
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        parallel.sequence_parallel = False
        config.notes.append(
            "--sequence-parallel has nothing to split with --tensor-model-parallel-size 1: switched off"
        )
    tensor = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    ulysses, ring = parallel.ulysses_parallel_size, parallel.ring_parallel_size
    balance = parallel.context_parallel_balance
    unit = length_unit(ulysses, ring, balance, tensor)
    if length % unit:
        split = f"Ulysses {ulysses} x Ring {ring} ({balance})"
        split += f" x TP {tensor} sequence-parallel" if tensor > 1 else ""
        raise Refusal(
            f"--seq-length {length}", f"cannot be divided by {split}: use a multiple of {unit}, {near(length, unit)}"
        )
    if model.max_position_embeddings < length:
        if model.position_embedding_type == "learned_absolute":
            raise Refusal(
                f"--max-position-embeddings {model.max_position_embeddings}",
                f"is below --seq-length {length}, and learned positions end there: use {length}, or "
                "--position-embedding-type rope",
            )
        config.notes.append(
            f"--seq-length {length} is above --max-position-embeddings {model.max_position_embeddings}, the length "
            "the model is made for"
        )


def complete_batch(config: Config, data_parallel: int) -> None:
    """Complete the global batch, an integer number of micro-batches on every data-parallel rank."""
    data, parallel = config.data, config.parallel
    unit = data.micro_batch_size * data_parallel
    if data.gradient_accumulation_steps is not None:
        wanted = unit * data.gradient_accumulation_steps
        if data.global_batch_size not in (None, wanted):
            raise Refusal(
                f"--global-batch-size {data.global_batch_size}",
                f"is not --micro-batch-size {data.micro_batch_size} x --gradient-accumulation-steps "
                f"{data.gradient_accumulation_steps} x {data_parallel} data-parallel ranks: use {wanted}, or "
                "leave one out",
            )
        data.global_batch_size = wanted
    if data.step_batch_size_schedule is not None:
        steps = batch_steps(data)
        others = {
            f"--global-batch-size {data.global_batch_size}": (
                data.global_batch_size,
                "its last size is the final one: leave --global-batch-size out",
            ),
            "--rampup-batch-size": (data.rampup_batch_size, "both change the batch size: leave one out"),
        }
        refuse_combinations("--step-batch-size-schedule", others)
        data.global_batch_size = steps[-1][1]
    virtual = parallel.num_virtual_stages_per_pipeline_rank is not None
    if data.global_batch_size is None:
        data.global_batch_size = unit * (parallel.pipeline_model_parallel_size if virtual else 1)
        config.notes.append(f"--global-batch-size was not given: {data.global_batch_size}")
    sizes = {"--global-batch-size": data.global_batch_size}
    if data.step_batch_size_schedule is not None:
        sizes = {f"--step-batch-size-schedule (from {start} samples)": size for start, size in steps}
    if data.rampup_batch_size:
        start, step, over = data.rampup_batch_size
        if over < 1:
            raise Refusal(
                f"--rampup-batch-size {start} {step} {over}", "grows over no samples: leave it out", LEAVE_OUT
            )
        if start < 1 or step < 1 or start >= data.global_batch_size or (data.global_batch_size - start) % step:
            raise Refusal(
                f"--rampup-batch-size {start} {step}",
                f"does not lead to --global-batch-size {data.global_batch_size} in equal steps: use a start below "
                "it and an increment that divides the difference",
            )
        sizes |= {"--rampup-batch-size (start)": start, "--rampup-batch-size (increment)": step}
    for flag, size in sizes.items():
        if size % unit:
            raise Refusal(
                f"{flag} {size}",
                f"is not a multiple of --micro-batch-size {data.micro_batch_size} x {data_parallel} data-parallel "
                f"ranks: use a multiple of {unit}, {near(size, unit)}",
                about="--micro-batch-size",
            )
    if virtual:
        _check_microbatch_groups(config, unit)
    elif parallel.microbatch_group_size_per_virtual_pipeline_stage is not None:
        config.notes.append("--microbatch-group-size-per-virtual-pipeline-stage has no effect without virtual stages")
        parallel.microbatch_group_size_per_virtual_pipeline_stage = None


def _check_microbatch_groups(config: Config, unit: int) -> None:
    """Refuse batches that interleaved 1F1B cannot run.

    It takes micro-batches in groups. The last group may be smaller, but not smaller than the number of stages.
    """
    data, parallel = config.data, config.parallel
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    stages, given = parallel.pipeline_model_parallel_size, parallel.microbatch_group_size_per_virtual_pipeline_stage
    group = given or stages
    if group < stages:
        raise Refusal(
            f"{flag} {group}",
            f"is below --pipeline-model-parallel-size {stages}: use at least {stages}",
            Fix(f"{flag} {stages}"),
        )
    sizes: dict[str, Sequence[int]] = {"--global-batch-size": [data.global_batch_size]}
    if data.step_batch_size_schedule is not None:
        sizes = {"--step-batch-size-schedule": [size for _, size in batch_steps(data)]}
    if data.rampup_batch_size:
        start, step, _ = data.rampup_batch_size
        sizes["--rampup-batch-size"] = range(start, data.global_batch_size, step)
    for source, size in ((source, size) for source, running in sizes.items() for size in running):
        count = size // unit
        if count >= group and (count % group == 0 or count % group >= stages):
            continue
        if given is None:
            raise Refusal(
                f"{source} {size}",
                f"is {count} micro-batches, and virtual pipeline stages need a multiple of "
                f"--pipeline-model-parallel-size {stages}: use a multiple of {unit * stages}, or give {flag}",
            )
        raise Refusal(
            f"{source} {size}",
            f"is {count} micro-batches, which {flag} {group} cuts into groups of less than "
            f"--pipeline-model-parallel-size {stages}: use a multiple of {unit * group}",
        )


def check_first_layers(config: Config) -> None:
    """Refuse pipeline stages that begin with a layer that needs what the layer before it hands on."""
    parallel = config.parallel
    virtual = parallel.num_virtual_stages_per_pipeline_rank or 1
    stages = product(range(parallel.pipeline_model_parallel_size), range(virtual))
    for first, last in (stage_span(config, rank, stage) for rank, stage in stages):
        for kind in kinds_in(config.model):
            if first < last and not kind.starts(config.model)[first]:
                raise Refusal(
                    f"{kind.condition.flag}",
                    f"lets layer {first + 1}, the first of a pipeline stage, use what a layer before it hands on: give "
                    "a --pipeline-model-parallel-layout whose stages begin with other layers",
                )
