# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's allocator reserves in a whole step: its list of allocations, continued to all layers and micro-batches
(continued.py), goes through the model of the allocator (allocator.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megatron.simulator.dry_run.allocator import OutOfMemory, replayed
from megatron.simulator.dry_run.allocator_settings import Settings, from_environment
from megatron.simulator.dry_run.continued import Changes, NoPattern, added, continued, lifetimes
from megatron.simulator.dry_run.pool import MIB

MOST = 60_000  # changes of repeated micro-batches; more of them reserve what these do
LONGEST = 2_500_000  # changes of layers that did not run; what more of them hold is one block, without gaps
CHEAP = 20_000  # changes of the layers that did not run: below, they are run where the list cannot be continued
WORKSPACE, BEYOND = -1, -2  # numbers of the blocks that are cuBLAS' workspace, and layers beyond LONGEST


@dataclass(frozen=True)
class Allocations:
    """(block, change of its bytes) of what ran; of these, the changes ``begin`` to ``end`` happen ``times`` more."""

    changes: Changes
    begin: int = 0
    end: int = 0
    times: int = 0


@dataclass(frozen=True)
class Reserved:
    """
    Attributes:
        bytes: most that is reserved, by setting; more than there is where that is not enough.
        retries: how often everything cached was given back meanwhile, by setting; None: it was not enough.
        scaled: what was multiplied, where the list could not be continued; empty: all was replayed.
        notes: what PYTORCH_ALLOC_CONF says and is not modelled, and which layers were not replayed.
    """

    bytes: dict[str, float] = field(default_factory=dict)
    retries: dict[str, int | None] = field(default_factory=dict)
    scaled: str = ""
    notes: tuple[str, ...] = ()


def settings() -> tuple[dict[str, Settings], tuple[str, ...]]:
    """Of the allocator, by name: PyTorch's own, expandable segments, and what the environment says."""
    found = {"default": Settings(), "expandable_segments": Settings(expandable_segments=True)}
    said = from_environment(os.environ)
    if said is None:
        return found, ()
    name, own, notes = said
    return found | {name: own}, tuple(notes)


def reserved(
    ran: list[Allocations],
    counts: list[int],
    layers: int,
    capacity: float,
    workspace: int,
    run_all: Callable[[], Allocations] | None = None,
) -> Reserved:
    """
    Args:
        ran: of a rank, with ``counts`` layers each, of all ``layers`` in the end.
        capacity: bytes that the device has for PyTorch's allocator. workspace: of these, cuBLAS'.
        run_all: runs all layers.

    Raises:
        Refusal: PYTORCH_ALLOC_CONF is not what PyTorch takes.
    """
    last, scale, scaled, beyond, notes = ran[-1], 1.0, "", 0, ()
    changes, places = lifetimes(last.changes)
    begin, end = places[last.begin], places[last.end]
    if len(counts) > 1:
        few = lifetimes(ran[0].changes)[0]
        more = (layers - counts[1]) // (counts[1] - counts[0])
        each, longer = peak(changes) - peak(few), len(changes) - len(few)
        grown, missing = peak(changes) + more * each, more * longer
        if missing > LONGEST:
            replays = min(max(LONGEST // longer, 2), more)
            beyond, more = (more - replays) * each, replays
            shown = f"{counts[1] + replays * (counts[1] - counts[0])} of {layers} layers"
            notes = (f"reserved: {shown} replayed; what the others hold is counted without gaps",)
        try:
            stretches, larger = added(few, changes)
            if larger and run_all is not None and missing <= CHEAP:
                raise NoPattern("shards of a distributed optimizer are not cut where layers end")
            changes, places = checked(*continued(changes, stretches, more, larger), grown - beyond)
            begin, end = places[begin], places[end]
        except NoPattern:
            if run_all is not None and missing <= CHEAP:
                return reserved([run_all()], [layers], layers, capacity, workspace)
            scale, scaled, beyond, notes = grown / peak(changes), f"{counts[1]} of {layers} layers", 0, ()
    times = min(last.times, max(MOST // max(end - begin, 1), 4))
    if times:
        try:
            left = times * sum(change for _, change in changes[begin:end])
            changes, _ = checked(*continued(changes, [(begin, end)], times), peak(changes) + left)
        except NoPattern:
            scaled = ", ".join(filter(None, (scaled, f"the micro-batches that ran, {last.times} being left out")))
    held = [(WORKSPACE, workspace), *[(BEYOND, beyond)] * (beyond > 0)]
    found = by_setting([*held, *changes], capacity, scale, scaled)
    return replace(found, notes=found.notes + notes)


def by_setting(changes: Changes, capacity: float, scale: float = 1.0, scaled: str = "") -> Reserved:
    """Replayed under each setting; what does not fit, on a device that is large enough."""
    names, notes = settings()
    sizes, retries = {}, {}
    for name, setting in names.items():
        try:
            found = replayed(changes, setting, capacity / scale)
            retries[name] = found.retries
        except OutOfMemory:
            found, retries[name] = replayed(changes, setting), None
        sizes[name] = scale * found.peak_reserved
    return Reserved(sizes, retries, scaled, notes)


def peak(changes: Changes) -> int:
    """Most bytes at any time."""
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def checked(changes: Changes, places: list[int], wanted: float) -> tuple[Changes, list[int]]:
    """A continued list, if its peak is what it should be.

    Raises:
        NoPattern: it is not.
    """
    if abs(peak(changes) - wanted) > 0.005 * wanted + MIB:
        raise NoPattern("the peak of the continued list is not what layers and micro-batches add up to")
    return changes, places
