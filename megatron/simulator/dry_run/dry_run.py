# SPDX-License-Identifier: Apache-2.0
"""A dry run: one step of the real program on each kind of rank of a simulated cluster, and what it says.

Layers are alike, so everything they cause grows by the same amount with each, once there are as many as the offload's
buffers and FSDP's prefetch look ahead: a long stage runs with four and with five units of layers, and the rest is the
difference, as often as there are layers left. ``every_layer`` runs them all. So are micro-batches: see replay.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, fields
from multiprocessing import get_context
from typing import Any

from megatron.simulator.cost.trace import HostCopy, Trace
from megatron.simulator.dry_run.allocation.reserved import (
    Allocations,
    Reserved,
    needed_by_setting,
    reserved,
    runtime_memory,
    settings,
)
from megatron.simulator.dry_run.call_replay import Unlike
from megatron.simulator.dry_run.one_rank import RankStep, micro_batches, run_rank
from megatron.simulator.dry_run.recording.fp8 import check_fp8, held_by
from megatron.simulator.dry_run.replay import Replay, Stretch, Unsteady, replay, stretch_of
from megatron.simulator.dry_run.whole_step import Program, WholeStep, program_of, together
from megatron.simulator.machines.machine import Machine
from megatron.training.arguments.config import Config
from megatron.training.arguments.stages import stage_layers
from megatron.training.arguments.validate import data_parallel_size
from megatron.training.report.memory_profile import Profile
from megatron.training.report.mfu import step_flops

# What a rank's step comes to, in numbers that are linear in its layers.


@dataclass(frozen=True)
class Figures:
    """What a rank's step comes to; every number is linear in its layers.

    Attributes:
        peaks: most device bytes in each phase, by kind.
        host_peak: bytes of host memory.
        flops: executed, recompute and all, 2 a multiply-add; of attention the pairs that are computed.
        communication: bytes sent, by axis.
        copies: bytes between device and host, by direction.
        seconds, exposed, busy: of the replay on a machine; empty without one.
    """

    peaks: dict[str, dict[str, float]]
    host_peak: float
    flops: float
    communication: dict[str, float]
    copies: dict[str, float]
    seconds: dict[str, float]
    exposed: dict[str, float]
    busy: dict[str, float]

    @property
    def device_peak_by_kind(self) -> dict[str, int]:
        fullest = max(self.peaks.values(), key=lambda kinds: sum(kinds.values()))
        return {kind: round(size) for kind, size in fullest.items()}

    @property
    def device_peak(self) -> int:
        return sum(self.device_peak_by_kind.values())


def figures(done: RankStep, replayed: Replay | None) -> Figures:
    """Figures of a step, from what ran and what that stands for; ``replayed`` is the whole step."""
    trace, times = done.trace, done.repeat.times if done.repeat else 0
    more = done.repeat.more(trace) if done.repeat else Trace()
    sent, sent_more = trace.communication_bytes(), more.communication_bytes()
    copies, copies_more = copied(trace), copied(more)
    seconds, exposed, busy = {}, {}, {}
    if replayed:
        optimizer = next((begin for name, begin in replayed.phases if name == "optimizer"), replayed.seconds)
        seconds = {"step": replayed.seconds, "passes": optimizer}
        exposed, busy = replayed.exposed, replayed.busy
    return Figures(
        done.peaks,
        done.host_peak,
        trace.flops() + times * more.flops(),
        {axis: size + times * sent_more[axis] for axis, size in sent.items()},
        {to: size + times * copies_more[to] for to, size in copies.items()},
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


def grown(a: Figures, b: Figures, few: int, more: int, all_of_them: int) -> Figures:
    """Figures of ``all_of_them`` layers, from those of ``few`` and ``more``."""
    share = (all_of_them - few) / (more - few)

    def along(x: Any, y: Any) -> Any:
        if isinstance(y, dict):
            return {key: along(x.get(key, 0 if not isinstance(value, dict) else {}), value) for key, value in y.items()}
        return x + share * (y - x)

    return Figures(**{field.name: along(getattr(a, field.name), getattr(b, field.name)) for field in fields(Figures)})


FEW = (4, 5)  # units of layers a stage that run in place of all


@dataclass(frozen=True)
class RankReport:
    """One rank of the cluster.

    Attributes:
        stage: its kind: ``first``, ``middle`` or ``last`` of the pipeline.
        layers: of its stage, and how many of them ran.
        micro_batches: of a step, and how many of them ran.
        profile, replayed: memory and time of what ran, for pictures.
        program: the passes of its whole step; None without a machine.
        reserved: what PyTorch's allocator takes from the driver; empty without a GPU.
    """

    rank: int
    stage: str
    layers: tuple[int, int]
    micro_batches: tuple[int, int]
    figures: Figures
    profile: Profile
    replayed: Replay | None
    program: Program | None = None
    reserved: Reserved = Reserved()


@dataclass(frozen=True)
class DryRun:
    """What a run would need, and on ``machine`` how long a step takes.

    Attributes:
        predicted_seconds: of a step; None without a machine.
        mfu: causal FLOPs without recompute over the machine's peak.
        fits: whether device and host memory suffice.
        reasons: what does not fit.
        step: every stage's passes, each when it happens; None without a machine.
    """

    config: Config
    world_size: int
    machine: Machine | None
    ranks: list[RankReport]
    predicted_seconds: float | None = None
    mfu: float | None = None
    fits: bool | None = None
    reasons: tuple[str, ...] = ()
    step: WholeStep | None = None


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
        machine: simulate its GPUs; None: processes on a CPU, as this program runs there.
        vocab_size: real vocabulary size.
        every_layer: run all layers of a stage in place of a few.
        every_micro_batch: run all micro-batches of a step in place of a few.
        workers: processes that share the work.

    Raises:
        Refusal: what the run itself would refuse, a PYTORCH_ALLOC_CONF that PyTorch does too; FP8 on a machine
            without it.
    """
    check_fp8(config.model, machine)
    settings()  # refuses now, not after the work
    depths = stage_layers(config)
    counts = [None] if every_layer or len(set(depths)) > 1 else layer_counts(config)
    kinds = list(ranks_of(config, world_size))
    jobs = [
        (with_layers(config, n) if n else config, world_size, rank, vocab_size, machine, every_micro_batch)
        for rank, _ in kinds
        for n in counts
    ]
    done = _do(jobs, workers)
    reports = []
    for index, (rank, stage) in enumerate(kinds):
        of_this = slice(index * len(counts), (index + 1) * len(counts))
        mine = done[of_this]
        if len({job[4] for job in mine}) > 1:  # a stretch stood for the rest at one number of layers alone
            mine = [run_job((*job[:-1], True)) for job in jobs[of_this]]
        found, layers = mine[-1][0], depths[rank * len(depths) // world_size]
        if len(counts) > 1:
            found = grown(mine[0][0], found, *counts, layers)
        ran = layers, counts[-1] or layers
        _, ran_batches, profile, replayed, stretch, _ = mine[-1]
        whole = None
        if replayed is not None:
            numbers = counts[0] or layers, ran[1], layers
            whole = program_of(mine[0][3], replayed, numbers, stretch, len(depths) > 1)
        taken = Reserved()
        if machine is not None and machine.is_gpu:
            own = runtime_memory(config, world_size, machine)
            every = (config, world_size, rank, vocab_size, machine, every_micro_batch)
            taken = reserved(
                [job[-1] for job in mine],
                counts,
                layers,
                machine.memory - own.beside,
                own.cublas,
                lambda every=every: run_job(every)[-1],
            )
        reports.append(RankReport(rank, stage, ran, ran_batches, found, profile, replayed, whole, taken))
    if machine is None:
        return DryRun(config, world_size, None, reports)
    # Of a stage the first rank; its neighbour on a ring comes last, and is here for its memory.
    step = together(config, {report.stage: report.program for report in reports[::-1]}, reports[0].micro_batches[0])
    seconds = step.seconds if len(step.stages) > 1 else reports[0].figures.seconds["step"]
    reasons = tuple(too_full(config, reports, world_size, machine))
    model = step_flops(config, vocab_size).model * config.data.global_batch_size
    mfu = model / (seconds * world_size * machine.peak["bf16"])
    return DryRun(config, world_size, machine, reports, seconds, mfu, not reasons, reasons, step)


def ranks_of(config: Config, world_size: int) -> Iterator[tuple[int, str]]:
    """(rank, stage) of each kind; of a ring, a rank that has the most to do.

    A contiguous ring's last rank sees the most keys. A zigzag ring's first has the beginning of the sequence: under a
    window fewer pairs than the others. Its queries meet keys of all ranks, so that with FPDT it is the slowest, but
    none of its early chunks wait for others' keys, and its host holds less than its neighbour's.
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
    kinds = {0: "first"}
    if stages > 2:  # where the ends are shorter, the second is the fullest: it has the most micro-batches of those
        kinds[1 if len(set(stage_layers(config))) > 1 else stages // 2] = "middle"
    if stages > 1:
        kinds[stages - 1] = "last"
    for stage, name in kinds.items():
        yield stage * stride + inside, name
    if zigzag and config.chunks.fpdt and not inside:
        yield neighbour, "first"  # which has the most micro-batches in flight


def layer_counts(config: Config) -> list[int | None]:
    """Layers of a stage to run: all of them (None), or two numbers that stand for all."""
    layers, few = _layers(config), [_unit(config) * n for n in FEW]
    return [None] if layers <= sum(few) or config.attention.recompute_method == "block" else few


Job = tuple[Config, int, int, int, Machine | None, bool]
Done = tuple[Figures, tuple[int, int], Profile, Replay | None, Stretch | None, Allocations]


def _do(jobs: list[Job], workers: int) -> list[Done]:
    workers = min(workers, len(jobs))
    if workers == 1:
        return [run_job(job) for job in jobs]
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        return list(pool.map(run_job, jobs[::-1]))[::-1]  # the long ones first


def run_job(job: Job) -> Done:
    """Figures of a rank's step; its micro-batches, and those that ran; memory and time of what ran; which micro-batches
    stand for the rest; allocations of what ran."""
    config, world_size, rank, vocab_size, machine, every_micro_batch = job
    batches = micro_batches(config, data_parallel_size(config, world_size))
    stage = rank * config.parallel.pipeline_model_parallel_size // world_size
    stretch = None if every_micro_batch else stretch_of(config, stage, batches)
    simulated = machine if machine is not None and machine.is_gpu else None  # a CPU runs what this program runs there
    how = {"machine": simulated, "fp8": held_by(config.model, machine) if config.model.fp8_format else None}
    done, every_chunk = None, False
    while done is None:
        try:
            done = run_rank(config, world_size, rank, vocab_size, stretch=stretch, every_chunk=every_chunk, **how)
        except Unsteady:
            stretch = None
        except Unlike:
            every_chunk = True
    replayed = replay(done.trace, machine) if machine else None
    whole = replay(done.trace, machine, keep_spans=False, repeat=done.repeat) if machine and stretch else replayed
    ran = stretch.micro_batches if stretch else batches
    return figures(done, whole), (batches, ran), done.profile, replayed, stretch, done.allocations


def with_layers(config: Config, layers: int) -> Config:
    """The same run with stages of so many layers."""
    config = deepcopy(config)
    parallel = config.parallel
    config.model.num_layers = layers * parallel.pipeline_model_parallel_size
    if parallel.num_virtual_stages_per_pipeline_rank:
        parallel.num_layers_per_virtual_pipeline_stage = layers // parallel.num_virtual_stages_per_pipeline_rank
    return config


def _layers(config: Config) -> int:
    return config.model.num_layers // config.parallel.pipeline_model_parallel_size


def _unit(config: Config) -> int:
    """Layers that repeat: of a recomputed unit, on every virtual stage."""
    attention = config.attention
    unit = attention.recompute_num_layers if attention.recompute_granularity == "full" else 1
    return (unit or 1) * (config.parallel.num_virtual_stages_per_pipeline_rank or 1)


def too_full(config: Config, reports: list[RankReport], world_size: int, machine: Machine) -> Iterator[str]:
    """Why a step does not fit. With a GPU's allocator replayed, the better of its settings decides."""
    gib = 2**30
    for report in reports:
        device, host = report.figures.device_peak, report.figures.host_peak * min(machine.gpus, world_size)
        needed = needed_by_setting(report.reserved.bytes, config, world_size, machine)
        if needed and min(needed.values()) > machine.memory:
            yield (
                f"rank {report.rank} needs {min(needed.values()) / gib:,.1f} GiB of device memory: {device / gib:,.1f} "
                f"allocated, what PyTorch's allocator reserves besides, context and NCCL; {machine.name} has "
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
