# SPDX-License-Identifier: Apache-2.0
"""After a restart: the newest step of which every rank's state is still in some host's memory.

All ranks tell what lies on their nodes, and each file is read against its sum by who will load it or send it on. What
is not whole is left out, and the other copy, or an older step, is taken. Ranks may have changed their nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.training.checkpoint.in_memory import copy_file
from megatron.training.checkpoint.in_memory.copies import Copies
from megatron.training.checkpoint.in_memory.copy_file import gathered, swap
from megatron.training.checkpoint.run_state import Progress

Step = tuple[int, str]  # iteration, and the start of the run that wrote it
Files = dict[Step, dict[int, Path]]  # by rank


@dataclass(frozen=True)
class Found:
    """What to go on from, on this rank."""

    path: Path
    progress: Progress
    told: str


def newest(copies: Copies, on_disk: int, notes: list[str]) -> Found | None:
    """The newest whole step that is newer than the disk's, on every rank; other copies are removed. All ranks call it.

    Args:
        on_disk: iteration of the latest checkpoint; 0 if there is none.
        notes: where a line goes that says why copies are of no use.
    """
    files, strange = _look(copies)
    told = gathered((sorted(strange), {step: sorted(of_rank) for step, of_rank in files.items()}), copies.group)
    holders = [one for _, one in told]
    strange = {line for lines, _ in told for line in lines}
    newer = sorted({step for one in holders for step in one if step[0] > on_disk}, reverse=True)
    missing, found = "", None
    for step in newer:
        found, reason = _bring(copies, step, files.get(step, {}), [one.get(step, []) for one in holders])
        missing = missing or reason
        if found:
            break
    gathered(None, copies.group)
    copies.clear(found and found.progress.iteration)
    if found is None and (newer or strange):
        reason = missing or f"they are of {min(strange)}, and this run is of {_form(copies.about)[0]}"
        notes.append(f"the copies in memory are of no use ({reason}): going on from the disk")
    return found


def _form(about: Mapping[str, str]) -> tuple[str, str]:
    return about.get("grid", "another grid"), about.get("settings", "")


def _look(copies: Copies) -> tuple[Files, set[str]]:
    """(this run's files on this node, of what others are)."""
    files: Files = {}
    strange = set()
    for path in copies.folder.at.glob("iter_*.safetensors"):
        about = copy_file.about(path)
        if about.get("run") != copies.about["run"]:
            continue
        grid, settings = _form(about)
        if (grid, settings) != _form(copies.about):
            strange.add(grid if grid != copies.about["grid"] else "other settings")
            continue
        try:
            iteration, rank, _ = int(about["iteration"]), int(about["rank"]), about["start"]
        except (KeyError, ValueError):
            continue  # no copy of ours
        if path == copies.path(iteration, rank):  # under another name it would be cleared away as another step's
            files.setdefault((iteration, about["start"]), {})[rank] = path
    return files, strange


def _bring(copies: Copies, step: Step, files: Mapping[int, Path], holders: list[list[int]]) -> tuple[Found | None, str]:
    """(this rank's file of a step, here by now, or None; what is missing).

    Args:
        files: of that step on this node, by rank.
        holders: by rank, of which ranks its node has a file.
    """
    me, iteration = copies.rank, step[0]
    bad: set[tuple[int, int]] = set()  # (rank, holder)
    while True:
        plan = {rank: _holder(rank, holders, bad) for rank in range(copies.ranks)}
        if lost := [rank for rank, holder in plan.items() if holder is None]:
            return None, f"of iteration {iteration} no whole copy of rank {lost[0]} is left"
        wrong = [(rank, me) for rank, holder in plan.items() if holder == me and not copy_file.whole(files[rank])]
        if not _agreed(copies, bad, wrong):
            continue
        path, wrong = files.get(me), []
        for rank, holder in plan.items():
            if rank == holder or me not in (rank, holder):
                continue
            if me == holder:
                _send(copies, files[rank], rank)
                continue
            path = _receive(copies, iteration, holder)
            if path is None:
                wrong = [(rank, holder)]
        if _agreed(copies, bad, wrong):
            break
    moved = [rank for rank, holder in plan.items() if rank != holder]
    lost = f", of rank{'s' * (len(moved) > 1)} {', '.join(map(str, moved))} from another node's" if moved else ""
    progress = Progress(**json.loads(copy_file.about(path)["progress"]))
    return Found(path, progress, f"loaded iteration {iteration} from the copies in memory{lost}"), ""


def _holder(rank: int, holders: list[list[int]], bad: set[tuple[int, int]]) -> int | None:
    """Which rank's node gives the file of a rank: its own if it can."""
    able = [holder for holder, has in enumerate(holders) if rank in has and (rank, holder) not in bad]
    return rank if rank in able else next(iter(able), None)


def _agreed(copies: Copies, bad: set[tuple[int, int]], wrong: list[tuple[int, int]]) -> bool:
    """Whether no rank found anything wrong; what was is added to ``bad``."""
    found = {one for of_rank in gathered(wrong, copies.group) for one in of_rank}
    bad |= found
    return not found


def _send(copies: Copies, path: Path, rank: int) -> None:
    dist.send(torch.tensor([path.stat().st_size]), rank, group=copies.group)
    swap((path, rank), None, copies.group)


def _receive(copies: Copies, iteration: int, holder: int) -> Path | None:
    """This rank's file, from another one; None where it did not come whole."""
    size, path = torch.tensor([0]), copies.path(iteration, copies.rank)
    partial = copies.partial(iteration, copies.rank)
    dist.recv(size, holder, group=copies.group)
    try:
        swap(None, (partial, holder, int(size)), copies.group)
        if not copy_file.whole(partial):
            raise OSError("it came as something else")
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        return None
    return path
