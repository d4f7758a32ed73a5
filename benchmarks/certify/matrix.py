#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which libraries compute what one process computes: a table of libraries by cases, measured as ``cp.certify`` does.

    python benchmarks/certify/matrix.py --json benchmarks/certify/matrix.json   # all cells, into matrix.json
    python benchmarks/certify/matrix.py --peer PyTorch --case packed     # some cells, only printed
    python benchmarks/certify/matrix.py --peer deepspeed --case causal --details
    python benchmarks/certify/matrix.py --show                           # the table of matrix.json

The libraries are those of benchmarks/certify/requirements.txt; one that is missing gives "not here". Every program
follows its library's documentation (with_*.py). Two ranks, fp32, gloo, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import megatron.context_parallel as cp  # noqa: E402
from benchmarks.certify.cases import CASES, Cell  # noqa: E402
from benchmarks.forked_ranks import NOT_INSTALLED, RankFailed, on_each_rank  # noqa: E402
from megatron.certifying.comparing import Compared, compare  # noqa: E402
from megatron.certifying.recording import GRADIENT, LOSS, UPDATE, Reference, measure, record  # noqa: E402

FILE = Path(__file__).with_name("matrix.json")
# Heading of a column: the program's file, and its grid.
PEERS: dict[str, tuple[str, dict[str, int]]] = {
    "ours, Ulysses": ("ours", {"ulysses": 2, "ring": 1}),
    "ours, Ring": ("ours", {"ulysses": 1, "ring": 2}),
    "PyTorch": ("pytorch", {"ranks": 2}),
    "DeepSpeed": ("deepspeed", {"ranks": 2}),
    "accelerate sp": ("accelerate", {"sequence": 2, "context": 1}),
    "accelerate cp": ("accelerate", {"sequence": 1, "context": 2}),
    "TRL sp": ("trl", {"sequence": 2, "context": 1}),
    "TRL cp": ("trl", {"sequence": 1, "context": 2}),
    "megatron-core": ("megatron_core", {"ranks": 2}),
}
VERSIONS = ("torch", "transformers", "deepspeed", "accelerate", "trl", "megatron-core")
RIGHT, WRONG, REFUSED, NOT_HERE, RANDOM = "right", "wrong", "refused", "not here", "other mask"
# Words in errors that a library raises only because this machine has no GPU.
NEEDS_GPU = (
    "DistributedType",
    "CUDA",
    "cuda",
    "on a CPU",
    "on CPU",
    "mixed torch.Tensor and DTensor",
    "TEDotProductAttention",
)
References = dict[tuple, Reference]  # measured on one process


def judged(peer: str, case: str, references: References, run: Callable[..., list] = on_each_rank) -> dict[str, Any]:
    """The result of one cell, as in matrix.json.

    Args:
        references: those that earlier cells measured; this cell's is added.
    """
    name, grid = PEERS[peer]
    cell = Cell(name, case)
    try:
        recorded = run(record, 2, cell, grid)
        reference = alone(name, case, grid, references, run)
    except RuntimeError as failed:
        text = " ".join(str(failed).split())
        here = not text.startswith(NOT_INSTALLED) and not any(words in text for words in NEEDS_GPU)
        return {"verdict": REFUSED if here else NOT_HERE, "message": text[:300]}
    known = {key[0] for rank in recorded for key in rank.numbers}
    compared = [one for one in compare(reference, recorded) if one.key[0] in known]
    wrong = [one for one in compared if not one.right]
    largest = [one for one in compared if one.key[0] == (GRADIENT if GRADIENT in known else UPDATE)]
    result: dict[str, Any] = {
        "verdict": RIGHT if not wrong else RANDOM if CASES[case].dropout else WRONG,
        "error": max(one.worst for one in largest),
        "loss_error": max(one.worst for one in compared if one.key[0] == LOSS),
        "kinds": sorted({one.key[0] for one in wrong}),
    }
    if factor := common_factor([one for one in wrong if one.key[0] == GRADIENT]):
        result["factor"] = factor
    return result


def common_factor(wrong: list[Compared]) -> float | None:
    """The factor by which all these gradients differ, if they differ by nothing else."""
    if not wrong or any(not one.cosine > 0.99999 for one in wrong):
        return None
    factors = [one.factor for one in wrong]
    return sum(factors) / len(factors) if max(factors) - min(factors) < 1e-3 * abs(factors[0]) else None


def alone(name: str, case: str, grid: dict[str, int], references: References, run: Callable[..., list]) -> Reference:
    """What one process computes, measured once for the libraries that share its program."""
    own = name in ("accelerate", "trl") or CASES[case].dropout
    key = name if own else "", case
    if key not in references:
        references[key] = run(measure, 1, Cell(name, case), dict.fromkeys(grid, 1))[0]
    return references[key]


def shown(cell: dict[str, Any]) -> str:
    """The text of a cell in the table."""
    verdict = cell["verdict"]
    if verdict == RIGHT:
        return f"{cell['error']:.0e}"
    if verdict == WRONG:
        return f"**× {cell['factor']:.2f}**" if "factor" in cell else f"**wrong, {100 * cell['error']:.0f} %**"
    return verdict


def table(cells: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Markdown of libraries by cases."""
    lines = [f"| |{'|'.join(CASES)}|", f"|---|{'---|' * len(CASES)}"]
    for peer in PEERS:
        row = [shown(cells[peer][case]) if case in cells.get(peer, {}) else "" for case in CASES]
        lines.append(f"|{peer}|{'|'.join(row)}|")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Versions of the libraries that are installed."""
    result = {}
    for name in VERSIONS:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return result


def named(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def import_all() -> None:
    """Import once what the forked ranks use."""
    for name in ("deepspeed.runtime.sequence_parallel.ulysses_sp", "transformers", "trl", "datasets"):
        try:
            __import__(name)
        except ImportError:
            continue


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({name for name, _ in PEERS.values()})
    parser.add_argument("--peer", action="append", choices=[*PEERS, *names], help="only this library; may be repeated")
    parser.add_argument("--case", action="append", choices=[*CASES], help="only this case; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="file of all cells, in which cells that run are replaced")
    parser.add_argument("--missing", action="store_true", help="only cells that the file does not have")
    parser.add_argument("--details", action="store_true", help="print the certificate of each cell; write nothing")
    parser.add_argument("--show", action="store_true", help="run nothing, print the table")
    args = parser.parse_args(argv)
    file = Path(args.json or FILE)
    known = json.loads(file.read_text()) if file.exists() else {"cells": {}}
    peers = [peer for peer in PEERS if args.peer is None or {peer, PEERS[peer][0]} & set(args.peer)]
    if not args.show:
        import_all()
        references: References = {}
        for case in args.case or CASES:
            for peer in peers:
                if args.details:
                    print(certificate(peer, case), flush=True)
                    continue
                cells = known["cells"].setdefault(peer, {})
                if args.missing and case in cells:
                    continue
                cells[case] = judged(peer, case, references)
                known["versions"] = known.get("versions", {}) | versions()
                if args.json:
                    file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
                print(f"{peer}, {case}: {shown(cells[case])} {cells[case].get('message', '')[:150]}", flush=True)
    if not args.details:
        print(table(known["cells"]))
        print(named(known.get("versions", {})))


def certificate(peer: str, case: str) -> str:
    """All numbers of a cell, and where they first differ."""
    name, grid = PEERS[peer]
    try:
        found = cp.certify(Cell(name, case), [grid], run=on_each_rank)
    except RankFailed as failed:
        return f"{peer}, {case}: {failed}"
    return f"{peer}, {case}:\n{found}"


if __name__ == "__main__":
    main()
