# SPDX-License-Identifier: Apache-2.0
"""Measures one device: matrix products and attention by size, memory, host copies, launches, memory of libraries."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.attention import kernels
from megatron.context_parallel.attention.attend import attend_all, attend_all_grad
from megatron.context_parallel.attention.kernels.base import Kernel, Scores
from megatron.context_parallel.attention.ring import RingSource
from megatron.context_parallel.attention.ring_plan import attention_plan
from megatron.context_parallel.attention.rule import TileKernel
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.masks import Causal
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.platform.collectives import all_gather

HEAD_DIM = 128
HEAD_SIZES = (32, 64, 128, 256)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Effort:
    """Sizes and durations of a measurement."""

    window: float  # seconds to spend on one figure, at least one call
    gemm: tuple[int, ...]  # sizes of square products
    attention: tuple[int, ...]  # sequence lengths
    heads: int  # of attention
    copy_bytes: int  # of a copy
    message_bytes: int  # of the large message of a collective


def effort(device: str, quick: bool) -> Effort:
    """Sizes that suit a ``cuda`` or a ``cpu`` device; ``quick``: fewer sizes and less time."""
    if device == "cuda":
        if quick:
            return Effort(0.1, (512, 1024, 2048, 4096, 8192), (1024, 4096, 16384), 16, 2**28, 2**26)
        sizes = (256, 512, 1024, 2048, 4096, 8192, 16384)
        return Effort(0.5, sizes, (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536), 32, 2**30, 2**28)
    if quick:
        return Effort(0.1, (64, 256, 1024), (128, 512), 4, 2**25, 2**22)
    return Effort(0.6, (64, 128, 256, 512, 1024, 2048), (128, 256, 512, 1024, 2048, 4096), 8, 2**27, 2**25)


def settle(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device, window: float) -> float:
    """Seconds of a call: the best of several batches of calls, each about a fifth of ``window``."""
    call()
    settle(device)
    calls, best, begun = 1, float("inf"), time.perf_counter()
    while True:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        settle(device)
        took = time.perf_counter() - start
        best = min(best, took / calls)
        if time.perf_counter() - begun > window:
            return best
        calls = max(1, min(10_000, int(window / 5 / best)))


def gemm_rate(size: int, dtype: torch.dtype, device: torch.device, window: float) -> float:
    """FLOP/s of a square product."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds_of(lambda: torch.mm(a, b, out=out), device, window)


def attention_rates(
    length: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, window: float
) -> tuple[float, float]:
    """FLOP/s of causal attention, forward and backward, with the kernel that training would use on this device."""
    kernel = kernels.select("auto", device=device, dtype=dtype, head_dim=head_dim)
    q, k, v = (torch.randn(length, 1, heads, head_dim, device=device).to(dtype) for _ in range(3))
    run, run_back = passes(kernel, q, k, v)
    out, lse = run()
    forward = seconds_of(run, device, window)
    backward = seconds_of(lambda: run_back(out, out, lse), device, window)
    flops = 2 * length * length * heads * head_dim
    return flops / forward, 2.5 * flops / backward


def passes(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], tuple[Tensor, Tensor]], Callable]:
    """Causal attention of one process by a kernel, without autograd; tensors are [s, b, heads, d].

    Returns a function that returns out and lse, and a function of dout, out and lse that returns dq, dk and dv.
    """
    layout = SequenceLayout(q.size(0), abstract_grid())
    source = RingSource(attention_plan(layout, Causal()).ring(), layout.grid.ring)
    tile_kernel = TileKernel(kernel, Scores(q.size(3) ** -0.5))
    return (
        lambda: attend_all(q, k, v, source, tile_kernel),
        lambda dout, out, lse: attend_all_grad(dout, q, k, v, out, lse, source, tile_kernel),
    )


def memory_bandwidth(size: int, device: torch.device, window: float) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device, window)


def launch_seconds(device: torch.device, window: float) -> float:
    """Seconds per kernel when many tiny ones run one after another."""
    x = torch.zeros(1, device=device)
    return seconds_of(lambda: x.add_(1), device, window)


def host_copy(size: int, device: torch.device, window: float) -> tuple[float, float]:
    """(Bytes per second, seconds of a tiny copy) between the device and pinned host memory, in the slower direction.

    On a CPU it measures copies between two buffers.
    """
    cuda = device.type == "cuda"
    host, tiny = (torch.zeros(n, dtype=torch.uint8, pin_memory=cuda) for n in (size, 8))
    buffer, dot = (torch.ones(n, dtype=torch.uint8, device=device) for n in (size, 8))
    pairs = ((buffer, host), (host, buffer)) if cuda else ((buffer, host),)
    slowest = max(seconds_of(partial(to.copy_, of, non_blocking=True), device, window) for to, of in pairs)

    def copy_tiny() -> None:
        dot.copy_(tiny, non_blocking=True)
        settle(device)

    latency = seconds_of(copy_tiny, device, window)
    return size / max(slowest - latency, 0.1 * slowest), latency


# --- device memory that no tensor holds: the CUDA context, cuBLAS' workspace, NCCL's buffers (GPUs only) ---

SIDE = 256  # size of the product that makes cuBLAS allocate its workspace


def memory_outside_allocator(device: torch.device) -> int:
    """Bytes in use on the device beyond those that PyTorch's allocator reserves. No other process may use the GPU."""
    torch.cuda.synchronize(device)
    free, whole = torch.cuda.mem_get_info(device)
    return whole - free - torch.cuda.memory_reserved(device)


def context_and_workspace(device: torch.device) -> dict[str, int]:
    """Bytes of the CUDA context with the kernels that the first product loads, and of cuBLAS' workspace.

    The workspace is what the first product leaves allocated.
    """
    a = torch.ones(SIDE, SIDE, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    before = torch.cuda.memory_allocated(device)
    torch.mm(a, a, out=out)
    workspace = torch.cuda.memory_allocated(device) - before
    return {"context": memory_outside_allocator(device), "cublas": workspace}


def communicator(group: dist.ProcessGroup, device: torch.device) -> int:
    """Bytes that the group's first all_reduce and all_gather leave in use. All its ranks must call this."""
    whole = torch.ones(dist.get_world_size(group), device=device)
    one = whole[:1].clone()  # loads the kernels of ones and clone before memory is read
    before = memory_outside_allocator(device)
    dist.all_reduce(one, group=group)
    all_gather(whole, one, group=group)
    return max(0, memory_outside_allocator(device) - before)
