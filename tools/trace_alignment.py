# SPDX-License-Identifier: Apache-2.0
"""Compare two traces of a step in the Trace Event Format: which operations are in both, in the same order, and their
times. One trace is a dry run's, the other torch.profiler's of a real run."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.training.json_file import parse_json, read_most
from megatron.training.refusal import one_line, reason

Json = dict[str, Any]
MOST_BYTES = 1 << 30  # of a decompressed trace
PHASES = ("forward", "backward", "optimizer")
MOST_EDITS = 3000  # limit of the differences between two sequences that are aligned
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p", "broadcast")  # of collectives


class NoTrace(ValueError):
    """A file is not a trace, or has nothing to compare."""


@dataclass(frozen=True)
class Operation:
    """An operation of a rank; times in microseconds from the trace's zero.

    Attributes:
        begin: of its first kernel on the GPU, or of its call without a GPU.
        took: of all its kernels, or of its call.
    """

    name: str
    kind: str
    phase: str
    begin: float
    took: float


def read(path: Path) -> Json:
    """Read and check a trace; it may be compressed by gzip. Raises NoTrace."""
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            data = read_most(gzip.GzipFile(fileobj=file) if packed else file, MOST_BYTES)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise NoTrace(f"{path}: cannot be read: {reason(error)}") from None
    try:
        trace = parse_json(data)
    except ValueError as error:
        what = f"not JSON ({one_line(error, 100)})"
        raise NoTrace(f"{path}: {what}: give a trace of a dry run or of torch.profiler") from None
    trace = {"traceEvents": trace} if isinstance(trace, list) else trace
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise NoTrace(f"{path}: has no traceEvents: give a trace of a dry run or of torch.profiler")
    if not all(_is_event(event) for event in trace["traceEvents"]) or not isinstance(trace.get("otherData", {}), dict):
        raise NoTrace(f"{path}: has invalid events: give a trace of a dry run or of torch.profiler")
    return trace


def _is_event(event: Any) -> bool:
    """Whether an event has the fields that its phase requires, with the right types."""
    if not isinstance(event, dict) or not isinstance(event.get("ph", ""), str):
        return False
    phase, args = event.get("ph"), event.get("args", {})
    if not isinstance(args, dict):
        return False
    required = {"X": ("name", "cat", "ts"), "M": ("name",), **dict.fromkeys("stf", ("cat", "id", "ts"))}.get(phase, ())
    numbers = [event[name] for name in ("ts", "dur") if name in event]
    plain = [event.get(name) for name in ("pid", "tid", "id")]
    plain += [args.get(name) for name in ("correlation", "External id")]
    return (
        all(name in event for name in required)
        and all(isinstance(event.get(name, ""), str) for name in ("name", "cat"))
        and all(isinstance(number, int | float) and abs(number) < 1e18 for number in numbers)
        and all(isinstance(value, int | float | str | None) for value in plain)
    )


def is_predicted(trace: Json) -> bool:
    return bool(trace.get("otherData", {}).get("simulated"))


def predicted(trace: Json, rank: int) -> list[Operation]:
    """A rank's operations in a dry run's trace, in the order of the file, which is the program's.

    Raises:
        NoTrace: the rank is not in the trace.
    """
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("pid") == rank]
    if not spans:
        ranks = sorted({str(event.get("pid")) for event in trace["traceEvents"] if event.get("ph") == "X"})
        raise NoTrace(f"rank {rank} is not in the dry run's trace, which has {', '.join(ranks[:20])}")
    marks = sorted(
        (event["ts"], event["name"]) for event in spans if event["cat"] == "phase" and event["name"] in PHASES
    )
    operations = []
    for event in spans:
        if event["cat"] not in ("phase", "wait"):
            kind = event["cat"] if event["cat"] in ("gemm", "attention", "memory") else event["name"]
            phase, took = phase_at(marks, event["ts"]), event.get("dur", 0.0)
            operations.append(Operation(event["name"], kind, phase, event["ts"], took))
    return operations


def phase_at(marks: list[tuple[float, str]], when: float) -> str:
    """The phase at a time, from sorted (begin, name); before the first begin, the first phase."""
    name = ""
    for begin, phase in marks:
        if begin > when + 1e-6:
            break
        name = phase
    return name or (marks[0][1] if marks else "step")


def aligned(ours: list[str], theirs: list[str]) -> list[tuple[int, int]] | None:
    """Index pairs of the longest common subsequence; None if the sequences differ in more than MOST_EDITS elements.

    E. W. Myers, An O(ND) Difference Algorithm and Its Variations, Algorithmica 1, 1986.
    """
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
                return _backtracked(trail, n, m)
    return None


def _backtracked(trail: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
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
    """Two sequences of a rank's operations, predicted and measured.

    Attributes:
        pairs: indices of operations that are in both, in the same order; None if the sequences differ too much.
    """

    ours: list[Operation]
    theirs: list[Operation]
    pairs: list[tuple[int, int]] | None

    @property
    def share(self) -> float:
        """The share of the predicted operations that were measured in the same order."""
        return len(self.pairs or ()) / max(len(self.ours), 1)

    def rows(self) -> list[Json]:
        """Calls and milliseconds in both, by phase and kind."""
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

    def differences(self) -> list[tuple[str, int]]:
        """(name, predicted minus measured calls) of operations that are not called equally often."""
        ours, theirs = (Counter(x.name for x in operations) for operations in (self.ours, self.theirs))
        differing = ((name, ours[name] - theirs[name]) for name in {*ours, *theirs})
        return sorted((pair for pair in differing if pair[1]), key=lambda pair: (-abs(pair[1]), pair[0]))


def compare(ours: list[Operation], theirs: list[Operation]) -> Comparison:
    return Comparison(ours, theirs, aligned([x.name for x in ours], [x.name for x in theirs]))
