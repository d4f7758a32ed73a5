# SPDX-License-Identifier: Apache-2.0
"""What NCCL's algorithms cost, by generation of the GPU: the constants of its own model of them.

NCCL chooses algorithm and protocol by a table of latencies and shares of bandwidth (its ``src/graph/tuning.cc``, 2.29).
The same figures price them here (cost/collective_cost.py). Protocols: *LL* sends a flag with every 8 bytes, so that
nobody waits for a fence, at half the bandwidth or less. *LL128* does so for 128 bytes. *Simple* sends plain data and
fences.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf

LL128_TREE_HOP = 8.5e-6  # of a tree between nodes; a ring's too, where a group has one rank a node


@dataclass(frozen=True)
class Way:
    """An algorithm with a protocol.

    Attributes:
        start: seconds before anything moves; step: of a hop in a node; hop: of one between nodes.
        share: of the bandwidth that plain rings have, in a node; between: the same between nodes.
        limits: bytes a second at most: in a node, on two nodes, on more.
    """

    start: float
    step: float
    hop: float
    share: float = 1.0
    between: float = 1.0
    limits: tuple[float, float, float] = (inf, inf, inf)


@dataclass(frozen=True)
class Collectives:
    """What NCCL can choose from on a kind of GPU; None: it cannot.

    Attributes:
        post: seconds in which the host gives a network card its work, of each step; three times that for Simple.
        ring_ll, ring_ll128, ring_simple: round rings. tree_ll, tree_ll128, tree_simple: up and down trees, all_reduce.
        nvls: all_reduce that NVSwitch sums, in a node; nvls_tree: the same in each node, and a tree between them. Their
            ``share`` is of the tensor's bytes a second, not of the bytes that rings would send.
        pat: all_gather and reduce_scatter with one rank a node: ``step`` a rank, ``hop`` a doubling.
    """

    post: float
    ring_ll: Way
    ring_simple: Way
    tree_ll: Way
    tree_simple: Way
    ring_ll128: Way | None = None
    tree_ll128: Way | None = None
    nvls: Way | None = None
    nvls_tree: Way | None = None
    pat: Way | None = None

    def protocols(self) -> list[tuple[str, Way | None, Way | None]]:
        """(protocol, its ring, its tree); None: NCCL cannot choose it."""
        names = ("ll", "ll128", "simple")
        return [(name, getattr(self, f"ring_{name}"), getattr(self, f"tree_{name}")) for name in names]


def _nccl(
    ll: tuple[float, float, float], post: float, nvls: tuple[float, float] | None = None, *, nvlink: bool = True
) -> Collectives:
    """``ll``: limits of LL, GB/s. ``nvls``: shares of NVLS and of NVLS with a tree."""
    us = 1e-6
    limits = tuple(1e9 * rate for rate in ll)
    step = (0.6, 1.9, 3.4, 0.6, 1.25, 4.0) if nvlink else (1.0, 2.5, 5.7, 1.0, 1.9, 4.0)
    found = {
        "ring_ll": Way(6.6 * us, step[0] * us, 2.7 * us, 0.5, 0.5, limits),
        "ring_simple": Way(8.4 * us, step[2] * us, 14 * us),
        "tree_ll": Way(6.8 * us, step[3] * us, 5.0 * us, 0.92 / 3.8, 0.92 / 3.8, limits),
        "tree_simple": Way(8.4 * us, step[5] * us, 14 * us, 0.92, 0.92),
        "pat": Way(8.0 * us, 2.8 * us, 4.0 * us, 0.75, 0.75),
    }
    if nvlink:  # PCIe may tear 128 bytes
        found["ring_ll128"] = Way(14 * us, step[1] * us, 4.0 * us, 0.92, 0.92)
        found["tree_ll128"] = Way(14 * us, step[4] * us, LL128_TREE_HOP, 0.92 * 7 / 9, 0.92 * 120 / 128)
    if nvls:
        found["nvls"] = Way(0.0, 25 * us, 18 * us, nvls[0], 0.0)
        found["nvls_tree"] = Way(0.0, 25 * us, 20.9 * us, 0.0, nvls[1])
    return Collectives(post * us, **found)


# NVLS: Hopper 480 GB/s of bus bandwidth on 8 GPUs (nccl-tests issue 212), 275 of the tensor's bytes where rings do 360;
# with a tree 250 on two nodes (issue 309). Blackwell: 480 of the tensor's bytes on 8 GB300 (published all_reduce_perf),
# the tree as far behind as NCCL's table says. Hosts: AMD's in DGX A100, Intel's in DGX H100 and B200.
GENERATIONS = {
    "ampere": _nccl((87.7, 22.5, 19.0), 2.0),
    "hopper": _nccl((141.0, 39.0, 20.4), 1.0, (0.764, 0.694)),
    "blackwell": _nccl((282.0, 39.0, 20.4), 1.0, (0.711, 0.607)),
    "pcie": _nccl((87.7, 39.0, 20.4), 1.0, nvlink=False),
}
WAYS = tuple(field.name for field in fields(Collectives) if field.name != "post")
