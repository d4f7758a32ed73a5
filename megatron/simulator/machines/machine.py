# SPDX-License-Identifier: Apache-2.0
"""Machines as data files: a GPU, the node it sits in, the network between nodes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, log
from typing import TYPE_CHECKING

from megatron.decisions.kernels import plain_kernel
from megatron.formulas.strategy import hashed_once
from megatron.simulator.machines.nccl_model import Collectives

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rate:
    """How fast a kind of kernel runs, by its size: points (size, FLOP/s), interpolated between their logarithms.

    Below the first point the time, above the last the rate stays as it is.

    Attributes:
        power: of the size, that the FLOPs of a kernel grow with; says how the rate falls below the first point.
    """

    points: tuple[tuple[float, float], ...]
    power: float = 3.0

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
    """What one kind of transfer was measured to take over a link.

    Attributes:
        bandwidth: bytes a second that each rank sends, while all devices of the node take part.
        latency: seconds of a step: of a hop, and of each of the n - 1 steps of a collective among n ranks.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Link:
    """A way out of a device: bytes a second and direction that one device gets, and the seconds a message takes.

    ``bandwidth`` is what a device gets while all others of its node use theirs: a bus that they share counts in parts.

    Attributes:
        kinds: by kind of transfer (:data:`KINDS`), what was measured; for the others bandwidth and latency hold.
        gpus_per_card: of a network: devices of a node, in a row, that share a network card. While one of them sends
            alone it has the bandwidth of all.
    """

    bandwidth: float
    latency: float
    name: str = ""
    kinds: dict[str, Measured] = field(default_factory=dict, hash=False)
    gpus_per_card: int = 1

    def of(self, kind: str) -> Link | Measured:
        """Bandwidth and latency of a kind of transfer: as measured, else the link's."""
        return self.kinds.get(kind, self)


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p")
"""Transfers that tools/measure_hardware.py measures."""


@dataclass(frozen=True)
class Power:
    """Watts of a GPU: the ``limit`` that it runs under, the one that its rates were measured under, and idle."""

    limit: float
    rated: float
    idle: float


@dataclass(frozen=True)
class Calibration:
    """The few constants that are fitted to a cluster; each a share of what the file's other figures promise.

    Attributes:
        gemm, attention: of their rates. memory: of the memory's bandwidth, for kernels bound by it.
        link: of a node's links, for collectives by rings. all_to_all, p2p: the same for these, in a node.
        network, host: of these links.
        overlap: of a transfer beside compute that compute does not feel; the rest stops it, for NCCL's kernels take
            multiprocessors and memory bandwidth. Copies to and from the host take neither.
        network_all_to_all: of what ``network`` leaves, for all_to_all between nodes.
        interleaved: of the network cards that a collective's ranks on a node have beyond the first, where these ranks
            are not neighbours, such as DP beside TP. 0: one card.
        fp8: of what FP8's peak promises over the rate in bf16.
    """

    gemm: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    all_to_all: float = 1.0
    p2p: float = 1.0
    network: float = 1.0
    host: float = 1.0
    overlap: float = 1.0
    network_all_to_all: float = 1.0
    interleaved: float = 1.0
    fp8: float = 1.0


@dataclass(frozen=True)
class Runtime:
    """Bytes of device memory that no tensor holds; None: as allocation/reserved.py assumes.

    Attributes:
        context: of the CUDA context with the kernels that are loaded. cublas: of cuBLAS' workspace.
        nccl: of a communicator's buffers in a node; nccl_network: of one between nodes.
    """

    context: float | None = None
    cublas: float | None = None
    nccl: float | None = None
    nccl_network: float | None = None


@hashed_once
@dataclass(frozen=True)
class Machine:
    """A kind of GPU in its node and cluster.

    Attributes:
        memory: bytes of device memory; reserved: of these, taken by contexts, libraries and fragmentation.
        peak: dense FLOP/s by dtype (``bf16``, ``fp32``, where there is one ``fp8``, and on Blackwell ``mxfp8``): the
            data sheet's; MFU is measured against bf16's.
        memory_bandwidth: bytes a second.
        gemm, attention, attention_backward: rates by size (see cost/seconds.py); of attention, counted
            as causal (half the pairs), backward as five matrix products, 2.5 times the FLOPs of forward.
        launch: seconds a kernel takes at least.
        gpus: of a node. link: between them. host_link: to host memory, when all of a node copy at once.
        host_memory: bytes of a node. network: between nodes, of one GPU.
        sources: where each figure comes from.
        collective: seconds a transfer takes at least, beside its links' latency; where there are ``collectives``, their
            ``start`` says so for all but all_to_all and p2p.
        head_size: share of the attention rates by head size.
        dtype: that the rates are for; those of another differ as its peak does.
        capability: of the GPU, major and minor version.
        kernels: share of the attention rates that each attention kernel gets; 1 where a name is missing.
        attention_kernel: that runs wherever it can; ``auto``: the first that PyTorch brings for the capability.
        power: watts; None: the rates are those of the limit that it runs under.
        collectives: what NCCL can choose from; the links' latency counts by what it is above NCCL's own of a step.
            None: rings at one rate, with the links' latency.
        dispatch: seconds in which the host launches a kernel or a transfer; 0: as fast as the device needs them.
        runtime: device memory of contexts and libraries, which ``reserved`` has room for.
        uncertain: lowest and highest value of a share of ``calibration``, where those who measured disagree.
    """

    name: str
    memory: float
    reserved: float
    peak: dict[str, float] = field(hash=False)
    memory_bandwidth: float
    gemm: Rate
    attention: Rate
    attention_backward: Rate
    launch: float
    gpus: int
    link: Link
    host_link: Link
    host_memory: float
    network: Link
    sources: dict[str, str] = field(default_factory=dict, hash=False)
    collective: float = 0.0
    head_size: Rate = Rate(((128.0, 1.0),), power=0.0)
    dtype: str = "bf16"
    calibration: Calibration = Calibration()
    capability: tuple[int, int] = (8, 0)
    kernels: dict[str, float] = field(default_factory=dict, hash=False)
    attention_kernel: str = "auto"
    power: Power | None = None
    collectives: Collectives | None = None
    dispatch: float = 0.0
    runtime: Runtime = Runtime()
    uncertain: dict[str, tuple[float, float]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        # Prices of transfers (cost/seconds.py): fewer to look up than in a cache that machines are keys of.
        object.__setattr__(self, "prices", {})

    def attention_share(self, head_size: int = 128) -> float:
        """Of the attention rates, by the kernel that runs plain tiles of such heads in bf16."""
        return self.kernels.get(_for_plain_tiles(self.capability, self.attention_kernel, head_size), 1.0)

    def choose_attention(
        self, name: str, dtype: torch.dtype, head_dim: int, *, many_tiles: bool = False, **needs: bool
    ) -> str:
        """The kernel that ``name`` is here; see `kernels.choose_on`. Raises KernelUnavailable."""
        return _choose(self.capability, self.attention_kernel, name, dtype, head_dim, many_tiles=many_tiles, **needs)

    def at_the_ends(self) -> tuple[Machine, Machine]:
        """The slowest and the fastest that the uncertain shares leave possible; twice this one, where none is."""
        shares = [{name: ends[at] for name, ends in self.uncertain.items()} for at in (0, 1)]
        slow, fast = (replace(self, calibration=replace(self.calibration, **found)) for found in shares)
        return slow, fast

    @property
    def is_gpu(self) -> bool:
        """False for a file that was measured on a CPU."""
        return self.attention_kernel != "cpu"

    @property
    def usable_memory(self) -> float:
        """Bytes that a training program can fill."""
        return self.memory - self.reserved


def _choose(
    capability: tuple[int, int],
    attention_kernel: str,
    name: str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    many_tiles: bool = False,
    **needs: bool,
) -> str:
    from megatron.context_parallel.attention.kernels import KernelUnavailable, choose_on

    how = {"many_tiles": many_tiles, **needs}
    if attention_kernel == "flash_attn":
        how["flash_attn"] = 3 if capability == (9, 0) else 2
    elif attention_kernel != "auto" and name == "auto" and not many_tiles:
        try:
            return choose_on(attention_kernel, capability, dtype, head_dim, **how)
        except KernelUnavailable:
            pass
    return choose_on(name, capability, dtype, head_dim, **how)


@lru_cache(maxsize=1024)
def _for_plain_tiles(capability: tuple[int, int], attention_kernel: str, head_size: int) -> str:
    if attention_kernel == "cpu":  # a file that was measured without a GPU
        return "cpu"
    kernel = plain_kernel(capability, attention_kernel, head_size)
    if kernel is None:
        raise ValueError(f"no attention kernel takes heads of {head_size} on capability {capability}")
    return kernel
