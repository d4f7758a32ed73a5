# SPDX-License-Identifier: Apache-2.0
"""Which network interface each process of a job uses, agreed before gloo and NCCL connect.

The processes already reach the store in which torch.distributed lets them meet. There every rank writes what it sees of
the network, and rank 0 chooses for all. Then the first rank of each node connects once to that of the next node. What
cannot work is refused on all ranks within seconds, by rank, host, address and interface, where gloo and NCCL would
wait until they time out.
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

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron.platform.processes import this_process

# Over which network interface each process of a job talks to the others.
#
# Left alone, gloo listens at the address of the host's name, which on many machines is that of the loopback interface:
# no other node reaches it there. Here the interface is the loopback for a job on one node, and for one on several nodes
# the interface on each node's route to the master, unless the user names one.


FLAG, GLOO, NCCL = "--network-interface", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class Unusable(ValueError):
    """The network cannot be used as it was chosen: one line with the way out."""


@dataclass(frozen=True)
class Place:
    """What one rank sees of the network.

    Attributes:
        host: its name, for messages.
        node: names its machine and network namespace: ranks with the same one reach each other over the loopback.
        interfaces: addresses of each interface by its name; gloo takes the first one.
        master: address that MASTER_ADDR leads to, here; empty where it leads nowhere.
        source: this rank's own address on the way there; empty where there is none.
        wanted: names of the interfaces that the user wants, with commas between them; empty: none was named.
        by: the flag or variable that names them.
        problem: why this rank cannot go on, in a whole line; else empty.
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
        """Where gloo listens if it is given these interfaces; empty for none."""
        return self.interfaces[names[0]][0] if names else ""

    def inventory(self) -> str:
        """Its interfaces that other nodes may reach, in words."""
        words = [f"{name} ({at[0]})" for name, at in self.interfaces.items() if not is_loopback(at[0])]
        return f"it has {', '.join(words)}" if words else "it has none but the loopback"


def look(interface: str | None, environment: Mapping[str, str]) -> Place:
    """What this rank sees of the network, and what the user wants of it.

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
        problem = f"{FLAG} {interface} and {GLOO}={of_gloo} of the environment differ: leave one out"
    elif interface and of_nccl and not nccl_takes(of_nccl, interface):
        problem = f"{FLAG} {interface} and {NCCL}={of_nccl} of the environment differ: leave one out"
    return Place(
        process.host,
        f"{process.boot or process.host} {namespace}",
        interfaces,
        *_route(environment.get("MASTER_ADDR", "")),
        wanted=interface or of_gloo,
        by=FLAG if interface else GLOO if of_gloo else "",
        problem=problem,
    )


def choose(places: Sequence[Place]) -> list[list[str]]:
    """Names of the interfaces of each rank; none where gloo is to choose by itself.

    Raises:
        Unusable: what is wrong with the first rank that cannot go on.
    """
    several = len({place.node for place in places}) > 1
    masters = {place.master for place in places if place.master and not is_loopback(place.master)}
    chosen, problems = [], []
    first_at: dict[str, int] = {}  # rank that listens at an address
    for rank, place in enumerate(places):
        names, problem = _names(place, masters, several)
        if several and not problem:
            at = place.address(names)
            other = first_at.setdefault(at, rank)
            if is_loopback(at):
                why = f"by {place.by}" if place.by else f"MASTER_ADDR leads to {place.master} there"
                problem = f"would listen at {at} ({names[0]}, {why}), where no other node reaches it"
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


def _names(place: Place, masters: set[str], several: bool) -> tuple[list[str], str]:
    """(interfaces of a rank, what is wrong with that)."""
    if place.problem:
        return [], place.problem
    if place.wanted:
        names = place.wanted.split(",")
        missing = next((name for name in names if name not in place.interfaces), None)
        return names, "" if missing is None else (
            f"{place.by} names {missing!r}, and {place.host} has no network interface of that name with an address: "
            f"{place.inventory()}"
        )
    if not several:
        return [name for name, at in place.interfaces.items() if is_loopback(at[0])][:1], ""
    # The master's own host may know itself by a loopback address: then what the other nodes call it counts.
    known = masters if is_loopback(place.source) else {place.source}
    for addresses in (known, {place.source}):
        if names := [name for name, at in place.interfaces.items() if addresses.intersection(at)]:
            return names[:1], ""
    return [], f"no network interface of {place.host} leads to MASTER_ADDR: give {FLAG} NAME; {place.inventory()}"


def nccl_takes(value: str, name: str) -> bool:
    """Whether NCCL takes an interface by its variable: beginnings of names, ``=`` for whole names, ``^`` for none."""
    negative = value.startswith("^")
    value = value.removeprefix("^")
    whole = value.startswith("=")
    words = value.removeprefix("=").split(",")
    return negative != any(name == word if whole else name.startswith(word) for word in words)


def is_loopback(address: str) -> bool:
    """Of an IPv4 or IPv6 address, also of one with a zone; not of an empty one."""
    return bool(address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _route(host: str) -> tuple[str, str]:
    """(address of a host, this host's own one on the way there); empty where there is no way. Nothing is sent."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else []
    except OSError:
        return "", ""
    for family, kind, _, _, where in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(where)
                return where[0], probe.getsockname()[0]
        except OSError:
            continue
    return "", ""


POLL = 1.0  # seconds between two looks at whether rank 0 has begun again; longer where there are many ranks
CONNECT = 20.0  # seconds that one connection may take
LATE = 5.0  # seconds more for one rank's answer to come to another
NAMED = 4  # nodes in one line


def meet(backend: str, timeout: timedelta, interface: str | None = None) -> str:
    """Initialize torch.distributed from the environment that torchrun sets, over interfaces that reach each other.

    Sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME where they are not set; the latter for several nodes alone, as NCCL
    needs no network on one.

    Args:
        interface: the one to use on every node; default the one that the variables name, or that the routes lead to.

    Returns:
        A line that says what is used, where there are several nodes or ``interface`` is given; else an empty string.

    Raises:
        Unusable: on every rank; an interface is missing, or nodes do not reach each other.
        RuntimeError: ranks did not come within the timeout.
    """
    store, rank, ranks = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    line = agree(dist.PrefixStore("network", store), rank, ranks, timeout, look(interface, os.environ), os.environ)
    own = dist.PrefixStore("default_pg", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=ranks, timeout=timeout)
    return line


def agree(
    store: dist.Store, rank: int, ranks: int, timeout: timedelta, mine: Place, environment: MutableMapping[str, str]
) -> str:
    """Settle the interfaces of all ranks by way of a store, and set the variables; all ranks call it. See `meet`.

    A restarted job may meet in the store of its predecessor. So rank 0 names each start, and answers are addressed to
    numbers that their receivers make up: nothing old is mistaken for new.
    """
    if rank == 0:
        start = uuid.uuid4().hex
        room = dist.PrefixStore(start, store)
        store.set("start", start)
        plan = _lead(room, ranks, timeout, mine)
    else:
        room, plan = _follow(store, rank, ranks, timeout, mine)
    if "late" in plan or "refused" in plan:
        _wait_for_readers(room, rank, plan.get("readers", []))
        raise RuntimeError(plan["late"]) if "late" in plan else Unusable(plan["refused"])
    if plan["names"]:
        environment.setdefault(GLOO, ",".join(plan["names"]))
        if plan["several"] or mine.by == FLAG:
            environment.setdefault(NCCL, f"={','.join(plan['names'])}")
    if plan["several"]:
        if "to" in plan:
            room.set(f"link/{rank}", json.dumps(try_link(room, rank, plan["at"], *plan["to"])))
        if rank == 0:
            found = _gathered(room, "link", plan["firsts"], timedelta(seconds=4 * CONNECT))
            wrong = [one[way] for way in ("connect", "accept") for one in found.values() if one[way]]
            wrong += [f"rank {first} ended while it connected" for first in plan["firsts"] if first not in found]
            room.set("verdict", wrong[0] if wrong else "")
        room.wait(["verdict"], timedelta(seconds=6 * CONNECT))
        if verdict := room.get("verdict").decode():
            _wait_for_readers(room, rank, plan.get("readers", []))
            raise Unusable(verdict)
    return plan["line"]


def _lead(room: dist.Store, ranks: int, timeout: timedelta, mine: Place) -> dict[str, Any]:
    """Rank 0: wait for the others, choose, and answer each; what rank 0 has to do itself."""
    came = _gathered(room, "place", range(1, ranks), timeout)
    nonces = {rank: raw.pop("nonce") for rank, raw in came.items()}
    missing = [str(rank) for rank in range(1, ranks) if rank not in came]
    places = [mine, *(Place(**raw) for raw in came.values())]
    try:
        if missing:
            named = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            late = f"timed out after {timeout.total_seconds():.0f} s: rank {named} did not come"
            plans: list[dict[str, Any]] = [{"late": late} for _ in places]
        else:
            plans = _plans(places, choose(places))
    except Unusable as refusal:
        plans = [{"refused": str(refusal)} for _ in places]
    for rank, plan in zip(came, plans[1:]):
        room.set(f"plan/{nonces[rank]}", json.dumps(plan))
    return {**plans[0], "readers": list(came)}


def _plans(places: Sequence[Place], chosen: Sequence[list[str]]) -> list[dict[str, Any]]:
    """What each rank is to do: its interfaces, and, of the first rank of each node, where it is to connect to."""
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
    store: dist.Store, rank: int, ranks: int, timeout: timedelta, mine: Place
) -> tuple[dist.Store, dict[str, Any]]:
    """Another rank: tell what it sees; (where the ranks of this start write, what rank 0 answers)."""
    nonce, start, room = uuid.uuid4().hex, "", store
    poll = max(POLL, ranks / 1000)  # the store answers some thousands a second
    end = time.monotonic() + timeout.total_seconds() + 2 * poll + LATE
    while True:
        latest = store.get("start").decode()
        if latest != start:  # what was there first may have been an earlier start's
            start, room = latest, dist.PrefixStore(latest, store)
            room.set(f"place/{rank}", json.dumps({**asdict(mine), "nonce": nonce}))
        try:
            room.wait([f"plan/{nonce}"], timedelta(seconds=poll))
            return room, json.loads(room.get(f"plan/{nonce}"))
        except dist.DistStoreError:
            if time.monotonic() > end:
                raise RuntimeError(f"timed out after {timeout.total_seconds():.0f} s: rank 0 did not answer") from None


def _gathered(room: dist.Store, key: str, ranks: Iterable[int], timeout: timedelta) -> dict[int, dict[str, Any]]:
    """What ranks wrote, in their order, of those that did within the time."""
    keys = {rank: f"{key}/{rank}" for rank in ranks}
    try:
        room.wait(list(keys.values()), timeout)
    except dist.DistStoreError:
        keys = {rank: name for rank, name in keys.items() if room.check([name])}
    return {rank: json.loads(room.get(name)) for rank, name in keys.items()}


def _wait_for_readers(room: dist.Store, rank: int, readers: Iterable[int]) -> None:
    """Before all ranks end: the store may live in rank 0, which ends last."""
    if rank == 0:
        with suppress(dist.DistStoreError):
            room.wait([f"read/{reader}" for reader in readers], timedelta(seconds=LATE))
    else:
        room.set(f"read/{rank}", "")


def try_link(room: dist.Store, rank: int, at: str, to: int, address: str, where: str) -> dict[str, str]:
    """Connect to the first rank of the next node, while that of the node before connects to this one.

    Args:
        at: this rank's address.
        to, address, where: the other rank, its address, and its place in words.

    Returns:
        What went wrong when it connected ("connect") and when it was connected to ("accept"); empty where nothing did.
    """
    token, wrong = f"{rank} {uuid.uuid4().hex}".encode(), {"connect": "", "accept": ""}
    room.set(f"token/{to}", token)
    try:
        server = socket.create_server((at, 0), family=socket.AF_INET6 if ":" in at else socket.AF_INET)
    except OSError as error:
        wrong["connect"] = f"rank {rank} cannot listen at {at}: {error.strerror or error}; give another {FLAG}"
        for key, value in ((f"port/{rank}", "0"), (f"tried/{rank}", wrong["connect"])):
            room.set(key, value)
        return wrong
    with server:
        room.set(f"port/{rank}", str(server.getsockname()[1]))
        port = int(room.get(f"port/{to}"))
        try:
            with socket.create_connection((address, port), CONNECT) as out:
                out.sendall(token)
        except OSError as error:
            if port:  # else that rank tells by itself what is wrong
                wrong["connect"] = (
                    f"rank {rank} at {at} cannot connect to rank {to} on {where}: {error.strerror or error}; give "
                    f"another {FLAG}, or open the firewall between the nodes"
                )
        room.set(f"tried/{rank}", wrong["connect"])
        expected = room.get(f"token/{rank}")
        before = expected.decode().split()[0]
        if room.get(f"tried/{before}"):
            return wrong  # nobody will come
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
                f"{FLAG}, whose addresses are each node's own"
            )
    return wrong
