# SPDX-License-Identifier: Apache-2.0
"""Machines as data files: a GPU, the node it sits in, the network between nodes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rate:
    """How fast a kind of kernel runs, by its size: points (size, FLOP/s), interpolated over the logarithm of the size.

    Below the first point the time, above the last the rate stays as it is.
    """

    points: tuple[tuple[float, float], ...]

    def __call__(self, size: float) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Link:
    """A way out of a device: bytes a second and direction that one device gets, and the seconds a message takes."""

    bandwidth: float
    latency: float
    name: str = ""


@dataclass(frozen=True)
class Machine:
    """A kind of GPU in its node and cluster.

    Attributes:
        memory: bytes of device memory; reserved: of these, taken by contexts, libraries and fragmentation.
        peak: dense FLOP/s by dtype (``bf16``, ``fp32``): the data sheet's, what MFU is measured against.
        memory_bandwidth: bytes a second.
        gemm, attention, attention_backward: rates by size; of attention, counted as causal (half the pairs).
        launch: seconds a kernel takes at least.
        gpus: of a node. link: between them. host_link: to host memory, when all of a node copy at once.
        host_memory: bytes of a node. network: between nodes, of one GPU.
        sources: where each figure comes from.
    """

    name: str
    memory: float
    reserved: float
    peak: dict[str, float]
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
    sources: dict[str, str] = field(default_factory=dict)
