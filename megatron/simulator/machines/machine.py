# SPDX-License-Identifier: Apache-2.0
"""Machines as data files: a GPU, the node it sits in, the network between nodes."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, inf, log
from typing import TYPE_CHECKING

from megatron.decisions.block_sizes import BlockTable
from megatron.decisions.kernel_order import plain_kernel
from megatron.formulas.strategy import hashed_once
from megatron.simulator.machines.nccl_model import Collectives

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rate:
    """FLOP/s of a kind of kernel by size: points (size, FLOP/s), with logarithmic interpolation.

    A kernel below the first point takes as long as a kernel at that point; above the last point the rate is constant.
    """

    points: tuple[tuple[float, float], ...]
    power: float = 3.0  # a kernel's FLOPs grow with this power of its size, and below the first point so does the rate

    def __post_init__(self) -> None:
        object.__setattr__(self, "_logs", [log(size) for size, _ in self.points])
        object.__setattr__(self, "_log_rates", [log(rate) for _, rate in self.points])

    def __call__(self, size: float) -> float:
        first, last = self.points[0], self.points[-1]
        if size <= first[0]:
            return first[1] * (size / first[0]) ** self.power
        if size >= last[0]:
            return last[1]
        logs, rates = self._logs, self._log_rates
        x = log(size)
        above = bisect_right(logs, x, 1, len(logs) - 1)
        low, rate = logs[above - 1], rates[above - 1]
        return exp(rate + (rates[above] - rate) * (x - low) / (logs[above] - low))


@dataclass(frozen=True)
class Measured:
    """Measured bandwidth and latency of one kind of transfer over a link."""

    bandwidth: float  # bytes per second that each rank sends, while all devices of the node take part
    latency: float  # seconds of a hop, or of each of the n - 1 steps of a collective among n ranks


@dataclass(frozen=True)
class Link:
    """A connection of a device."""

    # bytes per second and direction that one device gets while all others of its node use theirs; of a shared bus, the
    # device's part
    bandwidth: float
    latency: float  # seconds of a message
    name: str = ""
    # measured figures by kind of transfer (KINDS); other kinds use `bandwidth` and `latency`
    kinds: dict[str, Measured] = field(default_factory=dict, hash=False)
    # of a network: number of neighbouring devices of a node that share a network card. While only one of them sends, it
    # has the bandwidth of all.
    gpus_per_card: int = 1

    def of(self, kind: str) -> Link | Measured:
        """Bandwidth and latency of a kind of transfer: as measured, otherwise the link's."""
        return self.kinds.get(kind, self)


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p")
"""Transfers that tools/measure_hardware.py measures."""


@dataclass(frozen=True)
class Power:
    """Watts of a GPU."""

    limit: float  # the power limit that it runs under
    rated: float  # the limit that its rates were measured under
    idle: float


@dataclass(frozen=True)
class Calibration:
    """The constants that are fitted to a cluster; each is the share of another figure of the file that is reached."""

    gemm: float = 1.0  # of the rates of matrix products
    attention: float = 1.0  # of the rates of attention
    memory: float = 1.0  # of the memory's bandwidth, for kernels bound by it
    link: float = 1.0  # of a node's links, for collectives by rings
    all_to_all: float = 1.0  # of a node's links, for all_to_all
    p2p: float = 1.0  # of a node's links, for p2p
    network: float = 1.0  # of the links between nodes
    host: float = 1.0  # of the links to host memory
    # share of a transfer's time that does not slow down concurrent compute; during the rest compute stops, because
    # NCCL's kernels use multiprocessors and memory bandwidth. Host copies use neither.
    overlap: float = 1.0
    network_all_to_all: float = 1.0  # for all_to_all between nodes, in addition to `network`
    # share of the other network cards that a collective uses if its ranks on a node are not neighbours, such as DP
    # with TP. 0: one card only.
    interleaved: float = 1.0
    fp8: float = 1.0  # of the speed-up over bf16 that the two peaks promise


@dataclass(frozen=True)
class Runtime:
    """Bytes of device memory that no tensor holds; None: the defaults of allocation/reserved.py."""

    context: float | None = None  # of the CUDA context with the loaded kernels
    cublas: float | None = None  # of cuBLAS' workspace
    nccl: float | None = None  # of a communicator's buffers in a node
    nccl_network: float | None = None  # of a communicator's buffers between nodes


@hashed_once
@dataclass(frozen=True)
class Machine:
    """A kind of GPU in its node and cluster."""

    name: str
    memory: float  # bytes of device memory
    reserved: float  # bytes of it for contexts, libraries and fragmentation
    # dense FLOP/s of the data sheet by dtype: `bf16`, `fp32`, if available `fp8`, and on Blackwell `mxfp8`. MFU is
    # measured against bf16's.
    peak: dict[str, float] = field(hash=False)
    memory_bandwidth: float  # bytes per second
    # gemm, attention, attention_backward: rates by size (see cost/seconds.py). Attention counts as causal (half of the
    # pairs), its backward pass as five matrix products, 2.5 times the FLOPs of forward.
    gemm: Rate
    attention: Rate
    attention_backward: Rate
    launch: float  # least seconds of a kernel
    gpus: int  # of a node
    link: Link  # between them
    host_link: Link  # to host memory, while all GPUs of a node copy
    host_memory: float  # bytes of a node
    network: Link  # between nodes, for one GPU
    sources: dict[str, str] = field(default_factory=dict, hash=False)  # where each figure comes from
    # least seconds of a transfer, without its links' latency. With `collectives` it applies to all_to_all and p2p only;
    # the other kinds have their `start`.
    collective: float = 0.0
    head_size: Rate = Rate(((128.0, 1.0),), power=0.0)  # share of the attention rates by head size
    dtype: str = "bf16"  # of the rates; rates of other dtypes differ by the ratio of the peaks
    calibration: Calibration = Calibration()
    capability: tuple[int, int] = (8, 0)  # of the GPU, major and minor version
    # share of the attention rates that each attention kernel reaches; 1 for names that are missing
    kernels: dict[str, float] = field(default_factory=dict, hash=False)
    # (attention, attention_backward) of kernels that were measured by themselves, in place of their share
    kernel_rates: dict[str, tuple[Rate, Rate]] = field(default_factory=dict, hash=False)
    attention_kernel: str = "auto"  # runs wherever it can; `auto`: the first kernel that PyTorch has for the capability
    # rows of a tile from which each kernel is faster than Triton's; names that are missing: the prediction
    crossover: dict[str, float] = field(default_factory=dict, hash=False)
    attention_blocks: BlockTable = field(default_factory=dict, hash=False)  # of Triton's attention kernels
    power: Power | None = None  # watts; None: the GPU runs under the limit that its rates were measured under
    # NCCL's algorithms; the links add the latency by which they exceed NCCL's table. None: rings at one rate, with the
    # links' latency.
    collectives: Collectives | None = None
    # seconds in which the host launches a kernel or a transfer; 0: the host is never the bottleneck
    dispatch: float = 0.0
    runtime: Runtime = Runtime()  # device memory of contexts and libraries, which is part of `reserved`
    # lowest and highest value of a share of `calibration`, where measurements disagree
    uncertain: dict[str, tuple[float, float]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        # Prices of transfers (cost/seconds.py): cheaper than a global cache with the machine as part of the key.
        object.__setattr__(self, "prices", {})

    def plain_kernel(self, head_size: int = 128) -> str:
        """The kernel for plain tiles in bf16 with heads of this size."""
        return _for_plain_tiles(self.capability, self.attention_kernel, head_size)

    def attention_rate(self, kernel: str, size: float | None, *, backward: bool) -> float:
        """FLOP/s of a kernel with heads of 128 at a causal length of ``size`` tokens; None: the longest measured."""
        own = self.kernel_rates.get(kernel)
        rates = (own or (self.attention, self.attention_backward))[backward]
        rate = rates.points[-1][1] if size is None else rates(size)
        return rate if own else rate * self.kernels.get(kernel, 1.0)

    def choose_attention(
        self, name: str, dtype: torch.dtype, head_dim: int, *, tile_rows: float = inf, **needs: bool
    ) -> str:
        """The kernel that ``name`` means on this machine; see `kernels.choose_on`. Raises KernelUnavailable."""
        from megatron.context_parallel.attention.kernels import KernelUnavailable, choose_on

        options = {"tile_rows": tile_rows, "crossover": self.crossover, **needs}
        if self.attention_kernel == "flash_attn":
            options["flash_attn"] = 3 if self.capability == (9, 0) else 2
        elif self.attention_kernel != "auto" and name == "auto" and tile_rows == inf:
            with suppress(KernelUnavailable):
                return choose_on(self.attention_kernel, self.capability, dtype, head_dim, **options)
        return choose_on(name, self.capability, dtype, head_dim, **options)

    def slowest_and_fastest(self) -> tuple[Machine, Machine]:
        """This machine with all uncertain shares at their lowest, and at their highest."""
        shares = [{name: ends[at] for name, ends in self.uncertain.items()} for at in (0, 1)]
        slow, fast = (replace(self, calibration=replace(self.calibration, **changes)) for changes in shares)
        return slow, fast

    @property
    def is_gpu(self) -> bool:
        """False for a file that was measured on a CPU."""
        return self.attention_kernel != "cpu"

    @property
    def usable_memory(self) -> float:
        """Bytes that a training program can fill."""
        return self.memory - self.reserved


@lru_cache(maxsize=1024)
def _for_plain_tiles(capability: tuple[int, int], attention_kernel: str, head_size: int) -> str:
    if attention_kernel == "cpu":  # a file that was measured without a GPU
        return "cpu"
    kernel = plain_kernel(capability, attention_kernel, head_size)
    if kernel is None:
        raise ValueError(f"no attention kernel takes heads of {head_size} on capability {capability}")
    return kernel
