# SPDX-License-Identifier: Apache-2.0
"""Expressions that choose rows: ``lang == 'en' and score >= 0.5 and len(text) > 1000``.

Python's parser reads the expression, and this module turns a few kinds of its nodes into functions of a row. Nothing is
evaluated as Python: there are no calls except ``len`` and ``lower``, no attributes of objects, and no loops.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from megatron.training.refusal import Refusal, short

LONGEST = 4096  # characters of an expression
COMPARE = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
KNOWN = "names of columns, constants, comparisons, in, and, or, not, + - * /, len(column), lower(column), a.b"
Evaluate = Callable[[dict[str, Any]], Any]


class Filter:
    """A condition on a row, with ``names``, the columns that it reads.

    A column that a row lacks is None. A comparison of None with a number is false, as in SQL, and so is any other
    comparison of values that Python cannot compare.

    Args:
        text: the expression.

    Raises:
        Refusal: the expression cannot be parsed, or uses something else than the nodes above.
    """

    def __init__(self, text: str) -> None:
        self.text, self.names = text, set()
        try:
            if len(text) > LONGEST:
                raise SyntaxError(f"it has more than {LONGEST:,} characters")
            self._evaluate = self._function(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            hint = str(error) if isinstance(error, Refusal) else f"{getattr(error, 'msg', error)}; it may have {KNOWN}"
            raise Refusal(f"--filter {short(text)}: {hint}") from None

    def __call__(self, row: dict[str, Any]) -> bool:
        """Whether a row is kept."""
        return bool(self._evaluate(row))

    def _function(self, node: ast.AST) -> Evaluate:
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
            return lambda row, value=node.value: value
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            parts = [self._function(part) for part in node.elts]
            return lambda row: [part(row) for part in parts]
        if isinstance(node, ast.Name):
            self.names.add(node.id)
            return lambda row, name=node.id: row.get(name)
        if isinstance(node, ast.Attribute):  # a field of a column that is an object
            inner, name = self._function(node.value), node.attr
            return lambda row: value.get(name) if isinstance(value := inner(row), dict) else None
        if isinstance(node, ast.BoolOp):
            parts, every = [self._function(part) for part in node.values], isinstance(node.op, ast.And)
            combine = all if every else any
            return lambda row: combine(part(row) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            change = operator.not_ if isinstance(node.op, ast.Not) else operator.neg
            inner = self._function(node.operand)
            return lambda row: _or_none(change, inner(row))
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            left, right, combine = self._function(node.left), self._function(node.right), ARITHMETIC[type(node.op)]
            return lambda row: _number(combine, left(row), right(row))
        if isinstance(node, ast.Compare) and all(type(op) in COMPARE for op in node.ops):
            parts = [self._function(part) for part in (node.left, *node.comparators)]
            compare = [COMPARE[type(op)] for op in node.ops]
            return lambda row: _compared(compare, [part(row) for part in parts])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1 and not node.keywords:
            if node.func.id in ("len", "lower"):
                inner, call = self._function(node.args[0]), {"len": len, "lower": str.lower}[node.func.id]
                return lambda row: _or_none(call, inner(row))
        raise SyntaxError(f"{short(ast.unparse(node))} is not supported")


ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _or_none(function: Callable[[Any], Any], value: Any) -> Any:
    try:
        return function(value)
    except TypeError:
        return None


def _number(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Arithmetic of numbers only: "x" * 10**9 would fill the memory."""
    if not all(isinstance(value, (int, float)) for value in (left, right)):
        return None
    try:
        return function(left, right)
    except (ArithmeticError, ValueError):
        return None


def _compared(compare: list[Callable[[Any, Any], bool]], values: list[Any]) -> bool:
    try:
        return all(function(left, right) for function, left, right in zip(compare, values, values[1:]))
    except TypeError:
        return False
