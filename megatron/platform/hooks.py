# SPDX-License-Identifier: Apache-2.0
"""Functions that a simulation may replace, marked where they are defined.

A function with the decorator :func:`replaceable` can be replaced temporarily by :func:`replaced`. No other function of
this program is replaced from outside. :func:`patched` does the same for other libraries, and :func:`patched_items` for
tables of sizes that depend on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import update_wrapper
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Replaceable(Generic[P, R]):
    """A function or a method that :func:`replaced` may replace.

    Attributes:
        function: the original.
        current: the function that a call runs.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = self.current = function
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.current(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)


def replaceable(function: Callable[P, R]) -> Replaceable[P, R]:
    """Decorator: a simulation may replace ``function``."""
    return Replaceable(function)


@contextmanager
def replaced(hook: Replaceable[P, R], make: Callable[[Callable[P, R]], Callable[P, R]]) -> Iterator[None]:
    """In this context calls of ``hook`` run the function that ``make`` returns.

    Args:
        make: gets the function that a call has run so far, which the new function may call.
    """
    before = hook.current
    hook.current = make(before)
    try:
        yield
    finally:
        hook.current = before


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In this context attribute ``name`` of a module or class of another library is ``value``.

    Raises:
        ValueError: ``owner`` is part of this program, where functions must be marked as replaceable.
    """
    module = owner.__module__ if isinstance(owner, type) else owner.__name__
    if module.startswith("megatron.") and not module.startswith("megatron.core"):
        raise ValueError(f"{module} is part of this program: mark {name} as replaceable")
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)


@contextmanager
def patched_items(table: MutableMapping[str, Any], items: dict[str, Any]) -> Iterator[None]:
    """In this context ``table`` holds only ``items``."""
    before = dict(table)
    table.clear()
    table.update(items)
    try:
        yield
    finally:
        table.clear()
        table.update(before)
