# SPDX-License-Identifier: Apache-2.0
"""Files between ranks, through host memory and gloo."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BLOCK = 1 << 25  # bytes a message


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group=group)
    return every


def swap(sent: tuple[Path, int] | None, wanted: tuple[Path, int, int] | None, group: dist.ProcessGroup) -> None:
    """Send one file while another one arrives; the other ranks do their part of it.

    Args:
        sent: (file, to which rank).
        wanted: (file to be made, from which rank, its bytes).
        group: of all ranks, on gloo.

    Raises:
        OSError: it could not be written; it was received to its end all the same, so that nobody waits.
    """
    mine = sent[0].stat().st_size if sent else 0
    theirs = wanted[2] if wanted else 0
    data = torch.from_file(str(sent[0]), shared=False, size=mine, dtype=torch.uint8) if sent else None
    buffer = torch.empty(min(BLOCK, theirs), dtype=torch.uint8)
    error: OSError | None = None
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(wanted[0], "wb", buffering=0)) if wanted else None
        except OSError as problem:
            error = problem
        for start in range(0, max(mine, theirs), BLOCK):
            part, works = buffer[: max(theirs - start, 0)], []
            if start < theirs:  # first: posted after our own data, gloo would send one direction at a time
                works.append(dist.irecv(part, wanted[1], group=group))
            if start < mine:
                works.append(dist.isend(data[start : start + BLOCK], sent[1], group=group))
            for work in works:
                work.wait()
            if start < theirs and error is None:
                try:
                    view = memoryview(part.numpy())
                    while view:
                        view = view[file.write(view) :]
                except OSError as problem:
                    error = problem
    if error is not None:
        raise error
