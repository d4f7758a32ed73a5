# SPDX-License-Identifier: Apache-2.0
"""A stage: cases that run one after another within a time limit; each case's figures are written when it ends."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from megatron.formulas.strategy import Shape

Figures = dict[str, Any]
LEFT_OUT = "left out"  # how the reason begins if the time was too short; the next run makes up for it
BROKEN = 75  # exit code of a stage whose GPU context is lost: remaining cases need a new process


@dataclass(frozen=True)
class Case:
    """A measurement.

    Attributes:
        expected: rough seconds; only ratios within a family matter.
        family: cases whose real times have about the same ratio to the expected ones.
    """

    name: str
    run: Callable[[], Figures]
    expected: float = 1.0
    family: str = ""


class Stage:
    """The figures of one stage, in ``folder``/``name``.json.

    Attributes:
        report: ``finished`` (no case was left out for time) and ``cases``, by name the figures, or ``failed`` with the
            reason.

    Args:
        about: device and software, stored with the figures.
        minutes: time limit of the stage.
        keep_failed: do not repeat cases that have failed.
    """

    def __init__(self, name: str, folder: Path, about: Figures, minutes: float, keep_failed: bool = False) -> None:
        self.name, self.folder, self.begun, self.minutes = name, folder, time.monotonic(), minutes
        before = read(folder, name) or {}
        same = all(before.get(key) == value for key, value in about.items())
        cases = before.get("cases", {}) if same and not before.get("finished") else {}
        self.known = {n: figures for n, figures in cases.items() if keep_failed or "failed" not in figures}
        self.predict: Callable[[str, Figures], dict[str, float]] = lambda *_: {}
        self.report: Figures = {"stage": name, **about, "finished": False, "cases": dict(self.known)}

    def left(self) -> float:
        """Seconds left."""
        return 60 * self.minutes - (time.monotonic() - self.begun)

    def run(self, cases: list[Case]) -> None:
        """Run the cases; leave out a case that, judging by earlier ones, needs more time than is left."""
        todo = [case for case in cases if case.name not in self.known]
        pace: dict[str, float] = {}  # by family: measured over expected seconds of its last case
        self.say(f"{len(todo)} cases need about {clock(sum(case.expected for case in todo))}")
        for index, case in enumerate(todo):
            later = sum(pace.get(other.family, 1.0) * other.expected for other in todo[index:])
            self.say(f"{index + 1} of {len(todo)}, about {clock(min(later, self.left()))} left: {case.name}")
            expected, left = pace.get(case.family, 1.0) * case.expected, self.left()
            if expected > left:
                skipped = f"{LEFT_OUT}: it takes about {expected:.0f} s, the stage has {left:.0f} s left"
                self.keep(case.name, {"failed": skipped})
                continue
            begin = time.monotonic()
            figures = attempt(case.run)
            took = time.monotonic() - begin
            foreseen = {} if "failed" in figures else attempt(partial(self.predict, case.name, figures))
            self.keep(case.name, figures | {"prediction": foreseen, "took": round(took, 2)})
            for what, measured, predicted in compared(figures, foreseen):
                self.say(f"   {what}: {measured:.4g} measured, {predicted:.4g} predicted")
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
        reasons = [str(figures.get("failed", "")) for figures in self.report["cases"].values()]
        complete = not any(reason.startswith(LEFT_OUT) for reason in reasons)
        self.report |= {"finished": complete, "seconds": round(time.monotonic() - self.begun, 1)}
        self.write()

    def write(self) -> None:
        write(self.folder, self.name, self.report)

    def say(self, text: str) -> None:
        print(f"[{self.name} {clock(time.monotonic() - self.begun)}] {text}", flush=True)


def compared(figures: Figures, foreseen: Figures) -> Iterator[tuple[str, float, float]]:
    """(place of a figure, measured, predicted) for each prediction of a case."""
    for what, predicted in foreseen.items() if "failed" not in foreseen else ():
        yield what, reduce(lambda inside, name: inside[name], what.split("/"), figures), predicted


def attempt(run: Callable[[], Figures]) -> Figures:
    """The figures of ``run``, or why it failed; frees cached device memory."""
    try:
        return run()
    except Exception as error:
        return {"failed": reason(error)}
    finally:
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def reason(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip()
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
        return "out of memory"
    line = next((line for line in text.splitlines() if line.strip()), "")
    name = type(error).__name__
    return f"{name}: {line}"[:300] if line else name


def clock(seconds: float) -> str:
    return f"{int(max(seconds, 0)) // 60}:{int(max(seconds, 0)) % 60:02d}"


def read(folder: Path, name: str) -> Figures | None:
    """A stage's figures so far; None: there are none."""
    try:
        return json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None


def write(folder: Path, name: str, report: Figures) -> None:
    """Write the file atomically, so that an interrupted write keeps the previous figures."""
    path = folder / f"{name}.json.new"
    path.write_text(json.dumps(report, indent=1) + "\n")
    path.replace(folder / f"{name}.json")


# Problem sizes of the stages: for a GPU, and tiny ones that a CPU runs in seconds.
KIB = 1024


@dataclass(frozen=True)
class Sizes:
    """Problem sizes.

    Attributes:
        model: the shape to train; ``layers`` is the largest number.
        gemm: sizes of square products. copy_bytes: size of a copy. window: seconds to spend on one figure.
        rates: sequence lengths of attention in the machine file.
        lengths: sequence lengths for the kernels. masked: sequence lengths for the masks.
        windows: keys before each query in sliding windows. documents: number of packed documents.
        tiles: lengths of equal documents, by which the best kernel is chosen.
        linear: sequence lengths of linear-attention and SSM layers.
        steps: (sequence length, recompute) of the training steps.
        fpdt_length, fpdt_layers, fpdt_chunks: sequence length, layers and chunk sizes of the chunk sweep.
        longest: first length and chunk size of the search for the longest context.
        repeats: steps that count.
    """

    model: Shape
    gemm: tuple[int, ...]
    copy_bytes: int
    window: float
    rates: tuple[int, ...]
    lengths: tuple[int, ...]
    masked: tuple[int, ...]
    windows: tuple[int, ...]
    documents: int
    tiles: tuple[int, ...]
    linear: tuple[int, ...]
    steps: tuple[tuple[int, str], ...]
    fpdt_length: int
    fpdt_layers: int
    fpdt_chunks: tuple[int, ...]
    longest: tuple[int, int]
    repeats: int


GPU = Sizes(
    model=Shape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256),
    gemm=(512, 1024, 2048, 4096, 8192, 16384),
    copy_bytes=2**30,
    window=0.4,
    rates=(512, 1024, 2048, 4096, 8192, 16384, 32768),
    lengths=tuple(n * KIB for n in (8, 16, 32, 64, 128, 256, 512)),
    masked=(32 * KIB, 128 * KIB),
    windows=(1023, 4095),
    documents=64,
    tiles=(512, 2 * KIB, 8 * KIB, 32 * KIB),
    linear=(8 * KIB, 32 * KIB, 128 * KIB),
    steps=((8 * KIB, "none"), (32 * KIB, "none"), (32 * KIB, "full"), (128 * KIB, "full")),
    fpdt_length=128 * KIB,
    fpdt_layers=4,
    fpdt_chunks=(128 * KIB, 64 * KIB, 32 * KIB, 16 * KIB, 8 * KIB),
    longest=(256 * KIB, 32 * KIB),
    repeats=3,
)
TINY = replace(
    GPU,
    model=Shape(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=256),
    gemm=(64, 128),
    copy_bytes=2**18,
    window=0.005,
    rates=(64, 128),
    lengths=(128, 256),
    masked=(128,),
    windows=(15,),
    documents=4,
    tiles=(32, 128),
    linear=(128,),
    steps=((128, "none"), (256, "full")),
    fpdt_length=256,
    fpdt_layers=1,
    fpdt_chunks=(256, 64),
    longest=(256, 64),
    repeats=1,
)
