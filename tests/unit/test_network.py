# SPDX-License-Identifier: Apache-2.0
"""The network interface of each rank, refusals, and the agreement of ranks through a store."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron import platform
from megatron.platform import network
from megatron.platform.network import (
    FLAG,
    GLOO,
    NCCL,
    NetworkView,
    Unusable,
    agree,
    check_own_gpu,
    choose,
    inspect_network,
    nccl_takes,
    try_link,
)
from tests.patience import patience

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LO = {"lo": ["127.0.0.1", "::1"]}


def node(number: int, **change) -> NetworkView:
    """A rank on its own node: eth0 leads to the master, docker0 has the same address everywhere."""
    address = f"10.0.0.{number}"
    interfaces = {**LO, "docker0": ["172.17.0.1"], "eth0": [address, "fe80::1%eth0"]}
    return replace(NetworkView(f"node{number}", f"boot {number}", interfaces, "10.0.0.1", address), **change)


def test_one_node_uses_the_loopback_under_any_hostname():
    assert choose([node(1), node(1)]) == [["lo"], ["lo"]]
    assert choose([node(1, interfaces={"lo0": ["127.0.0.1"], "en0": ["10.0.0.1"]})]) == [["lo0"]]
    assert choose([node(1, interfaces={})]) == [[]]  # gloo then chooses


def test_several_nodes_use_the_route_to_the_master():
    other = node(2, interfaces={**LO, "ens3": ["10.0.0.2"]})
    assert choose([node(1), node(1), other]) == [["eth0"], ["eth0"], ["ens3"]]


def test_a_master_whose_hostname_means_loopback_uses_the_address_that_others_use():
    itself = node(1, master="127.0.1.1", source="127.0.0.1")
    assert choose([itself, node(2)]) == [["eth0"], ["eth0"]]


def test_the_interface_that_the_user_names_is_used():
    named = [node(number, wanted="eth0", by=GLOO) for number in (1, 2)]
    assert choose(named) == [["eth0"], ["eth0"]]
    alone = node(1, wanted="docker0,eth0", by=FLAG)
    assert choose([alone]) == [["docker0", "eth0"]]


@pytest.mark.parametrize(
    "changes, words",
    [
        ([{}, {"wanted": "eht0", "by": FLAG}], f"{FLAG} names 'eht0', but node2 has no network interface of that name"),
        ([{"wanted": "lo", "by": GLOO}] * 2, f"rank 0 on node1 would listen at 127.0.0.1 (lo, by {GLOO})"),
        ([{}, {"wanted": "lo", "by": GLOO}], f"rank 1 on node2 would listen at 127.0.0.1 (lo, by {GLOO})"),
        (
            [{"wanted": "docker0", "by": FLAG}] * 2,
            "rank 1 on node2 would listen at 172.17.0.1 (docker0), as rank 0 on node1 does",
        ),
        (
            [{"master": "127.0.0.1", "source": "127.0.0.1"}] * 2,
            "rank 0 on node1 would listen at 127.0.0.1 (lo, MASTER_ADDR resolves to 127.0.0.1 on that host)",
        ),
        ([{}, {"master": "", "source": ""}], "no network interface of node2 leads to MASTER_ADDR"),
        ([{}, {"problem": "one and two differ"}], "one and two differ"),
    ],
)
def test_a_network_that_cannot_work_is_refused_with_rank_address_and_flag(changes, words):
    places = [node(number, **change) for number, change in enumerate(changes, 1)]
    with pytest.raises(Unusable, match=re.escape(words)) as refused:
        choose(places)
    if "differ" not in words:
        assert "it has docker0 (172.17.0.1), eth0 (10.0.0." in str(refused.value) and FLAG in str(refused.value)
    both = len(changes) == 2 and changes[0] == changes[1] and "as rank 0" not in words
    assert ("(and 1 more ranks)" in str(refused.value)) == both


def test_network_facts_of_one_rank():
    place = inspect_network(None, {"MASTER_ADDR": "localhost"})
    assert place.source in ("127.0.0.1", "::1") and place.problem == place.wanted == place.by == ""
    assert any("127.0.0.1" in addresses for addresses in place.interfaces.values())
    assert inspect_network("lo", {GLOO: "lo", NCCL: "=lo"}) == replace(
        place, wanted="lo", by=FLAG, master="", source=""
    )
    assert inspect_network(None, {GLOO: "eth0,eth1"}).wanted == "eth0,eth1"
    assert f"{FLAG} a and {GLOO}=b of the environment differ" in inspect_network("a", {GLOO: "b"}).problem
    assert f"{FLAG} a and {NCCL}=b of the environment differ" in inspect_network("a", {NCCL: "b"}).problem
    assert inspect_network(None, {"MASTER_ADDR": "no.such.host.invalid"}).source == ""


@pytest.mark.parametrize(
    "value, name, takes",
    [
        ("eth", "eth0", True),
        ("=eth", "eth0", False),
        ("=eth0", "eth0", True),
        ("ib,eth", "eth0", True),
        ("^eth", "eth0", False),
        ("^lo,docker", "eth0", True),
        ("^=eth", "eth0", True),
    ],
)
def test_names_as_nccl_reads_them(value, name, takes):
    assert nccl_takes(value, name) == takes


def on_all(places: list[NetworkView], store: dist.Store, seconds: float = 60.0) -> tuple[list, list[dict[str, str]]]:
    """The result of `agree` on each rank, and the variables that it sets; a rank whose place is None takes no part."""
    output: list = [None] * len(places)
    variables: list[dict[str, str]] = [{} for _ in places]

    def one(rank: int) -> None:
        try:
            output[rank] = agree(store, rank, len(places), timedelta(seconds=seconds), places[rank], variables[rank])
        except (Unusable, RuntimeError) as error:
            output[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank, place in enumerate(places) if place]
    for thread in reversed(threads):  # rank 0 comes last
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    return output, variables


def local(number: int, **change) -> NetworkView:
    """A node with an address of this machine, to which others can connect; see ``no_loopback``."""
    return replace(node(number, interfaces={"eth0": [f"127.0.0.{number}"]}, source=f"127.0.0.{number}"), **change)


@pytest.fixture
def no_loopback(monkeypatch):
    """Treat this machine's addresses as those of other machines."""
    monkeypatch.setattr("megatron.platform.network.is_loopback", lambda address: False)


def test_ranks_of_one_node_agree_on_the_loopback_and_leave_nccl_alone():
    output, variables = on_all([node(1)] * 3, dist.HashStore())
    assert output == [""] * 3 and variables == [{GLOO: "lo"}] * 3


@pytest.mark.skipif(not os.path.exists("/proc/net"), reason="needs Linux, where all of 127.0.0.0/8 is local")
@pytest.mark.usefixtures("no_loopback")
def test_nodes_that_reach_each_other_agree_and_say_what_they_use():
    places = [local(1), local(1), local(2), local(3, wanted="eth0", by=GLOO)]
    store = dist.HashStore()
    for _ in range(2):  # a restarted job uses the same store
        output, variables = on_all(places, store)
        assert set(output) == {
            "network by the route to MASTER_ADDR: node1, eth0 (127.0.0.1); node2, eth0 (127.0.0.2); node3, eth0 "
            "(127.0.0.3)"
        }
        assert variables == [{GLOO: "eth0", NCCL: "=eth0"}] * 4


def test_a_refusal_reaches_all_ranks():
    output, variables = on_all([node(1), node(2, wanted="lo", by=GLOO), node(3)], dist.HashStore())
    assert all(isinstance(one, Unusable) and "rank 1 on node2" in str(one) for one in output), output
    assert variables == [{}] * 3


def test_a_missing_rank_is_named():
    output, _ = on_all([node(1), None, node(1)], dist.HashStore(), seconds=1.0)
    assert [str(one) for one in output] == ["timed out after 1 s: rank 1 did not arrive", "None"] + [str(output[0])]


def test_an_answer_to_an_earlier_start_is_ignored(monkeypatch):
    monkeypatch.setattr(network, "POLL", 0.2)
    store = dist.HashStore()
    store.set("start", "an earlier one")
    output, _ = on_all([node(1), node(1)], store)
    assert output == ["", ""]


def linked(pairs: list[tuple[str, str]], monkeypatch) -> list[dict[str, str]]:
    """Results of `try_link` in a ring of ranks, given as (own address, address used by others)."""
    monkeypatch.setattr(network, "CONNECT", 1.0)
    monkeypatch.setattr(network, "LATE", 0.2)
    store, count = dist.HashStore(), len(pairs)
    output: list = [None] * count

    def one(rank: int) -> None:
        after = (rank + 1) % count
        output[rank] = try_link(store, rank, pairs[rank][0], after, pairs[after][1], f"node{after}, eth0")

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    return output


def test_two_ranks_that_cannot_connect_are_named(monkeypatch):
    """No host has an address of 192.0.2.0/24. First rank 0 connects to one; then rank 1 also listens at it."""
    fine = ("127.0.0.1", "127.0.0.1")
    assert linked([fine, fine], monkeypatch) == [{"connect": "", "accept": ""}] * 2
    output = linked([fine, ("127.0.0.1", "192.0.2.1")], monkeypatch)
    assert output[0]["connect"].startswith("rank 0 at 127.0.0.1 cannot connect to rank 1 on node1, eth0: ")
    assert FLAG in output[0]["connect"] and output[1] == {"connect": "", "accept": ""}
    output = linked([fine, ("192.0.2.1", "192.0.2.1")], monkeypatch)
    assert output[0]["connect"] == "" and output[1]["connect"].startswith("rank 1 cannot listen at 192.0.2.1: ")


def test_another_host_at_the_same_address_is_noticed(monkeypatch):
    """Rank 0 connects to a process that is not rank 1."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        connect = socket.create_connection

        def misled(address, timeout):
            port = stranger.getsockname()[1] if address[0] == "127.0.0.9" else address[1]
            return connect(("127.0.0.1", port), timeout)

        monkeypatch.setattr(network.socket, "create_connection", misled)
        output = linked([("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.9")], monkeypatch)
    assert output[0] == {"connect": "", "accept": ""}
    assert output[1]["accept"].startswith(
        "rank 0 does not reach rank 1 at 127.0.0.1, and may have reached another host"
    )


@pytest.mark.parametrize("gpus, shared", [("abcd", None), ("abab", "ranks 4, 6 share"), ("aaaa", "ranks 4, 5,")])
def test_ranks_of_a_node_that_share_a_gpu_are_refused(gpus: str, shared: str | None) -> None:
    """Ranks 4 to 7 are on the second node; the first has other GPUs, or GPUs with the same names."""
    store, refused = dist.HashStore(), []

    def start(rank: int) -> None:
        local = rank % 4
        try:
            check_own_gpu(store, rank, gpus[local], {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": "4"})
        except Unusable as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(20))
    assert len(refused) == (0 if shared is None else 4) and all("--nproc-per-node" in line for line in refused)
    assert shared is None or any(shared in line for line in refused)


def test_gloo_does_not_send_from_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--distributed-backend gloo on GPUs: gloo sends host memory alone"):
        platform.select("auto", 0, "gloo")
