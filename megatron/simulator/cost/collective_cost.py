# SPDX-License-Identifier: Apache-2.0
"""The time of a transfer by its size: the fastest of NCCL's algorithms, each with a latency and a bandwidth.

For each message NCCL compares ``latency + bytes / bandwidth`` of all its algorithms and protocols
(``src/graph/tuning.cc``), and takes the least. This module does the same, with the latencies of that table
(machines/nccl_model.py) and the bandwidths of the machine's links:

- **rings**: n - 1 hops, all_reduce 2 (n - 1); every rank's bytes cross every edge. An edge between nodes is as fast as
  the link or as the group's network cards, one for each of its ranks on a node, whichever is slower.
- **trees**, for all_reduce: up and down a chain in a node and a tree of depth log2(nodes); half of a ring's bandwidth
  for the tensor. On two nodes the tensor crosses the network once in each direction, as if the cards were doubled.
- **NVLS**, for all_reduce on NVSwitch from Hopper on: switches add up within nodes, and a tree between nodes.
- **PAT**, for all_gather and reduce_scatter with one rank per node: log2(nodes) hops of latency.

A machine whose file has no ``collectives`` (a CPU, or a measured machine) has rings only, at one rate. A kind of
transfer that was measured over a link (``Link.kinds``) has the measured rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import log2
from typing import NamedTuple

from megatron.simulator.machines.machine import Machine, Measured
from megatron.simulator.machines.nccl_model import LL128_TREE_HOP, Algorithm, Collectives

# --- placement of a group's ranks on nodes, which decides the links that they cross ---
#
# Ranks are numbered in the order TP, Ulysses, Ring, DP, PP, and each node holds consecutive ranks. A group is ``size``
# ranks ``stride`` apart. ``stride`` groups of one kind interleave in a block of ``size`` x ``stride`` ranks. If blocks
# and nodes do not divide each other, groups are placed differently; all wait for the group that spans the most nodes.
# If several do, all wait for the one with the fewest ranks on a node.


class Placement(NamedTuple):
    """The placement of the worst placed group."""

    nodes: int  # number of its nodes
    fewest: int  # least number of its ranks on a node
    most: int  # largest number of its ranks on a node
    neighbours: bool  # whether its ranks on a node are consecutive

    def cards(self, interleaved: float) -> float:
        """Network cards of a node that its rings use.

        Each of its ranks on the node can use one card, because every ring leaves the node from another GPU. If the
        ranks are not neighbours, the rings use one card and a share ``interleaved`` of the others.
        """
        return self.fewest if self.neighbours else 1 + interleaved * (self.fewest - 1)

    def hop_share(self, stride: int, gpus_per_card: int) -> int:
        """Bandwidth of a hop to another node, such as a ring's, as a multiple of one GPU's part of a network card.

        Only one of the group's ranks on a node sends to the next node. The card carries one message for each of the
        ``stride`` interleaved groups, not one for each GPU.
        """
        return min(self.fewest, max(1, gpus_per_card // stride))


@lru_cache(maxsize=4096)
def placed(size: int, stride: int, gpus: int) -> Placement:
    """Placement on nodes of ``gpus`` GPUs. A group whose block fits into a node is assumed to be in one node."""
    if stride >= gpus:
        return Placement(size, 1, 1, True)
    if size * stride <= gpus:
        return Placement(1, size, size, stride == 1)
    if gpus % stride == 0 and size % (gpus // stride) == 0:
        each = gpus // stride
        return Placement(size * stride // gpus, each, each, stride == 1 or each == 1)
    worst = None
    for first in group_starts(size * stride, stride, gpus):
        counts = Counter((first + rank * stride) // gpus for rank in range(size)).values()
        key = (-len(counts), min(counts))
        if worst is None or key < worst[0]:
            worst = key, Placement(len(counts), min(counts), max(counts), stride == 1 or max(counts) == 1)
    return worst[1]


def group_starts(block: int, stride: int, gpus: int) -> set[int]:
    """Indices in a node at which groups begin."""
    blocks = {index * block % gpus for index in range(gpus)}
    return {(first + offset) % gpus for first in blocks for offset in range(stride)}


PLATEAU = 1.4  # NCCL's factor on the latency of all_reduce by Simple rings between nodes
# Share of their bandwidth that trees reach at 64 bytes, 128, ... 512 MiB, where pipelines are not full. Interpolated
# between two sizes, so that more bytes never take less time.
FILLED = {
    "ll": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    "ll128": (
        1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1
    ),
    "simple": (
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8,
        0.9, 0.9, 0.9,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of an algorithm by bytes that a rank sends."""

    name: str
    latency: float  # seconds
    rate: float  # seconds per byte
    # share of the bandwidth that is reached, by powers of two of the tensor's bytes, from 64 on
    filled: tuple[float, ...] = ()
    tensor: float = 1.0  # bytes of the tensor per byte that a rank sends

    def __call__(self, size: float) -> float:
        if not self.filled:
            return self.latency + size * self.rate
        place = log2(max(size * self.tensor, 64.0)) - 6
        low = int(place)
        if low >= len(self.filled) - 1:
            kept = 1.0 if low >= len(self.filled) else self.filled[-1] + (1 - self.filled[-1]) * (place - low)
        else:
            kept = self.filled[low] + (self.filled[low + 1] - self.filled[low]) * (place - low)
        return self.latency + size * self.rate / kept


@dataclass(frozen=True)
class Price:
    """Seconds by bytes: of the fastest of ``lines``, or of the slowest if they are concurrent parts (``together``)."""

    lines: tuple[Line, ...]
    together: bool = False
    large: Line = field(init=False)
    # from this number of bytes on the line `large` gives the price, as for most transfers of training
    beyond: float = field(init=False)

    def __post_init__(self) -> None:
        large = (max if self.together else min)(self.lines, key=lambda line: (line.rate, line.latency))
        object.__setattr__(self, "large", large)
        object.__setattr__(self, "beyond", max(_crossover(large, line) for line in self.lines))

    def __call__(self, size: float) -> float:
        if size >= self.beyond:
            return self.large.latency + size * self.large.rate
        times = [line(size) for line in self.lines]
        return max(times) if self.together else min(times)

    def chosen(self, size: float) -> str:
        """The name of the line that decides."""
        pick = max if self.together else min
        return pick(self.lines, key=lambda line: line(size)).name


def _crossover(large: Line, other: Line) -> float:
    """Bytes from which on ``large`` has a full pipeline and ``other`` no longer decides."""
    full = 64.0 * 2 ** len(large.filled) / large.tensor if large.filled else 0.0
    if other.rate == large.rate:
        return full
    return max(full, (large.latency - other.latency) / (other.rate - large.rate))


def price_of(kind: str, size: int, stride: int, machine: Machine) -> Price:
    """The price of a kind of transfer among ``size`` > 1 ranks ``stride`` apart; cached in ``Machine.prices``."""
    where = placed(size, stride, machine.gpus)
    if kind == "all_to_all":
        return _all_to_all(size, where, machine)
    if kind == "p2p":
        return Price((_hop(where, stride, machine),))
    if machine.collectives is None or _is_measured(kind, where, machine):
        return Price((_one_rate(kind, size, where, machine),))
    return Price(pruned(_lines(kind, size, where, machine, machine.collectives)))


def bandwidth(where: Placement, machine: Machine, times: float = 1.0, kind: str = "") -> float:
    """Bytes per second over an edge of a ring; ``times``: factor on the network cards' bandwidth."""
    calibration = machine.calibration
    inside = machine.link.of(kind).bandwidth * calibration.link
    if where.nodes == 1:
        return inside
    outside = machine.network.of(kind).bandwidth * calibration.network * where.cards(calibration.interleaved)
    return min(inside, times * outside)


def _is_measured(kind: str, where: Placement, machine: Machine) -> bool:
    """Whether the machine's file has measured figures of this kind for the slowest link that the group crosses."""
    return isinstance((machine.network if where.nodes > 1 else machine.link).of(kind), Measured)


def _start(kind: str, where: Placement, machine: Machine) -> float:
    """Least seconds of a transfer in addition to its steps; measured latencies include them."""
    return 0.0 if _is_measured(kind, where, machine) else machine.collective


def pruned(lines: Iterator[Line]) -> tuple[Line, ...]:
    """The lines without those that are slower than another one at every size."""
    candidates = list(lines)

    def beaten(place: int, line: Line) -> bool:
        for index, other in enumerate(candidates):
            equal = not line.filled and (other.latency, other.rate) == (line.latency, line.rate)
            if index == place or other.filled or (equal and index > place):  # the first of equal lines stays
                continue
            if other.latency <= line.latency and other.rate <= line.rate:
                return True
        return False

    return tuple(line for place, line in enumerate(candidates) if not beaten(place, line))


def _hop(where: Placement, stride: int, machine: Machine) -> Line:
    """A send and a receive, over the slowest edge."""
    if where.nodes > 1:
        link = machine.network.of("p2p")
        share = machine.calibration.network * where.hop_share(stride, machine.network.gpus_per_card)
    else:
        link, share = machine.link.of("p2p"), machine.calibration.p2p
    return Line("p2p", _start("p2p", where, machine) + link.latency, 1 / (link.bandwidth * share))


def _all_to_all(size: int, where: Placement, machine: Machine) -> Price:
    """Messages within the node travel at the same time as messages to other nodes, which use the GPU's network card.

    The worst placed rank has k of the n ranks on its node and sends (n - k) / (n - 1) of its bytes to other nodes. With
    two ranks on a node, the transfer within it is one hop.
    """
    calibration, start = machine.calibration, _start("all_to_all", where, machine)
    near, far = machine.link.of("all_to_all"), machine.network.of("all_to_all")
    within = (where.most - 1) / (size - 1)
    share = calibration.all_to_all if where.most > 2 else calibration.p2p
    inner = Line("all_to_all in nodes", start + (where.most - 1) * near.latency, within / (near.bandwidth * share))
    if where.nodes == 1:
        return Price((inner,))
    away = size - where.fewest
    outside = far.bandwidth * calibration.network * calibration.network_all_to_all
    outer = Line("all_to_all between nodes", start + away * far.latency, away / (size - 1) / outside)
    return Price((inner, outer), together=True)


def _one_rate(kind: str, size: int, where: Placement, machine: Machine) -> Line:
    """Rings at one rate. all_reduce has the latency of a tree, log2(nodes) hops between nodes, unless measured."""
    near, far = machine.link.of(kind).latency, machine.network.of(kind).latency
    if kind == "all_reduce" and not _is_measured(kind, where, machine):
        latency = 2 * ((where.most - 1) * near + log2(where.nodes) * far)
    else:
        latency = (size - where.nodes) * near + (where.nodes - 1) * far
    rate = 1 / bandwidth(where, machine, kind=kind)
    return Line("ring", _start(kind, where, machine) + latency, rate)


def _lines(kind: str, size: int, where: Placement, machine: Machine, algorithms: Collectives) -> Iterator[Line]:
    reduces = kind == "all_reduce"
    tensor = size / (2 * (size - 1)) if reduces else size / (size - 1)  # bytes of the tensor per byte that a ring sends
    nodes, passes = where.nodes, 2 if reduces else 1
    plain = bandwidth(where, machine)
    # Latency of the machine's links in excess of NCCL's table. Simple's fence adds it a second time.
    near = max(0.0, machine.link.latency - algorithms.ring_ll.step)
    slower = max(0.0, machine.network.latency - algorithms.ring_ll.hop)
    for name, ring, tree in algorithms.protocols():
        simple = name == "simple"
        fences = 2 if simple else 1
        if ring:
            step, hop = ring.step, ring.hop
            if nodes > 1:
                step = max(step, algorithms.post * (3 if simple else 1))
                apart = tree.hop if tree else LL128_TREE_HOP  # as in NCCL's table, for one rank per node
                hop = (apart if where.most == 1 else ring.hop) + fences * slower
            latency = ring.start + passes * ((size - nodes) * (step + fences * near) + (nodes - 1) * hop)
            if simple and reduces and nodes > 1:
                latency *= PLATEAU
            yield Line(f"ring {name}", latency, 1 / _capped(plain, ring, nodes))
        if reduces and tree:
            # A tree has half of a ring's bandwidth for the tensor; for bytes that a ring sends, (n - 1) / n of it.
            wide = bandwidth(where, machine, 2.0 if nodes == 2 else 1.0)
            rate = size / (size - 1) / _capped(wide, tree, nodes)
            step, hop = tree.step + fences * near, tree.hop + fences * slower
            latency = tree.start + 2 * ((where.most - 1) * step + log2(nodes) * hop)
            yield Line(f"tree {name}", latency, rate, FILLED[name], tensor)
    if reduces and nodes == 1 and size > 2 and algorithms.nvls:
        yield Line(
            "nvls", algorithms.nvls.start + algorithms.nvls.step + 2 * near, tensor / (plain * algorithms.nvls.share)
        )
    if reduces and nodes > 1 and where.fewest > 1 and algorithms.nvls_tree:
        yield _nvls_tree(size, where, machine, algorithms.nvls_tree, near, slower)
    if not reduces and where.most == 1 and algorithms.pat and kind != "broadcast":
        latency = algorithms.pat.start + log2(size) * (algorithms.pat.hop + slower) + size * algorithms.pat.step
        yield Line("pat", latency, 1 / _capped(plain, algorithms.pat, nodes))


def _nvls_tree(size: int, where: Placement, machine: Machine, algorithm: Algorithm, near: float, slower: float) -> Line:
    """The slower of the switches' sums and the tree between nodes decides the rate."""
    inside = machine.link.bandwidth * machine.calibration.link * algorithm.between
    sent = 2 * (size - 1) / size  # bytes that a ring sends per byte of the tensor
    cards = machine.network.bandwidth * machine.calibration.network * where.cards(machine.calibration.interleaved)
    rate = min(inside, (2 if where.nodes == 2 else 1) * cards / sent)
    latency = algorithm.start + algorithm.step + 2 * near + 2 * log2(where.nodes) * (algorithm.hop + 2 * slower)
    return Line("nvls tree", latency, 1 / (sent * rate), FILLED["simple"], 1 / sent)


def _capped(plain: float, algorithm: Algorithm, nodes: int) -> float:
    share = algorithm.share if nodes == 1 else algorithm.between
    return min(share * plain, algorithm.limits[min(nodes, 3) - 1])
