# SPDX-License-Identifier: Apache-2.0
"""Which network interface each rank gets, what is refused, and how the ranks agree on it through a store."""

import os
import re
import socket
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.platform import network
from megatron.platform.network import FLAG, GLOO, NCCL, Place, Unusable, agree, choose, look, nccl_takes, try_link
from tests.patience import patience

LO = {"lo": ["127.0.0.1", "::1"]}


def node(number: int, **change) -> Place:
    """A rank on its own node: eth0 leads to the master, docker0 has the same address everywhere."""
    address = f"10.0.0.{number}"
    interfaces = {**LO, "docker0": ["172.17.0.1"], "eth0": [address, "fe80::1%eth0"]}
    return replace(Place(f"node{number}", f"boot {number}", interfaces, "10.0.0.1", address), **change)


def test_on_one_node_it_is_the_loopback_whatever_its_name():
    assert choose([node(1), node(1)]) == [["lo"], ["lo"]]
    assert choose([node(1, interfaces={"lo0": ["127.0.0.1"], "en0": ["10.0.0.1"]})]) == [["lo0"]]
    assert choose([node(1, interfaces={})]) == [[]]  # then gloo chooses


def test_on_several_nodes_it_is_the_route_to_the_master():
    other = node(2, interfaces={**LO, "ens3": ["10.0.0.2"]})
    assert choose([node(1), node(1), other]) == [["eth0"], ["eth0"], ["ens3"]]


def test_a_master_whose_own_name_is_its_loopback_is_what_the_others_call_it():
    itself = node(1, master="127.0.1.1", source="127.0.0.1")
    assert choose([itself, node(2)]) == [["eth0"], ["eth0"]]


def test_what_the_user_names_is_taken():
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
            "rank 0 on node1 would listen at 127.0.0.1 (lo, MASTER_ADDR leads to 127.0.0.1 there)",
        ),
        ([{}, {"master": "", "source": ""}], "no network interface of node2 leads to MASTER_ADDR"),
        ([{}, {"problem": "one and two differ"}], "one and two differ"),
    ],
)
def test_what_cannot_work_is_refused_by_rank_address_and_flag(changes, words):
    places = [node(number, **change) for number, change in enumerate(changes, 1)]
    with pytest.raises(Unusable, match=re.escape(words)) as refused:
        choose(places)
    if "differ" not in words:
        assert "it has docker0 (172.17.0.1), eth0 (10.0.0." in str(refused.value) and FLAG in str(refused.value)
    both = len(changes) == 2 and changes[0] == changes[1] and "as rank 0" not in words
    assert ("(and 1 more ranks)" in str(refused.value)) == both


def test_what_a_rank_sees_of_its_own_network():
    place = look(None, {"MASTER_ADDR": "localhost"})
    assert place.source in ("127.0.0.1", "::1") and place.problem == place.wanted == place.by == ""
    assert any("127.0.0.1" in addresses for addresses in place.interfaces.values())
    assert look("lo", {GLOO: "lo", NCCL: "=lo"}) == replace(place, wanted="lo", by=FLAG, master="", source="")
    assert look(None, {GLOO: "eth0,eth1"}).wanted == "eth0,eth1"
    assert f"{FLAG} a and {GLOO}=b of the environment differ" in look("a", {GLOO: "b"}).problem
    assert f"{FLAG} a and {NCCL}=b of the environment differ" in look("a", {NCCL: "b"}).problem
    assert look(None, {"MASTER_ADDR": "no.such.host.invalid"}).source == ""


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


def on_all(places: list[Place], store: dist.Store, seconds: float = 60.0) -> tuple[list, list[dict[str, str]]]:
    """What `agree` says to each rank, and the variables that it sets; a rank whose place is None does not come."""
    said: list = [None] * len(places)
    variables: list[dict[str, str]] = [{} for _ in places]

    def one(rank: int) -> None:
        try:
            said[rank] = agree(store, rank, len(places), timedelta(seconds=seconds), places[rank], variables[rank])
        except (Unusable, RuntimeError) as error:
            said[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank, place in enumerate(places) if place]
    for thread in reversed(threads):  # rank 0 comes last
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    return said, variables


def local(number: int, **change) -> Place:
    """A node whose address is one of this machine, so that others can connect to it; see ``no_loopback``."""
    return replace(node(number, interfaces={"eth0": [f"127.0.0.{number}"]}, source=f"127.0.0.{number}"), **change)


@pytest.fixture
def no_loopback(monkeypatch):
    """What is on this machine stands for other machines."""
    monkeypatch.setattr("megatron.platform.network.is_loopback", lambda address: False)


def test_ranks_of_one_node_agree_on_the_loopback_and_leave_nccl_alone():
    said, variables = on_all([node(1)] * 3, dist.HashStore())
    assert said == [""] * 3 and variables == [{GLOO: "lo"}] * 3


@pytest.mark.skipif(not os.path.exists("/proc/net"), reason="Linux has all addresses of 127.0.0.0/8")
@pytest.mark.usefixtures("no_loopback")
def test_nodes_that_reach_each_other_agree_and_say_what_they_use():
    places = [local(1), local(1), local(2), local(3, wanted="eth0", by=GLOO)]
    store = dist.HashStore()
    for _ in range(2):  # a job that is started again meets in the same store
        said, variables = on_all(places, store)
        assert set(said) == {
            "network by the route to MASTER_ADDR: node1, eth0 (127.0.0.1); node2, eth0 (127.0.0.2); node3, eth0 "
            "(127.0.0.3)"
        }
        assert variables == [{GLOO: "eth0", NCCL: "=eth0"}] * 4


def test_a_refusal_comes_to_all_ranks():
    said, variables = on_all([node(1), node(2, wanted="lo", by=GLOO), node(3)], dist.HashStore())
    assert all(isinstance(one, Unusable) and "rank 1 on node2" in str(one) for one in said), said
    assert variables == [{}] * 3


def test_a_rank_that_does_not_come_is_named_to_the_others():
    said, _ = on_all([node(1), None, node(1)], dist.HashStore(), seconds=1.0)
    assert [str(one) for one in said] == ["timed out after 1 s: rank 1 did not arrive", "None"] + [str(said[0])]


def test_an_answer_to_an_earlier_start_is_not_taken(monkeypatch):
    monkeypatch.setattr(network, "POLL", 0.2)
    store = dist.HashStore()
    store.set("start", "an earlier one")
    said, _ = on_all([node(1), node(1)], store)
    assert said == ["", ""]


def linked(pairs: list[tuple[str, str]], monkeypatch) -> list[dict[str, str]]:
    """What `try_link` says of ranks in a ring, each given as (its address, where it is looked for)."""
    monkeypatch.setattr(network, "CONNECT", 1.0)
    monkeypatch.setattr(network, "LATE", 0.2)
    store, count = dist.HashStore(), len(pairs)
    said: list = [None] * count

    def one(rank: int) -> None:
        after = (rank + 1) % count
        said[rank] = try_link(store, rank, pairs[rank][0], after, pairs[after][1], f"node{after}, eth0")

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    return said


def test_two_that_cannot_connect_are_named(monkeypatch):
    """192.0.2.0/24 belongs to nobody: first it is where a rank is looked for, then where it listens."""
    fine = ("127.0.0.1", "127.0.0.1")
    assert linked([fine, fine], monkeypatch) == [{"connect": "", "accept": ""}] * 2
    said = linked([fine, ("127.0.0.1", "192.0.2.1")], monkeypatch)
    assert said[0]["connect"].startswith("rank 0 at 127.0.0.1 cannot connect to rank 1 on node1, eth0: ")
    assert FLAG in said[0]["connect"] and said[1] == {"connect": "", "accept": ""}
    said = linked([fine, ("192.0.2.1", "192.0.2.1")], monkeypatch)
    assert said[0]["connect"] == "" and said[1]["connect"].startswith("rank 1 cannot listen at 192.0.2.1: ")


def test_another_host_at_the_same_address_is_noticed(monkeypatch):
    """Rank 0 gets through to somebody, who is not rank 1."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        connect = socket.create_connection

        def misled(address, timeout):
            port = stranger.getsockname()[1] if address[0] == "127.0.0.9" else address[1]
            return connect(("127.0.0.1", port), timeout)

        monkeypatch.setattr(network.socket, "create_connection", misled)
        said = linked([("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.9")], monkeypatch)
    assert said[0] == {"connect": "", "accept": ""}
    assert said[1]["accept"].startswith("rank 0 does not reach rank 1 at 127.0.0.1, and may have reached another host")
