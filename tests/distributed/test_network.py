# SPDX-License-Identifier: Apache-2.0
"""The program on two nodes with separate networks: it works by default, or is refused at once.

The choice of --network-interface is tested in tests/unit/test_network.py.
"""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from megatron.platform.network import FLAG, GLOO
from tests.distributed.test_program import FLAGS, PROGRAM
from tests.faults.network import Network, why_not
from tests.program import run_each

PREFIX, SUBNET = "nt", "10.78.0"
REASON = why_not(PREFIX)
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

ON_A_NODE = Path(__file__).with_name("on_a_node.py")
TRAIN = f"{FLAGS} --ring-parallel-size 2 --train-iters 1 --eval-iters 0 --distributed-timeout-minutes 1"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two nodes; each has an unconnected second card and a third one with the same address on both."""
    with Network(2, prefix=PREFIX, subnet=SUBNET) as made:
        for node in range(2):
            for name, address in (("eth1", f"10.79.0.{node + 1}/32"), ("docker0", "172.17.0.1/16")):
                for words in (
                    f"link add {name} type bridge",
                    f"addr add {address} dev {name}",
                    f"link set {name} up",
                ):
                    subprocess.run(["ip", "-n", f"{PREFIX}{node}", *words.split()], check=True)
        yield made


def on_two_nodes(
    folder: Path, flags: str, variables: Mapping[str, str] | None = None
) -> list[subprocess.CompletedProcess]:
    """The program by rank, one rank per node. As on Debian, a node's name resolves to a loopback address."""
    environments = []
    for rank in range(2):
        hosts = folder / f"hosts{rank}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node{rank}\n" + f"{SUBNET}.1 node0\n" * (rank == 1))
        environment = {name: value for name, value in os.environ.items() if name not in (GLOO, "NCCL_SOCKET_IFNAME")}
        environment |= {"NAMESPACE": f"{PREFIX}{rank}", "HOST": f"node{rank}", "HOSTS": str(hosts)}
        environment |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environments.append({**environment, "MASTER_ADDR": "node0", "MASTER_PORT": "29500", **(variables or {})})
    return run_each(ON_A_NODE, [str(PROGRAM), *TRAIN.split(), *flags.split()], environments)


def lines(output: str) -> list[str]:
    """Without PyTorch's warnings that an address has no name."""
    return [line for line in output.splitlines() if line and not line.startswith("[W")]


@pytest.mark.lab
def test_nodes_whose_names_lead_to_the_loopback_meet_all_the_same(network, tmp_path):
    first, second = on_two_nodes(tmp_path, "")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    line = " > network by the route to MASTER_ADDR: node0, eth0 (10.78.0.1); node1, eth0 (10.78.0.2)"
    assert line in first.stdout.splitlines()
    assert "iteration        1/" in first.stdout


@pytest.mark.parametrize(
    "flags, variables, words",
    [
        (f"{FLAG} eht0", {}, f"{FLAG} names 'eht0', but node0 has no network interface of that name .*eth0 "),
        ("", {GLOO: "lo"}, rf"rank 0 on node0 would listen at 127.0.0.1 \(lo, by {GLOO}\), .* give {FLAG} NAME"),
        (f"{FLAG} docker0", {}, r"rank 1 on node1 would listen at 172.17.0.1 \(docker0\), as rank 0 on node0 does"),
        (f"{FLAG} eth1", {}, r"rank 0 at 10.79.0.1 cannot connect to rank 1 on node1, eth1 \(10.79.0.2\): "),
        (f"{FLAG} eth0", {GLOO: "eth1"}, f"{FLAG} eth0 and {GLOO}=eth1 of the environment differ"),
    ],
)
def test_a_wrong_interface_is_refused_on_all_ranks_in_one_line(network, tmp_path, flags, variables, words):
    first, second = on_two_nodes(tmp_path, flags, variables)
    assert (first.returncode, second.returncode) == (2, 2), first.stderr + second.stderr
    (line,) = lines(first.stderr)
    assert re.match(f"error: .*{words}", line), line
    assert not lines(second.stderr)
