# SPDX-License-Identifier: Apache-2.0
"""A stage: cases one after the other within some minutes, each written down as soon as it is done."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]
BROKEN = 75  # exit code of a stage whose GPU context is lost: what is left needs a new process


@dataclass(frozen=True)
class Case:
    """One of them.

    Attributes:
        expected: seconds, roughly; what matters is how they compare within a family.
        family: cases that are as much slower than expected as each other.
    """

    name: str
    run: Callable[[], Figures]
    expected: float = 1.0
    family: str = ""


class Stage:
    """The figures of one stage, in ``folder``/``name``.json.

    Attributes:
        report: ``finished`` once all cases are done or given up; ``cases`` by name: their figures, or ``failed`` with
            the reason.

    Args:
        about: device and software, written down with the figures.
        minutes: that the stage may take in all.
        keep_failed: cases that have failed are not tried again.
    """

    def __init__(self, name: str, folder: Path, about: Figures, minutes: float, keep_failed: bool = False) -> None:
        self.name, self.folder, self.begun, self.minutes = name, folder, time.monotonic(), minutes
        before = read(folder, name) or {}
        same = all(before.get(key) == value for key, value in about.items())
        cases = before.get("cases", {}) if same and not before.get("finished") else {}
        self.known = {n: figures for n, figures in cases.items() if keep_failed or "failed" not in figures}
        self.report: Figures = {"stage": name, **about, "finished": False, "cases": dict(self.known)}

    def left(self) -> float:
        """Seconds."""
        return 60 * self.minutes - (time.monotonic() - self.begun)

    def run(self, cases: list[Case]) -> None:
        """All cases that there is time for; one is left out if, by those before it, it would take too long."""
        todo = [case for case in cases if case.name not in self.known]
        pace: dict[str, float] = {}  # of a family: seconds its last case took, over those expected
        for index, case in enumerate(todo):
            later = sum(pace.get(other.family, 1.0) * other.expected for other in todo[index:])
            self.say(f"{index + 1} of {len(todo)}, about {clock(min(later, self.left()))} left: {case.name}")
            expected, left = pace.get(case.family, 1.0) * case.expected, self.left()
            if expected > left:
                self.keep(case.name, {"failed": f"left out: it takes about {expected:.0f} s, of the stage {left:.0f}"})
                continue
            begin = time.monotonic()
            figures = attempt(case.run)
            took = time.monotonic() - begin
            self.keep(case.name, figures | {"took": round(took, 2)})
            if "failed" in figures:
                self.say(f"   {figures['failed']}")
                if "CUDA error" in figures["failed"]:
                    raise SystemExit(BROKEN)
            else:
                pace[case.family] = took / case.expected

    def keep(self, name: str, figures: Figures) -> None:
        self.report["cases"][name] = figures
        self.write()

    def finish(self) -> None:
        self.report |= {"finished": True, "seconds": round(time.monotonic() - self.begun, 1)}
        self.write()

    def write(self) -> None:
        write(self.folder, self.name, self.report)

    def say(self, text: str) -> None:
        print(f"[{self.name} {clock(time.monotonic() - self.begun)}] {text}", flush=True)


def attempt(run: Callable[[], Figures]) -> Figures:
    """What ``run`` returns, or why it failed; what it held on the device is let go."""
    try:
        return run()
    except Exception as error:
        return {"failed": reason(error)}
    finally:
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def reason(error: BaseException) -> str:
    """One line."""
    text = str(error).strip()
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
        return "out of memory"
    line = next((line for line in text.splitlines() if line.strip()), "")
    name = type(error).__name__
    return f"{name}: {line}"[:300] if line else name


def clock(seconds: float) -> str:
    return f"{int(max(seconds, 0)) // 60}:{int(max(seconds, 0)) % 60:02d}"


def read(folder: Path, name: str) -> Figures | None:
    """A stage's figures so far; None where there are none."""
    try:
        return json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None


def write(folder: Path, name: str, report: Figures) -> None:
    """As a whole, so that a run that is killed meanwhile leaves what was there."""
    path = folder / f"{name}.json.new"
    path.write_text(json.dumps(report, indent=1) + "\n")
    path.replace(folder / f"{name}.json")
