# SPDX-License-Identifier: Apache-2.0
"""A rehearsal of several nodes: the real program under torchrun in network namespaces, on links of limited rate."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.distributed.test_program import PROGRAM
from tests.faults.kills import logged
from tests.faults.network import SUBNET, Network, processes_in, why_not
from tests.patience import patience
from tests.program import run_forked

NODES = int(os.environ.get("NODES", "0"))
REASON = why_not() if NODES else "real nodes in network namespaces, minutes: bash tests/faults/nodes.sh, as root"
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 480 --max-position-embeddings 480 "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --lr-decay-style constant --num-workers 0 --device cpu "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --log-interval 1 --eval-iters 0"
)
FOREVER = "--train-iters 1000000 --distributed-timeout-minutes 1"
TIMEOUT = 60  # seconds, as FOREVER says


def command(flags: str, folder: Path) -> list[str]:
    return [str(PROGRAM), *f"{FLAGS} --log-jsonl {folder}/log.jsonl {flags}".split()]


def output(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("node*.log")))


def until(condition: Callable[[], bool], seconds: float, folder: Path, launchers: list[subprocess.Popen]) -> float:
    """Wait until ``condition`` returns True; returns the seconds. Fails after too long, or if a launcher has ended."""
    begin = time.monotonic()
    while not condition():
        late, ended = time.monotonic() - begin > patience(seconds), any(one.poll() is not None for one in launchers)
        assert not late and not ended, output(folder)[-9000:]
        time.sleep(0.1)
    return time.monotonic() - begin


def finish(launchers: list[subprocess.Popen], seconds: float, folder: Path) -> list[int]:
    """Exit codes of launchers that end in time."""
    deadline = time.monotonic() + patience(seconds)
    try:
        return [one.wait(max(0.1, deadline - time.monotonic())) for one in launchers]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not done after {patience(seconds):.0f} s\n{output(folder)[-9000:]}") from None


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[int], list[float]]:
    """Losses of one process for some steps."""
    folder = tmp_path_factory.mktemp("alone")
    done = run_forked(PROGRAM, command("--train-iters 20", folder)[1:], os.environ)
    assert done.returncode == 0, done.stderr
    return lambda steps: [row["lm_loss"] for row in logged(folder)[:steps]]


@pytest.fixture
def network(request) -> Iterator[Network]:
    """A network with the parameter's number of nodes and Mbit/s."""
    with Network(*request.param) as made:
        yield made


GRIDS = [
    ((2, None), 1, "--ring-parallel-size 2"),
    ((2, 50), 2, "--ulysses-parallel-size 2 --ring-parallel-size 2"),
    ((2, 50), 2, "--ring-parallel-size 4"),
    ((2, 50), 2, "--tensor-model-parallel-size 2 --ring-parallel-size 2 --sequence-parallel"),
    ((2, 50), 2, "--ring-parallel-size 2 --zero-stage 1"),
    ((2, 50), 2, "--ring-parallel-size 2 --pipeline-model-parallel-size 2"),
    ((4, 200), 1, "--ring-parallel-size 4 --fpdt --fpdt-chunk-size 240"),
    ((3, 200), 1, "--ring-parallel-size 3"),
]


@pytest.mark.parametrize("network, per_node, flags", GRIDS, indirect=["network"])
def test_losses_are_those_of_one_process(network, per_node, flags, alone, tmp_path):
    launchers = network.torchrun(per_node, command(f"{flags} --train-iters 4", tmp_path), tmp_path)
    assert set(finish(launchers, 100, tmp_path)) == {0}, output(tmp_path)
    losses, expected = [row["lm_loss"] for row in logged(tmp_path)], alone(4)
    worst = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    assert worst < 1e-6
    print(f"\n{network.nodes} x {per_node}, {network.mbit} Mbit/s, {flags}: losses within {worst:.1e} of one process")


@pytest.mark.skipif(not shutil.which("iptables"), reason="losing packets needs iptables")
@pytest.mark.parametrize("network", [(2, 200)], indirect=True)
@pytest.mark.parametrize("share", [0.01, 0.05])
def test_packets_that_are_lost(network, share, alone, tmp_path):
    for node in range(2):
        network.lose(node, share)
    launchers = network.torchrun(1, command("--ring-parallel-size 2 --train-iters 10", tmp_path), tmp_path)
    assert finish(launchers, 200, tmp_path) == [0, 0], output(tmp_path)
    result = logged(tmp_path)
    assert max(abs(row["lm_loss"] / b - 1) for row, b in zip(result, alone(10), strict=True)) < 1e-6
    took = sorted(row["iteration_ms"] for row in result[2:])
    print(f"\n{100 * share:g} % of packets lost: a step {took[0]:.0f} to {took[-1]:.0f} ms, losses as before")


@pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="a delay needs /dev/net/tun")
@pytest.mark.parametrize("network", [(2, None, 0.02)], indirect=True)
def test_packets_that_take_long(network, alone, tmp_path):
    """20 ms each way, as between two cities."""
    launchers = network.torchrun(1, command("--ring-parallel-size 2 --train-iters 10", tmp_path), tmp_path)
    assert finish(launchers, 200, tmp_path) == [0, 0], output(tmp_path)
    result = logged(tmp_path)
    assert max(abs(row["lm_loss"] / b - 1) for row, b in zip(result, alone(10), strict=True)) < 1e-6
    took = sorted(row["iteration_ms"] for row in result[2:])
    assert took[0] > 200  # a step waits for more than ten messages
    print(f"\n20 ms each way: a step {took[0]:.0f} to {took[-1]:.0f} ms, losses as before")


HOP = """
import time, torch, torch.distributed as dist
from megatron.context_parallel.attention.ring import _Transfer
from megatron.context_parallel.attention.ring_plan import Message
from types import SimpleNamespace
torch.set_num_threads(1)
dist.init_process_group("gloo")
axis = SimpleNamespace(group=dist.group.WORLD, global_rank=lambda rank: rank)
message, best = Message(((0, 2**18),), 1 - dist.get_rank()), 1e9
for _ in range(6):
    hop = _Transfer(axis)
    dist.barrier()
    begin = time.perf_counter()
    hop.send(torch.zeros(2**18, 1), message)
    hop.receive(message, torch.zeros(1), (1,), torch.float32)
    hop.start()
    hop.wait()
    dist.barrier()
    best = min(best, time.perf_counter() - begin)
if dist.get_rank() == 0:
    print(f"both ways in {best:.4f} s", flush=True)
"""


@pytest.mark.parametrize("network", [(2, 50)], indirect=True)
def test_a_ring_of_two_sends_in_both_directions_at_once(network, tmp_path):
    """1 MiB each way over 50 Mbit/s takes 0.17 s, or twice that where one direction waits for the other."""
    (tmp_path / "hop.py").write_text(HOP)
    launchers = network.torchrun(1, [str(tmp_path / "hop.py")], tmp_path, {"GLOO_SOCKET_IFNAME": "eth0"})
    assert finish(launchers, 60, tmp_path) == [0, 0], output(tmp_path)
    took = float(re.search(r"both ways in (\S+) s", output(tmp_path))[1])
    ideal = 2**20 * 8 / 50e6
    assert 0.8 * ideal < took < 1.5 * ideal
    print(f"\n1 MiB each way at 50 Mbit/s: {1000 * took:.0f} ms, one direction alone {1000 * ideal:.0f}")


@pytest.mark.parametrize("network", [(2, 50)], indirect=True)
def test_a_link_that_is_down_for_ten_seconds(network, alone, tmp_path):
    launchers = network.torchrun(1, command(f"--ring-parallel-size 2 {FOREVER}", tmp_path), tmp_path)
    until(lambda: len(logged(tmp_path)) > 5, 60, tmp_path, launchers)
    network.plug(1, False)
    time.sleep(1)
    before = len(logged(tmp_path))
    time.sleep(9)
    assert len(logged(tmp_path)) == before, "the link was not down"
    network.plug(1, True)
    took = until(lambda: len(logged(tmp_path)) > before + 10, 40, tmp_path, launchers)
    expected = alone(20)
    losses = [row["lm_loss"] for row in logged(tmp_path)[: len(expected)]]
    assert max(abs(a / b - 1) for a, b in zip(losses, expected)) < 1e-6
    print(f"\nlink down for 10 s: ten more steps {took:.0f} s after it came back, losses as before")


@pytest.mark.parametrize("network", [(2, None)], indirect=True)
def test_a_link_that_is_down_for_good(network, tmp_path):
    launchers = network.torchrun(2, command(f"--ring-parallel-size 4 {FOREVER}", tmp_path), tmp_path)
    until(lambda: len(logged(tmp_path)) > 5, 60, tmp_path, launchers)
    network.plug(1, False)
    begin = time.monotonic()
    assert all(finish(launchers, TIMEOUT + 60, tmp_path))
    took = time.monotonic() - begin
    assert took < TIMEOUT + patience(40), output(tmp_path)
    # Node 0 holds the store, so only its ranks can name the ranks that do not answer.
    first = (tmp_path / "node0.log").read_text()
    blamed = {int(rank) for rank in re.findall(r"error: rank (\d) on node1 does not answer", first)}
    blamed |= {int(rank) for rank in re.findall(r"rank (\d) on node1 does not answer", first)}
    assert blamed == {2, 3}, output(tmp_path)
    assert not [pid for node in range(2) for pid in processes_in(f"sn{node}")]
    print(f"\nlink down for good: all ended after {took:.0f} s, ranks 2 and 3 named")


@pytest.mark.parametrize("network", [(2, 200), (3, 200)], indirect=True)
def test_a_link_that_becomes_ten_times_slower_is_named(network, tmp_path):
    flags = f"--log-straggler {FOREVER} --seq-length 1536"
    flags += f" --max-position-embeddings 1536 --ring-parallel-size {network.nodes}"
    launchers = network.torchrun(1, command(flags, tmp_path), tmp_path)
    until(lambda: len(logged(tmp_path)) > 12, 100, tmp_path, launchers)
    network.limit(20, 1)
    named = re.compile(r"the link from rank (\d) on node(\d) to rank (\d) on node(\d) takes (\S+) ms for 256 KiB")
    took = until(lambda: named.search(output(tmp_path)), 100, tmp_path, launchers)
    line = next(line for line in output(tmp_path).splitlines() if named.search(line))
    slowest = named.search(line)
    after = (1 + 1) % network.nodes
    assert slowest.groups()[:4] == ("1", "1", f"{after}", f"{after}"), line  # messages from node 1
    assert 80 < float(slowest[5]) < 1000, line  # 256 KiB at 20 Mbit/s take 105 ms
    print(f"\n{took:.0f} s after a link became slow: {line.strip()}")


def in_mounts_of(process: subprocess.Popen, *words: str) -> None:
    """Run a command in the mount namespace of a node's launcher."""
    subprocess.run(["nsenter", "--mount", "-t", f"{process.pid}", *words], check=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {f"{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("network", [(2, None)], indirect=True)
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("how", ["read-only", "gone"])
def test_a_node_that_loses_its_disk(network, node, how, tmp_path):
    """Each failed save gives one line, training continues, earlier saves stay; later, saves succeed again."""
    disk, mounted = tmp_path / "disk", tmp_path / "mounted"
    disk.mkdir()
    mounted.mkdir()
    flags = f"--ring-parallel-size 2 --zero-stage 1 --save {mounted} --save-interval 10 {FOREVER}"
    mount = f"mount --bind {disk} {mounted}"
    launchers = network.torchrun(1, command(flags, tmp_path), tmp_path, prepare=mount)
    saved = lambda: sorted(path.name for path in disk.glob("iter_*"))  # noqa: E731
    until(lambda: len(saved()) >= 2 and not list(disk.glob(".*.partial")), 90, tmp_path, launchers)
    lose, restore = {
        "read-only": (["mount", "-o", "remount,ro,bind", mounted], ["mount", "-o", "remount,rw,bind", mounted]),
        "gone": (["umount", "--lazy", mounted], ["mount", "--bind", disk, mounted]),
    }[how]
    in_mounts_of(launchers[node], *map(str, lose))
    before, failed = contents(disk), lambda: re.findall(r".*no checkpoint was written to.*", output(tmp_path))
    until(lambda: len(failed()) >= 2, 60, tmp_path, launchers)
    after = contents(disk)
    changed = {name for name in before if after.get(name) != before[name] and "partial" not in name}
    # A save that had begun may still be published; earlier ones must not change.
    assert {name for name in changed if not name.startswith(".owner")} <= {"latest_checkpointed_iteration.txt"}
    message = failed()
    assert all(f"mounted (rank {node}: " in line for line in message), message
    steps, count = len(logged(tmp_path)), len(saved())
    until(lambda: len(logged(tmp_path)) > steps + 2, 60, tmp_path, launchers)
    in_mounts_of(launchers[node], *map(str, restore))
    until(lambda: len(saved()) > count, 60, tmp_path, launchers)
    assert "Traceback" not in output(tmp_path)
    print(f"\nthe disk of node {node} {how}: {message[0].strip()}")


def agent(network: Network, node: int, folder: Path) -> subprocess.Popen:
    """An elastic torchrun with one worker per node; node 0 holds the store."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    launcher += ["--max-restarts", "10", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{SUBNET}.1:29400"]
    launcher += ["--rdzv-id", "nodes", "--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=5"]
    launcher += ["--local-addr", f"{SUBNET}.{node + 1}"]
    flags = f"--save {folder}/c --load {folder}/c --save-interval 4 {FOREVER}"
    elastic = ["--elastic-grids", "2: r2; 1: r1"]
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return network.start(node, [*launcher, *command(flags, folder), *elastic], folder / f"node{node}.log", environment)


@pytest.mark.parametrize("network", [(2, 200)], indirect=True)
def test_a_node_that_dies_and_comes_back(network, alone, tmp_path):
    """An elastic job continues with the other node and grows again; its losses equal those of one process."""
    starts = lambda: [int(n) for n in re.findall(r"elastic: (\d) process", (tmp_path / "node0.log").read_text())]  # noqa: E731
    last = lambda: max((row["iteration"] for row in logged(tmp_path)), default=0)  # noqa: E731
    launchers = [agent(network, node, tmp_path) for node in range(2)]
    until(lambda: starts()[-1:] == [2] and last() >= 4, 120, tmp_path, launchers)

    for pid in processes_in("sn1"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launchers.pop().wait()
    shrunk = until(lambda: starts()[-1] == 1, 120, tmp_path, launchers)
    before = last()
    until(lambda: last() >= before + 4, 120, tmp_path, launchers)

    launchers.append(agent(network, 1, tmp_path))
    grown = until(lambda: starts()[-1] == 2, 120, tmp_path, launchers)
    before = last()
    until(lambda: last() >= before + 4, 120, tmp_path, launchers)
    result = {row["iteration"]: row["lm_loss"] for row in logged(tmp_path)}
    expected = alone(20)
    worst = max(abs(result[number] / loss - 1) for number, loss in enumerate(expected, 1) if number in result)
    assert sorted(result) == list(range(1, max(result) + 1)) and worst < 1e-5
    print(f"\na node died: continued with the other after {shrunk:.0f} s, with both after {grown:.0f} s")
