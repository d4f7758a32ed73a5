# SPDX-License-Identifier: Apache-2.0
"""Read the operations of a step from torch.profiler's trace, for comparison with those of a dry run.

On a GPU an operation has a call on the CPU, which gives its name and its place in the program's order, and kernels,
which give its time. NCCL uses the same kernel for all_to_all, send and receive, so only the call distinguishes them.
Kineto links the two: a kernel has the ``correlation`` of the launch (cuda_runtime, cuda_driver) within the call, and in
newer traces the call's ``External id``.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator

from tools.trace_alignment import PHASES, Json, NoTrace, Operation, phase_at

# The kinds of collectives, by the beginning of the name of the operation in c10d, gloo's range, or "Collective name".
COLLECTIVES = (
    (r"(c10d::|gloo:)_?all_?gather", "all_gather"),
    (r"(c10d::|gloo:)_?reduce_?scatter", "reduce_scatter"),
    (r"(c10d::|gloo:)_?(all_?reduce|reduce(_|$))", "all_reduce"),
    (r"(c10d::|gloo:)_?all_?to_?all", "all_to_all"),
    (r"(c10d::|gloo:)_?send", "p2p"),
    (r"(c10d::|gloo:)_?broadcast", "broadcast"),
)
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
Thread = tuple[object, object]


def measured(trace: Json, known: dict[str, str]) -> list[Operation]:
    """The last step's operations in the order of the program's calls; of nested calls, the outermost one that counts.

    A call counts if its name is in ``known`` or it is a collective.

    Args:
        known: kind by name, of the operations to look for.

    Raises:
        NoTrace: the trace has none of these operations.
    """
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    begin, end = last_step(trace)
    marks, device = _marks(spans), Device(spans)
    threads = defaultdict(list)
    for event in spans:
        if event.get("cat") == "cpu_op" and begin <= event["ts"] < end:
            threads[thread_of(event)].append(event)
    calls: list[tuple[Json, str, list[Json]]] = []  # call, kind, kernels
    for thread, events in threads.items():
        for event, inside in _outermost(events, known):
            calls.append((event, collective(event) or known[event["name"]], device.kernels_of(thread, event, inside)))
    calls.sort(key=lambda call: call[0]["ts"])
    if device:
        device.give_coalesced([call for call in calls if collective(call[0])], begin, end)
    operations = []
    for event, kind, kernels in calls:
        name = kind if collective(event) else event["name"]
        when = min((kernel["ts"] for kernel in kernels), default=event["ts"])
        took = sum(kernel.get("dur", 0.0) for kernel in kernels) if device else event.get("dur", 0.0)
        operations.append(Operation(name, kind, phase_at(marks, event["ts"]), when, took))
    if not operations:
        raise NoTrace("none of the dry run's operations is in the profiler's trace: is it of the same model?")
    return operations


def thread_of(event: Json) -> Thread:
    return event.get("pid"), event.get("tid")


def last_step(trace: Json) -> tuple[float, float]:
    """(begin, end) of the last step on the CPU, each at the first phase after an optimizer's.

    A last step without optimizer, in which the profiler was stopped, is used only if there is no other. If the trace
    has no phases, all of it is the step.
    """
    marks = _marks([event for event in trace["traceEvents"] if event.get("ph") == "X"])
    begins = [
        when
        for at, (when, name) in enumerate(marks)
        if name != "optimizer" and (not at or marks[at - 1][1] == "optimizer")
    ]
    if not begins:
        return float("-inf"), float("inf")
    if len(begins) > 1 and marks[-1][1] != "optimizer":
        return begins[-2], begins[-1]
    return begins[-1], float("inf")


def _marks(spans: list[Json]) -> list[tuple[float, str]]:
    return sorted(
        (event["ts"], event["name"])
        for event in spans
        if event.get("cat") in ("user_annotation", "cpu_op") and event["name"] in PHASES
    )


def collective(event: Json) -> str | None:
    """The kind of a collective's call; None for anything else. Of a message only the send counts."""
    name = event["name"]
    if name == "record_param_comms":
        name = f"c10d::{_args(event).get('Collective name', '')}"
    return next((kind for pattern, kind in COLLECTIVES if re.match(pattern, name.lower())), None)


def _args(event: Json) -> Json:
    return event.get("args") or {}


class Device:
    """The kernels that ran on a GPU, by the call that launched them; false if there are none."""

    def __init__(self, spans: list[Json]) -> None:
        self._kernels: dict[object, list[Json]] = defaultdict(list)  # by correlation
        for event in spans:
            if event.get("cat") in ON_GPU:
                self._kernels[_args(event).get("correlation")].append(event)
        self._launches: dict[Thread, list[tuple[float, object]]] = defaultdict(list)  # (when, correlation), in order
        launched = set()
        for event in spans:
            number = _args(event).get("correlation")
            if event.get("cat") in LAUNCHES and number in self._kernels:
                self._launches[thread_of(event)].append((event["ts"], number))
                launched.add(number)
        for launches in self._launches.values():
            launches.sort(key=lambda launch: launch[0])
        self._by_call: dict[object, list[Json]] = defaultdict(list)  # by External id, for traces without launches
        for number, kernels in self._kernels.items():
            for kernel in kernels if number not in launched else ():
                self._by_call[_args(kernel).get("External id")].append(kernel)
        self._given: set[object] = set()

    def __bool__(self) -> bool:
        return bool(self._kernels)

    def kernels_of(self, thread: Thread, call: Json, inside: list[Json]) -> list[Json]:
        """The kernels of a call and of the calls ``inside`` it."""
        launches = self._launches.get(thread, [])
        first = bisect_left(launches, call["ts"], key=lambda launch: launch[0])
        kernels = []
        for when, number in launches[first:]:
            if when > call["ts"] + call.get("dur", 0.0):
                break
            kernels += self._kernels[number]
            self._given.add(number)
        for one in (call, *inside):
            kernels += self._by_call.get(_args(one).get("External id"), [])
        return kernels

    def give_coalesced(self, calls: list[tuple[Json, str, list[Json]]], begin: float, end: float) -> None:
        """Assign the kernels of batched sends and receives to the last call before them.

        Such a batch is launched as one kernel after all of its calls, and within none of them.
        """
        for thread, launches in self._launches.items():
            mine = [call for call in calls if thread_of(call[0]) == thread]
            times = [call[0]["ts"] for call in mine]
            for when, number in launches:
                named = self._kernels[number][0]["name"].lower()
                if number in self._given or not begin <= when < end or not named.startswith("nccl"):
                    continue
                at = bisect_left(times, when) - 1
                if at >= 0 and not mine[at][2]:
                    mine[at][2].extend(self._kernels[number])


def _outermost(events: list[Json], known: dict[str, str]) -> Iterator[tuple[Json, list[Json]]]:
    """(event, events inside it) for known events and collectives that are not inside another one."""
    outer: Json | None = None
    inside: list[Json] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0.0))):
        if outer is not None and event["ts"] < outer["ts"] + outer.get("dur", 0.0):
            inside.append(event)
            continue
        if outer is not None:
            yield outer, inside
            outer, inside = None, []
        if event["name"] in known or collective(event):
            outer, inside = event, []
    if outer is not None:
        yield outer, inside
