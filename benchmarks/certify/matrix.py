#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which systems compute what one process computes: a table of cases by systems, measured as ``cp.certify`` does.

    python benchmarks/certify/matrix.py --lab                            # all cells, matrix.json and the page's table
    python benchmarks/certify/matrix.py --system PyTorch --case packed   # some cells, only printed
    python benchmarks/certify/matrix.py --system deepspeed --case dense --details
    python benchmarks/certify/matrix.py --page                           # the table of docs/use/certify.md again

Released wheels (requirements/*.txt) are installed into a folder of ~/.cache/megatron-longcontext/matrix. Every program
follows its library's documentation (with_*.py). Two ranks, fp32, gloo, on a CPU. ``systems.py`` says how to add one.

A cell is one of these:

- equal: loss, gradients, norm and update differ by no more than rounding explains.
- wrong in silence: they differ, and nothing was reported. ``error`` is the largest of a gradient, over its largest
  entry; ``factor``, if all gradients differ by this factor alone.
- refuses: the library ends with an error that says so (:data:`REFUSALS`).
- crashes: it ends with any other error, a signal, or not at all.
- not applicable: the library has no such feature, needs a GPU, or draws another dropout mask on each grid.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import torch  # noqa: E402

import megatron.context_parallel as cp  # noqa: E402
from benchmarks.certify.cases import CASES, Cell  # noqa: E402
from benchmarks.certify.systems import SYSTEMS, environment_of, python_of  # noqa: E402
from benchmarks.forked_ranks import NOT_INSTALLED, RankFailed, on_each_rank  # noqa: E402
from megatron.certifying.comparing import Compared, compare  # noqa: E402
from megatron.certifying.recording import GRADIENT, LOSS, UPDATE, Reference, measure, record  # noqa: E402

FILE = Path(__file__).with_name("matrix.json")
PAGE = Path(__file__).parents[2] / "docs" / "use" / "certify.md"
EQUAL, WRONG, REFUSES, CRASHES, NONE = "equal", "wrong in silence", "refuses", "crashes", "not applicable"
REFUSALS = ("Refused", "NotImplementedError", "ValueError", "AssertionError")  # errors that say what is not supported
# Words in errors that a library raises only because this machine has no GPU.
NEEDS_GPU = ("CUDA", "cuda", "on a CPU", "on CPU", "DistributedType.MULTI_CPU")
References = dict[tuple, Reference]  # measured on one process


def judged(
    system: str, case: str, references: References, run: Callable[..., list] = partial(on_each_rank, patience=900)
) -> dict[str, Any]:
    """The result of one cell, as in matrix.json.

    Args:
        references: those that earlier cells measured; this cell's is added.
    """
    grid, cell = SYSTEMS[system].grid, cell_of(system, case)
    try:
        recorded = run(record, math.prod(grid.values()), WithType(cell), grid)
        reference = alone(system, case, references, run)
    except RuntimeError as failed:
        return failure(str(failed))
    known = {key[0] for rank in recorded for key in rank.numbers} & {key[0] for key in reference.recording.numbers}
    compared = [one for one in compare(reference, recorded) if one.key[0] in known]
    wrong = [one for one in compared if not one.right]
    if wrong and CASES[case].dropout:
        return {"verdict": NONE, "message": "dropout draws another mask on each grid"}
    largest = [one for one in compared if one.key[0] == (GRADIENT if GRADIENT in known else UPDATE)]
    result: dict[str, Any] = {
        "verdict": WRONG if wrong else EQUAL,
        "error": max(one.worst for one in largest),
        "loss_error": max(one.worst for one in compared if one.key[0] == LOSS),
        "kinds": sorted({one.key[0] for one in wrong}),
    }
    if factor := common_factor([one for one in wrong if one.key[0] == GRADIENT]):
        result["factor"] = factor
    return result


def cell_of(system: str, case: str) -> Cell:
    return Cell(SYSTEMS[system].program, case, SYSTEMS[system].options)


class WithType:
    """A program whose errors name their type, because a rank reports only an error's text."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def __call__(self, **sizes: int) -> cp.Outcome:
        try:
            return self._cell(**sizes)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            raise RuntimeError(f"<{type(error).__name__}> {error}") from error


def failure(text: str) -> dict[str, Any]:
    """The result of a cell whose program ended with an error.

    Raises:
        RuntimeError: a package is missing.
    """
    text = " ".join(text.split())
    if text.startswith(NOT_INSTALLED):
        raise RuntimeError(text)
    kind, message = re.search(r"<(\w+)> (.*)", text).groups() if "<" in text else ("", text)
    if kind == "NotApplicable":
        return {"verdict": NONE, "message": message[:300]}
    if any(words in message for words in NEEDS_GPU):
        return {"verdict": NONE, "message": f"needs a GPU: {message[:300]}"}
    said = kind in REFUSALS and message
    return {"verdict": REFUSES if said else CRASHES, "message": message[:300], "type": kind or "process"}


def common_factor(wrong: list[Compared]) -> float | None:
    """The factor by which all these gradients differ, if they differ by nothing else."""
    if not wrong or any(not one.cosine > 0.99999 for one in wrong):
        return None
    factors = [one.factor for one in wrong]
    return sum(factors) / len(factors) if max(factors) - min(factors) < 1e-3 * abs(factors[0]) else None


def alone(system: str, case: str, references: References, run: Callable[..., list]) -> Reference:
    """What one process computes, measured once for the systems that share its program."""
    own = SYSTEMS[system].own_reference or CASES[case].dropout
    cell = cell_of(system, case)
    key = (cell.program, *cell.options.items()) if own else (), case
    if key not in references:
        references[key] = run(measure, 1, WithType(cell), dict.fromkeys(SYSTEMS[system].grid, 1))[0]
    return references[key]


def shown(cell: dict[str, Any]) -> str:
    """The text of a cell in the table."""
    verdict = cell["verdict"]
    if verdict == EQUAL:
        return f"{cell['error']:.0e}"
    if verdict == WRONG:
        return f"**× {cell['factor']:.2f}**" if "factor" in cell else f"**{100 * cell['error']:.2g} %**"
    return "–" if verdict == NONE else verdict


def table(known: dict[str, Any]) -> str:
    """Markdown of cases by systems, with versions and dates."""
    names = [name for name in SYSTEMS if name in known]
    lines = [f"| |{'|'.join(names)}|", f"|---|{'---|' * len(names)}"]
    for case in CASES:
        cells = [shown(known[name]["cells"][case]) if case in known[name]["cells"] else "" for name in names]
        lines.append(f"|{case}|{'|'.join(cells)}|")
    released = {pair for name in names for pair in known[name]["versions"].items()}
    dates = sorted({known[name]["date"] for name in names})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return "\n".join([*lines, "", f"Run on {when} with {', '.join(' '.join(pair) for pair in sorted(released))}."])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({system.program for system in SYSTEMS.values()})
    parser.add_argument("--lab", action="store_true", help="all cells; the same as --record --page")
    parser.add_argument("--system", action="append", choices=[*SYSTEMS, *names], help="only this; may be repeated")
    parser.add_argument("--case", action="append", choices=[*CASES], help="only this case; may be repeated")
    parser.add_argument("--record", action="store_true", help="write the cells that run into matrix.json")
    parser.add_argument("--missing", action="store_true", help="only cells that matrix.json lacks")
    parser.add_argument("--details", action="store_true", help="print the certificate of each cell; write nothing")
    parser.add_argument("--page", action="store_true", help="write the page's table; alone, run nothing")
    parser.add_argument("--here", action="store_true", help="in the running environment, as the command itself does")
    args = parser.parse_args(argv)
    chosen = [name for name in SYSTEMS if args.system is None or {name, SYSTEMS[name].program} & set(args.system)]
    if args.here:
        run_here(chosen, args)
    elif args.lab or not args.page:
        options = [f"--{name}" for name in ("missing", "details") if getattr(args, name)]
        options += ["--record"] * (args.record or args.lab) + [f"--case={case}" for case in args.case or ()]
        places = itertools.groupby(chosen, lambda name: (SYSTEMS[name].needs, SYSTEMS[name].python))
        for (needs, python), group in places:
            only = [f"--system={name}" for name in group]
            command = [python_of(python), os.path.abspath(__file__), "--here", *only, *options]
            subprocess.run(command, env=environment_of(needs), check=True)
    if args.lab or args.page:
        marks = "<!-- matrix -->\n", "<!-- end of matrix -->"
        before, _, after = PAGE.read_text().partition(marks[0])
        PAGE.write_text(
            f"{before}{marks[0]}\n{table(json.loads(FILE.read_text()))}\n\n{marks[1]}{after.partition(marks[1])[2]}"
        )


def run_here(chosen: list[str], args: argparse.Namespace) -> None:
    """Run cells of systems that share an environment, and print each."""
    known = json.loads(FILE.read_text())
    import_all()
    torch.set_num_threads(1)  # a rank that is forked from a process with OpenMP's threads may wait for them for ever
    references: References = {}
    for system in chosen:
        released = {package: metadata.version(package) for package in SYSTEMS[system].packages}
        row = known.get(system, {})
        if row.get("versions") != released:
            row = {"versions": released, "cells": {}}
        for case in args.case or CASES:
            if args.missing and case in row["cells"]:
                continue
            if args.details:
                print(certificate(system, case), flush=True)
                continue
            row["cells"][case] = cell = judged(system, case, references)
            row["date"] = datetime.date.today().isoformat()
            print(f"{system}, {case}: {shown(cell)} {cell.get('message', '')[:150]}", flush=True)
            if args.record:
                FILE.write_text(json.dumps(known | {system: row}, indent=1, sort_keys=True) + "\n")
                known[system] = row


def import_all() -> None:
    """Import once what the forked ranks use."""
    for name in ("deepspeed.runtime.sequence_parallel.ulysses_sp", "transformers", "trl", "datasets"):
        try:
            __import__(name)
        except ImportError:
            continue


def certificate(system: str, case: str) -> str:
    """All numbers of a cell, and where they first differ."""
    try:
        found = cp.certify(cell_of(system, case), [SYSTEMS[system].grid], run=on_each_rank)
    except RankFailed as failed:
        return f"{system}, {case}: {failed}"
    return f"{system}, {case}:\n{found}"


if __name__ == "__main__":
    main()
