# SPDX-License-Identifier: Apache-2.0
"""After a restart, find the newest step for which every rank's state is still in some host's memory.

All ranks exchange which files their nodes have. Each file is compared with its checksum by the rank that will load or
send it; if it is damaged, another copy or an older step is used. Ranks may run on other nodes than before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.platform.collectives import gathered_objects
from megatron.training.checkpoint.in_memory import copy_file
from megatron.training.checkpoint.in_memory.copies import Copies
from megatron.training.checkpoint.in_memory.copy_file import swap
from megatron.training.checkpoint.run_state import Progress

Step = tuple[int, str]  # iteration, and identity of the program start that wrote it
Files = dict[Step, dict[int, Path]]  # by rank


@dataclass(frozen=True)
class CopyToLoad:
    """The copy to load on this rank."""

    path: Path
    progress: Progress
    line: str  # to be printed


def newest(copies: Copies, on_disk: int, notes: list[str]) -> CopyToLoad | None:
    """The newest complete step that is newer than the checkpoint on the disk; other copies are removed.

    All ranks call it, and all get the same step.

    Args:
        on_disk: iteration of the latest checkpoint; 0 if there is none.
        notes: receives a line if there are copies that cannot be used.
    """
    files, others = _list_files(copies)
    ranks_of = {step: sorted(of_rank) for step, of_rank in files.items()}
    listed = gathered_objects((sorted(others), ranks_of), copies.group)
    steps_of_ranks = [steps for _, steps in listed]
    others = {line for lines, _ in listed for line in lines}
    newer = sorted({step for steps in steps_of_ranks for step in steps if step[0] > on_disk}, reverse=True)
    missing, chosen = "", None
    for step in newer:
        chosen, reason = _fetch(copies, step, files.get(step, {}), [steps.get(step, []) for steps in steps_of_ranks])
        missing = missing or reason
        if chosen:
            break
    gathered_objects(None, copies.group)
    copies.clear(chosen and chosen.progress.iteration)
    if chosen is None and (newer or others):
        reason = missing or f"they are of {min(others)}, but this run is of {_layout(copies.about)[0]}"
        notes.append(f"the copies in memory cannot be used ({reason}): continuing from the disk")
    return chosen


def _layout(about: Mapping[str, str]) -> tuple[str, str]:
    """(grid, settings that determine a rank's tensors)."""
    return about.get("grid", "another grid"), about.get("settings", "")


def _list_files(copies: Copies) -> tuple[Files, set[str]]:
    """(this run's files on this node, grids or settings of files that do not fit this run)."""
    files: Files = {}
    others = set()
    for path in copies.folder.at.glob("iter_*.safetensors"):
        about = copy_file.about(path)
        if about.get("run") != copies.about["run"]:
            continue
        grid, settings = _layout(about)
        if (grid, settings) != _layout(copies.about):
            others.add(grid if grid != copies.about["grid"] else "other settings")
            continue
        try:
            iteration, rank, _ = int(about["iteration"]), int(about["rank"]), about["start"]
        except (KeyError, ValueError):
            continue  # not a copy of ours
        if path == copies.path(iteration, rank):  # otherwise the file would be removed as one of another step
            files.setdefault((iteration, about["start"]), {})[rank] = path
    return files, others


def _fetch(
    copies: Copies, step: Step, files: Mapping[int, Path], holders: list[list[int]]
) -> tuple[CopyToLoad | None, str]:
    """(this rank's file of a step, received from another node if necessary, or None; what is missing).

    Args:
        files: this node's files of the step, by rank.
        holders: for each rank, the ranks whose files its node has.
    """
    me, iteration = copies.rank, step[0]
    bad: set[tuple[int, int]] = set()  # (rank, holder)
    while True:
        plan = {rank: _holder(rank, holders, bad) for rank in range(copies.ranks)}
        if lost := [rank for rank, holder in plan.items() if holder is None]:
            return None, f"no undamaged copy of rank {lost[0]} at iteration {iteration} is left"
        wrong = [(rank, me) for rank, holder in plan.items() if holder == me and not copy_file.intact(files[rank])]
        if not _agreed(copies, bad, wrong):
            continue
        path, wrong = files.get(me), []
        for rank, holder in plan.items():
            if rank == holder or me not in (rank, holder):
                continue
            if me == holder:
                dist.send(torch.tensor([files[rank].stat().st_size]), rank, group=copies.group)
                swap((files[rank], rank), None, copies.group)
                continue
            path = _receive(copies, iteration, holder)
            if path is None:
                wrong = [(rank, holder)]
        if _agreed(copies, bad, wrong):
            break
    moved = [str(rank) for rank, holder in plan.items() if rank != holder]
    fetched = f", for rank{'s' * (len(moved) > 1)} {', '.join(moved)} from another node" if moved else ""
    progress = Progress(**json.loads(copy_file.about(path)["progress"]))
    return CopyToLoad(path, progress, f"loaded iteration {iteration} from the copies in memory{fetched}"), ""


def _holder(rank: int, holders: list[list[int]], bad: set[tuple[int, int]]) -> int | None:
    """The rank whose node provides the file of ``rank``: itself if possible; None if no node has the file."""
    candidates = [holder for holder, ranks in enumerate(holders) if rank in ranks and (rank, holder) not in bad]
    return rank if rank in candidates else next(iter(candidates), None)


def _agreed(copies: Copies, bad: set[tuple[int, int]], wrong: list[tuple[int, int]]) -> bool:
    """Whether no rank reports a damaged file; reported files are added to ``bad``."""
    damaged = {file for of_rank in gathered_objects(wrong, copies.group) for file in of_rank}
    bad |= damaged
    return not damaged


def _receive(copies: Copies, iteration: int, holder: int) -> Path | None:
    """Receive this rank's file from another rank; None if it arrived damaged."""
    size, path = torch.tensor([0]), copies.path(iteration, copies.rank)
    partial = copies.partial(iteration, copies.rank)
    dist.recv(size, holder, group=copies.group)
    try:
        swap(None, (partial, holder, int(size)), copies.group)
        if not copy_file.intact(partial):
            raise OSError("it was damaged in transit")
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        return None
    return path
