# SPDX-License-Identifier: Apache-2.0
"""Answers to operations on fake tensors whose like has been seen before.

A long sequence in chunks calls the same few operations on the same few shapes a million times, and PyTorch's fake
tensors take a tenth of a millisecond for each, also where they remember it. What an operation returns depends on the
shapes, strides, dtypes and numbers that it is given, so it is worked out once. Views are made by PyTorch's own kernels
for tensors without memory. What is neither, or does more than return tensors, is asked each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from megatron.platform.simulation import UNKNOWN

aten = torch.ops.aten

# Whose kernels without memory are in C++, and which fake tensors run as they are.
VIEWS = frozenset(
    (
        aten._unsafe_view.default,
        aten.as_strided.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    )
)
CHANGES_TENSORS = ("resize_", "set_", "lift", "_resize")  # beginnings of names: shapes and storages of what is given
NUMBERS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Unknown(Exception):
    """What an operation is given cannot be looked up."""


class Remembered:
    """
    Args:
        mode: whose tensors are answered for, and who is asked about what is new.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._recipes: dict[tuple, Callable | None] = {}

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What the operation returns, or ``UNKNOWN``."""
        if func in VIEWS:
            x = args[0]
            if type(x) is not FakeTensor or x.constant is not None or x.fake_mode is not self.mode:
                return UNKNOWN
            with in_kernel_invocation_manager(self.mode):
                out = func(*args, **kwargs)
            return FakeTensor(self.mode, out, x.fake_device)
        if not makes_tensors(func):
            return UNKNOWN
        try:
            recipe = self._recipes.get(self._key(func, args, kwargs))
        except Unknown:
            return UNKNOWN
        return UNKNOWN if recipe is None else recipe((*args, *kwargs.values()))

    def keep(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Remember that the operation has returned ``out``."""
        if func in VIEWS or not makes_tensors(func):
            return
        try:
            key = self._key(func, args, kwargs)
        except Unknown:
            return
        if key not in self._recipes:
            self._recipes[key] = self._recipe(out, (*args, *kwargs.values()))

    def _key(self, func: Any, args: tuple, kwargs: dict) -> tuple:
        """
        Raises:
            Unknown: among what is given is something that cannot be compared.
        """
        return func, torch.get_default_dtype(), self._described(args), *self._described_by_name(kwargs)

    def _described_by_name(self, kwargs: dict) -> tuple:
        return (tuple(kwargs), self._described(kwargs.values())) if kwargs else ()

    def _described(self, things: Any) -> tuple:
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
                found += (x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device)
            elif kind in NUMBERS:
                found += (kind, x)
            elif kind is list or kind is tuple:
                found += (kind, self._described(x))
            else:
                raise Unknown
        return tuple(found)

    def _recipe(self, out: Any, given: Sequence[Any]) -> Callable[[Sequence[Any]], Any] | None:
        """How to make ``out`` again; None where that cannot be told from the tensors that were ``given``."""
        if isinstance(out, Tensor):
            return self._tensor_recipe(out, given)
        if type(out) not in (tuple, list) or not all(isinstance(x, Tensor | int | None) for x in out):
            return None
        storages = [x.untyped_storage()._cdata for x in out if isinstance(x, Tensor)]
        recipes = [self._tensor_recipe(x, given) if isinstance(x, Tensor) else x for x in out]
        if len(storages) != len(set(storages)) or any(x is None for x, y in zip(recipes, out) if y is not None):
            return None
        kind = type(out)
        return lambda given: kind(recipe(given) if callable(recipe) else recipe for recipe in recipes)

    def _tensor_recipe(self, out: Tensor, given: Sequence[Any]) -> Callable[[Sequence[Any]], Tensor] | None:
        for place, x in enumerate(given):
            if x is out:
                return lambda given: given[place]
        flat = [x for y in given for x in (y if isinstance(y, list | tuple) else (y,)) if isinstance(x, Tensor)]
        if type(out) is not FakeTensor or out.constant is not None or out.layout is not torch.strided:
            return None
        storage = out.untyped_storage()
        if any(x.untyped_storage()._cdata == storage._cdata for x in flat) or out.requires_grad or out.is_complex():
            return None
        mode, shape, stride, dtype, device = self.mode, out.shape, out.stride(), out.dtype, out.fake_device

        def make(_: Sequence[Any] = ()) -> Tensor:
            with in_kernel_invocation_manager(mode):
                empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return FakeTensor(mode, empty, device)

        again = make()
        same = (
            again.untyped_storage().nbytes() == storage.nbytes()
            and out.storage_offset() == 0
            and torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(out)
        )
        return make if same else None


@cache
def makes_tensors(func: Any) -> bool:
    """Whether an operation returns new tensors, or some that it is given, and does nothing beside."""
    if (
        func in VIEWS
        or func.namespace != "aten"
        or any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
    ):
        return False
    name = func._schema.name.removeprefix("aten::")
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
    return not name.startswith(CHANGES_TENSORS) and not any(tag in func.tags for tag in tags)
