# SPDX-License-Identifier: Apache-2.0
"""tools/measure_hardware.py: what it writes is a machine; what cannot be written or measured is refused, early."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import queue
from types import SimpleNamespace

import pytest
import torch

from megatron.simulator.dry_run.allocation.reserved import runtime_memory
from megatron.simulator.machines import measure_device
from megatron.simulator.machines.machine import KINDS
from megatron.simulator.machines.machine_file import load
from megatron.simulator.machines.measure_device import Effort
from megatron.simulator.machines.measure_links import Figures, figures, listen, measure_in_processes
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from tools import hardware_figures, measure_hardware

TINY = Effort(0.01, (16, 32), (16, 32), 2, 2**16, 2**16)
FAST = ["--device", "cpu", "--quick", "--gemm-sizes", "16", "32", "--attention-lengths", "16", "32"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a hundredth of a second; and PyTorch's number of threads as it was."""
    monkeypatch.setattr(measure_device, "effort", lambda device, quick: TINY)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_measured_file_is_a_machine(tmp_path, capsys):
    path = tmp_path / "new" / "here.json"
    assert measure_hardware.main(["--output", str(path), "--processes", "1", *FAST]) == 0
    machine = load(path)
    assert machine.name == "here" and machine.dtype == "fp32" and machine.gpus == 1
    assert [size for size, _ in machine.gemm.points] == [16, 32]
    assert [size for size, _ in machine.attention_backward.points] == [16, 32]
    assert machine.peak["fp32"] >= max(rate for _, rate in machine.gemm.points) > 0
    assert machine.head_size(128) == 1 and 0 < machine.reserved < machine.memory
    assert "not measured with one process" in machine.sources["link"]
    assert set(machine.sources) >= {"peak", "gemm", "launch", "memory", "network"}
    assert f"use it as --gpu {path}" in capsys.readouterr().out
    assert os.listdir(path.parent) == ["here.json"]
    assert measure_hardware.main(["--output", str(path), "--processes", "1", *FAST]) == 2
    assert "give --overwrite to replace it" in capsys.readouterr().err
    assert measure_hardware.main(["--output", str(path), "--processes", "1", "--overwrite", *FAST]) == 0


def never(*_: object) -> None:
    raise AssertionError("measured before it was known that the file can be written")


@pytest.mark.parametrize("full", [False, True])
def test_what_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch, full):
    monkeypatch.setattr(hardware_figures, "measured", never)
    (tmp_path / "file").write_text("")
    path = tmp_path / ("here.json" if full else "file/here.json")
    if full:

        def no_space(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", no_space)
    assert measure_hardware.main(["--output", str(path), *FAST]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: cannot write") and ("the disk is full" in told) == full
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--processes", "0"], "--processes 0: give a number above 0"),
        (["--gemm-sizes", "4", "2"], "--gemm-sizes: give sizes above 0 in increasing order"),
    ],
)
def test_bad_settings_are_refused(tmp_path, capsys, flags, told):
    with pytest.raises(SystemExit, match="2"):
        measure_hardware.main(["--output", str(tmp_path / "x.json"), *flags])
    assert told in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path, capsys):
    assert measure_hardware.main(["--output", str(tmp_path / "x.json"), "--device", "cuda"]) == 2
    assert "--device cuda: no GPU is visible" in capsys.readouterr().err


def measure_here(per_node: int) -> Figures:
    """On a rank of the pool."""
    told = []
    result = figures(torch.device("cpu"), per_node, TINY, told.append)
    assert told[-1] == "copies to the host, all at once"
    return result


def test_processes_measure_what_they_send_each_other(pool):
    found = pool.run(measure_here, 4, 2)[0]
    assert set(found.node) == set(KINDS) and found.processes == found.nodes == 2
    assert all(seconds > 0 and bandwidth > 0 for seconds, bandwidth in [*found.node.values(), *found.network.values()])
    assert set(found.network) == set(KINDS) and found.alone > 0
    alone = pool.run(measure_here, 1, 1)[0]
    assert alone.node == alone.network == {} and alone.host[0] > 0


def test_links_become_a_link_and_shares_of_it():
    node = {"all_gather": (9e-6, 8e9), "all_to_all": (9e-6, 5e9), "p2p": (5e-6, 10e9)}
    link, collective = hardware_figures.node_link(Figures(node, {}, (1e9, 0.0), 4, 1), {})
    assert (link["bandwidth"], link["latency"]) == (10e9, pytest.approx(2e-6))
    assert {kind: one["bandwidth"] for kind, one in link["kinds"].items()} == {k: rate for k, (_, rate) in node.items()}
    assert link["kinds"]["all_gather"]["latency"] == pytest.approx(3e-6) == link["kinds"]["p2p"]["latency"] - 2e-6
    assert collective == pytest.approx(3e-6)


@pytest.mark.parametrize("alone, sharing", [(10e6, 1), (13e6, 1), (19e6, 2), (33e6, 4), (90e6, 4)])
def test_processes_that_share_a_card_are_recognised(alone, sharing):
    """One process alone has as much as all that share its card have together."""
    network = {"p2p": (1e-3, 10e6), "all_reduce": (4e-3, 8e6)}
    link = hardware_figures.network_link(Figures({}, network, (1e9, 0.0), 4, 3, alone))
    assert link.get("gpus_per_card", 1) == sharing and link["bandwidth"] == 10e6
    assert link["kinds"]["all_reduce"] == {"bandwidth": 8e6, "latency": 2e-3}
    assert hardware_figures.network_link(Figures({}, {}, (1e9, 0.0), 4, 1)) is None


class Gpu:
    """Stands for torch.cuda: what others take grows with the first product and with each communicator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others, self.allocated = 400, 0
        for name, answer in {
            "synchronize": lambda device: None,
            "mem_get_info": lambda device: (80_000 - self.others - self.reserved, 80_000),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.allocated,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch, "mm", self.product)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
        monkeypatch.setattr(torch.distributed, "all_reduce", self.reduce)
        monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", lambda *_, group: None)

    @property
    def reserved(self) -> int:
        return 2 * self.allocated

    def product(self, *_: torch.Tensor, out: torch.Tensor) -> None:
        self.others, self.allocated = 500, 32

    def reduce(self, x: torch.Tensor, group: object) -> None:
        self.others, self.allocated = self.others + 128, self.allocated + 1


def test_a_gpu_is_asked_what_no_tensor_holds(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """By stand-ins for torch.cuda: nobody has tried it on a GPU."""
    device, _ = torch.device("cpu"), Gpu(monkeypatch)
    found = measure_device.context_and_workspace(device)
    assert found == {"context": 500, "cublas": 32}
    assert measure_device.communicator(None, device) == 128
    links = Figures({}, {}, (1.0, 0.0), 4, 1, buffers={"nccl": 128})
    raw = hardware_figures.named({"sources": {}} | hardware_figures.runtime_fields(found, links), "x.json", device)
    assert raw["runtime"] == {"context": 500, "cublas": 32, "nccl": 128}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"extends": "H100-80G", **raw}))
    machine = load(path)
    shape = "--model llama3-8b --seq-length 1024 --micro-batch-size 1 --global-batch-size 1 --mock-data --train-iters 1"
    own = runtime_memory(parse([*shape.split(), "--lr", "1e-3", "--ulysses-parallel-size", "4"], {}, 4), 4, machine)
    assert (own.context, own.cublas, own.nccl) == (500, 32, 128 * own.communicators)
    assert own.outside_allocator == own.context + own.nccl and own.source.startswith("measured on")
    assert hardware_figures.runtime_fields({}, Figures({}, {}, (1.0, 0.0), 1, 1)) == {}


@pytest.mark.full
def test_processes_of_its_own_are_started_and_ended():
    told: list[str] = []
    found = measure_in_processes(2, "cpu", TINY, 200, told.append)
    assert set(found.node) == set(KINDS) and len(told) == len(KINDS) + 1
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("Spawn")]


@pytest.mark.parametrize(
    "said, code, told",
    [
        ([], None, "--processes 2: not done after 1 s; give --timeout more, or give --processes 1"),
        ([], 9, "--processes 2: one ended with code 9; give --processes 1 to leave the links out"),
        (["p2p", RuntimeError("no route")], None, "--processes 2: no route; give --processes 1"),
    ],
)
def test_processes_that_fail_or_hang_are_told(said, code, told):
    messages: queue.Queue = queue.Queue()
    for message in said:
        messages.put(message)
    with pytest.raises(Refusal, match=told):
        listen([SimpleNamespace(exitcode=code), SimpleNamespace(exitcode=None)], messages, 0.6, lambda text: None)


def test_the_file_is_plain_json(tmp_path):
    path = tmp_path / "here.json"
    assert measure_hardware.main(["--output", str(path), "--processes", "1", *FAST]) == 0
    raw = json.loads(path.read_text())
    assert raw["host_memory"] > raw["reserved"] and path.read_text().endswith("}\n")
