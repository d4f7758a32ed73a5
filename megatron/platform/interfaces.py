# SPDX-License-Identifier: Apache-2.0
"""Over which network interface each process of a job talks to the others.

Left alone, gloo listens at the address of the host's name, which on many machines is that of the loopback interface:
no other node reaches it there. Here the interface is the loopback for a job on one node, and for one on several nodes
the interface on each node's route to the master, unless the user names one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.platform.processes import this_process

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
