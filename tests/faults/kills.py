# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` of all ranks of the training program, or of one, at a random moment; and what its log says afterwards."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.test_program import PROGRAM
from tests.patience import patience
from tests.program import ENVIRONMENT, meeting, start_forked


@dataclass(frozen=True)
class Ended:
    """The end of the ranks.

    Attributes:
        what: what was killed, "job" or "rank"; "over" if all had ended before.
        seconds: from the start until then; 0 if nothing was to be killed.
        output: standard output of rank 0.
        errors: standard error of all ranks.
        codes: exit codes.
    """

    what: str
    seconds: float
    output: str
    errors: str
    codes: list[int]


def run_and_kill(
    argv: Sequence[Sequence[str]],
    logs: Path,
    draw: random.Random | None,
    window: tuple[float, float] = (0.0, 0.0),
    more: dict[str, str] | None = None,
) -> Ended:
    """Start a rank for each command line, kill all or one of them, and check that the others end by themselves.

    Args:
        logs: folder for their output; it must not exist.
        draw: None kills nobody.
        window: earliest and latest time of the kill, in seconds from the start.
        more: environment of each rank.
    """
    what, seconds, ready = "over", 0.0, True
    with meeting(ENVIRONMENT, len(argv)) as environments:
        ranks = [
            start_forked(PROGRAM, words, {**one, **(more or {})}, logs / str(rank))
            for rank, (words, one) in enumerate(zip(argv, environments))
        ]
        begin = time.monotonic()
        end = begin + patience(60)
        if draw is not None:
            moment = begin + draw.uniform(*window)
            while time.monotonic() < moment and any(rank.is_alive() for rank in ranks):
                time.sleep(0.01)
            seconds = time.monotonic() - begin
            victims = ranks if draw.random() < 0.5 else [draw.choice(ranks)]
            if any(rank.is_alive() for rank in ranks):
                what = "job" if len(victims) > 1 else "rank"
            ready = "ready after" in text(logs / "0" / "out")  # before that only a launcher would notice a dead rank
            for victim in victims:
                victim.kill()
            end = time.monotonic() + (patience(20) if ready else 1.0)
        for rank in ranks:  # a survivor notices by itself
            rank.join(max(0.0, end - time.monotonic()))
        late = [number for number, rank in enumerate(ranks) if rank.is_alive()]
        for rank in ranks:
            rank.kill()
            rank.join()
    errors = "".join(text(logs / str(rank) / "err") for rank in range(len(ranks)))
    assert not (late and ready), f"ranks {late} still run\n{errors}"
    assert "Traceback" not in errors, errors
    return Ended(what, seconds, text(logs / "0" / "out"), errors, [rank.exitcode for rank in ranks])


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and norm by step."""
    return {row["iteration"]: (row["lm_loss"], row["grad_norm"]) for row in logged(folder)}


def logged(folder: Path) -> list[dict]:
    """Complete rows of ``folder/log.jsonl``: a kill may truncate the last one."""
    rows = []
    for line in text(folder / "log.jsonl").splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def text(file: Path) -> str:
    """The text of a file; empty if its rank was killed before opening it."""
    return file.read_text() if file.exists() else ""
