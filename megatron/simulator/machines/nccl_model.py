# SPDX-License-Identifier: Apache-2.0
"""Latencies and bandwidths of NCCL's algorithms by GPU generation: the constants of NCCL's own cost model.

NCCL chooses algorithm and protocol by a table of latencies and shares of bandwidth (``src/graph/tuning.cc``, 2.29);
cost/collective_cost.py prices transfers with the same figures. Protocols: *LL* sends a flag with every 8 bytes, which
needs no fence but at most half of the bandwidth. *LL128* sends a flag with every 128 bytes. *Simple* sends plain data
and fences.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf

LL128_TREE_HOP = 8.5e-6  # seconds of a hop between nodes, in a tree or in a ring with one rank per node


@dataclass(frozen=True)
class Algorithm:
    """An algorithm with a protocol."""

    start: float  # seconds before the first byte moves
    step: float  # seconds of a hop in a node
    hop: float  # seconds of a hop between nodes
    share: float = 1.0  # share of plain rings' bandwidth that it reaches in a node
    between: float = 1.0  # the same between nodes
    limits: tuple[float, float, float] = (inf, inf, inf)  # maximum bytes per second in a node, on two nodes, on more


@dataclass(frozen=True)
class Collectives:
    """The algorithms that NCCL can choose from on a kind of GPU; None: not available."""

    post: float  # seconds per step in which the host posts work to a network card; three times that for Simple
    ring_ll: Algorithm
    ring_simple: Algorithm
    tree_ll: Algorithm  # trees are for all_reduce only
    tree_simple: Algorithm
    ring_ll128: Algorithm | None = None
    tree_ll128: Algorithm | None = None
    nvls: Algorithm | None = None  # all_reduce in a node, summed by NVSwitch
    # NVLS in each node, with a tree between nodes. The shares of `nvls` and `nvls_tree` count bytes of the tensor, not
    # the bytes that rings would send.
    nvls_tree: Algorithm | None = None
    # all_gather and reduce_scatter with one rank per node: a `step` per rank, a `hop` per doubling
    pat: Algorithm | None = None

    def protocols(self) -> list[tuple[str, Algorithm | None, Algorithm | None]]:
        """(protocol, its ring, its tree); None: not available."""
        names = ("ll", "ll128", "simple")
        return [(name, getattr(self, f"ring_{name}"), getattr(self, f"tree_{name}")) for name in names]


def _nccl(
    ll: tuple[float, float, float], post: float, nvls: tuple[float, float] | None = None, *, nvlink: bool = True
) -> Collectives:
    """A generation. ``ll``: limits of LL in GB/s; ``post``: microseconds; ``nvls``: shares without and with a tree."""
    us = 1e-6
    limits = tuple(1e9 * rate for rate in ll)
    step = (0.6, 1.9, 3.4, 0.6, 1.25, 4.0) if nvlink else (1.0, 2.5, 5.7, 1.0, 1.9, 4.0)
    algorithms = {
        "ring_ll": Algorithm(6.6 * us, step[0] * us, 2.7 * us, 0.5, 0.5, limits),
        "ring_simple": Algorithm(8.4 * us, step[2] * us, 14 * us),
        "tree_ll": Algorithm(6.8 * us, step[3] * us, 5.0 * us, 0.92 / 3.8, 0.92 / 3.8, limits),
        "tree_simple": Algorithm(8.4 * us, step[5] * us, 14 * us, 0.92, 0.92),
        "pat": Algorithm(8.0 * us, 2.8 * us, 4.0 * us, 0.75, 0.75),
    }
    if nvlink:  # PCIe may split 128 bytes, which LL128 does not allow
        algorithms["ring_ll128"] = Algorithm(14 * us, step[1] * us, 4.0 * us, 0.92, 0.92)
        algorithms["tree_ll128"] = Algorithm(14 * us, step[4] * us, LL128_TREE_HOP, 0.92 * 7 / 9, 0.92 * 120 / 128)
    if nvls:
        algorithms["nvls"] = Algorithm(0.0, 25 * us, 18 * us, nvls[0], 0.0)
        algorithms["nvls_tree"] = Algorithm(0.0, 25 * us, 20.9 * us, 0.0, nvls[1])
    return Collectives(post * us, **algorithms)


# Sources for NVLS. Hopper: 480 GB/s of bus bandwidth on 8 GPUs (nccl-tests issue 212), which are 275 GB/s of the tensor
# where rings reach 360; with a tree 250 on two nodes (issue 309). Blackwell: 480 GB/s of the tensor on 8 GB300
# (published all_reduce_perf), with a tree in the ratio of NCCL's table. Hosts are AMD's in DGX A100, Intel's in DGX
# H100 and B200.
GENERATIONS = {
    "ampere": _nccl((87.7, 22.5, 19.0), 2.0),
    "hopper": _nccl((141.0, 39.0, 20.4), 1.0, (0.764, 0.694)),
    "blackwell": _nccl((282.0, 39.0, 20.4), 1.0, (0.711, 0.607)),
    "pcie": _nccl((87.7, 39.0, 20.4), 1.0, nvlink=False),
}
ALGORITHMS = tuple(field.name for field in fields(Collectives) if field.name != "post")
