# SPDX-License-Identifier: Apache-2.0
"""Generates from the source all single changes of the kinds that matter in a parallel program.

The kinds are: reductions, waits and syncs that are left out or doubled, wrong groups and ranks, lost scales, spans off
by one, wrong signs, sums in a narrower dtype, and changed conditions.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = [f"megatron/context_parallel/{name}" for name in ("layout", "attention", "linear_attention", "positions",
                                                            "fpdt", "core")]  # fmt: skip
STEP = [f"megatron/training/{name}.py" for name in ("step", "loss", "watch", "model/optimizer", "model/fsdp",
                                                    "model/weights")]  # fmt: skip
CHECKPOINT = [f"megatron/training/{name}" for name in ("checkpoint", "families", "ownership")]
PLACES = (*CONTEXT, "megatron/context_parallel/sdpa.py", *STEP, *CHECKPOINT)

LEFT_OUT = {
    "all_reduce", "wait", "synchronize", "wait_stream", "wait_event", "record", "record_stream", "fsync", "sync",
    "flush", "barrier", "zero_", "mul_", "div_", "add_", "copy_", "update", "append",
}  # fmt: skip
DOUBLED = {"all_reduce", "mul_", "add_", "div_"}
NARROWER = {"float64": "float32", "float32": "bfloat16"}
ORDER = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}


@dataclass(frozen=True)
class Change:
    """The bytes ``start`` to ``stop`` of a file become ``new``."""

    file: str
    line: int
    kind: str
    start: int
    stop: int
    old: str
    new: str
    key: str  # stays the same when lines above are changed

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]


def all_changes(places: tuple[str, ...] = PLACES) -> list[Change]:
    """All changes, in the order of the files."""
    files = [file for place in places for file in ([ROOT / place] if place.endswith(".py") else
             sorted((ROOT / place).rglob("*.py")))]  # fmt: skip
    return [change for file in files for change in changes_of(str(file.relative_to(ROOT)), file.read_bytes())]


def changes_of(file: str, source: bytes) -> list[Change]:
    """The changes of one file."""
    lines = [0]
    for text in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(text))

    def span(node: ast.AST) -> tuple[int, int]:
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    result, seen = [], Counter()
    for function, node, parent in _nodes(ast.parse(source), "", None):
        for kind, start, stop, new in _changes(node, parent, source, span):
            old = source[start:stop].decode()
            what = f"{file}:{function}:{kind}:{' '.join(old.split())}"
            seen[what] += 1
            result.append(Change(file, node.lineno, kind, start, stop, old, new, f"{what}:{seen[what]}"))
    return result


def _nodes(node: ast.AST, function: str, parent: ast.AST | None) -> Iterator[tuple[str, ast.AST, ast.AST | None]]:
    """(qualified name of the function, node, parent) of all code that computes: no messages, types or decorators."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.ImportFrom, ast.Import)):
        return
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        if node.name in ("__str__", "__repr__"):
            return
        function = f"{function}.{node.name}" if function else node.name
        for child in node.body:
            yield from _nodes(child, function, node)
        return
    if function and hasattr(node, "lineno"):
        yield function, node, parent
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child, function, node)


def _changes(node: ast.AST, parent: ast.AST | None, source: bytes, span) -> Iterator[tuple[str, int, int, str]]:
    """(kind, start, stop, new text) of the changes of one node."""

    def text(part: ast.AST) -> str:
        a, b = span(part)
        return source[a:b].decode()

    def operator(left: ast.AST, right: ast.AST, old: str, new: str) -> tuple[int, int, str] | None:
        a, b = span(left)[1], span(right)[0]
        between = source[a:b].decode()
        return (a, b, between.replace(old, new, 1)) if between.count(old) == 1 else None

    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = node.value.func.attr if isinstance(node.value.func, ast.Attribute) else getattr(
            node.value.func, "id", "")  # fmt: skip
        if name in LEFT_OUT:
            yield "call left out", *span(node), "pass"
        if name in DOUBLED and "MAX" not in text(node):  # a maximum of maxima is the same
            yield "call doubled", *span(node), f"{text(node)}; {text(node)}"
    if isinstance(node, ast.keyword) and node.arg == "group" and not isinstance(node.value, ast.Constant):
        yield "wrong group", *span(node.value), "None"
    if isinstance(node, ast.BinOp) and not any(
        isinstance(part, ast.Constant) and isinstance(part.value, str) or isinstance(part, (ast.JoinedStr, ast.List))
        for part in (node.left, node.right)
    ):
        for kind, old, new in ((ast.Add, "+", "-"), (ast.Sub, "-", "+")):
            if isinstance(node.op, kind) and (edit := operator(node.left, node.right, old, new)):
                yield "sign", *edit
        if isinstance(node.op, (ast.Add, ast.Sub)) and getattr(node.right, "value", None) == 1:
            yield "off by one", *span(node), text(node.left)
        if isinstance(node.op, (ast.Mult, ast.Div)):
            yield "scale left out", *span(node), text(node.left)
        if isinstance(node.op, ast.FloorDiv):
            yield "off by one", *span(node), f"({text(node)} + 1)"
        if isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant):
            yield "no remainder", *span(node), text(node.left)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
        yield "sum left out", *span(node), "pass"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        if not isinstance(node.operand, ast.Constant):
            yield ("sign" if isinstance(node.op, ast.USub) else "condition"), *span(node), f"({text(node.operand)})"
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in ORDER:
        if edit := operator(node.left, node.comparators[0], *ORDER[type(node.ops[0])]):
            yield "off by one", *edit
    if isinstance(node, ast.Slice) and node.upper is not None:
        yield "off by one", *span(node.upper), f"({text(node.upper)}) - 1"
    if isinstance(node, ast.BoolOp) and len(node.values) == 2:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        if edit := operator(*node.values, old, new):
            yield "condition", *edit
    if isinstance(node, ast.If) and not isinstance(node.test, (ast.UnaryOp, ast.Compare)):
        yield "condition", *span(node.test), f"not ({text(node.test)})"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args and not node.keywords:
        if node.func.attr in ("float", "double"):
            yield "dtype", *span(node), text(node.func.value)
    if isinstance(node, ast.Attribute) and node.attr in NARROWER and text(node.value) == "torch":
        yield "dtype", *span(node), f"torch.{NARROWER[node.attr]}"
    if isinstance(node, ast.Attribute) and node.attr == "rank" and isinstance(node.ctx, ast.Load):
        if not (isinstance(parent, ast.Call) and parent.func is node):
            owner = text(node.value)
            yield "ranks swapped", *span(node), f"({owner}.size - 1 - {owner}.rank)"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        yield "min and max", *span(node.func), "max" if node.func.id == "min" else "min"
