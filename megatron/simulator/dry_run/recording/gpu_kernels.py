# SPDX-License-Identifier: Apache-2.0
"""A GPU's kernels, streams and host memory, simulated on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from math import inf, prod
from typing import Any

import torch
from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.nn import functional
from torch.optim import adam

from megatron.context_parallel.attention import kernels
from megatron.context_parallel.attention.kernels import KERNELS, math_kernel, sums
from megatron.context_parallel.attention.kernels.base import Final, Kernel, Scores
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.attention.kernels.tile_by_tile import TileByTile
from megatron.context_parallel.attention.kernels.triton_kernels.triton_tiles import groups
from megatron.context_parallel.fpdt import chunked_loss
from megatron.context_parallel.fpdt.host_store import HostPool, Offload
from megatron.context_parallel.layout.masks import PAIR_BYTES
from megatron.context_parallel.layout.tiles import Tiles
from megatron.context_parallel.linear_attention import block_scan, mixer
from megatron.context_parallel.linear_attention.rules import Prepared
from megatron.context_parallel.positions import position_dropout, rope
from megatron.platform.hooks import patched, patched_items, replaced
from megatron.platform.streams import COMPUTE, STORES, Streams
from megatron.simulator.cost import trace
from megatron.simulator.cost.seconds import attention_named
from megatron.simulator.cost.trace import Transfer
from megatron.simulator.dry_run.recording.chosen_launches import chosen_launches
from megatron.simulator.dry_run.recording.recorder import Recorder, bytes_of
from megatron.simulator.machines.machine import Machine

# --- FSDP's streams ---
#
# On a GPU FSDP gathers weights on a separate stream while the previous unit computes; the host is one unit ahead of the
# device, because gathered weights wait for the copy-out of the previous unit. FSDP reduces gradients on another stream,
# for which the backward pass waits at its end. On a CPU, where the simulation runs, FSDP waits immediately.


@contextmanager
def sharded_streams(recorder: Recorder) -> Iterator[None]:
    """Inside this context, the trace waits for FSDP's collectives where a GPU would."""
    events = recorder.trace.events
    gathered: dict[int, list[int]] = {}  # tickets, by the id of FSDP's result
    reduced: list[int] = []
    free_since: list[int | None] = [None]  # index in the trace from which on the all-gathers' stream is idle
    gather, reduce = fsdp.foreach_all_gather, fsdp.foreach_reduce
    wait, finish = fsdp.FSDPParamGroup.wait_for_unshard, fsdp.FSDPParamGroup.finalize_backward

    @wraps(gather)
    def gather_ahead(*args: Any, **kwargs: Any) -> Any:
        begin = len(events)
        with recorder.deferring() as tickets:
            result = gather(*args, **kwargs)
        moved = [event for event in events[begin:] if isinstance(event, Transfer)]
        events[begin:] = [event for event in events[begin:] if not isinstance(event, Transfer)]
        place = begin if free_since[0] is None else free_since[0]
        events[place:place] = moved
        gathered[id(result)] = tickets
        return result

    @wraps(wait)
    def wait_for_gather(group: fsdp.FSDPParamGroup) -> None:
        for ticket in gathered.pop(id(group._all_gather_result), ()):
            recorder.wait(ticket)
            free_since[0] = len(events)
        wait(group)

    @wraps(reduce)
    def reduce_async(*args: Any, **kwargs: Any) -> Any:
        with recorder.deferring() as tickets:
            result = reduce(*args, **kwargs)
        reduced.extend(tickets)
        return result

    @wraps(finish)
    def finish_backward(group: fsdp.FSDPParamGroup) -> None:
        while reduced:
            recorder.wait(reduced.pop(0))
        finish(group)

    with ExitStack() as stack:
        stack.enter_context(patched(fsdp, "foreach_all_gather", gather_ahead))
        stack.enter_context(patched(fsdp, "foreach_reduce", reduce_async))
        stack.enter_context(patched(fsdp.FSDPParamGroup, "wait_for_unshard", wait_for_gather))
        stack.enter_context(patched(fsdp.FSDPParamGroup, "finalize_backward", finish_backward))
        yield


FUSED_ATTENTION = ("flash_attn", "cudnn", "flash")


def simulated_kernel(
    recorder: Recorder,
    machine: Machine,
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    tile_rows: float = inf,
    **needs: bool,
) -> Kernel:
    """Like `kernels.select`, for a GPU of ``machine`` that ``device`` simulates. Raises KernelUnavailable."""
    chosen = machine.choose_attention(name, dtype, head_dim, tile_rows=tile_rows, **needs)
    if chosen == "triton":
        return SimulatedTriton(recorder)
    return SimulatedFused(recorder, chosen) if chosen in FUSED_ATTENTION else KERNELS[chosen]


class SimulatedFused(TileByTile):
    """A fused attention kernel, simulated by PyTorch's flash attention, whose shapes fake tensors know."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def forward(self, *tile: Any) -> tuple[Tensor, Tensor]:
        with self.recorder.calling(attention_named(self.name)):
            return KERNELS["flash"].forward(*tile)

    def backward(self, *tile: Any) -> tuple[Tensor, Tensor, Tensor]:
        with self.recorder.calling(attention_named(self.name)):
            return KERNELS["flash"].backward(*tile)


class SimulatedTriton:
    """Replaces `TritonKernel`: computes nothing, and records launches with the pairs of their tiles.

    The work of dropout and of a soft-cap is not counted.
    """

    name = "triton"

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def attend(self, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, scores: Scores, result: Accumulator) -> None:
        """One launch for each of `groups`; see `kernels.base.Kernel`."""
        each = groups(tiles)
        for group in each:
            fresh = result.unset(whole=len(each) == 1)  # which the kernel does not read
            self._price(group, (2, 2), q, k, v, moved=(q, k, v, *(fresh or result.sums() * 2)))

    def attend_grad(
        self,
        tiles: Tiles,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Scores,
        final: Final,
        dq: GradientSum,
        dkv: KeyGradients,
    ) -> None:
        """Two launches that both compute scores and their gradients: 6 and 8 FLOPs, where a single kernel has 10."""
        read, each = (q, k, v, final.dout, final.lse, final.delta), groups(tiles)
        for group in each:
            fresh = dq.unset(whole=len(each) == 1)
            of_q = (dq.sum(),) * 2 if fresh is None else (fresh,)
            of_kv = dkv.unset(whole=len(each) == 1) or dkv.sums() * 2
            self._price(group, (4, 2), q, k, v, moved=(*read, *of_q), backward=True)
            self._price(group, (4, 4), q, k, v, moved=(*read, *of_kv), backward=True, reads_mask=False)

    def delta(self, out: Tensor, dout: Tensor) -> Tensor:
        """Row sums of ``dout * out``, fp32 [s, b, h]."""
        total = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
        self.recorder.price(trace.Kernel("delta", "memory", 0.0, bytes_of((out, dout, total))))
        return total

    def _price(
        self,
        tiles: Tiles,
        flops: tuple[int, int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        moved: tuple[Tensor, ...],
        backward: bool = False,
        reads_mask: bool = True,
    ) -> None:
        """Record a launch.

        Args:
            flops: of a pair, for each entry of a key and for each of a value.
            reads_mask: it reads the masks of masked tiles, as the first launch of a pass does.
        """
        masked = reads_mask * sum((tile.q[1] - tile.q[0]) * (tile.k[1] - tile.k[0]) for tile in tiles if tile.masked)
        if masked:
            self.recorder.price(trace.Kernel("mask_bits", "memory", 0.0, masked * PAIR_BYTES))
        rows, batch, heads, size = q.shape
        of_pair = flops[0] * size + flops[1] * v.size(3)
        work = float(batch * heads * of_pair * tiles.pairs)
        shape = (rows, k.size(0), batch * heads, size)
        name = attention_named(self.name)
        self.recorder.price(trace.Kernel(name, "attention", work, bytes_of(moved), shape, q.element_size(), backward))


# --- states of linear attention ---


def by_state_kernel(x: Tensor, keys: int) -> bool:
    """Replaces `block_scan.by_kernel`: whether a GPU runs Triton's kernels (context_parallel/linear_attention)."""
    return x.dtype != torch.float64 and keys <= block_scan.LARGEST_KEYS


@dataclass
class SimulatedLaunch:
    """Replaces the launch of such a kernel: computes nothing, and records the work on all blocks of all heads."""

    recorder: Recorder
    name: str
    ready: Prepared
    arguments: dict[str, Any]
    values: int

    def run(self) -> None:
        b, heads, blocks, rows, _ = self.ready.own.shape
        keys, erases, backward = self.ready.writes.size(-1), self.ready.erase is not None, "grads" in self.name
        of_values = keys + erases * (keys + backward * (rows + keys))  # multiplications of a token, for each value
        work = 2.0 * b * heads * blocks * rows * of_values * self.values
        moved = bytes_of(list(self.arguments.values()))
        self.recorder.price(trace.Kernel(self.name, "memory", work, moved, itemsize=4, backward=backward))


# --- host memory: buffers without memory, and a GPU's copy streams ---

CPU = torch.device("cpu")


class SimulatedPool(HostPool):
    """Counts bytes like a :class:`HostPool`; its buffers are fake tensors."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = max(prod(shape) * dtype.itemsize, 1)
        buffer = torch.empty(size, dtype=torch.uint8)
        storage = buffer.untyped_storage()
        storage.is_host_buffer = True
        weakref.finalize(storage, self._return, size).atexit = False
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def block_of(self, host: Tensor) -> int:
        return host.untyped_storage()._cdata

    def _return(self, size: int) -> None:
        self.in_use -= size


class SimulatedStreams(Streams):
    """A GPU's streams. An event is the ticket of the last copy. Waits of copy streams are not simulated."""

    asynchronous = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(CPU)
        self.recorder = recorder
        self._last: dict[str, int] = {}

    def copy(self, stream: str, to: Tensor, source: Tensor) -> None:
        if source.requires_grad and torch.is_grad_enabled():
            with self.recorder.muted():
                to.copy_(source)
        else:
            self.recorder.written(to)
        direction = "to_host" if stream == STORES else "to_device"
        self._last[stream] = self.recorder.copy(direction, to.numel() * to.element_size())

    def record(self, stream: str) -> int | None:
        return self._last.get(stream)

    def wait(self, stream: str, event: int | None) -> None:
        if stream == COMPUTE and event is not None:
            self.recorder.wait(event)


def simulated_offload(recorder: Recorder, on_gpu: bool) -> Offload:
    """A simulated rank's offload. Without a GPU its copies are recorded as compute, as on a real CPU."""
    streams = SimulatedStreams(recorder) if on_gpu else Streams(CPU)
    return Offload(CPU, streams, SimulatedPool(streams))


# --- fused kernels: one kernel on a GPU that is several operations on a CPU is recorded as one ---

# torch.compile makes one kernel of each (core's @jit_fuser).
FUSED = (
    (fused_bias_swiglu, ("swiglu", "bias_swiglu", "swiglu_back", "bias_swiglu_back")),
    (fused_bias_dropout, ("bias_dropout_add_fused_train", "bias_dropout_add_fused_inference")),
)


@contextmanager
def gpu_kernels(recorder: Recorder, machine: Machine, fused_rope: bool = True) -> Iterator[None]:
    """Inside this context, operations that a GPU fuses are recorded as one kernel without intermediate memory.

    Attention uses a simulation of the kernel that ``machine`` would choose.

    Args:
        fused_rope: the rotation of queries and keys is fused, too.
    """
    with ExitStack() as stack:
        for module, names in FUSED:
            for name in names:
                stack.enter_context(patched(module, name, _as_one(recorder, getattr(module, name))))
        stack.enter_context(patched(functional, "rms_norm", partial(_rms_norm, recorder)))
        stack.enter_context(patched(adam, "_fused_adam", _adam(recorder, adam._fused_adam)))
        stack.enter_context(sharded_streams(recorder))
        stack.enter_context(chosen_launches(recorder))
        stack.enter_context(replaced(sums.merged, lambda _: partial(_merge, recorder)))
        if fused_rope:
            stack.enter_context(replaced(rope.rotated, lambda _: _as_one(recorder, _rotate)))
        # The sizes of pieces are those of a GPU, not those chosen for a CPU's caches.
        stack.enter_context(patched_items(rope.PIECE, {}))
        for sizes in (math_kernel.SCORE_BYTES, position_dropout.ELEMENTS_AT_ONCE):
            stack.enter_context(patched_items(sizes, sizes | {"cpu": sizes["cuda"]}))
        stack.enter_context(replaced(kernels.select, lambda _: partial(simulated_kernel, recorder, machine)))
        stack.enter_context(replaced(block_scan.by_kernel, lambda _: by_state_kernel))
        stack.enter_context(replaced(mixer.chosen_kernel, lambda _: lambda *_, **__: "blocks"))
        stack.enter_context(replaced(block_scan.launch, lambda _: partial(SimulatedLaunch, recorder)))
        stack.enter_context(replaced(chunked_loss.adds_wide, lambda _: lambda *_: True))
        stack.enter_context(replaced(chunked_loss.loss_kernels, lambda _: partial(_loss_kernels, recorder)))
        yield


def _loss_kernels(recorder: Recorder, weight: Tensor) -> tuple[Callable, Callable]:
    """Replaces Triton's kernels (context_parallel/fpdt/loss_kernel.py)."""

    def row_sums(logits: Tensor, bias: Tensor | None, targets: Tensor, *_: Any) -> Tensor:
        return torch.zeros((4, logits.size(0)), dtype=torch.float32)

    def write_gradient(logits: Tensor, bias: Tensor | None, targets: Tensor, factors: Tensor, *_: Any) -> Tensor:
        return logits  # written in their place

    return _as_one(recorder, row_sums), _as_one(recorder, write_gradient)


def _merge(recorder: Recorder, out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> Tensor:
    """Replaces `sums.merged`: Triton's kernel, but PyTorch's operations for fp64."""
    if out.dtype == torch.float64:
        return sums.merged.function(out, lse, tile_out, tile_lse)

    def merge(*_: Tensor) -> tuple[Tensor, Tensor]:
        return out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32), lse

    return recorder.fused(merge, (out, lse, tile_out, tile_lse), {})[0]


def _rotate(x: Tensor, angles: Tensor, settings: rope.Rope, sign: int) -> Tensor:
    """Replaces Triton's kernel (context_parallel/positions/rope_kernel.py); only its memory matters."""
    return torch.empty_like(x)


def _as_one(recorder: Recorder, function: Callable) -> Callable:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return recorder.fused(function, args, kwargs)

    return run


def _adam(recorder: Recorder, function: Callable) -> Callable:
    """One kernel for all tensors, also where PyTorch has one for each group of them."""

    def fused_adam(*args: Any, **kwargs: Any) -> tuple:
        function(*args, **kwargs)
        return args[0], args[2], args[3]  # the tensors that it writes: parameters and moments

    def run(*args: Any, **kwargs: Any) -> None:
        recorder.fused(fused_adam, args, kwargs)

    return run


def _rms_norm(recorder: Recorder, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None):
    """CUDA's RMSNorm, which saves its input and one number per row."""
    return _RmsNorm.apply(recorder, x, weight)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: Recorder, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.recorder = recorder
        rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)

        def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
            return torch.empty_like(x)

        return recorder.fused(rms_norm, (x, weight), {})

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, Tensor | None]:
        x, weight, rstd = ctx.saved_tensors

        def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return torch.empty_like(x), None if weight is None else torch.empty_like(weight)

        return None, *ctx.recorder.fused(rms_norm_backward, (dy, x, weight), {})
