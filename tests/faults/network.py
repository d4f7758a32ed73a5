# SPDX-License-Identifier: Apache-2.0
"""Several nodes on one machine: network namespaces, each with its own address, host name and link of limited rate.

Each node is a namespace ``sn0``, ``sn1``, ... with one network card ``eth0`` (10.77.0.1, 10.77.0.2, ...). The cards are
plugged into a bridge, in the namespace ``snsw``, so that the machine's own network is not affected.
Needs root.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

PREFIX, SUBNET = "sn", "10.77.0"
MASTER = f"{SUBNET}.1"  # address of the first node
BURST, QUEUE = "16kb", 3_000_000  # of the token bucket: burst, and bytes of the queue
ROOT = Path(__file__).resolve().parents[2]


def _ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if check and done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_not(prefix: str = PREFIX) -> str:
    """Why this machine cannot have such nodes; empty if it can."""
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if not shutil.which(name)]
    if missing:
        return f"no {missing[0]} here (Debian: apt-get install iproute2 util-linux)"
    if os.geteuid():
        return "network namespaces need root"
    try:
        with Network(1, 100, prefix=prefix):
            return ""
    except OSError as error:
        return f"no network namespaces here: {error}"


class Network:
    """The nodes, as a context manager that removes them and ends their processes.

    Args:
        nodes: how many.
        mbit: of each card and direction; None: unlimited.
        delay: seconds of latency; then a program (relay.py) carries packets instead of a bridge.
        prefix, subnet: of the namespaces' names and addresses; networks that differ in both can exist at once.
    """

    def __init__(
        self,
        nodes: int,
        mbit: float | None = None,
        delay: float = 0.0,
        prefix: str = PREFIX,
        subnet: str = SUBNET,
    ) -> None:
        self.nodes, self.mbit, self.delay, self.prefix, self.subnet = nodes, mbit, delay, prefix, subnet
        self._carrier: subprocess.Popen | None = None

    def __enter__(self) -> Network:
        self._lock = _lock(self.prefix)
        remove(self.prefix)  # left over from a killed run
        switch = f"{self.prefix}sw"
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "snbr", "type", "bridge")
            _ip("-n", switch, "link", "set", "snbr", "up")
            names = [f"{self.prefix}{node}" for node in range(self.nodes)]
            for name in names:
                _ip("netns", "add", name)
            if self.delay:
                self._relay(switch, names)
            for node, name in enumerate(names):
                if not self.delay:
                    port = f"p{node}"
                    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
                    _ip("-n", switch, "link", "set", port, "master", "snbr", "up")
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", name, "addr", "add", f"{self.subnet}.{node + 1}/24", "dev", "eth0")
            self.limit(self.mbit)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        remove(self.prefix)
        if self._carrier:
            self._carrier.communicate()
        self._lock.close()

    def _relay(self, switch: str, names: Sequence[str]) -> None:
        words = ["ip", "netns", "exec", switch, sys.executable, "-m", "tests.faults.relay", f"{self.delay}", *names]
        self._carrier = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
        if not self._carrier.stdout.readline():
            raise OSError("no cards of /dev/net/tun can be made here")

    def limit(self, mbit: float | None, *nodes: int) -> None:
        """Limit the outgoing rate of these nodes (default: all); None: unlimited."""
        for node in nodes or range(self.nodes):
            tc = ["netns", "exec", f"{self.prefix}{node}", "tc", "qdisc"]
            _ip(*tc, "del", "dev", "eth0", "root", check=False)
            if mbit is not None:
                rate = f"{round(1e6 * mbit)}bit"
                _ip(*tc, "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", BURST, "limit", f"{QUEUE}")

    def plug(self, node: int, plugged: bool) -> None:
        """Disconnect or reconnect a node's card."""
        _ip("-n", f"{self.prefix}sw", "link", "set", f"p{node}", "up" if plugged else "down")

    def lose(self, node: int, share: float) -> None:
        """Drop this share of the packets that reach a node, at random (needs iptables).

        Raises:
            OSError: iptables, or its module for random loss, is missing.
        """
        name = f"{self.prefix}{node}"
        _ip("netns", "exec", name, "iptables", "-A", "INPUT", "-i", "eth0", "-m", "statistic", "--mode",
            "random", "--probability", f"{share}", "-j", "DROP")  # fmt: skip

    def start(
        self, node: int, command: Sequence[str], log: Path, environment: dict[str, str], prepare: str = "true"
    ) -> subprocess.Popen:
        """A process on a node, whose host name is ``node0``, ``node1``, ...

        Args:
            log: where its output goes, added to the file's end.
            prepare: a shell command that runs first, in the same private mount namespace.
        """
        script = f'hostname node{node} && {prepare} && exec "$@"'
        name = f"{self.prefix}{node}"
        words = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "bash", "-c", script, "bash"]
        with open(log, "a") as file:
            return subprocess.Popen(
                [*words, *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
                | environment,
                start_new_session=True,
            )

    def torchrun(
        self,
        per_node: int,
        program: Sequence[str],
        folder: Path,
        environment: dict[str, str] | None = None,
        prepare: str = "true",
    ) -> list[subprocess.Popen]:
        """One launcher a node, as on a cluster; their output goes to ``node0.log``, ... in ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{self.nodes}"]
        launcher += ["--nproc-per-node", f"{per_node}", "--master-addr", f"{self.subnet}.1", "--master-port", "29500"]
        return [
            self.start(
                node,
                [*launcher, "--node-rank", f"{node}", *program],
                folder / f"node{node}.log",
                environment or {},
                prepare,
            )
            for node in range(self.nodes)
        ]


def processes_in(name: str) -> list[int]:
    """Processes in a network namespace."""
    return [int(pid) for pid in _ip("netns", "pids", name, check=False).split()]


def remove(prefix: str = PREFIX) -> None:
    """End all processes in these namespaces and remove the namespaces, if there are any."""
    every = [line.split()[0] for line in _ip("netns", "list", check=False).splitlines() if line]
    for name in every:
        if name == f"{prefix}sw" or (name.startswith(prefix) and name[len(prefix) :].isdigit()):
            for pid in processes_in(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _ip("netns", "del", name, check=False)


def _lock(prefix: str = PREFIX) -> IO[str]:
    """A file that is locked while it is open, because the namespaces' names are global on the machine.

    Raises:
        OSError: another process has locked it.
    """
    path = os.path.join(tempfile.gettempdir(), f"megatron-nodes-{prefix}.lock")
    # root must not follow another user's link of that name.
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise OSError("another rehearsal of several nodes runs on this machine") from None
    return file


if __name__ == "__main__":
    with suppress(OSError), _lock():
        remove()
