# SPDX-License-Identifier: Apache-2.0
"""What a simulation may stand in for, marked where it is defined.

A function that carries :func:`replaceable` can be replaced for a while by :func:`replaced`. No other function of this
program is exchanged from outside. :func:`patched` does the same for other libraries, which have no such marks, and
:func:`patched_items` for tables of sizes that depend on the device.
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
    """A function or a method that :func:`replaced` may exchange.

    Attributes:
        function: as it was written.
        current: what a call runs.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = self.current = function
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.current(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)


def replaceable(function: Callable[P, R]) -> Replaceable[P, R]:
    """Decorator: ``function`` is one that a simulation may replace."""
    return Replaceable(function)


@contextmanager
def replaced(hook: Replaceable[P, R], make: Callable[[Callable[P, R]], Callable[P, R]]) -> Iterator[None]:
    """Within, calls of ``hook`` run what ``make`` returns.

    Args:
        make: takes what a call has run so far, which the new function may call.
    """
    before = hook.current
    hook.current = make(before)
    try:
        yield
    finally:
        hook.current = before


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within, attribute ``name`` of a module or class of another library is ``value``.

    Raises:
        ValueError: ``owner`` is part of this program, whose functions say themselves that they are replaceable.
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
    """Within, ``table`` holds ``items`` and nothing else."""
    before = dict(table)
    table.clear()
    table.update(items)
    try:
        yield
    finally:
        table.clear()
        table.update(before)
