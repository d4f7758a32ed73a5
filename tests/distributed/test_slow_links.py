# SPDX-License-Identifier: Apache-2.0
"""A link between nodes that becomes slow is named. Over real links: tests/faults/test_nodes.py."""

from __future__ import annotations

import os
import socket
import time
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from megatron.training.features import stragglers
from megatron.training.features.stragglers import LEAST_STEPS as LEAST
from megatron.training.features.stragglers import REST, SlowLinks, edges_by_phase, named


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8])
def test_every_neighbouring_pair_of_nodes_has_edges_and_no_node_does_two_things_at_once(nodes):
    ranks = [[2 * node, 2 * node + 1] for node in range(nodes)]
    phases = edges_by_phase(ranks)
    for phase in phases:
        sends, receives = ([{rank // 2 for rank in end}] for end in zip(*phase))
        busy = sorted(chain(*({a // 2, b // 2} for a, b in phase[::2])))
        assert busy == sorted(set(busy)) and not sends[0] & receives[0]
    assert sorted(chain(*phases)) == sorted(
        (2 * node + place, (2 * node + 2 + place) % (2 * nodes)) for node in range(nodes) for place in (0, 1)
    )
    assert edges_by_phase([[0, 1, 2]]) == []


def test_links_are_named_by_how_much_slower_they_are_than_usual():
    edges, hosts = [(0, 2), (1, 3), (2, 0), (3, 1)], ["a", "a", "b", "b"]
    assert named(edges, [0.004, 0.004, 0.004, 0.004], [0.004] * 4, hosts) == ""
    line = named(edges, [0.004, 0.0432, 0.004, 0.2], [0.004] * 4, hosts)
    assert line == (
        "--log-straggler: the link from rank 3 on b to rank 1 on a takes 200 ms for 256 KiB, usual are 4 ms; "
        "the link from rank 1 on a to rank 3 on b takes 43.2 ms for 256 KiB, usual are 4 ms"
    )
    assert named(edges, [1e-3, 1e-5, 1e-5, 1e-5], [1e-5] * 4, hosts) == ""  # a moment, and no link
    many = [(rank, rank + 8) for rank in range(8)]
    assert named(many, [1.0] * 8, [0.1] * 8, ["a"] * 8 + ["b"] * 8).endswith("; and 4 more")


def watch(slow_from: int | None) -> tuple[list[str], int, float]:
    """Lines after steps of which the eighth and those after it are slow; measurements; and this rank's edges.

    Four ranks stand for two nodes. From the eighth step on what ``slow_from`` sends takes 50 ms longer.
    """
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    links, lines, measured = SlowLinks(torch.device("cpu")), [], 0
    hop, measure = links._hop, links._measure

    def slow_hop(edge: tuple[int, int], data: torch.Tensor) -> float:
        if edge[0] == slow_from and dist.get_rank() == edge[1] and step >= 8:
            time.sleep(0.05)
            return hop(edge, data) + 0.05
        return hop(edge, data)

    def counted() -> list[float]:
        nonlocal measured
        measured += 1
        return measure()

    links._hop, links._measure = slow_hop, counted
    for step in range(8 + REST + 3):
        slow = torch.tensor([int(links.is_slow(1.0 if step < 8 else 1.6))])
        dist.all_reduce(slow, dist.ReduceOp.MAX)
        lines.append(links.report(bool(slow)))
    return lines, measured, len(links.edges)


@pytest.mark.parametrize("slow_from", [3, None])
def test_the_slow_link_is_named_when_steps_become_slow(pool, slow_from, monkeypatch):
    """Threads of a busy machine make links slow as well: what is known is the one that is."""
    results = pool.run(watch, 4, slow_from)
    lines, measured, edges = results[0]
    assert all(one == results[0] for one in results) and edges == 4
    assert measured == 3  # once before, and of the slow steps the first and the one after a rest
    assert not any(lines[: LEAST - 1] + lines[LEAST:8])
    told = [number for number, line in enumerate(lines) if f"from rank 3 on {socket.gethostname()} to rank 1" in line]
    assert told == ([8, 8 + REST + 1] if slow_from else []), lines


def one_node() -> list[str]:
    os.environ.pop("GROUP_RANK", None)
    links = SlowLinks(torch.device("cpu"))
    links._measure = lambda: 1 / 0
    return [links.report(links.is_slow(seconds)) for seconds in [1.0] * 8 + [9.0] * 3]


def test_on_one_node_nothing_is_measured(pool):
    assert pool.run(one_node, 2) == [[""] * 11] * 2
    assert stragglers.LEAST > 2
