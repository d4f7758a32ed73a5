# SPDX-License-Identifier: Apache-2.0
"""A replay as a picture, and a step as a trace file for chrome://tracing.

The picture has a lane for each stream, cut into columns. A colour's height is the share of the column's time that the
stream spends on that kind of work. Long events therefore appear as blocks, short ones show how busy the stream is, and
a million spans are drawn as fast as a hundred.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megatron.simulator.dry_run.dry_run import DryRun, RankReport
from megatron.simulator.dry_run.replay import HOST, Interval, Replay, duration
from megatron.simulator.dry_run.whole_step import Placed, stage_name
from megatron.system.whole_file import save_figure, whole_file
from megatron.training.report.memory_picture import GREY, INK, PHASES, pyplot_for_files

COLUMNS = 1200
COLOURS = {
    "gemm": "#0072b2", "attention": "#e69f00", "memory": "#8a8a8a", "tp": "#009e73", "ulysses": "#56b4e9",
    "ring": "#cc6677", "cp": "#332288", "ep": "#117733", "dp": "#aa4499", "pp": "#999933", "host load": "#d55e00",
    "host store": "#882255",
}  # fmt: skip
OTHER = "#444444"
LANES = ("compute", "tp", "ulysses", "ring", "cp", "ep", "dp", "pp")
NAMES = {"gemm": "matrix products", "memory": "other kernels"}


def lanes(spans: Iterable[Interval]) -> list[str]:
    """The streams of the spans in the order in which they are drawn: compute first, the host last."""
    streams, last = {span.stream for span in spans}, tuple(HOST.values())
    others = sorted(streams - {*LANES, *last})
    return [name for name in (*LANES, *others, *last) if name in streams]


def coverage(begins: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Share of each column between two ``edges`` that spans cover. Spans are in order and do not overlap."""
    if not len(begins):
        return np.zeros(len(edges) - 1)
    lengths = ends - begins
    before = np.concatenate(([0.0], lengths.cumsum()))
    last = np.searchsorted(begins, edges, side="right") - 1  # the span that began last, at each edge
    inside = np.clip(edges - begins[last], 0.0, lengths[last])
    covered = np.where(last >= 0, before[last] + inside, 0.0)
    return np.diff(covered) / np.diff(edges)


def shares(spans: list[Interval], edges: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
    """Share of each column by (stream, kind)."""
    grouped: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for stream, kind, begin, end, _ in spans:
        begins, ends = grouped.setdefault((stream, kind), ([], []))
        begins.append(begin)
        ends.append(end)
    return {key: coverage(np.array(begins), np.array(ends), edges) for key, (begins, ends) in grouped.items()}


def draw(result: Replay, output: str | Path, title: str = "one step") -> None:
    """Write the picture of a replay that has kept its spans.

    Raises:
        ValueError: the replay has no spans, or they take no time.
    """
    if not result.spans or not result.seconds:
        raise ValueError("nothing to draw: the replay has no spans, or none that takes time")
    pyplot = pyplot_for_files()
    scale, unit = (1e3, "ms") if result.seconds < 10 else (1.0, "s")
    edges = np.linspace(0.0, result.seconds, COLUMNS + 1)
    filled, names = shares(result.spans, edges), lanes(result.spans)
    figure = pyplot.figure(figsize=(12, 1.5 + 0.62 * len(names)), dpi=110, layout="constrained")
    axes = figure.subplots()
    for row, name in enumerate(names):
        base = float(len(names) - 1 - row) + np.zeros(COLUMNS)
        axes.axhline(base[0], color=GREY, linewidth=0.5, alpha=0.6)
        for (stream, kind), share in filled.items():
            if stream == name:
                top = base + 0.8 * share
                axes.fill_between(scale * edges, closed(base), closed(top), step="post", lw=0, color=colour(kind))
                base = top
    draw_phases(axes, result, scale, len(names))
    axes.set_yticks([len(names) - 1 - row + 0.4 for row in range(len(names))], [label(name) for name in names])
    axes.set_xlim(0, scale * result.seconds)
    axes.set_ylim(-0.08, len(names) + 0.32)
    axes.set_xlabel(f"time in the step ({unit})", color=INK)
    axes.set_title(f"{title}: {duration(result.seconds)}", fontsize=12, color=INK, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9, length=3)
    axes.tick_params(axis="y", length=0)
    draw_legend(figure, [kind for kind in ("gemm", "attention", "memory") if ("compute", kind) in filled])
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, output)
    pyplot.close(figure)


def colour(kind: str) -> str:
    return COLOURS.get(kind, OTHER)


def label(stream: str) -> str:
    return stream if stream == "compute" or stream in HOST.values() else f"{stream} communication"


def closed(heights: np.ndarray) -> np.ndarray:
    """``heights`` with the last one repeated, for the last edge."""
    return np.append(heights, heights[-1])


def draw_phases(axes: Any, result: Replay, scale: float, top: int) -> None:
    """Draw a strip with the phases above the lanes, with names where there is space."""
    ends = [begin for _, begin in result.phases[1:]] + [result.seconds]
    drawn = [(*phase, end) for phase, end in zip(result.phases, ends) if end - phase[1] > result.seconds / COLUMNS]
    for name, begin, end in drawn:
        shade = PHASES.get(name, "#eeeeee")
        axes.broken_barh([(scale * begin, scale * (end - begin))], (top + 0.02, 0.26), facecolor=shade, edgecolor="w")
        if end - begin > 0.06 * result.seconds:
            middle = scale * (begin + end) / 2
            axes.text(middle, top + 0.14, name, ha="center", va="center", fontsize=9, color=INK)


def draw_legend(figure: Any, kinds: list[str]) -> None:
    """Draw the colours of the kinds of compute below the picture."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour(kind), label=NAMES.get(kind, kind)) for kind in kinds]
    if handles:
        figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=9)


# --- the trace file, for chrome://tracing and https://ui.perfetto.dev ---
#
# It has Google's Trace Event Format, like torch.profiler's files: a process is a rank, a thread is a stream. Kernels
# have the names of torch.profiler (``aten::mm``), phases have those of a real run's ranges (forward, backward,
# optimizer), so that tools/compare_trace.py can compare the two. Arrows are messages between pipeline stages.
#
# The file has all layers and micro-batches of all stages (whole_step.py). If that is too much for a browser, it has one
# rank per stage and no details of passes in the middle of the step, which ``otherData`` and the processes' names state.

MOST_EVENTS = 400_000  # events within passes, of all ranks; about 50 MB of text
PHASE_LANE = "phases"
BUBBLE = "bubble"
Event = dict[str, Any]


def write_trace(result: DryRun, path: str | Path, most: int = MOST_EVENTS) -> None:
    """Write ``path``, compressed if it ends in .gz, with at most ``most`` kernels, transfers and copies.

    Raises:
        OSError: the file cannot be written.
    """
    ranks, detailed = shown(result, most)
    about = metadata(result, ranks, detailed)
    with whole_file(path) as raw:
        stream = gzip.open(raw, "wb", compresslevel=5) if str(path).endswith(".gz") else raw
        with io.TextIOWrapper(stream, encoding="utf-8") as file:
            _write(file, about, (event for rank in ranks for event in rank_events(result, rank, detailed)))


def _write(file: TextIO, about: Event, events: Iterator[Event]) -> None:
    file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[')
    for at, event in enumerate(events):
        file.write((",\n" if at else "\n") + json.dumps(event, separators=(",", ":")))
    file.write("\n]}\n")


def shown(result: DryRun, most: int) -> tuple[list[int], int]:
    """(ranks in the trace, number of a rank's first passes, and of its last ones, that have details).

    All ranks of a stage are the same, so the trace is first reduced to one rank per stage, then details are left out.
    """
    stages, world = len(result.step.stages), result.world_size
    sizes = [[len(placed.phase.spans) for placed in row] for row in result.step.stages]
    if sum(map(sum, sizes)) * (world // stages) <= most:
        return list(range(world)), max(map(len, sizes))
    ranks = [_simulated(result, stage) for stage in range(stages)]
    if sum(map(sum, sizes)) <= most:
        return ranks, max(map(len, sizes))
    # Details of the first and the last passes of every stage, as many as allowed.
    longest = max(map(len, sizes))
    outer = [sum(row[at] + row[-1 - at] for row in sizes if at < len(row) - at) for at in range(longest)]
    return ranks, sum(total <= most for total in accumulate(outer))


def _simulated(result: DryRun, stage: int) -> int:
    """The stage's rank that ran or, for other middle stages, the rank at the same place in the stage."""
    stride = result.world_size // len(result.step.stages)
    return stage * stride + _report(result, stage).rank % stride


def _report(result: DryRun, stage: int) -> RankReport:
    name = stage_name(stage, len(result.step.stages))
    return next(report for report in result.ranks if report.stage == name)


def metadata(result: DryRun, ranks: list[int], detailed: int) -> Event:
    """The file's ``otherData``: what it contains and what is left out."""
    longest = max(map(len, result.step.stages))
    return {
        "simulated": True,
        "ranks": len(ranks),
        "world_size": result.world_size,
        "predicted_ms": 1e3 * result.predicted_seconds,
        "layers_of_a_stage": {report.stage: report.layers[0] for report in result.ranks},
        "layers_run": {report.stage: report.layers[1] for report in result.ranks},
        "micro_batches": result.ranks[0].micro_batches[0],
        "micro_batches_run": {report.stage: report.micro_batches[1] for report in result.ranks},
        "left_out": [
            *(["ranks that do the same as another rank of their stage"] if len(ranks) < result.world_size else []),
            *(
                [f"the contents of passes {detailed + 1} to {longest - detailed} of a rank"]
                if 2 * detailed < longest
                else []
            ),
        ],
    }


def rank_events(result: DryRun, rank: int, detailed: int) -> Iterator[Event]:
    """Events of one rank in program order; times in microseconds."""
    stages = len(result.step.stages)
    stage = rank * stages // result.world_size
    row, report = result.step.stages[stage], _report(result, stage)
    inside = [*row[:detailed], *row[max(detailed, len(row) - detailed) :]]
    like = "" if rank == report.rank else f", as rank {report.rank}"
    less = f", {len(inside)} of {len(row)} passes in detail" if len(inside) < len(row) else ""
    yield named("process_name", rank, 0, f"rank {rank} ({report.stage} stage{like}{less}), simulated")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    drawn = lanes(span for placed in inside for span in placed.phase.spans)
    streams = {name: number for number, name in enumerate([PHASE_LANE, *drawn])}
    for name, number in streams.items():
        label = name if name in ("compute", PHASE_LANE, *HOST.values()) else f"{name} stream"
        yield named("thread_name", rank, number, label)
    detailed_ids, free, end = set(map(id, inside)), dict.fromkeys(streams, 0.0), 0.0
    for placed in row:
        if stages > 1 and placed.begin - end > 1e-9:
            yield span(BUBBLE, "wait", rank, streams[PHASE_LANE], end, placed.begin - end)
        end = placed.begin + placed.phase.seconds
        if placed.slot is not None or placed.phase.seconds:
            yield {
                **span(placed.phase.name, "phase", rank, streams[PHASE_LANE], placed.begin, placed.phase.seconds),
                **_slot(placed),
            }
        if id(placed) in detailed_ids:
            for stream, kind, begin, stop, name in placed.phase.spans:
                begin, stop = placed.begin + begin, placed.begin + stop
                late = 0.0 if stream == "compute" else max(0.0, free[stream] - begin)
                free[stream] = stop + late
                yield span(profiled(name, kind), kind, rank, streams[stream], begin + late, stop - begin)
        yield from arrows(result, rank, stage, placed)


def _slot(placed: Placed) -> Event:
    return {} if placed.slot is None else {"args": {"micro-batch": placed.slot.micro_batch, "chunk": placed.slot.chunk}}


def arrows(result: DryRun, rank: int, stage: int, placed: Placed) -> Iterator[Event]:
    """Ends of message arrows at a pass: to the pass that waits for it, and from the pass that it waits for."""
    if placed.slot is None:
        return
    stages, slot = len(result.step.stages), placed.slot
    last = stages * max(1, 1 + max(x.slot.chunk for x in result.step.stages[0] if x.slot is not None)) - 1
    place, step = slot.chunk * stages + stage, -1 if slot.backward else 1
    ends = (
        ("s", place, place + step, placed.begin + min(placed.phase.sent, 0.9999 * placed.phase.seconds)),
        ("f", place - step, place, placed.begin),
    )
    for phase, source, target, when in ends:
        if 0 <= min(source, target) and max(source, target) <= last:
            inside = rank % (result.world_size // stages)
            number = ((slot.micro_batch * (last + 1) + source) * 2 + slot.backward) * result.world_size + inside
            event = {"ph": phase, "name": "message", "cat": "pp", "id": number, "pid": rank, "tid": 0}
            yield {**event, "ts": round(1e6 * when, 3), **({"bp": "e"} if phase == "f" else {})}


def profiled(name: str, kind: str) -> str:
    """torch.profiler's name of an operation."""
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
