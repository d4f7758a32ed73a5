# SPDX-License-Identifier: Apache-2.0
"""Runs a program of this folder under certify, as it stands or with a change of its source."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron.certifying.certificate import Certificate, certify
from megatron.certifying.processes_of_program import ProgramFailed, Run
from tests.referee import pieces

HERE = Path(__file__).parent
GRIDS = {2: {"ranks": 2}, 4: {"data": 2, "model": 2}}


@dataclass(frozen=True)
class Program:
    """A function of a file of this folder, whose one occurrence of ``old`` is replaced by ``new``."""

    file: str
    name: str
    old: str = ""
    new: str = ""
    seed: int = 0

    def __call__(self, **sizes: int) -> Any:
        torch.manual_seed(self.seed)
        pieces.SEED = self.seed
        return getattr(module_of(self.file, self.old, self.new), self.name)(**sizes)

    def __str__(self) -> str:
        return f"{self.file}.{self.name}" + f", seed {self.seed}" * bool(self.seed)


@cache
def module_of(file: str, old: str = "", new: str = "") -> ModuleType:
    source = (HERE / f"{file}.py").read_text()
    if old and source.count(old) != 1:
        raise ValueError(f"{file}.py has {source.count(old)} times: {old}")
    module = ModuleType(f"tests.referee.{file}" + f"_changed_{abs(hash((old, new)))}" * bool(old))
    sys.modules[module.__name__] = module  # where autograd and dataclasses look for it
    exec(compile(source.replace(old, new) if old else source, f"{file}.py", "exec"), module.__dict__)
    return module


def functions(file: str) -> list[str]:
    """The programs of a file: its functions that take a grid."""
    return re.findall(r"^def (\w+)\((?:ranks|data): int", (HERE / f"{file}.py").read_text(), re.M)


FILES = ("data_parallel", "sequence_parallel", "model_parallel", "of_libraries")
RIGHT = [Program(file, name) for file in FILES for name in functions(file)]


def with_seeds(seeds: int) -> list[Program]:
    """For each seed, the next right program of each file."""
    by_file = [[program for program in RIGHT if program.file == file] for file in FILES]
    return [replace(some[seed % len(some)], seed=seed) for seed in range(1, seeds + 1) for some in by_file]


@dataclass
class Verdict:
    certificate: Certificate | None
    seconds: float
    failure: str = ""

    @property
    def said(self) -> str:
        """In one line: the first difference, or that there is none."""
        if self.certificate is None:
            return self.failure.strip().splitlines()[-1][:300]
        grid = self.certificate.grids[0]
        if self.certificate.right:
            worst = max((one.worst / one.limit for one in grid.compared if one.limit), default=0.0)
            return f"right; largest error {worst:.2g} of its limit"
        return str(grid.place or f"WRONG; {grid.note}")


def judge(program: Program, run: Run | None = None) -> Verdict:
    """Compare one process with two ranks, or with 2 x 2 for a program of two axes."""
    start = time.monotonic()
    two = re.search(rf"^def {program.name}\(data", (HERE / f"{program.file}.py").read_text(), re.M)
    try:
        return Verdict(certify(program, [GRIDS[4 if two else 2]], run=run), time.monotonic() - start)
    except (ProgramFailed, ValueError) as error:
        return Verdict(None, time.monotonic() - start, str(error))


def placed(verdict: Verdict, kind: str, module: str) -> str:
    """Whether an error was found, and whether the first difference is that of the error."""
    if verdict.certificate is None or verdict.certificate.right:
        return "MISSED"
    place = verdict.certificate.grids[0].place
    good = place is not None and place.kind == kind and all(re.fullmatch(module, name) for name in place.modules)
    return "placed" if good else "FOUND, BUT NOT PLACED"
