# SPDX-License-Identifier: Apache-2.0
"""Merge a predicted step and the measured one into one trace in which both begin at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from tools.profiled_trace import last_step
from tools.trace_alignment import Json

FIRST = 1_000_000  # process ids of measured ranks begin here
EACH = 1000  # process ids per rank


def merged(dry: Json, real: list[tuple[int, Json]]) -> Json:
    """One trace with both, each rank's measured step below its predicted one; earlier steps are left out."""
    arrows = [event["id"] for event in dry["traceEvents"] if event.get("ph") in ("s", "f")]
    numbers = count(1 + max((arrow for arrow in arrows if isinstance(arrow, int)), default=0))
    events = [_sorted(event) for event in dry["traceEvents"]]
    for rank, trace in real:
        events += _moved(trace, rank, _first_forward(dry, rank), numbers)
    return {"displayTimeUnit": "ms", "otherData": dry.get("otherData", {}), "traceEvents": events}


def _sorted(event: Json) -> Json:
    """Multiply sort indices, so that measured ranks fit between predicted ones."""
    if event.get("name") != "process_sort_index" or not isinstance(event.get("args", {}).get("sort_index"), int):
        return event
    return {**event, "args": {"sort_index": EACH * event["args"]["sort_index"]}}


def _first_forward(dry: Json, rank: int) -> float:
    """When a rank's first phase is predicted to begin."""
    marks = [
        event["ts"]
        for event in dry["traceEvents"]
        if event.get("ph") == "X" and event.get("pid") == rank and event["cat"] == "phase" and event["name"] != "start"
    ]
    return min(marks, default=0.0)


def _moved(trace: Json, rank: int, zero: float, numbers: Iterator[int]) -> Iterator[Json]:
    """The events of the compared step and all later ones, moved so that the step begins at ``zero``.

    The names of processes and threads are included, and the arrows whose two ends are among these events.
    """
    timed = [event for event in trace["traceEvents"] if "ts" in event and event.get("ph") != "M"]
    begin = last_step(trace)[0]
    if begin == float("-inf"):
        begin = min((event["ts"] for event in timed), default=0.0)
    kept = [event for event in timed if event["ts"] + event.get("dur", 0.0) >= begin]
    kept = [event for event in kept if event.get("ph") == "X" or event["ts"] >= begin]
    arrows = {end: {_arrow(event) for event in kept if event.get("ph") == end} for end in ("s", "f")}
    complete = dict(zip(sorted(arrows["s"] & arrows["f"], key=str), numbers))
    shown = {event.get("pid") for event in kept}
    home = next((event.get("pid") for event in kept if event.get("cat") == "cpu_op"), None)
    others = sorted((pid for pid in shown if pid != home), key=str)
    processes = {pid: FIRST + EACH * rank + at for at, pid in enumerate([home, *others])}
    for pid, process in processes.items():
        name = f"rank {rank}, measured" + ("" if pid == home else f": {_label(trace, pid)}")
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        place = {"sort_index": EACH * rank + 1 + process % EACH}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": place}
    for event in trace["traceEvents"]:
        ours = event.get("ph") == "M" and event["name"] not in ("process_name", "process_sort_index", "process_labels")
        if ours and event.get("pid") in processes:
            yield {key: value for key, value in event.items() if key != "ts"} | {"pid": processes[event["pid"]]}
    for event in kept:
        cut = max(0.0, begin - event["ts"])  # an event that began before the step is cut where the step begins
        moved = {**event, "pid": processes[event.get("pid")], "ts": round(event["ts"] + cut - begin + zero, 3)}
        if cut:
            moved["dur"] = round(event.get("dur", 0.0) - cut, 3)
        if event.get("ph") in ("s", "t", "f"):
            if _arrow(event) not in complete:
                continue
            moved["id"] = complete[_arrow(event)]
        yield moved


def _arrow(event: Json) -> tuple[object, object]:
    return event.get("cat"), event.get("id")


def _label(trace: Json, pid: object) -> str:
    """The profiler's name of a process, such as GPU 0, or its number."""
    labels = [
        (event.get("args") or {}).get("labels", "")
        for event in trace["traceEvents"]
        if event.get("ph") == "M" and event["name"] == "process_labels" and event.get("pid") == pid
    ]
    return next(filter(None, labels), str(pid))
