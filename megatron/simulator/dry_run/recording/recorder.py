# SPDX-License-Identifier: Apache-2.0
"""Records the trace of a step of the real program: kernels, transfers, host copies, waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._pytree import tree_leaves

from megatron.context_parallel.layout.grid import Grid
from megatron.context_parallel.sparse_attention.blocks_of_scores import count_of
from megatron.formulas.strategy import Group
from megatron.platform.simulated_cluster import UNKNOWN, Answer
from megatron.simulator.cost.trace import Collective, Event, HostCopy, Kernel, Phase, Trace, Transfer, Wait
from megatron.training.report.tensor_memory import TensorMeter

T = TypeVar("T")

# --- operations as kernels: FLOPs, and bytes that they read and write ---

aten = torch.ops.aten


def bytes_of(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_in(tensors))


def tensors_in(things: Any) -> list[Tensor]:
    """All tensors in an operation's arguments or results."""
    if isinstance(things, Tensor):
        return [things]
    if isinstance(things, tuple | list):
        return [x for thing in things for x in ((thing,) if isinstance(thing, Tensor) else tensors_in(thing))]
    return [x for x in tree_leaves(things) if isinstance(x, Tensor)] if isinstance(things, dict) else []


@cache
def operation_name(func: Any) -> str:
    """An operation's name in the trace."""
    return func._schema.name.removeprefix("aten::")


MOVES_NOTHING = (
    aten._local_scalar_dense.default,
    aten.new_empty.default,
    aten.empty_like.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.lift_fresh.default,
)


@cache
def moves_nothing(func: Any) -> bool:
    """Whether an operation only makes views or allocates memory."""
    if func.namespace == "prim" or func._schema.name.startswith(("aten::empty", "aten::detach", "aten::set_")):
        return True
    if func in MOVES_NOTHING:
        return True
    returned = func._schema.returns
    return bool(returned) and all(x.alias_info is not None and not x.alias_info.is_write for x in returned)


def host_copy(func: Any, args: tuple, out: Any) -> HostCopy | None:
    """The operation as a copy between a host buffer and the device; None if it is no such copy."""
    if func is aten.copy_.default:
        to, source = args[0], args[1]
    elif func is aten.clone.default:
        to, source = out, args[0]
    else:
        return None
    to_host, from_host = in_host(to), in_host(source)
    if to_host == from_host:
        return None
    return HostCopy("to_host" if to_host else "to_device", to.numel() * to.element_size())


def in_host(x: Tensor) -> bool:
    """Whether ``x`` is in a buffer of host memory."""
    x = getattr(x, "_local_tensor", x)
    return torch._C._has_storage(x) and getattr(x.untyped_storage(), "is_host_buffer", False)


# Index of the first matrix among the arguments, for every overload.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
GEMMS = {
    getattr(getattr(aten, name), overload): first
    for name, first in PRODUCTS.items()
    for overload in getattr(aten, name).overloads()
}
WRITES_ALONE = (aten.copy_.default, aten.zero_.default, aten.fill_.Scalar)
ATTENTION = ("_scaled_dot_product_", "_flash_attention_")


def kernel(func: Any, args: tuple, kwargs: dict, out: Any) -> Kernel | None:
    """The kernel that an operation runs on the compute stream; None if it runs none."""
    name = operation_name(func)
    given = [value for name, value in kwargs.items() if name != "out"]  # "out" is the result
    tensors = [getattr(x, "_local_tensor", x) for x in tensors_in((args, given, out))]
    size = sum(x.numel() * x.element_size() for x in tensors)
    if not size:
        return None
    if func in WRITES_ALONE:  # the target is not read
        size -= tensors[0].numel() * tensors[0].element_size()
    if func in GEMMS:
        a, b = args[GEMMS[func] : GEMMS[func] + 2]
        shape = (1 if a.dim() == 2 else a.size(0), a.size(-2), b.size(-1), a.size(-1))
        return Kernel(name, "gemm", 2.0 * prod(shape), size, shape, a.element_size())
    if name.startswith(ATTENTION):
        return _attention(func, name, args, kwargs, size)
    return Kernel(name, "memory", 0.0, size, itemsize=tensors[-1].element_size())


def _attention(func: Any, name: str, args: tuple, kwargs: dict, size: int) -> Kernel:
    """An attention kernel; forward: (q, k, v, ...); backward: (dout, q, k, v, ...), all [b, heads, s, d]."""
    given = dict(zip((x.name for x in func._schema.arguments), args)) | kwargs
    q, k = given["query"], given["key"]
    backward = "backward" in name
    batch, heads, rows, head_dim = q.shape
    keys, causal = k.size(2), bool(given.get("is_causal", False))
    pairs = rows * (rows + 1) / 2 if causal else rows * keys
    flops = (10.0 if backward else 4.0) * batch * heads * head_dim * pairs
    return Kernel(name, "attention", flops, size, (rows, keys, batch * heads, head_dim), q.element_size(), backward)


# --- operations of torch.distributed as transfers ---

STAGES = "pp"  # key of the pipeline's group among the names of groups


@cache
def communicates(func: Any) -> bool:
    """Whether an operation is one of torch.distributed."""
    return func.namespace in ("c10d", "_c10d_functional")


def sent(kind: Collective, size: int, ranks: int) -> int:
    """Bytes that a rank sends of a tensor of ``size`` bytes; see :class:`Transfer`."""
    if kind in ("all_gather", "reduce_scatter"):
        return size * (ranks - 1) // ranks
    if kind == "all_reduce":
        return 2 * size * (ranks - 1) // ranks
    return size


def transfer(func: Any, args: tuple, out: Any) -> tuple[Collective, ProcessGroup, int] | None:
    """(kind, group, bytes) of a communication operation; for gathers and reductions, bytes of the complete tensor."""
    name = func._schema.name.split("::")[1]
    if name in ("barrier", "monitored_barrier_", "wait_tensor", "recv_", "recv_any_source_"):
        return None  # messages are recorded by their sender; for a ring's receives see `received`
    group = _group(args)
    if name.startswith(("allreduce", "all_reduce", "reduce_")) and "scatter" not in name:
        return "all_reduce", group, bytes_of(args[0])
    if "reduce_scatter" in name:
        return "reduce_scatter", group, bytes_of(args[0] if func.namespace == "_c10d_functional" else args[1])
    if name.startswith(("allgather", "_allgather", "all_gather")):
        return "all_gather", group, bytes_of(out if func.namespace == "_c10d_functional" else args[0])
    if name.startswith(("alltoall", "all_to_all")):
        return "all_to_all", group, _sent_to_others(args, group)
    if name in ("scatter", "scatter_"):  # rank 0 sends each rank a part
        return "broadcast", group, bytes_of(args[1]) * (group.size() - 1) // group.size() if args[1] else 0
    if name.startswith("broadcast"):
        root = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
        return "broadcast", group, bytes_of(args[0]) if group.rank() == root else 0
    if name == "send":
        return "p2p", group, bytes_of(args[0])
    raise NotImplementedError(f"the recorder does not know the communication operation {func}: add it to transfer()")


def received(func: Any, args: tuple) -> tuple[ProcessGroup, int] | None:
    """(group, bytes) of a receive; None: another operation."""
    return (_group(args), bytes_of(args[0])) if func._schema.name == "c10d::recv_" else None


def _sent_to_others(args: tuple, group: ProcessGroup) -> int:
    """Bytes sent by alltoall_base_(out, in, group, out sizes, in sizes) or alltoall_(outs, ins, group)."""
    source = args[1]
    if isinstance(source, (list, tuple)):
        return bytes_of([x for rank, x in enumerate(source) if rank != group.rank()])
    sizes, total = args[4] if len(args) > 4 else [], bytes_of(source)
    if not sizes:
        return total * (group.size() - 1) // group.size()
    return total * (sum(sizes) - sizes[group.rank()]) // max(sum(sizes), 1)


def _group(args: tuple) -> ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(arg)
            except RuntimeError:  # a reduction's operator
                continue
    return dist.distributed_c10d._resolve_process_group([x for x in args if isinstance(x, str)][-1])


def axes_of(grid: Grid) -> dict[str, tuple[str, Group]]:
    """(axis, ranks) of each of this rank's process groups, by the group's name."""
    from megatron.core import parallel_state as ps

    tensor, ulysses, ring = grid.tensor.size, grid.ulysses.size, grid.ring.size
    context = ulysses * ring
    dp, pp = Group(context * grid.data.size, tensor), Group(grid.pipeline.size, tensor * context * grid.data.size)
    named = [
        ("pp", grid.pipeline.group, pp),
        ("dp", grid.data.group, Group(grid.data.size, tensor * context)),
        ("dp", ps.get_data_parallel_group(with_context_parallel=True), dp),
        ("tp", grid.tensor.group, Group(tensor)),
        ("ulysses", grid.ulysses.group, Group(ulysses, tensor)),
        ("ring", grid.ring.group, Group(ring, tensor * ulysses)),
        ("cp", grid.context.group, Group(context, tensor)),
    ]
    axes = {group.group_name: (axis, placement) for axis, group, placement in named if group is not None}
    axes[STAGES] = ("pp", pp)
    group = ps.get_embedding_group(check_initialized=False)
    if group is not None and group.group_name not in axes:
        axes[group.group_name] = ("pp", Group(group.size(), pp.stride * max(1, pp.size - 1)))
    for name, placement in _expert_groups(grid).items():
        axes.setdefault(name, placement)
    return axes


def _expert_groups(grid: Grid) -> dict[str, tuple[str, Group]]:
    """The same for the groups of experts: neighbours share an expert's width, and further ones the experts."""
    from megatron.core import parallel_state as ps

    split = ps.get_expert_tensor_parallel_world_size()
    shared = ps.get_expert_model_parallel_world_size() * split
    holders = ps.get_expert_data_parallel_group()  # of the same experts
    named = [
        ("ep", ps.get_expert_model_parallel_group(), split),
        ("ep", ps.get_expert_tensor_parallel_group(), 1),
        ("ep", ps.get_expert_tensor_and_model_parallel_group(), 1),
        ("dp", holders, shared),
    ]
    return {group.group_name: (axis, Group(group.size(), stride)) for axis, group, stride in named}


DEVICE_OF = torch.ops.prim.device.default


@dataclass
class _Hop:
    """Messages of the current hop of a ring."""

    axis: str = ""
    group: Group = Group(1)
    receives: list[int] = field(default_factory=list)  # numbers of the receives that are not in the trace yet
    bytes: float = 0.0  # of these receives
    sends: Transfer | None = None  # the transfer whose `excess` stands for receives that are in the trace


def repeated(event: Event, times: float) -> Event:
    """An event that happens ``times`` times; a fraction is part of the size of each."""
    if not isinstance(event, Kernel | Transfer | HostCopy):
        return event
    whole = ceil(times)
    sizes = {"bytes": event.bytes * times / whole, "count": event.count * whole}
    return replace(event, **sizes, **({"flops": event.flops * times / whole} if isinstance(event, Kernel) else {}))


class Recorder(TensorMeter):
    """A :class:`TensorMeter` that also records a trace while it is active.

    It works with real tensors and process groups, without changing what they do, and with fake ones.

    Args:
        axes: name of the axis and ranks of each process group, by the group's name; see :func:`axes_of`.
        resized, before: see :class:`TensorMeter`.
    """

    def __init__(
        self,
        axes: dict[str, tuple[str, Group]],
        *,
        resized: bool = False,
        history: bool = True,
        before: type[Tensor] = Tensor,
    ) -> None:
        super().__init__("cpu", record=history, resized=resized, before=before)
        self.axes, self.trace = axes, Trace()
        self.tickets = 0
        self._of_collective: dict[int, int] = {}  # tickets, by the number of the collective
        self._collectives = 0
        self._hop = _Hop()
        self._deferred: list[int] | None = None
        self.attention = ""  # name of attention kernels, instead of the operation that simulates them
        self.answer: Answer | None = None  # may return an operation's result without calling it
        self.quiet = 0  # depth of regions whose operations the recorder ignores

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE_OF:  # half of the calls of fake tensors
            return self._call(func, args, kwargs)
        self.settle()
        out = self._call(func, args, kwargs)
        self.see_all(out)
        if not self.quiet:
            self.note(func, args, kwargs, out)
        return out

    def _call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        out = UNKNOWN if self.answer is None else self.answer(func, args, kwargs)
        return func(*args, **kwargs) if out is UNKNOWN else out

    def note(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Record one operation."""
        if communicates(func):
            self._note_transfer(func, args, out)
        elif not moves_nothing(func):
            event = host_copy(func, args, out) or kernel(func, args, kwargs, out)
            if event is not None:
                self.end_hop()
                if self.attention and getattr(event, "kind", "") == "attention":
                    event.name = self.attention
                self.trace.events.append(event)

    def written(self, to: Tensor) -> None:
        """Account for a write into ``to`` by an operation that the caller records instead of calling it."""
        self.settle()
        self.see(to)

    def price(self, kernel: Kernel) -> None:
        """Record a kernel that does not run."""
        if not self.quiet:
            self.trace.events.append(kernel)

    def mark(self, phase: str) -> None:
        """Record that a phase begins."""
        self.trace.events.append(Phase(phase))

    @property
    def plain(self) -> bool:
        """Whether operations are recorded one by one, unchanged."""
        return self.history is not None and not self.quiet and not self.attention and self._deferred is None

    @property
    def unfinished(self) -> dict[int, int]:
        """Tickets of collectives that have not been waited for."""
        return dict(self._of_collective)

    def counts(self) -> tuple[int, int, int, int]:
        """Numbers of storages, events, changes of memory and tickets until now."""
        return self._count, len(self.trace.events), len(self.history.events), self.tickets

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def wait(self, ticket: int) -> None:
        self.trace.events.append(Wait((ticket,)))

    def waited(self, collective: int) -> None:
        """Record a wait for the collective of this number (1, 2, ... in the order of their starts)."""
        self.end_hop()
        ticket = self._of_collective.pop(collective, None)
        if ticket is None:
            return
        if self._deferred is not None:
            self._deferred.append(ticket)
        else:
            self.wait(ticket)

    @contextmanager
    def deferring(self) -> Iterator[list[int]]:
        """Inside this context, waits are not recorded, but their tickets are collected for the caller to wait later."""
        before, self._deferred = self._deferred, []
        try:
            yield self._deferred
        finally:
            self._deferred = before

    def copy(self, direction: str, size: int) -> int:
        """Record a host copy on a copy stream; returns its ticket."""
        ticket = self.ticket()
        self.trace.events.append(HostCopy(direction, size, ticket))
        return ticket

    @contextmanager
    def calling(self, attention: str) -> Iterator[None]:
        """Inside this context, attention kernels have this name."""
        before, self.attention = self.attention, attention
        try:
            yield
        finally:
            self.attention = before

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Inside this context, operations are not recorded, but their memory is counted."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def one_for_all(self, parts: Sequence[T], work: Callable[[T], int] = count_of) -> Iterator[T]:
        """The part with the most work; the events recorded for it count for all parts."""
        each = [work(part) for part in parts]
        if not sum(each):
            return
        most, begin = max(each), len(self.trace.events)
        yield parts[each.index(most)]
        times = sum(each) / most
        self.trace.events[begin:] = [repeated(event, times) for event in self.trace.events[begin:]]

    def fused(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Run ``function`` and record it as one kernel, without memory for its intermediate tensors."""
        self.settle()
        device = self._levels["device"]
        high, peak, begin = device.high, device.peak, len(self.history.events) if self.history else 0
        with self.muted():
            out = function(*args, **kwargs)
        if not self.quiet:
            self.settle()
            device.peak, device.high = peak, max(high, device.now)
            self._drop_temporaries(begin)
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            size = bytes_of([getattr(x, "_local_tensor", x) for x in tensors])
            self.trace.events.append(Kernel(function.__name__, "memory", 0.0, size))
        return out

    def _drop_temporaries(self, begin: int) -> None:
        """Remove storages from the history that were both made and freed since its event ``begin``."""
        if self.history is None:
            return
        since, change = self.history.events[begin:], Counter()
        for _, number, size in since:
            change[number] += size
        self.history.events[begin:] = [event for event in since if change[event[1]]]

    def _note_transfer(self, func: Any, args: tuple, out: Any) -> None:
        functional = func.namespace == "_c10d_functional"
        self._collectives += not functional
        arriving = received(func, args)
        if arriving is not None:
            group, size = arriving
            axis, placement = self.axes.get(group.group_name, ("", None))
            if axis == "ring":
                self._hop.receives.append(self._collectives)
                self._hop.axis, self._hop.group, self._hop.bytes = axis, placement, self._hop.bytes + size
            return
        described = transfer(func, args, out)
        if described is None:
            return
        kind, group, size = described
        # Between two stages core sends some messages over the group of all ranks.
        known = self.axes.get(group.group_name) or (self.axes.get(STAGES) if kind == "p2p" else None)
        axis, placement = known or ("other", Group(group.size()))
        if placement.size == 1:
            return
        ticket = None if functional else self.ticket()
        self._of_collective[self._collectives] = ticket
        moved = Transfer(kind, axis, placement, sent(kind, size, placement.size), ticket)
        self.trace.events.append(moved)
        if kind == "p2p" and axis == self._hop.axis:
            self._pair_with_receives(moved)

    def _pair_with_receives(self, moved: Transfer) -> None:
        """Merge a hop's receives, issued before its sends, into the send, with the excess of received bytes."""
        hop = self._hop
        if hop.receives:
            moved.excess = max(0.0, hop.bytes - moved.bytes)
            self._of_collective |= dict.fromkeys(hop.receives, moved.ticket)
            self._hop = _Hop(moved.axis, moved.group, sends=moved)
        elif hop.sends is not None:
            hop.sends.excess = max(0.0, hop.sends.excess - moved.bytes)

    def end_hop(self) -> None:
        """End the current hop; its receives become a transfer if nothing was sent."""
        if not self._hop.axis:
            return
        hop, self._hop = self._hop, _Hop()
        if hop.receives:
            ticket = self.ticket()
            self._of_collective |= dict.fromkeys(hop.receives, ticket)
            self.trace.events.append(Transfer("p2p", hop.axis, hop.group, 0.0, ticket, excess=hop.bytes))
