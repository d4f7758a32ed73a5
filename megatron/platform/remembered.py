# SPDX-License-Identifier: Apache-2.0
"""Answers to operations on fake tensors whose like has been seen before.

A long sequence in chunks calls the same few operations on the same few shapes a million times, and PyTorch's fake
tensors take a tenth of a millisecond for each, also where they remember it. What an operation returns depends on the
shapes, strides, dtypes and numbers that it is given, so it is worked out once. What does more than return tensors is
asked each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

UNKNOWN = object()
"""In place of what an operation returns: it has to be called."""

CHANGES_TENSORS = ("resize_", "set_", "lift", "_resize")  # beginnings of names: shapes and storages of what is given
SLICE = torch.ops.aten.slice.Tensor
NUMBERS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

Recipe = Callable[[Sequence[Any]], Any]
"""What an operation returns, given all of its arguments in their order."""


class Unknown(Exception):
    """What an operation is given cannot be looked up."""


class Remembered:
    """
    Args:
        mode: whose tensors are answered for, and who is asked about what is new.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._recipes: dict[tuple, Recipe | None] = {}
        self._slices: dict[tuple, New] = {}  # of each row of a long tensor another: by their sizes alone

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What the operation returns, or ``UNKNOWN``."""
        if not only_returns(func):
            return UNKNOWN
        if func is SLICE and not kwargs and (cut := Cut.of(*args)) is not None:
            like = self._slices.get(cut.key)
            if like is not None and args[0].fake_mode is self.mode:
                return like.over(args[0].untyped_storage(), cut.offset)
        try:
            recipe = self._recipes.get(self._key(func, args, kwargs))
        except Unknown:
            return UNKNOWN
        return UNKNOWN if recipe is None else recipe((*args, *kwargs.values()) if kwargs else args)

    def keep(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Remember that the operation has returned ``out``."""
        if not only_returns(func):
            return
        try:
            key = self._key(func, args, kwargs)
        except Unknown:
            return
        if key not in self._recipes:
            recipe = self._recipes[key] = self._recipe(out, (*args, *kwargs.values()), may_view(func))
            if func is SLICE and not kwargs and isinstance(recipe, New) and (cut := Cut.of(*args)) is not None:
                if out.storage_offset() == cut.offset:
                    self._slices[cut.key] = recipe

    def _key(self, func: Any, args: tuple, kwargs: dict) -> tuple:
        """
        Raises:
            Unknown: among what is given is something that cannot be compared.
        """
        begins = may_view(func)  # where tensors begin in their memory then matters, too
        key = func, torch.get_default_dtype(), self._described(args, begins)
        return (*key, tuple(kwargs), self._described(kwargs.values(), begins)) if kwargs else key

    def _described(self, things: Any, begins: bool) -> tuple:
        """All that an answer can depend on, of what an operation is given; 1, 1.0 and True differ.

        Raises:
            Unknown: there is something else among them.
        """
        found: list[Any] = []
        for x in things:
            kind = type(x)
            if kind is FakeTensor:
                if x.constant is not None or x.fake_mode is not self.mode or x.layout is not torch.strided:
                    raise Unknown
                found += (x.shape, x.stride(), x.storage_offset() if begins else 0, x.dtype, x.fake_device)
            elif kind in NUMBERS:
                found += (kind, x)
            elif kind is list or kind is tuple:
                found += (kind, self._described(x, begins))
            else:
                raise Unknown
        return tuple(found)

    def _recipe(self, out: Any, given: Sequence[Any], views: bool) -> Recipe | None:
        """How to make ``out`` again; None where that cannot be told from what was ``given``."""
        if isinstance(out, Tensor):
            return self._tensor_recipe(out, given, views)
        if type(out) not in (tuple, list) or not all(isinstance(x, Tensor | int | None) for x in out):
            return None
        parts = [self._tensor_recipe(x, given, views) if isinstance(x, Tensor) else (lambda _, x=x: x) for x in out]
        news = [x.untyped_storage()._cdata for x, part in zip(out, parts) if isinstance(part, New) and part.of is None]
        if None in parts or len(news) != len(set(news)):
            return None
        kind = type(out)
        return lambda given: kind([part(given) for part in parts])

    def _tensor_recipe(self, out: Tensor, given: Sequence[Any], views: bool) -> Recipe | None:
        """
        Args:
            views: what is returned may be a view of something ``given``.
        """
        for place, x in enumerate(given):
            if x is out:
                return lambda given: given[place]
        if type(out) is not FakeTensor or out.constant is not None or out.layout is not torch.strided:
            return None
        if out.requires_grad or out.is_complex() or out.fake_mode is not self.mode:
            return None
        storage, of = out.untyped_storage(), None
        for place, x in enumerate(given):
            for part in x if isinstance(x, list | tuple) else (x,):
                if isinstance(part, Tensor) and part.untyped_storage()._cdata == storage._cdata:
                    if part is not x or not views:
                        return None
                    of = place
        recipe = New(self.mode, out, of)
        again = recipe(given)
        same = (
            again.untyped_storage().nbytes() == storage.nbytes()
            and (again.shape, again.stride(), again.storage_offset()) == (out.shape, out.stride(), out.storage_offset())
            and torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(out)
            and vars(again) == vars(out)
        )
        return recipe if same else None


class Cut(NamedTuple):
    """A slice of a fake tensor.

    Attributes:
        key: all that its shape and strides depend on.
        offset: where in the storage it begins.
    """

    key: tuple
    offset: int

    @classmethod
    def of(cls, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Cut | None:
        """None for what is no ordinary fake tensor."""
        if type(x) is not FakeTensor or x.constant is not None or x.layout is not torch.strided:
            return None
        stride, (first, stop, _) = x.stride(), slice(start, end, step).indices(x.shape[dim])
        key = x.shape, stride, x.dtype, x.fake_device, dim, step, len(range(first, stop, step))
        return cls(key, x.storage_offset() + first * stride[dim])


class New:
    """Makes fake tensors like ``like``.

    Args:
        of: the place, among what the operation is given, of the tensor that the new one is a view of; None: it has
            memory of its own.
    """

    def __init__(self, mode: FakeTensorMode, like: FakeTensor, of: int | None) -> None:
        self.of, self.dtype, self.device = of, like.dtype, like.fake_device
        self.size, self.offset = (like.shape, like.stride()), like.storage_offset()
        with torch._C._DisableTorchDispatch():
            self.attributes = dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), self.device)))

    def __call__(self, given: Sequence[Any]) -> Tensor:
        with torch._C._DisableTorchDispatch():  # nobody counts what stands behind a fake tensor
            behind = torch.empty_strided(*self.size, dtype=self.dtype, device="meta")
            if self.of is not None:
                behind.set_(given[self.of].untyped_storage(), self.offset, *self.size)
            return self._before(behind)

    def over(self, storage: torch.UntypedStorage, offset: int) -> Tensor:
        """One that begins ``offset`` elements into ``storage``, which is a tensor's or a meta device's own."""
        with torch._C._DisableTorchDispatch():
            behind = torch.empty(0, dtype=self.dtype, device="meta").set_(storage, offset, *self.size)
            return self._before(behind)

    def _before(self, behind: Tensor) -> Tensor:
        # As FakeTensor's constructor does, which takes four times as long.
        new = Tensor._make_subclass(
            FakeTensor, behind, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        torch._C._set_throw_on_mutable_data_ptr(new)
        vars(new).update(self.attributes)
        return new


@cache
def only_returns(func: Any) -> bool:
    """Whether an operation returns new tensors, views or some that it is given, and does nothing beside."""
    if func.namespace != "aten":
        return False
    name = func._schema.name.removeprefix("aten::")
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
    return not name.startswith(CHANGES_TENSORS) and not any(tag in func.tags for tag in tags)


@cache
def may_view(func: Any) -> bool:
    """Whether an operation may return a view of what it is given."""
    name = func._schema.name.removeprefix("aten::")
    return name in ("_unsafe_view", "_reshape_alias") or any(x.alias_info is not None for x in func._schema.returns)
