# SPDX-License-Identifier: Apache-2.0
"""A simulated cluster: any rank of a world of any size, in a single process.

Collectives of the fake process group return immediately and send nothing: shapes, plans and sizes are real, but the
contents are not. With :func:`fake_tensors`, tensors have shapes and no memory.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron.platform import forget_meshes
from megatron.platform.hooks import patched

# A cache for operations on fake tensors.
#
# A long sequence in chunks calls the same few operations on the same few shapes a million times, and PyTorch's fake
# tensors need 0.1 ms for each, even with their own cache. The result of an operation depends only on the shapes,
# strides, dtypes and numbers of its arguments. Operations that do more than return tensors are not cached.


UNKNOWN = object()
"""Returned in place of a result: the operation has to be called."""

CHANGES_TENSORS = ("resize_", "set_", "lift", "_resize")  # prefixes of operations that change shapes or storages
SLICE = torch.ops.aten.slice.Tensor
NUMBERS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

Recipe = Callable[[Sequence[Any]], Any]
"""Makes the result of an operation from all of its arguments, in their order."""


class Unknown(Exception):
    """The arguments of an operation cannot be a key of the cache."""


class OperationCache:
    """A cache of operations on fake tensors.

    Args:
        mode: the mode of the fake tensors, which computes new results.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._recipes: dict[tuple, Recipe | None] = {}
        self._slices: dict[tuple, New] = {}  # slices of a tensor at different rows, by their sizes only

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """The result of the operation, or ``UNKNOWN``."""
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
        """Store the result ``out`` of the operation."""
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
        """Everything on which the operation's result depends.

        Raises:
            Unknown: an argument cannot be compared.
        """
        offsets = may_view(func)  # a view also depends on storage offsets
        key = func, torch.get_default_dtype(), self._described(args, offsets)
        return (*key, tuple(kwargs), self._described(kwargs.values(), offsets)) if kwargs else key

    def _described(self, things: Any, offsets: bool) -> tuple:
        """The properties of arguments on which a result can depend; 1, 1.0 and True differ.

        Raises:
            Unknown: an argument is of another kind.
        """
        properties: list[Any] = []
        for x in things:
            kind = type(x)
            if kind is FakeTensor:
                if x.constant is not None or x.fake_mode is not self.mode or x.layout is not torch.strided:
                    raise Unknown
                properties += (x.shape, x.stride(), x.storage_offset() if offsets else 0, x.dtype, x.fake_device)
            elif kind in NUMBERS:
                properties += (kind, x)
            elif kind is list or kind is tuple:
                properties += (kind, self._described(x, offsets))
            else:
                raise Unknown
        return tuple(properties)

    def _recipe(self, out: Any, given: Sequence[Any], views: bool) -> Recipe | None:
        """How to make ``out`` again from the arguments ``given``; None if this is not possible."""
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
        """How to make the tensor ``out`` again from the arguments ``given``; None if this is not possible.

        Args:
            views: whether the result may be a view of an argument.
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
        key: everything that determines its shape and strides.
        offset: its storage offset.
    """

    key: tuple
    offset: int

    @classmethod
    def of(cls, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Cut | None:
        """The slice, or None if ``x`` is not an ordinary fake tensor."""
        if type(x) is not FakeTensor or x.constant is not None or x.layout is not torch.strided:
            return None
        stride, (first, stop, _) = x.stride(), slice(start, end, step).indices(x.shape[dim])
        key = x.shape, stride, x.dtype, x.fake_device, dim, step, len(range(first, stop, step))
        return cls(key, x.storage_offset() + first * stride[dim])


class New:
    """Makes fake tensors like ``like``.

    Args:
        of: the index of the argument of which the new tensor is a view; None: it has its own storage.
    """

    def __init__(self, mode: FakeTensorMode, like: FakeTensor, of: int | None) -> None:
        self.of, self.dtype, self.device = of, like.dtype, like.fake_device
        self.size, self.offset = (like.shape, like.stride()), like.storage_offset()
        with torch._C._DisableTorchDispatch():
            self.attributes = dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), self.device)))

    def __call__(self, given: Sequence[Any]) -> Tensor:
        with torch._C._DisableTorchDispatch():  # dispatch modes must not count the meta tensor inside a fake tensor
            meta = torch.empty_strided(*self.size, dtype=self.dtype, device="meta")
            if self.of is not None:
                meta.set_(given[self.of].untyped_storage(), self.offset, *self.size)
            return self._fake_of(meta)

    def over(self, storage: torch.UntypedStorage, offset: int) -> Tensor:
        """A tensor at ``offset`` elements in ``storage``."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(0, dtype=self.dtype, device="meta").set_(storage, offset, *self.size)
            return self._fake_of(meta)

    def _fake_of(self, meta: Tensor) -> Tensor:
        # Like FakeTensor's constructor, which takes four times as long.
        new = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=self.device)
        torch._C._set_throw_on_mutable_data_ptr(new)
        vars(new).update(self.attributes)
        return new


@cache
def only_returns(func: Any) -> bool:
    """Whether an operation only returns new tensors, views or its arguments, without other effects."""
    if func.namespace != "aten":
        return False
    name = func._schema.name.removeprefix("aten::")
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
    return not name.startswith(CHANGES_TENSORS) and not any(tag in func.tags for tag in tags)


@cache
def may_view(func: Any) -> bool:
    """Whether an operation may return a view of an argument."""
    name = func._schema.name.removeprefix("aten::")
    return name in ("_unsafe_view", "_reshape_alias") or any(x.alias_info is not None for x in func._schema.returns)


Answer = Callable[[Any, tuple, dict], Any]
"""Gives the result of an operation from its arguments, or :data:`UNKNOWN` if it has to be called."""

CPU = torch.device("cpu")
IN_PLACE = frozenset(
    getattr(packet, kind)
    for packet in (
        getattr(torch.ops.aten, f"{name}_")
        for name in "add sub mul div addcmul addcdiv lerp copy zero fill exp neg clamp normal uniform".split()
    )
    for kind in packet.overloads()
)


@contextmanager
def simulated_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """A context in which this process is rank ``rank`` of ``world_size``, with that rank's real grid:

        with simulated_world(16384, rank=77):
            grid = cp.initialize_grid(tensor=8, ulysses=8, ring=4, pipeline=4)

    Gathered objects are all this rank's own. At the end torch.distributed and megatron-core are not
    initialized, as before. The random states, PyTorch's deterministic mode and the environment are restored.

    Raises:
        ValueError: there is no such rank.
        RuntimeError: this process is already part of a world, real or simulated.
    """
    from megatron.core import parallel_state, rerun_state_machine
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not 0 <= rank < world_size:
        raise ValueError(f"a world of {world_size} has no rank {rank}")
    if dist.is_initialized() or parallel_state.is_initialized():
        raise RuntimeError(
            "this process is already part of a torch.distributed world: run the simulation in another process"
        )
    random_states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    environment = dict(os.environ)
    before = dict(vars(parallel_state))  # core keeps its groups in this module; destroy_model_parallel forgets some
    create_group = parallel_state.create_group

    def create_own_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup | None:
        """Core creates every group of the world on every rank, but uses only those that contain this rank."""
        if rank not in ranks:
            return None
        options["backend"] = None  # core would also create real gloo groups
        return create_group(ranks, **options)

    def all_gather_object(objects: list, mine: Any, group: Any = None) -> None:
        objects[:] = [mine] * len(objects)

    parallel_state.create_group = create_own_group
    try:
        with patched(dist, "all_gather_object", all_gather_object):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
            yield
    finally:
        vars(parallel_state).update(before)
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        rerun_state_machine.destroy_rerun_state_machine()
        for restore, state in zip((random.setstate, np.random.set_state, torch.set_rng_state), random_states):
            restore(state)
        torch.use_deterministic_algorithms(deterministic[0])  # --deterministic-mode sets these for its process
        torch.utils.deterministic.fill_uninitialized_memory = deterministic[1]
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def fake_tensors(
    waited: Callable[[int], None] | None = None, *, gloo: bool = False, selected: Callable[[Tensor], int] | None = None
) -> Iterator[Answer]:
    """A context in which new tensors have a shape and no memory. Programs run; numbers read from tensors are made up.

    Yields the function that gives results, for a dispatch mode on top of this one.

    Args:
        waited: called with the number of a collective (1, 2, ... in the order of their starts) when it is waited for.
        gloo: simulate that gloo reduces a copy of the complete tensor for a reduce-scatter.
        selected: gives the number of entries that a mask selects.
    """
    from torch._C._distributed_c10d import FakeWork
    from torch.distributed import DeviceMesh

    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    answers = Collectives(OperationCache(fakes), selected)

    def wait(work: Any, timeout: Any = None) -> bool:
        number, whole = answers.started.pop(id(work), (None, 0))[:2]
        if gloo and whole:
            torch.empty(whole, dtype=torch.uint8).split(whole)
        if number is not None and waited is not None:
            waited(number)
        return True

    make_mesh = DeviceMesh.from_group

    def from_group(*args: Any, **kwargs: Any) -> DeviceMesh:
        with _disable_current_modes():  # from_group reads its rank from a tensor of ranks
            return make_mesh(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patched(DeviceMesh, "from_group", from_group))
        stack.enter_context(patched(nn.Module, "_apply", _apply))
        stack.enter_context(patched(FakeWork, "wait", wait))
        stack.enter_context(fakes)
        stack.enter_context(answers)
        yield answers.answer


def outside_fakes(function: Callable) -> Callable:
    """``function`` for real tensors within :func:`fake_tensors`."""

    def run(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return run


class Collectives(TorchDispatchMode):
    """Gives results that fake tensors cannot give: collectives, and numbers read from tensors (1, or 0 for overflow).

    Args:
        cache: the cache for all other operations.
        selected: gives the number of entries that a mask selects.
    """

    def __init__(self, cache: OperationCache, selected: Callable[[Tensor], int] | None = None) -> None:
        super().__init__()
        self.cache, self.selected = cache, selected
        # By id of the work, which is kept until it is waited for: (number, bytes of a reduce-scatter, the work).
        self.started: dict[int, tuple[int, int, Any]] = {}
        self.count = 0
        self._overflow: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = self.answer(func, args, kwargs)
        if out is UNKNOWN:
            out = func(*args, **kwargs)
            self.cache.keep(func, args, kwargs, out)
        return out

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """The result of an operation, or ``UNKNOWN`` if it must be called."""
        kind = _kind(func)
        if kind == "device":
            return CPU  # the device of all tensors
        if kind == "in place":
            return args[0]  # shapes do not change, and calling it would be slow
        if kind == "collective":
            return self._collective(func, args)
        if kind == "number":
            return self._number(args[0])
        if kind == "selection" and self.selected is not None:
            return torch.empty(self.selected(args[1]), dtype=args[0].dtype)
        if kind == "detach" and type(args[0]) is Tensor:  # a real tensor stays real for recompute
            return outside_fakes(func)(*args)
        if kind == "overflow":
            self._overflow.add(args[1].untyped_storage()._cdata)
        return self.cache.answer(func, args, kwargs)

    def _collective(self, func: Any, args: tuple) -> Any:
        from torch._C._distributed_c10d import FakeWork

        name = func._schema.name
        self.count += 1
        work = FakeWork()
        whole = sum(x.nbytes for x in tree_leaves(args[1]) if isinstance(x, Tensor)) if "reduce_scatter" in name else 0
        self.started[id(work)] = (self.count, whole, work)
        tensors = [args[0]] if len(func._schema.returns) > 1 else []
        return (*tensors, work.boxed()) if tensors else work.boxed()

    def _number(self, x: Tensor) -> float | int | bool:
        if x.dtype == torch.bool:
            return False
        if not x.dtype.is_floating_point:
            return 1
        return 0.0 if x.untyped_storage()._cdata in self._overflow else 1.0


@cache
def _kind(func: Any) -> str:
    """How :class:`Collectives` handles an operation."""
    if func is torch.ops.prim.device.default:
        return "device"
    if func is torch.ops.aten.detach.default:
        return "detach"
    if func in IN_PLACE:
        return "in place"
    if func.namespace == "c10d":
        return "collective"
    if func is torch.ops.aten.masked_select.default:
        return "selection"
    if func is torch.ops.aten._local_scalar_dense.default:
        return "number"
    return "overflow" if "non_finite_check" in func._schema.name else "other"


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` in place; PyTorch's would swap fake parameters, which fails because of weak references."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for parameter in module._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                parameter.data = function(parameter.data)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module
