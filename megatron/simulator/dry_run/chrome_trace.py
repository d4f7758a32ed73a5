# SPDX-License-Identifier: Apache-2.0
"""The predicted step as a file that chrome://tracing and https://ui.perfetto.dev open: all ranks, all streams.

Google's Trace Event Format, as torch.profiler writes it: a process is a rank, a thread is a stream. A kernel has the
name that torch.profiler gives it (``aten::mm``), a phase that of the range which a real run makes around it (forward,
backward, optimizer): tools/compare_trace.py lays one beside the other.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.simulator.dry_run.dry_run import DryRun, RankReport
from megatron.simulator.dry_run.replay import HOST, Replay
from megatron.simulator.dry_run.timeline import lanes

MOST_RANKS = 64  # of more, those that were simulated stand alone
PHASES = "phases"
Event = dict[str, Any]


def write_trace(result: DryRun, path: str | Path) -> None:
    """Writes ``path``, compressed where it ends in .gz.

    Raises:
        OSError: it cannot be written.
    """
    events = [event for report, rank in copies(result) for event in rank_events(result, report, rank)]
    whole = {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {"simulated": True, "ranks": len(result.ranks)},
    }
    text = json.dumps(whole, separators=(",", ":"))
    if str(path).endswith(".gz"):
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
            file.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def copies(result: DryRun) -> Iterator[tuple[RankReport, int]]:
    """(report, rank) of all ranks: those of a pipeline stage are alike, and so are the stages in the middle."""
    if result.world_size > MOST_RANKS:
        yield from ((report, report.rank) for report in result.ranks)
        return
    stages = result.config.parallel.pipeline_model_parallel_size
    kinds = {report.stage: report for report in result.ranks}
    for rank in range(result.world_size):
        stage = rank * stages // result.world_size
        name = "first" if stage == 0 else "last" if stage == stages - 1 else "middle"
        yield kinds[name], rank


def rank_events(result: DryRun, report: RankReport, rank: int) -> Iterator[Event]:
    """Of one rank; times in microseconds. A later pipeline stage begins when its first micro-batch can be there."""
    replayed = report.replayed
    if replayed is None:
        return
    stages = result.config.parallel.pipeline_model_parallel_size
    stage = rank * stages // result.world_size
    begin = stage * first_forward(replayed)
    ran = "".join(
        f", {some} of {every} {what}"
        for what, (every, some) in (("layers", report.layers), ("micro-batches", report.micro_batches))
        if some != every
    )
    like = "" if rank == report.rank else f", as rank {report.rank}"
    yield named("process_name", rank, 0, f"rank {rank} ({report.stage} stage{like}{ran}), simulated")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    streams = {name: number for number, name in enumerate([PHASES, *lanes(replayed)])}
    for name, number in streams.items():
        yield named(
            "thread_name", rank, number, name if name in ("compute", PHASES, *HOST.values()) else f"{name} stream"
        )
    ends = [when for _, when in replayed.phases[1:]] + [replayed.seconds]
    for (name, when), end in zip(replayed.phases, ends):
        yield span(name, "phase", rank, streams[PHASES], begin + when, end - when)
    for stream, kind, start, end, name in replayed.spans:
        yield span(profiled(name, kind), kind, rank, streams[stream], begin + start, end - start)


def first_forward(replayed: Replay) -> float:
    """Seconds of a step's first forward pass."""
    times = [when for _, when in replayed.phases[:2]] + [replayed.seconds]
    return times[1] - times[0]


def profiled(name: str, kind: str) -> str:
    """What torch.profiler calls an operation that a trace names."""
    if kind in ("gemm", "attention", "memory") and not name.endswith("_attention") and ":" not in name:
        return f"aten::{name}"
    return name


def span(name: str, kind: str, rank: int, thread: int, begin: float, took: float) -> Event:
    return {
        "ph": "X", "name": name, "cat": kind, "pid": rank, "tid": thread, "ts": round(1e6 * begin, 3),
        "dur": round(1e6 * took, 3),
    }  # fmt: skip


def named(what: str, rank: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}
