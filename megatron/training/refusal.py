# SPDX-License-Identifier: Apache-2.0
"""The one error that settings end in, and how all ranks end in it together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Refusal(ValueError):
    """Settings that cannot run: one line that names the options and the way out. Entry points print it and exit 2."""

    everywhere = False  # whether every rank has raised it; then rank 0 tells it for all


def together(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; if it is refused on any, it is refused on all, and nobody waits for anybody.

    Raises:
        Refusal: of the first rank that refused; ``everywhere`` is set, so that one rank tells it for all.
    """
    import torch.distributed as dist  # not for those who only refuse

    result, told = None, None
    try:
        result = action()
    except Refusal as refusal:
        told = str(refusal)
    lines: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, told)
    refused = [(index, line) for index, line in enumerate(lines) if line]
    if refused:
        index, line = refused[0]
        refusal = Refusal(line if index == 0 else f"{line} (rank {index})")
        refusal.everywhere = True
        raise refusal
    return result
