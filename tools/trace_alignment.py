# SPDX-License-Identifier: Apache-2.0
"""Two traces of a step in the Trace Event Format, operation by operation: what is in both, in the same order, and how
long it took in each. One is a dry run's, the other torch.profiler's of a real run."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
PHASES = ("forward", "backward", "optimizer")
MOST_EDITS = 3000  # of two sequences that are laid beside each other
# What a collective is called, by how its operation in c10d, its range of gloo's or its kernel of NCCL's begins.
COLLECTIVES = (
    (r"(c10d::|gloo:|nccl:|nccldevkernel_|ncclkernel_)_?(all_?gather)", "all_gather"),
    (r"(c10d::|gloo:|nccl:|nccldevkernel_|ncclkernel_)_?(reduce_?scatter)", "reduce_scatter"),
    (r"(c10d::|gloo:|nccl:|nccldevkernel_|ncclkernel_)_?(all_?reduce|reduce_)", "all_reduce"),
    (r"(c10d::|gloo:|nccl:)_?(all_?to_?all)", "all_to_all"),
    (r"(c10d::|gloo:|nccl:|nccldevkernel_|ncclkernel_)_?(send|sendrecv)", "p2p"),
    (r"(c10d::|gloo:|nccl:|nccldevkernel_|ncclkernel_)_?(broadcast)", "broadcast"),
)
KINDS = tuple(name for _, name in COLLECTIVES)


class NoTrace(ValueError):
    """A file is no trace, or there is nothing in it to compare."""


@dataclass(frozen=True)
class Operation:
    """Something that a rank did; microseconds, from the trace's own zero."""

    name: str
    kind: str
    phase: str
    begin: float
    took: float


def read(path: Path) -> Json:
    """
    Raises:
        NoTrace: the file cannot be read as a trace.
    """
    try:
        data = path.read_bytes()
        trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as error:
        raise NoTrace(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise NoTrace(f"{path}: not JSON: give a trace of a dry run or of torch.profiler") from None
    trace = {"traceEvents": trace} if isinstance(trace, list) else trace
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise NoTrace(f"{path}: has no traceEvents: give a trace of a dry run or of torch.profiler")
    return trace


def is_predicted(trace: Json) -> bool:
    return bool((trace.get("otherData") or {}).get("simulated"))


def predicted(trace: Json, rank: int) -> list[Operation]:
    """What a dry run says of a rank, in the order of its streams' times.

    Raises:
        NoTrace: the rank is not in it.
    """
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("pid") == rank]
    if not spans:
        there = sorted({event["pid"] for event in trace["traceEvents"] if event.get("ph") == "X"})
        raise NoTrace(f"rank {rank} is not in the dry run's trace, which has {', '.join(map(str, there))}")
    marks = sorted((event["ts"], event["name"]) for event in spans if event["cat"] == "phase")
    found = []
    for event in spans:
        if event["cat"] != "phase":
            kind = event["cat"] if event["cat"] in ("gemm", "attention", "memory") else event["name"]
            found.append(Operation(event["name"], kind, _phase(marks, event["ts"]), event["ts"], event["dur"]))
    return sorted(found, key=lambda operation: operation.begin)


def measured(trace: Json, known: dict[str, str]) -> list[Operation]:
    """What torch.profiler saw, in the order of time: of calls within calls the outermost that is in ``known``.

    An operation takes the time of its kernels where a GPU ran, else its own. The last step counts of several.

    Args:
        known: kind by name, of the operations to look for.
    """
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = sorted(
        (event["ts"], event["name"])
        for event in spans
        if event.get("cat") in ("user_annotation", "cpu_op") and event["name"] in PHASES
    )
    steps = _steps(marks)
    begin, end = steps[-1] if steps else (float("-inf"), float("inf"))
    kernels: dict[Any, float] = defaultdict(float)
    on_gpu = [event for event in spans if event.get("cat") == "kernel"]
    for event in on_gpu:
        kernels[(event.get("args") or {}).get("External id")] += event.get("dur", 0.0)
    found = []
    for event in spans:
        name = collective(event["name"])
        if name and begin <= event["ts"] < end and event.get("cat") == ("kernel" if on_gpu else "cpu_op"):
            found.append(Operation(name, name, _phase(marks, event["ts"]), event["ts"], event.get("dur", 0.0)))
    threads = defaultdict(list)
    for event in spans:
        if event.get("cat") == "cpu_op" and begin <= event["ts"] < end:
            threads[event.get("tid")].append(event)
    for events in threads.values():
        for event, inside in _outermost(events, known):
            if event["name"] not in known:
                continue  # a collective, which is there already
            took = event.get("dur", 0.0)
            if on_gpu:
                took = sum(kernels.get((one.get("args") or {}).get("External id"), 0.0) for one in (event, *inside))
            kind = known[event["name"]]
            found.append(Operation(event["name"], kind, _phase(marks, event["ts"]), event["ts"], took))
    if not found:
        raise NoTrace("none of the dry run's operations is in the profiler's trace: is it of the same model?")
    return sorted(found, key=lambda operation: operation.begin)


def collective(name: str) -> str | None:
    """The kind of a collective's operation; None for anything else. A message is its sender's."""
    return next((kind for pattern, kind in COLLECTIVES if re.match(pattern, name.lower())), None)


def _steps(marks: list[tuple[float, str]]) -> list[tuple[float, float]]:
    """(begin, end) of each step: from the first phase after an optimizer to that of the next."""
    begins = [
        when
        for at, (when, name) in enumerate(marks)
        if name != "optimizer" and (not at or marks[at - 1][1] == "optimizer")
    ]
    return list(zip(begins, [*begins[1:], float("inf")]))


def _outermost(events: list[Json], known: dict[str, str]) -> Iterator[tuple[Json, list[Json]]]:
    """(event, those within it), of the known ones that are in no other."""
    taken: Json | None = None
    inside: list[Json] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0.0))):
        if taken is not None and event["ts"] < taken["ts"] + taken.get("dur", 0.0):
            inside.append(event)
            continue
        if taken is not None:
            yield taken, inside
            taken, inside = None, []
        if event["name"] in known or collective(event["name"]):  # whose own copies are its own
            taken, inside = event, []
    if taken is not None:
        yield taken, inside


def _phase(marks: list[tuple[float, str]], when: float) -> str:
    name = ""
    for begin, phase in marks:
        if begin > when + 1e-6:
            break
        name = phase
    return name or (marks[0][1] if marks else "step")


def aligned(ours: list[str], theirs: list[str]) -> list[tuple[int, int]] | None:
    """Places of the longest common subsequence (E. W. Myers, An O(ND) difference algorithm, Algorithmica 1, 1986); None
    where more than MOST_EDITS operations are in one alone."""
    n, m = len(ours), len(theirs)
    reach, trail = {1: 0}, []
    for edits in range(min(n + m, MOST_EDITS) + 1):
        trail.append(dict(reach))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reach[k - 1] < reach[k + 1])
            x = reach[k + 1] if down else reach[k - 1] + 1
            while x < n and x - k < m and ours[x] == theirs[x - k]:
                x += 1
            reach[k] = x
            if x >= n and x - k >= m:
                return _walked_back(trail, n, m)
    return None


def _walked_back(trail: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs = []
    for edits in range(len(trail) - 1, -1, -1):
        reach, k = trail[edits], x - y
        down = k == -edits or (k != edits and reach[k - 1] < reach[k + 1])
        before = k + 1 if down else k - 1
        px = reach[before]
        py = px - before
        while x > max(px, 0) and y > max(py, 0) and (x, y) != (px + (not down), py + down):
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = px, py
    return pairs[::-1]


@dataclass(frozen=True)
class Comparison:
    """Two sequences of a rank's operations, and the pairs of places where they agree.

    Attributes:
        pairs: None where the sequences differ too much to be laid beside each other.
    """

    ours: list[Operation]
    theirs: list[Operation]
    pairs: list[tuple[int, int]] | None

    @property
    def share(self) -> float:
        """Of what was predicted, what was measured in the same order."""
        return len(self.pairs or ()) / max(len(self.ours), 1)

    def rows(self) -> list[Json]:
        """By phase and kind: calls and milliseconds in each."""
        sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
        for at, operations in enumerate((self.ours, self.theirs)):
            for operation in operations:
                row = sums[operation.phase, operation.kind]
                row[at] += 1
                row[2 + at] += operation.took / 1e3
        order = {name: at for at, name in enumerate(PHASES)}
        names = ("calls_predicted", "calls_measured", "ms_predicted", "ms_measured")
        return [
            {"phase": phase, "kind": kind, **dict(zip(names, row))}
            for (phase, kind), row in sorted(sums.items(), key=lambda item: (order.get(item[0][0], 9), item[0][1]))
        ]

    def alone(self) -> list[tuple[str, int]]:
        """(name, calls predicted less calls measured) of what is not called equally often."""
        ours, theirs = (Counter(x.name for x in operations) for operations in (self.ours, self.theirs))
        differing = ((name, ours[name] - theirs[name]) for name in {*ours, *theirs})
        return sorted((pair for pair in differing if pair[1]), key=lambda pair: (-abs(pair[1]), pair[0]))


def compare(ours: list[Operation], theirs: list[Operation]) -> Comparison:
    return Comparison(ours, theirs, aligned([x.name for x in ours], [x.name for x in theirs]))


def merged(dry: Json, real: list[tuple[int, Json]]) -> Json:
    """One file with both, each rank's real events below its predicted ones, all from zero on."""
    events = list(dry["traceEvents"])
    for rank, trace in real:
        spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        zero = min(event["ts"] for event in spans)
        process = 1_000_000 + rank
        name = {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": f"rank {rank}, measured"}}
        events += [name, *({**event, "pid": process, "ts": event["ts"] - zero} for event in spans)]
    return {"displayTimeUnit": "ms", "traceEvents": events}
