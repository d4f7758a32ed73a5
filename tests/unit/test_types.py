# SPDX-License-Identifier: Apache-2.0
"""Types of distribution: every autograd function and collective has one, or a reason; they alone find errors."""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("spmd_types", reason="the checker of types is not installed")

from tests import distribution_types  # noqa: E402
from tests.program import run_forked  # noqa: E402

ROOT = Path(__file__).parents[2]
ON_TENSORS = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
    "all_to_all_single", "broadcast", "isend", "irecv", "send", "recv", "batch_isend_irecv", "reduce", "gather",
    "scatter",
}  # fmt: skip


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """(name, tree) of each module that has an autograd function or a collective."""
    texts = {path: path.read_text() for path in sorted((ROOT / "megatron").rglob("*.py"))}
    return [
        (".".join(path.relative_to(ROOT / "megatron").with_suffix("").parts), ast.parse(text))
        for path, text in texts.items()
        if "autograd.Function" in text or "dist." in text or "torch.distributed." in text
    ]


def test_every_autograd_function_has_a_type_or_a_reason() -> None:
    found = {
        f"{module}.{node.name}"
        for module, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(base) for base in node.bases)
    }
    typed = {f"{one.__module__}.{one.__name__}".removeprefix("megatron.") for one in distribution_types.TYPED}
    assert found == typed | set(distribution_types.UNTYPED) and not typed & set(distribution_types.UNTYPED)
    assert all(hasattr(one, "spmd_typecheck") for one in distribution_types.TYPED)


def test_every_collective_has_a_type_or_a_reason() -> None:
    found = {
        module
        for module, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ON_TENSORS
        and ast.unparse(node.func.value) in ("dist", "torch.distributed")
    }
    assert found == set(distribution_types.COLLECTIVES)


def test_right_parts_have_types_and_errors_have_none() -> None:
    """In one process, with a fake group of DP 2 x CP 2 x TP 2: 9 right parts, and 20 errors, none of which passes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = run_forked(ROOT / "tests" / "typed_programs.py", [], environment)
    assert done.returncode == 0, done.stderr
    verdicts = dict(line.rsplit(": right", 1) if line.endswith(": right") else line.split(": wrong", 1)
                    for line in done.stdout.splitlines() if ": right" in line or ": wrong" in line)  # fmt: skip
    right = {name for name, why in verdicts.items() if not why}
    assert right == {
        "ulysses", "ring", "ring with gathered keys", "chunked loss", "chunked loss, TP-sp", "MLP", "MLP, TP-sp",
        "gradients summed over DP then CP", "norm of queries, weight summed over TP",
    }  # fmt: skip
    assert len(verdicts) - len(right) >= 20
