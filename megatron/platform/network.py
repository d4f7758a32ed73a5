# SPDX-License-Identifier: Apache-2.0
"""Choose the network interface of each process of a job, before gloo and NCCL connect.

Every rank writes what it sees of the network to the store of torch.distributed's rendezvous, and rank 0 chooses for
all. Then the first rank of each node connects to the first of the next. If this fails, all ranks stop within seconds
with a message (rank, host, address, interface), while gloo and NCCL would wait until they time out.

By default gloo listens at the address of the host's name. On many machines this is a loopback address, which other
nodes cannot reach. Unless the user names an interface, this module chooses the loopback for a job on one node. For
several nodes it chooses on each node the interface on the route to the master.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron.system.processes import this_process

FLAG, GLOO, NCCL = "--network-interface", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class Unusable(ValueError):
    """The network cannot be used as chosen; the message is one line that says what to do."""


@dataclass(frozen=True)
class NetworkView:
    """What one rank sees of the network.

    Attributes:
        host: name of the host, for messages.
        node: identifies machine and network namespace; ranks with the same value reach each other over the loopback.
        interfaces: addresses of each interface by its name; gloo uses the first one.
        master: address of MASTER_ADDR as resolved on this host; empty if there is no route.
        source: this rank's address on the route to the master; empty if there is no route.
        wanted: names of the interfaces that the user has chosen, separated by commas; empty: none.
        by: the flag or variable with the names in ``wanted``.
        problem: why this rank cannot continue, as one line; empty if it can.
    """

    host: str
    node: str
    interfaces: dict[str, list[str]] = field(default_factory=dict)
    master: str = ""
    source: str = ""
    wanted: str = ""
    by: str = ""
    problem: str = ""

    def address(self, names: Sequence[str]) -> str:
        """The address at which gloo listens for these interfaces; empty if there are none."""
        return self.interfaces[names[0]][0] if names else ""

    def inventory(self) -> str:
        """The interfaces that other nodes may reach, for messages."""
        words = [f"{name} ({at[0]})" for name, at in self.interfaces.items() if not is_loopback(at[0])]
        return f"it has {', '.join(words)}" if words else "it has only the loopback"


def inspect_network(interface: str | None, environment: Mapping[str, str]) -> NetworkView:
    """What this rank sees of the network, and the interfaces that the user has chosen.

    Args:
        interface: from the command line.
        environment: MASTER_ADDR, and the variables of gloo and NCCL.
    """
    import psutil

    process, problem = this_process(), ""
    interfaces = {
        name: at
        for name, every in psutil.net_if_addrs().items()
        if (at := [one.address for one in every if one.family in (socket.AF_INET, socket.AF_INET6)])
    }
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        namespace = ""
    of_gloo, of_nccl = environment.get(GLOO, ""), environment.get(NCCL, "")
    if interface and of_gloo and of_gloo != interface:
        problem = f"{FLAG} {interface} and {GLOO}={of_gloo} of the environment differ: leave one of them out"
    elif interface and of_nccl and not nccl_takes(of_nccl, interface):
        problem = f"{FLAG} {interface} and {NCCL}={of_nccl} of the environment differ: leave one of them out"
    return NetworkView(
        process.host,
        f"{process.boot or process.host} {namespace}",
        interfaces,
        *_route(environment.get("MASTER_ADDR", "")),
        wanted=interface or of_gloo,
        by=FLAG if interface else GLOO if of_gloo else "",
        problem=problem,
    )


def choose(places: Sequence[NetworkView]) -> list[list[str]]:
    """Names of the interfaces of each rank; empty lists let gloo choose.

    Raises:
        Unusable: with the problem of the first rank that cannot continue.
    """
    several = len({place.node for place in places}) > 1
    masters = {place.master for place in places if place.master and not is_loopback(place.master)}
    chosen, problems = [], []
    first_at: dict[str, int] = {}  # by address: the first rank that listens there
    for rank, place in enumerate(places):
        names, problem = _names(place, masters, several)
        if several and not problem:
            at = place.address(names)
            other = first_at.setdefault(at, rank)
            if is_loopback(at):
                why = f"by {place.by}" if place.by else f"MASTER_ADDR resolves to {place.master} on that host"
                problem = f"would listen at {at} ({names[0]}, {why}), which other nodes cannot reach"
            elif places[other].node != place.node:
                problem = f"would listen at {at} ({names[0]}), as rank {other} on {places[other].host} does"
            if problem:
                problem = f"rank {rank} on {place.host} {problem}: give {FLAG} NAME; {place.inventory()}"
        if problem:
            problems.append(problem)
        chosen.append(names)
    if problems:
        raise Unusable(problems[0] + (f" (and {len(problems) - 1} more ranks)" if len(problems) > 1 else ""))
    return chosen


def _names(place: NetworkView, masters: set[str], several: bool) -> tuple[list[str], str]:
    """(interfaces of a rank, the problem with this choice or an empty string)."""
    if place.problem:
        return [], place.problem
    if place.wanted:
        names = place.wanted.split(",")
        missing = next((name for name in names if name not in place.interfaces), None)
        return names, "" if missing is None else (
            f"{place.by} names {missing!r}, but {place.host} has no network interface of that name with an address: "
            f"{place.inventory()}"
        )
    if not several:
        return [name for name, at in place.interfaces.items() if is_loopback(at[0])][:1], ""
    # The master's host may resolve its own name to a loopback address; then the address seen by other nodes is used.
    known = masters if is_loopback(place.source) else {place.source}
    for addresses in (known, {place.source}):
        if names := [name for name, at in place.interfaces.items() if addresses.intersection(at)]:
            return names[:1], ""
    return [], f"no network interface of {place.host} leads to MASTER_ADDR: give {FLAG} NAME; {place.inventory()}"


def nccl_takes(value: str, name: str) -> bool:
    """Whether NCCL would use an interface by its variable: a list of prefixes; ``=``: exact names; ``^``: not these."""
    negative = value.startswith("^")
    value = value.removeprefix("^")
    exact = value.startswith("=")
    words = value.removeprefix("=").split(",")
    return negative != any(name == word if exact else name.startswith(word) for word in words)


def is_loopback(address: str) -> bool:
    """Whether an IPv4 or IPv6 address (also with a zone) is a loopback address; False for an empty one."""
    return bool(address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _route(host: str) -> tuple[str, str]:
    """(address of a host, this host's address on the route to it); empty if there is no route. Nothing is sent."""
    try:
        addresses = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else []
    except OSError:
        return "", ""
    for family, kind, _, _, address in addresses:
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return address[0], probe.getsockname()[0]
        except OSError:
            continue
    return "", ""


POLL = 1.0  # seconds between two checks whether rank 0 has restarted; more for many ranks
CONNECT = 20.0  # seconds, time limit of one connection
LATE = 5.0  # additional seconds for an answer of another rank
NAMED = 4  # limit of the nodes that a line names


def meet(backend: str, timeout: timedelta, interface: str | None = None) -> str:
    """Initialize torch.distributed from torchrun's environment, over interfaces that reach each other.

    It sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME unless they are set; the latter only for several nodes or with
    ``interface``, because NCCL needs no network on one node.

    Args:
        interface: to use on every node; default: the interface that the variables name, or else the one on the route.

    Returns:
        A line with the interfaces, if there are several nodes or ``interface`` is given; else an empty string.

    Raises:
        Unusable: on every rank, if an interface is missing or nodes do not reach each other.
        RuntimeError: some ranks did not arrive within the timeout.
    """
    store, rank, ranks = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    place = inspect_network(interface, os.environ)
    line = agree(dist.PrefixStore("network", store), rank, ranks, timeout, place, os.environ)
    if "nccl" in backend:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        check_own_gpu(dist.PrefixStore("gpu", store), rank, str(properties.uuid), os.environ)
    group_store = dist.PrefixStore("default_pg", store)
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=ranks, timeout=timeout)
    return line


def check_own_gpu(store: dist.Store, rank: int, gpu: str, environment: Mapping[str, str]) -> None:
    """Refuse several ranks on one GPU, where NCCL would stop with an error of its own. All ranks call it.

    Args:
        gpu: UUID of this rank's GPU.
        environment: LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them.

    Raises:
        Unusable: another rank of this node has the same GPU.
    """
    local, count = (int(environment.get(name, usual)) for name, usual in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    start = environment.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restarted job may use the same store
    store.set(f"{start}/{rank}", gpu)
    first = rank - local
    same = [other for other in range(first, first + count) if store.get(f"{start}/{other}").decode() == gpu]
    if len(same) > 1:
        raise Unusable(
            f"ranks {', '.join(map(str, same))} share one GPU, and NCCL needs one for each: start fewer ranks on a "
            "node (torchrun --nproc-per-node), or use --device cpu"
        )


def agree(
    store: dist.Store,
    rank: int,
    ranks: int,
    timeout: timedelta,
    mine: NetworkView,
    environment: MutableMapping[str, str],
) -> str:
    """Agree on the interfaces of all ranks through a store, and set the variables; all ranks call it. See `meet`.

    A restarted job may use the store of the previous one. Therefore rank 0 gives each start a name, and answers are
    addressed to random numbers of their receivers, so that old entries are never read.
    """
    if rank == 0:
        start = uuid.uuid4().hex
        entries = dist.PrefixStore(start, store)
        store.set("start", start)
        plan = _lead(entries, ranks, timeout, mine)
    else:
        entries, plan = _follow(store, rank, ranks, timeout, mine)
    if "late" in plan or "refused" in plan:
        _wait_for_readers(entries, rank, plan.get("readers", []))
        raise RuntimeError(plan["late"]) if "late" in plan else Unusable(plan["refused"])
    if plan["names"]:
        environment.setdefault(GLOO, ",".join(plan["names"]))
        if plan["several"] or mine.by == FLAG:
            environment.setdefault(NCCL, f"={','.join(plan['names'])}")
    if plan["several"]:
        if "to" in plan:
            entries.set(f"link/{rank}", json.dumps(try_link(entries, rank, plan["at"], *plan["to"])))
        if rank == 0:
            links = _gathered(entries, "link", plan["firsts"], timedelta(seconds=4 * CONNECT))
            wrong = [link[side] for side in ("connect", "accept") for link in links.values() if link[side]]
            wrong += [f"rank {first} ended while it connected" for first in plan["firsts"] if first not in links]
            entries.set("verdict", wrong[0] if wrong else "")
        entries.wait(["verdict"], timedelta(seconds=6 * CONNECT))
        if verdict := entries.get("verdict").decode():
            _wait_for_readers(entries, rank, plan.get("readers", []))
            raise Unusable(verdict)
    return plan["line"]


def _lead(entries: dist.Store, ranks: int, timeout: timedelta, mine: NetworkView) -> dict[str, Any]:
    """Rank 0: wait for the others, choose, and answer each of them. Returns the plan of rank 0."""
    came = _gathered(entries, "place", range(1, ranks), timeout)
    nonces = {rank: raw.pop("nonce") for rank, raw in came.items()}
    missing = [str(rank) for rank in range(1, ranks) if rank not in came]
    places = [mine, *(NetworkView(**raw) for raw in came.values())]
    try:
        if missing:
            named = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            late = f"timed out after {timeout.total_seconds():.0f} s: rank {named} did not arrive"
            plans: list[dict[str, Any]] = [{"late": late} for _ in places]
        else:
            plans = _plans(places, choose(places))
    except Unusable as refusal:
        plans = [{"refused": str(refusal)} for _ in places]
    for rank, plan in zip(came, plans[1:]):
        entries.set(f"plan/{nonces[rank]}", json.dumps(plan))
    return {**plans[0], "readers": list(came)}


def _plans(places: Sequence[NetworkView], chosen: Sequence[list[str]]) -> list[dict[str, Any]]:
    """The plan of each rank: its interfaces and, for the first rank of each node, the rank to which it connects."""
    firsts: dict[str, int] = {}
    for rank, place in enumerate(places):
        firsts.setdefault(place.node, rank)
    ring, several = list(firsts.values()), len(firsts) > 1
    where = {
        rank: f"{places[rank].host}, {','.join(chosen[rank])} ({places[rank].address(chosen[rank])})" for rank in ring
    }
    line = ""
    if several or places[0].by == FLAG:
        more = f"; and {len(ring) - NAMED} more" if len(ring) > NAMED else ""
        by = places[0].by or "the route to MASTER_ADDR"
        line = f"network by {by}: {'; '.join(where[rank] for rank in ring[:NAMED])}{more}"
    plans: list[dict[str, Any]] = [{"names": names, "several": several, "line": line} for names in chosen]
    for rank, after in zip(ring, ring[1:] + ring[:1]):
        plans[rank]["at"] = places[rank].address(chosen[rank])
        plans[rank]["to"] = after, places[after].address(chosen[after]), where[after]
    plans[0]["firsts"] = ring
    return plans


def _follow(
    store: dist.Store, rank: int, ranks: int, timeout: timedelta, mine: NetworkView
) -> tuple[dist.Store, dict[str, Any]]:
    """Any rank but 0: report what it sees. Returns (the store of this start, the plan from rank 0)."""
    nonce, start, entries = uuid.uuid4().hex, "", store
    poll = max(POLL, ranks / 1000)  # the store answers a few thousand requests in a second
    end = time.monotonic() + timeout.total_seconds() + 2 * poll + LATE
    while True:
        latest = store.get("start").decode()
        if latest != start:  # the first value may belong to an earlier start
            start, entries = latest, dist.PrefixStore(latest, store)
            entries.set(f"place/{rank}", json.dumps({**asdict(mine), "nonce": nonce}))
        try:
            entries.wait([f"plan/{nonce}"], timedelta(seconds=poll))
            return entries, json.loads(entries.get(f"plan/{nonce}"))
        except dist.DistStoreError:
            if time.monotonic() > end:
                raise RuntimeError(f"timed out after {timeout.total_seconds():.0f} s: rank 0 did not answer") from None


def _gathered(entries: dist.Store, key: str, ranks: Iterable[int], timeout: timedelta) -> dict[int, dict[str, Any]]:
    """By rank, the entries of all ranks that have written one within the time."""
    keys = {rank: f"{key}/{rank}" for rank in ranks}
    try:
        entries.wait(list(keys.values()), timeout)
    except dist.DistStoreError:
        keys = {rank: name for rank, name in keys.items() if entries.check([name])}
    return {rank: json.loads(entries.get(name)) for rank, name in keys.items()}


def _wait_for_readers(entries: dist.Store, rank: int, readers: Iterable[int]) -> None:
    """Let rank 0 end last, because the store may be in its process."""
    if rank == 0:
        with suppress(dist.DistStoreError):
            entries.wait([f"read/{reader}" for reader in readers], timedelta(seconds=LATE))
    else:
        entries.set(f"read/{rank}", "")


def try_link(entries: dist.Store, rank: int, at: str, to: int, address: str, where: str) -> dict[str, str]:
    """Connect to the first rank of the next node, while the first rank of the previous node connects to this one.

    Args:
        at: this rank's address.
        to, address, where: the other rank, its address, and its description for messages.

    Returns:
        The problem of the outgoing ("connect") and of the incoming connection ("accept"); empty if there is none.
    """
    token, wrong = f"{rank} {uuid.uuid4().hex}".encode(), {"connect": "", "accept": ""}
    entries.set(f"token/{to}", token)
    try:
        server = socket.create_server((at, 0), family=socket.AF_INET6 if ":" in at else socket.AF_INET)
    except OSError as error:
        wrong["connect"] = f"rank {rank} cannot listen at {at}: {error.strerror or error}; give another {FLAG}"
        for key, value in ((f"port/{rank}", "0"), (f"tried/{rank}", wrong["connect"])):
            entries.set(key, value)
        return wrong
    with server:
        entries.set(f"port/{rank}", str(server.getsockname()[1]))
        port = int(entries.get(f"port/{to}"))
        try:
            with socket.create_connection((address, port), CONNECT) as out:
                out.sendall(token)
        except OSError as error:
            if port:  # otherwise that rank reports its problem itself
                wrong["connect"] = (
                    f"rank {rank} at {at} cannot connect to rank {to} on {where}: {error.strerror or error}; give "
                    f"another {FLAG}, or open the firewall between the nodes"
                )
        entries.set(f"tried/{rank}", wrong["connect"])
        expected = entries.get(f"token/{rank}")
        before = expected.decode().split()[0]
        if entries.get(f"tried/{before}"):
            return wrong  # the previous rank could not connect
        server.settimeout(LATE)
        try:
            with server.accept()[0] as link:
                link.settimeout(CONNECT)
                came = link.makefile("rb").read(len(expected))
        except OSError:
            came = b""
        if came != expected:
            wrong["accept"] = (
                f"rank {before} does not reach rank {rank} at {at}, and may have reached another host: give another "
                f"{FLAG}, with a different address on each node"
            )
    return wrong
