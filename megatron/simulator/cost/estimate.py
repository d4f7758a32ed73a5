# SPDX-License-Identifier: Apache-2.0
"""The time of a training step in closed form, which takes microseconds to compute, for planners and tables.

A step consists of layers, embedding and loss, micro-batches in a pipeline, gradients and optimizer. Layers are segments
of work (layer_operations.py), priced once for each machine and cached.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.formulas.flops import forward_flops
from megatron.formulas.sizes import chunks_of
from megatron.formulas.strategy import Strategy, Workload, refuse_unknown
from megatron.simulator.cost.layer_operations import layer
from megatron.simulator.cost.layer_program import OURS, OWN_ENDS, Program, as_run, computed_again, host_bound
from megatron.simulator.cost.operations import Parts, Segment, add, price, price_and_launches
from megatron.simulator.cost.seconds import kernel_seconds, transfer_seconds
from megatron.simulator.cost.step_operations import (
    States,
    ends,
    gather_parameters,
    last_bucket,
    optimizer_step,
    reduce_gradients,
    split_and_join,
    stage_transfer,
    states,
    sum_shared_gradients,
)
from megatron.simulator.machines.machine import Machine


@dataclass(frozen=True)
class Estimate:
    """A step's time and throughput."""

    seconds: float  # of a step
    # seconds by cause, which add up to `seconds`: `gemm`, `attention`, `memory` (norms, activations, copies on the
    # device), `optimizer`; waiting for `tp`, `ulysses`, `ring`, `dp`, `pp` or `host`; `bubble` of the pipeline;
    # `launching`, where the host is slower than the GPU
    parts: dict[str, float]
    flops: float  # of the model in a step, all ranks together: causal, without recompute
    mfu: float  # `flops` over the FLOPs that the GPUs' peak allows in the time
    mfu_full_mask_with_recompute: float  # as older papers count it: with the full mask and with recompute
    tokens_per_second: float  # of all ranks


def estimate(workload: Workload, strategy: Strategy, machine: Machine, program: Program = OURS) -> Estimate:
    """The time of a step on the busiest rank, under this program or another one.

    Raises:
        ValueError: the strategy does not divide the model or the batch; Ulysses may exceed a rank's heads.
    """
    parts = step_parts(workload, strategy, machine, program)
    seconds = sum(parts.values())
    flops, full_mask_flops = model_flops(workload, recompute=strategy.recompute == "full")
    capacity = seconds * strategy.ranks * machine.peak[machine.dtype]
    return Estimate(
        seconds=seconds,
        parts=parts,
        flops=flops,
        mfu=flops / capacity,
        mfu_full_mask_with_recompute=full_mask_flops / capacity,
        tokens_per_second=workload.global_batch * workload.seq_length / seconds,
    )


def model_flops(workload: Workload, *, recompute: bool) -> tuple[float, float]:
    """FLOPs of a step: (of pairs that the mask allows, of the full mask with ``recompute`` counted)."""
    one, batch = forward_flops(workload.shape, workload.seq_length), workload.global_batch
    allowed = workload.attended
    all_pairs = (4 if recompute else 3) * (one.gemm + one.attention) + (2 if recompute else 1) * one.choice
    return batch * (3 * one.gemm + allowed * (3 * one.attention + one.choice)), batch * all_pairs


def step_parts(workload: Workload, strategy: Strategy, machine: Machine, program: Program = OURS) -> Parts:
    """Seconds of a step by cause (``Estimate.parts``)."""
    shape, pipeline = workload.shape, strategy.pipeline
    refuse_unknown(shape, strategy)
    batches = strategy.micro_batches(workload)
    if batches < 1 or workload.global_batch % (strategy.data * strategy.micro_batch):
        raise ValueError(
            f"global batch {workload.global_batch} is not a multiple of data {strategy.data} x micro-batch "
            f"{strategy.micro_batch}"
        )
    sample = _sample(workload, strategy.slowest(workload) * strategy.busiest(workload))
    first, last = priced_ends(sample, _ends_key(strategy), machine, program)

    def on_stage(stage: int) -> tuple[States, Parts, Parts, Parts]:
        """(parameters of a stage; seconds by cause of a micro-batch, and of a mean layer's forward and backward)."""
        held, parts, forward, backward = states(shape, strategy, stage), {}, {}, {}
        works = layer_works(sample, held.experts_share, strategy.stage_span(shape.layers, stage))
        launching = [0.0, 0.0]  # in layers of one kind the host may run ahead, for those of another
        for layer_strategy, layers in strategy.layer_kinds(held.layers):
            for work, share in works:
                passes = layer_passes(work, _layer_key(layer_strategy), machine, program)
                for at, (mean, (one, host)) in enumerate(zip((forward, backward), passes)):
                    add(mean, one, share * layers / held.layers)
                    launching[at] += share * layers / held.layers * host
        for mean, host in zip((forward, backward), launching):
            mean |= host_bound(mean, host)
            add(parts, mean, held.layers)
        return held, add(parts, last) if stage == pipeline - 1 else parts, forward, backward

    busiest = on_stage(pipeline - 1)  # which has the loss
    others = (pipeline - 1) * (sum(busiest[1].values()) - sum(last.values()))
    if shape.mixed and pipeline > 1:
        stages = [on_stage(stage) for stage in range(pipeline)]
        seconds = [sum(stage[1].values()) for stage in stages]
        busiest, others = stages[seconds.index(max(seconds))], sum(seconds) - max(seconds)
    elif strategy.uneven:
        seconds = [sum(on_stage(stage)[1].values()) for stage in (0, min(1, pipeline - 2), pipeline - 1)]
        others = seconds[0] + (pipeline - 2) * seconds[1] + seconds[2] - max(seconds)
        if seconds[2] < max(seconds):  # an earlier stage has more layers, without the loss
            busiest = on_stage(0 if seconds[0] == max(seconds) else 1)
    held, parts, forward, backward = busiest
    if pipeline == 1:
        add(parts, first)
    if strategy.zero >= 2:
        rooted = shape.tied or chunks_of(workload, strategy).loss > 0
        _sharded_layers(parts, sum(forward.values()), sum(backward.values()), strategy, held, machine, program, rooted)
    total = add({}, parts, batches)
    if workload.reference:  # a forward pass of all layers and of the loss, whose parts are those of three passes
        add(total, forward, batches * held.layers)
        add(total, last, batches / 3)
        others += (pipeline - 1) * sum(forward.values()) * held.layers
        if strategy.zero >= 2:
            _, waited = _gathering(strategy, held, sum(forward.values()), machine)
            total["dp"] = total.get("dp", 0.0) + batches * waited * held.layers
    if pipeline > 1:
        _pipeline(total, others, workload, strategy, machine, program)
    if strategy.zero <= 1 and strategy.group("dp").size > 1:
        total["dp"] = total.get("dp", 0.0) + _exposed_states(forward, backward, strategy, held, machine, program)
    for transfer in sum_shared_gradients(shape, strategy, held):
        total[transfer.axis] = total.get(transfer.axis, 0.0) + transfer_seconds(transfer, machine)
    steps = [optimizer_step(strategy, held.all, ours=program.runs == "ours")]
    if held.experts:
        steps.append(optimizer_step(strategy, held.experts, ours=program.runs == "ours", over="expert dp"))
    total["optimizer"] = sum(kernel_seconds(step, machine) for step in steps)
    if "launching" in total:  # otherwise the host is ahead of the GPU at the end of the step
        launching = machine.dispatch * program.optimizer_launches(held.layers)
        total["launching"] += max(0.0, launching - total["optimizer"])
    return total


def layer_works(sample: Workload, with_experts: float, span: tuple[int, int]) -> list[tuple[Workload, float]]:
    """(workload of a model whose layers are all of one kind, share of layers of this kind), for each kind.

    Args:
        with_experts: share of layers with experts.
        span: first layer, and number of layers.
    """
    if sample.shape.mixed:
        return _with_states(sample, *span)
    kinds = sample.kinds()
    if not sample.shape.mixture:
        return kinds
    plain = replace(sample, shape=sample.shape.without_experts())
    both = [(work, share * with_experts) for work, share in kinds]
    both += [(work, share * (1 - with_experts)) for work, share in plain.kinds()]
    return [(work, share) for work, share in both if share]


@lru_cache(maxsize=1024)
def _with_states(sample: Workload, first: int, count: int) -> list[tuple[Workload, float]]:
    """:func:`layer_works` of a model whose layers differ in more than their experts."""
    shapes = Counter(sample.shape.kind(first + layer) for layer in range(count))
    return [
        (work, share * number / count)
        for shape, number in shapes.items()
        for work, share in replace(sample, shape=shape).kinds()
    ]


def pass_seconds(workload: Workload, strategy: Strategy, machine: Machine) -> float:
    """Seconds of all layers, embedding and loss in a micro-batch without a pipeline, to compare memory savings."""
    sample = _sample(workload, strategy.slowest(workload) * strategy.busiest(workload))
    took = sum(map(sum, (part.values() for part in priced_ends(sample, _ends_key(strategy), machine))))
    for layer_strategy, layers in strategy.layer_kinds(workload.shape.layers):
        layers_with_experts = workload.shape.with_experts(0, workload.shape.layers)
        span = 0, workload.shape.layers
        for work, share in layer_works(sample, layers_with_experts / workload.shape.layers, span):
            passes = layer_passes(work, _layer_key(layer_strategy), machine, OURS)  # as `step_parts` calls it
            took += share * layers * sum(sum(host_bound(*one).values()) for one in passes)
    return took


def _exposed(took: float, layer: float, machine: Machine) -> float:
    """Seconds that transfers add to a layer that computes at the same time."""
    return max((1 - machine.calibration.overlap) * took, took - layer)


def _gathering(strategy: Strategy, held: States, forward: float, machine: Machine) -> tuple[float, float]:
    """ZeRO 2 and 3: (seconds to gather a layer's weights, those of them that the layer before it does not hide)."""
    gather = transfer_seconds(gather_parameters(strategy, held.layer), machine)
    if held.experts and strategy.group("expert dp").size > 1:  # at the same time, from a group of their own
        gather += transfer_seconds(gather_parameters(strategy, held.experts / held.layers, "expert dp"), machine)
    return gather, _exposed(gather, forward, machine) if strategy.overlap_param_gather else gather


def _sharded_layers(
    parts: Parts,
    forward: float,
    backward: float,
    strategy: Strategy,
    held: States,
    machine: Machine,
    program: Program,
    rooted: bool,
) -> None:
    """ZeRO 2 and 3: a layer's weights are gathered, and its gradients reduced, while the layer next to it computes.

    ``rooted``: the output layer belongs to FSDP's root.
    """
    gather, waited = _gathering(strategy, held, forward, machine)
    scatter = transfer_seconds(reduce_gradients(strategy, held.layer, program.gradients), machine)
    if held.experts and strategy.group("expert dp").size > 1:
        each = held.experts / held.layers  # on average
        scatter += transfer_seconds(reduce_gradients(strategy, each, program.gradients, "expert dp"), machine)
    again = gather if strategy.zero == 3 else 0.0
    weights, gradients = strategy.overlap_param_gather, strategy.overlap_grad_reduce
    waited += _exposed(again * weights + scatter * gradients, backward, machine)
    waited += again * (not weights) + scatter * (not gradients)
    # The embedding is gathered first and reduced last. The transfers of a separate output layer overlap the layers. An
    # output layer that is tied, or read by a chunked loss, is part of FSDP's root and transferred with the embedding.
    alone = held.ends if rooted or program.runs != "ours" or not (weights and gradients) else held.table
    ends, hidden = (
        transfer_seconds(gather_parameters(strategy, size), machine)
        + transfer_seconds(reduce_gradients(strategy, size, program.gradients), machine)
        for size in (alone, held.ends - alone)
    )
    ends += (1 - machine.calibration.overlap) * hidden
    copies = split_and_join(strategy, held.all + held.experts)
    parts["memory"] = parts.get("memory", 0.0) + kernel_seconds(copies, machine)
    # Nothing overlaps the first layer's weights, the last gradients and the root's transfers.
    first = gather * weights + scatter * gradients
    parts["dp"] = parts.get("dp", 0.0) + waited * held.layers + first + ends


def _exposed_states(
    forward: Parts, backward: Parts, strategy: Strategy, held: States, machine: Machine, program: Program
) -> float:
    """DDP and ZeRO 1: seconds of transfers that the last backward and the first forward pass do not overlap."""

    def exposed(took: float, overlapped: bool, layer: float) -> float:
        if not overlapped:
            return took
        # Nothing overlaps the last transfers of gradients (the embedding's and a bucket) or the first of weights.
        tail = took * min(1.0, (last_bucket(strategy, held, ours=program.runs == "ours") + held.table) / held.all)
        return tail + _exposed(took - tail, layer * held.layers, machine)

    reduce = transfer_seconds(reduce_gradients(strategy, held.all, program.gradients), machine)
    gather = transfer_seconds(gather_parameters(strategy, held.all), machine)
    if held.experts and strategy.group("expert dp").size > 1:  # buckets of their own
        reduce += transfer_seconds(reduce_gradients(strategy, held.experts, program.gradients, "expert dp"), machine)
        gather += transfer_seconds(gather_parameters(strategy, held.experts, "expert dp"), machine)
    waited = exposed(reduce, strategy.overlap_grad_reduce, sum(backward.values()))
    if strategy.zero:
        waited += exposed(gather, strategy.overlap_param_gather, sum(forward.values()))
    return waited


def _pipeline(
    total: Parts, others: float, workload: Workload, strategy: Strategy, machine: Machine, program: Program
) -> None:
    """Adds messages and the bubble of 1F1B: the seconds of a micro-batch on the other stages (``others``).

    Virtual stages divide the bubble.
    """
    exposed = 1 - machine.calibration.overlap if program.overlap and strategy.virtual > 1 else 1.0
    total["pp"] = total.get("pp", 0.0) + exposed * transfer_seconds(stage_transfer(workload, strategy), machine)
    total["bubble"] = others / strategy.virtual


# Fields that change neither a layer's nor the ends' price; strategies that differ in them share a cache entry.
_IRRELEVANT = {
    "data": 1, "pipeline": 1, "virtual": 1, "first_less": 0, "last_less": 0,
    "overlap_grad_reduce": True, "overlap_param_gather": True,
}  # fmt: skip


def _summing(strategy: Strategy) -> int:
    """The ZeRO stage that stands for how gradients are summed: 1 for DDP, 2 for FSDP."""
    return 2 if strategy.zero > 1 else 1


def _layer_key(strategy: Strategy) -> Strategy:
    """The strategy without fields that do not change a layer's price."""
    unit = min(strategy.recompute_layers, 2) if strategy.fpdt_chunk and strategy.recompute == "full" else 1
    return strategy.but(loss_chunks=0, recompute_layers=unit, zero=_summing(strategy), **_IRRELEVANT)


def _ends_key(strategy: Strategy) -> Strategy:
    """The strategy without fields that do not change the ends' price. FPDT's chunk size decides the loss's chunks."""
    return strategy.but(
        recompute="none", recompute_layers=1, recompute_method="uniform", keep_attention=False,
        offload_checkpoints=False, fpdt_offload=False, ffn_chunks=strategy.ffn_chunks if strategy.fpdt_chunk else 0,
        zero=_summing(strategy), expert=1, expert_tensor=1, **_IRRELEVANT,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _sample(workload: Workload, slowest: float) -> Workload:
    """One sample, with the keys that the busiest rank sees."""
    keys = min(workload.keys * slowest, workload.seq_length / 2)
    return replace(workload, global_batch=1, keys=keys, spread=0.0, uneven=())


@lru_cache(maxsize=65536)
def layer_passes(
    workload: Workload, strategy: Strategy, machine: Machine, program: Program = OURS
) -> tuple[tuple[Parts, float], tuple[Parts, float]]:
    """(seconds on the GPU, seconds that the host needs for launches) of a layer's forward and backward pass."""
    forward, backward = (as_run(part, workload.shape, program) for part in layer(workload, strategy))
    backward = computed_again(forward, program) + backward
    return _priced(forward, machine, program), _priced(backward, machine, program, backward=True)


def _priced(
    segments: list[Segment], machine: Machine, program: Program, *, backward: bool = False
) -> tuple[Parts, float]:
    parts, own = price_and_launches(segments, machine)
    return parts, machine.dispatch * program.launches(own, backward=backward)


@lru_cache(maxsize=65536)
def priced_ends(
    workload: Workload, strategy: Strategy, machine: Machine, program: Program = OURS
) -> tuple[Parts, Parts]:
    """Seconds in a micro-batch of (both passes of the embedding, both passes of the loss)."""
    first, last = (as_run(part, workload.shape, program, linear=False) for part in ends(workload, strategy))
    launched = OWN_ENDS if program.runs == "ours" else (0, 0)
    return tuple(
        host_bound(price(part, machine), machine.dispatch * count) for part, count in zip((first, last), launched)
    )
