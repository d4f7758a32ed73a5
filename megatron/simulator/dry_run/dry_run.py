# SPDX-License-Identifier: Apache-2.0
"""A dry run: one step of the real program on each kind of rank of a simulated cluster.

All figures are linear in the number of layers, once there are more layers than the offload's buffers and FSDP's
prefetch hold. Therefore a stage with many layers runs twice, with four and with five units of layers, and the figures
of the complete stage are extrapolated. ``every_layer`` runs all layers. Micro-batches are repeated: see replay.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from math import lcm
from multiprocessing import get_context
from typing import Any

from megatron.platform.autograd import forks_can_train
from megatron.simulator.cost.trace import HostCopy, Trace
from megatron.simulator.dry_run.allocation.reserved import (
    Allocations,
    Reserved,
    needed_by_setting,
    reserved,
    runtime_memory,
    settings,
)
from megatron.simulator.dry_run.call_replay import ReplayMismatch
from megatron.simulator.dry_run.one_rank import RankStep, micro_batches, run_rank
from megatron.simulator.dry_run.recording.fp8 import check_fp8, held_by
from megatron.simulator.dry_run.replay import Replay, Stretch, Unsteady, replay, stretch_of
from megatron.simulator.dry_run.whole_step import Program, WholeStep, program_of, whole_step_of
from megatron.simulator.machines.machine import Machine
from megatron.system.processes import end_with_parent
from megatron.training.arguments.stages import chunk_layers, stage_layers
from megatron.training.arguments.validate import data_parallel_size
from megatron.training.report.memory_profile import Profile
from megatron.training.report.mfu import step_flops
from megatron.training.settings.config import Config
from megatron.training.settings.kinds import kinds_in
from megatron.training.settings.kinds.dsa_kind import DSA
from megatron.training.settings.kinds.layer_patterns import expert_layers
from megatron.training.settings.models import rope_layers, window_layers


@dataclass(frozen=True)
class Figures:
    """Results of a rank's step; every number is linear in its layers."""

    peaks: dict[str, dict[str, float]]  # peak device bytes in each phase, by kind
    host_peak: float  # peak bytes of host memory
    flops: float  # executed, with recompute, 2 for each multiply-add; attention counts the computed pairs only
    communication: dict[str, float]  # bytes sent, by axis
    copies: dict[str, float]  # bytes between device and host, by direction
    seconds: dict[str, float]  # of the `step` and of its `passes`; empty without a machine
    exposed: dict[str, float]  # as in `Replay`; empty without a machine
    busy: dict[str, float]  # as in `Replay`; empty without a machine

    @property
    def device_peak_by_kind(self) -> dict[str, int]:
        fullest = max(self.peaks.values(), key=lambda kinds: sum(kinds.values()))
        return {kind: round(size) for kind, size in fullest.items()}

    @property
    def device_peak(self) -> int:
        return sum(self.device_peak_by_kind.values())


def figures(step: RankStep, replayed: Replay | None) -> Figures:
    """Figures of a step, including repeated micro-batches; ``replayed``: of the complete step."""
    trace, times = step.trace, step.repeat.times if step.repeat else 0
    repeated = step.repeat.more(trace) if step.repeat else Trace()
    sent, sent_again = trace.communication_bytes(), repeated.communication_bytes()
    copies, copied_again = copied(trace), copied(repeated)
    seconds, exposed, busy = {}, {}, {}
    if replayed:
        optimizer = next((begin for name, begin in replayed.phases if name == "optimizer"), replayed.seconds)
        seconds = {"step": replayed.seconds, "passes": optimizer}
        exposed, busy = replayed.exposed, replayed.busy
    return Figures(
        step.peaks,
        step.host_peak,
        trace.flops() + times * repeated.flops(),
        {axis: size + times * sent_again[axis] for axis, size in sent.items()},
        {to: size + times * copied_again[to] for to, size in copies.items()},
        seconds,
        exposed,
        busy,
    )


def copied(trace: Trace) -> dict[str, float]:
    """Bytes copied between device and host, by direction."""
    copies = {"to_host": 0.0, "to_device": 0.0}
    for event in trace.events:
        if isinstance(event, HostCopy):
            copies[event.direction] += event.bytes * event.count
    return copies


def extrapolated(a: Figures, b: Figures, few: int, more: int, all_of_them: int) -> Figures:
    """Figures of ``all_of_them`` layers, from the figures ``a`` of ``few`` layers and ``b`` of ``more`` layers."""
    share = (all_of_them - few) / (more - few)

    def along(x: Any, y: Any) -> Any:
        if isinstance(y, dict):
            return {key: along(x.get(key, 0 if not isinstance(value, dict) else {}), value) for key, value in y.items()}
        return x + share * (y - x)

    return Figures(**{field.name: along(getattr(a, field.name), getattr(b, field.name)) for field in fields(Figures)})


FEW = (4, 5)  # units of layers of a stage in the two runs from which all layers are extrapolated


@dataclass(frozen=True)
class RankReport:
    """One rank of the cluster."""

    rank: int
    stage: str  # its kind: `first`, `middle` or `last` of the pipeline
    layers: tuple[int, int]  # (number in its stage, number that ran)
    micro_batches: tuple[int, int]  # (number in a step, number that ran)
    figures: Figures
    # profile, replayed: memory and time of the layers and micro-batches that ran, for pictures
    profile: Profile
    replayed: Replay | None
    program: Program | None = None  # the passes of its complete step; None without a machine
    reserved: Reserved = Reserved()  # memory that PyTorch's allocator takes from the driver; empty without a GPU


@dataclass(frozen=True)
class DryRun:
    """Memory that a run needs and, on ``machine``, the time of a step."""

    config: Config
    world_size: int
    machine: Machine | None
    ranks: list[RankReport]
    predicted_seconds: float | None = None  # of a step; None without a machine
    mfu: float | None = None  # causal FLOPs without recompute over the machine's peak
    fits: bool | None = None  # whether device and host memory suffice
    reasons: tuple[str, ...] = ()  # why it does not fit
    step: WholeStep | None = None  # the passes of all stages with their times; None without a machine


@contextmanager
def paused_collector() -> Iterator[None]:
    """Python does not look for reference cycles, for which it would read millions of recorded events again and again.

    Tensors are not part of cycles, so that their memory is counted as before.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@paused_collector()
def dry_run(
    config: Config,
    world_size: int,
    machine: Machine | None = None,
    *,
    vocab_size: int,
    every_layer: bool = False,
    every_micro_batch: bool = False,
    workers: int = 1,
) -> DryRun:
    """Run the first, a middle and the last pipeline stage of ``config``, completed for ``world_size``.

    Args:
        machine: simulate its GPUs; None: simulate this program's processes on a CPU.
        vocab_size: vocabulary size without padding.
        every_layer: run all layers of a stage instead of a few.
        every_micro_batch: run all micro-batches of a step instead of a few.
        workers: processes that share the work.

    Raises:
        Refusal: the run itself would be refused, PYTORCH_ALLOC_CONF is wrong, or the machine has no FP8.
    """
    check_fp8(config.model, machine)
    settings()  # refuses a wrong PYTORCH_ALLOC_CONF before the work
    depths = stage_layers(config)
    counts = [None] if every_layer or len(set(chunk_layers(config))) > 1 else layer_counts(config)
    ranks = list(ranks_of(config, world_size))
    jobs = [
        (with_layers(config, n) if n else config, world_size, rank, vocab_size, machine, every_micro_batch)
        for rank, _ in ranks
        for n in counts
    ]
    results = _run_jobs(jobs, workers)
    reports = []
    for index, (rank, stage) in enumerate(ranks):
        of_rank = slice(index * len(counts), (index + 1) * len(counts))
        runs = results[of_rank]
        if len({run[4] for run in runs}) > 1:  # micro-batches repeat for only one number of layers: run all
            runs = [run_job((*job[:-1], True)) for job in jobs[of_rank]]
        rank_figures, layers = runs[-1][0], depths[rank * len(depths) // world_size]
        if len(counts) > 1:
            rank_figures = extrapolated(runs[0][0], rank_figures, *counts, layers)
        ran = layers, counts[-1] or layers
        _, ran_batches, profile, replayed, stretch, _ = runs[-1]
        rank_program = None
        if replayed is not None:
            numbers = counts[0] or layers, ran[1], layers
            rank_program = program_of(runs[0][3], replayed, numbers, stretch, len(depths) > 1)
        memory = Reserved()
        if machine is not None and machine.is_gpu:
            runtime = runtime_memory(config, world_size, machine)
            all_layers = (config, world_size, rank, vocab_size, machine, every_micro_batch)
            memory = reserved(
                [run[-1] for run in runs],
                counts,
                layers,
                machine.memory - runtime.outside_allocator,
                runtime.cublas,
                lambda job=all_layers: run_job(job)[-1],
            )
        reports.append(RankReport(rank, stage, ran, ran_batches, rank_figures, profile, replayed, rank_program, memory))
    if machine is None:
        return DryRun(config, world_size, None, reports)
    # A stage's time is its first report's; the neighbour on a ring (`ranks_of`) is simulated for its memory only.
    step = whole_step_of(
        config, {report.stage: report.program for report in reports[::-1]}, reports[0].micro_batches[0]
    )
    seconds = step.seconds if len(step.stages) > 1 else reports[0].figures.seconds["step"]
    reasons = tuple(too_full(config, reports, world_size, machine))
    model = step_flops(config, vocab_size).model * config.data.global_batch_size
    mfu = model / (seconds * world_size * machine.peak["bf16"])
    return DryRun(config, world_size, machine, reports, seconds, mfu, not reasons, reasons, step)


def ranks_of(config: Config, world_size: int) -> Iterator[tuple[int, str]]:
    """(rank, stage) of the ranks to simulate: in each kind of stage the busiest rank of a ring.

    On a contiguous ring that is the last rank, which sees the most keys. On a zigzag ring under a window it is the
    second, because the first has the beginning of the sequence and fewer pairs. Otherwise it is the first rank, whose
    queries see keys of all ranks, and of Ulysses ranks that choose keys the last, which has the latest queries; with
    FPDT its neighbour is simulated as well, because it needs more host memory: only the first rank's early chunks never
    wait for other ranks' keys.
    """
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size
    stride = world_size // stages
    neighbour = parallel.ulysses_parallel_size * parallel.tensor_model_parallel_size  # on the ring
    zigzag = parallel.context_parallel_balance == "zigzag" and parallel.ring_parallel_size > 1
    inside = 0
    if parallel.context_parallel_balance == "contiguous":
        inside = (parallel.ring_parallel_size - 1) * neighbour
    elif zigzag and config.attention.window_size:
        inside = neighbour
    elif DSA.chosen(vars(config.model)):  # Ulysses ranks choose keys for their own queries
        inside = neighbour - parallel.tensor_model_parallel_size
    kinds = {0: "first"}
    if (
        stages > 2
    ):  # of uneven stages the first with the most layers: it has more micro-batches in flight than later ones
        depths = stage_layers(config)
        middle = depths[1:-1]
        kinds[1 + middle.index(max(middle)) if len(set(depths)) > 1 else stages // 2] = "middle"
    if stages > 1:
        kinds[stages - 1] = "last"
    for stage, name in kinds.items():
        yield stage * stride + inside, name
    if zigzag and config.chunks.fpdt and not inside:
        yield neighbour, "first"  # the stage with the most micro-batches in flight


def layer_counts(config: Config) -> list[int | None]:
    """Numbers of layers of a stage to run: all layers (None), or two numbers to extrapolate from.

    Layers with different rules are extrapolated if all stages begin with the same one and consist of complete periods.
    """
    layers, few = _layers(config), [_unit(config) * n for n in FEW]
    uneven = layers % _period(config) or config.attention.recompute_method == "block"
    return [None] if layers <= sum(few) or uneven else few


Job = tuple[Config, int, int, int, Machine | None, bool]
JobResult = tuple[Figures, tuple[int, int], Profile, Replay | None, Stretch | None, Allocations]


def _run_jobs(jobs: list[Job], workers: int) -> list[JobResult]:
    workers = min(workers, len(jobs))
    if workers == 1:
        return [run_job(job) for job in jobs]
    start = get_context("fork" if forks_can_train() else "spawn")
    with ProcessPoolExecutor(workers, mp_context=start, initializer=end_with_parent) as pool:
        return list(pool.map(run_job, jobs[::-1]))[::-1]  # the longest jobs first


def run_job(job: Job) -> JobResult:
    """Simulate a rank's step.

    Returns:
        (figures, (micro-batches, how many ran), memory profile and replay of what ran, the micro-batches that repeat or
        None, allocations of what ran).
    """
    config, world_size, rank, vocab_size, machine, every_micro_batch = job
    batches = micro_batches(config, data_parallel_size(config, world_size))
    stage = rank * config.parallel.pipeline_model_parallel_size // world_size
    every_micro_batch = every_micro_batch or config.data.dpo_reference in ("copy", "adapters-off")  # it reads all first
    stretch = None if every_micro_batch else stretch_of(config, stage, batches)
    simulated = machine if machine is not None and machine.is_gpu else None  # None: the kernels of a CPU
    options = {"machine": simulated, "fp8": held_by(config.model, machine) if config.model.fp8_format else None}
    done, every_chunk = None, False
    while done is None:
        try:
            done = run_rank(config, world_size, rank, vocab_size, stretch=stretch, every_chunk=every_chunk, **options)
        except Unsteady:
            stretch = None
        except ReplayMismatch:
            every_chunk = True
    replayed = replay(done.trace, machine) if machine else None
    whole = replay(done.trace, machine, keep_spans=False, repeat=done.repeat) if machine and stretch else replayed
    ran = stretch.micro_batches if stretch else batches
    return figures(done, whole), (batches, ran), done.profile, replayed, stretch, done.allocations


def with_layers(config: Config, layers: int) -> Config:
    """The same run with ``layers`` layers in each stage."""
    config = deepcopy(config)
    parallel, count = config.parallel, layers * config.parallel.pipeline_model_parallel_size
    config.model.num_layers = count
    by_layer = [(config.model, f"{name}_freq") for name in ("no_rope", "moe_layer", "linear_attention")]
    for part, name in ((config.attention, "window_attn_skip_freq"), *by_layer):
        if isinstance(getattr(part, name), list):  # its beginning is like all of it: see `layer_counts`
            setattr(part, name, getattr(part, name)[:count])
    parallel.pipeline_model_parallel_layout = None
    if parallel.num_virtual_stages_per_pipeline_rank:
        parallel.num_layers_per_virtual_pipeline_stage = layers // parallel.num_virtual_stages_per_pipeline_rank
    return config


def _layers(config: Config) -> int:
    return config.model.num_layers // config.parallel.pipeline_model_parallel_size


def _unit(config: Config) -> int:
    """Number of layers that repeat: a recomputed unit, and a period of the layers' rules, on every virtual stage."""
    attention = config.attention
    unit = attention.recompute_num_layers if attention.recompute_granularity == "full" else 1
    return lcm(unit or 1, _period(config)) * (config.parallel.num_virtual_stages_per_pipeline_rank or 1)


def _period(config: Config) -> int:
    """The smallest number of layers after which the rules of all layers repeat."""
    layers = config.model.num_layers
    rules = [rope_layers(config.model), expert_layers(config.model)]
    rules += [rule(config.model) for kind in kinds_in(config.model) for rule in (kind.layers, kind.starts)]
    rules = list(zip(window_layers(config.attention, layers), *rules))
    return next(n for n in range(1, layers + 1) if all(a == b for a, b in zip(rules, rules[n:])))


def too_full(config: Config, reports: list[RankReport], world_size: int, machine: Machine) -> Iterator[str]:
    """Why a step does not fit. On a GPU the better of the allocator's settings decides."""
    gib = 2**30
    for report in reports:
        device, host = report.figures.device_peak, report.figures.host_peak * min(machine.gpus, world_size)
        needed = needed_by_setting(report.reserved.bytes, config, world_size, machine)
        if needed and min(needed.values()) > machine.memory:
            yield (
                f"rank {report.rank} needs {min(needed.values()) / gib:,.1f} GiB of device memory: {device / gib:,.1f} "
                f"allocated, the rest reserved by PyTorch's allocator, context and NCCL; {machine.name} has "
                f"{machine.memory / gib:,.1f}"
            )
        elif not needed and device > machine.usable_memory:
            yield (
                f"rank {report.rank} needs {device / gib:,.1f} GiB of device memory, {machine.name} has "
                f"{machine.usable_memory / gib:,.1f} for a program"
            )
        if host > machine.host_memory:
            yield (
                f"rank {report.rank} and its neighbours need {host / gib:,.0f} GiB of host memory, a node has "
                f"{machine.host_memory / gib:,.0f}"
            )
