# SPDX-License-Identifier: Apache-2.0
"""A simulated cluster: any rank of a world of any size, in this one process.

Collectives of the fake process group return at once and move nothing, so shapes, plans and sizes are real and contents
are not. With :func:`fake_tensors`, tensors have shapes and no memory either.
"""

from __future__ import annotations

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

from megatron.platform.hooks import patched

# Answers to operations on fake tensors whose like has been seen before.
#
# A long sequence in chunks calls the same few operations on the same few shapes a million times, and PyTorch's fake
# tensors take a tenth of a millisecond for each, also where they remember it. What an operation returns depends on the
# shapes, strides, dtypes and numbers that it is given, so it is worked out once. What does more than return tensors is
# asked each time.


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


Answer = Callable[[Any, tuple, dict], Any]
"""What an operation returns, given its arguments; :data:`UNKNOWN` where it has to be called."""

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
    """Be rank ``rank`` of ``world_size``: within, ``cp.initialize_grid(...)`` yields that rank's real grid.

        with simulated_world(16384, rank=77):
            grid = cp.initialize_grid(tensor=8, ulysses=8, ring=4, pipeline=4)

    Objects that ranks exchange are this rank's own. On leaving, torch.distributed and megatron-core are as before: not
    initialized; so are the random states.

    Raises:
        ValueError: there is no such rank.
        RuntimeError: this process already is part of a world, real or simulated.
    """
    from megatron.core import parallel_state, rerun_state_machine
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not 0 <= rank < world_size:
        raise ValueError(f"a world of {world_size} has no rank {rank}")
    if dist.is_initialized() or parallel_state.is_initialized():
        raise RuntimeError(
            "this process is part of a torch.distributed world already: simulate in a process of its own"
        )
    random_states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    before = dict(vars(parallel_state))  # core keeps its groups in this module; destroy_model_parallel forgets some
    create_group = parallel_state.create_group

    def create_own_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup | None:
        """core makes every group of the world on every rank; only those with this rank in them are ever looked at."""
        if rank not in ranks:
            return None
        options["backend"] = None  # core would have real gloo groups beside the others
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
        rerun_state_machine.destroy_rerun_state_machine()
        for restore, state in zip((random.setstate, np.random.set_state, torch.set_rng_state), random_states):
            restore(state)


@contextmanager
def fake_tensors(waited: Callable[[int], None] | None = None, *, gloo: bool = False) -> Iterator[Answer]:
    """Within, every tensor that is made has a shape and no memory; programs run, numbers read from tensors are made up.

    Yields what answers operations, for a dispatch mode on top of this that would ask at once: :data:`UNKNOWN` is to be
    called as it is.

    Args:
        waited: called with the number of a collective (1, 2, ... in the order of their starts) when it is waited for.
        gloo: simulate what gloo does beside: it reduces a copy of the whole in place of a scatter.
    """
    from megatron.core.utils import local_multi_tensor_l2_norm
    from torch._C._distributed_c10d import FakeWork
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed import DeviceMesh

    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    answers = Collectives(Remembered(fakes))

    def wait(work: Any, timeout: Any = None) -> bool:
        number, whole = answers.started.pop(id(work), (None, 0))[:2]
        if gloo and whole:
            torch.empty(whole, dtype=torch.uint8).split(whole)
        if number is not None and waited is not None:
            waited(number)
        return True

    make_mesh = DeviceMesh.from_group

    def from_group(*args: Any, **kwargs: Any) -> DeviceMesh:
        with _disable_current_modes():  # it looks its own rank up in a tensor of ranks
            return make_mesh(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patched(DeviceMesh, "from_group", from_group))
        stack.enter_context(patched(nn.Module, "_apply", _apply))
        stack.enter_context(patched(FakeWork, "wait", wait))
        stack.callback(setattr, local_multi_tensor_l2_norm, "__code__", local_multi_tensor_l2_norm.__code__)
        local_multi_tensor_l2_norm.__code__ = _l2_norm.__code__  # its callers have imported it by name
        stack.enter_context(fakes)
        stack.enter_context(answers)
        yield answers.answer


def outside_fakes(function: Callable) -> Callable:
    """``function``, of tensors that are real within :func:`fake_tensors` too, and stay so."""

    def run(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return run


class Collectives(TorchDispatchMode):
    """Answers what fake tensors cannot: collectives, and numbers read from tensors (1, or 0 of fp16's overflow).

    Args:
        remembered: answers all else, as far as it can.
    """

    def __init__(self, remembered: Remembered) -> None:
        super().__init__()
        self.remembered = remembered
        # By address of the work, which stays until it is waited for: number, bytes of a reduce-scatter, the work.
        self.started: dict[int, tuple[int, int, Any]] = {}
        self.count = 0
        self._overflow: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = self.answer(func, args, kwargs)
        if out is UNKNOWN:
            out = func(*args, **kwargs)
            self.remembered.keep(func, args, kwargs, out)
        return out

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What an operation returns; ``UNKNOWN``: fake tensors know, or a subclass of tensors among the arguments."""
        kind = _kind(func)
        if kind == "device":
            return CPU  # all of them
        if kind == "in place":
            return args[0]  # nothing changes, and fake tensors would take their time to find out
        if kind == "collective":
            return self._collective(func, args)
        if kind == "number":
            return self._number(args[0])
        if kind == "detach" and type(args[0]) is Tensor:  # not a fake: recompute keeps it so
            return outside_fakes(func)(*args)
        if kind == "overflow":
            self._overflow.add(args[1].untyped_storage()._cdata)
        return self.remembered.answer(func, args, kwargs)

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
    """What :class:`Collectives` does about an operation."""
    if func is torch.ops.prim.device.default:
        return "device"
    if func is torch.ops.aten.detach.default:
        return "detach"
    if func in IN_PLACE:
        return "in place"
    if func.namespace == "c10d":
        return "collective"
    if func is torch.ops.aten._local_scalar_dense.default:
        return "number"
    return "overflow" if "non_finite_check" in func._schema.name else "other"


def _l2_norm(chunk_size, noop_flag, tensor_lists, per_tensor, *args):  # noqa: ANN001, ANN202
    """Core's, without a tensor made from a list of numbers."""
    return torch.stack([torch.norm(tensor) for tensor in tensor_lists[0]]).norm().view(1), None


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` in place: PyTorch's would swap fake parameters, which have weak references."""
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
