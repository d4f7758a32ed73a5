# SPDX-License-Identifier: Apache-2.0
"""tools/measure_hardware.py writes a valid machine file; impossible measurements and outputs are refused early."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import queue
import runpy
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.platform import collectives
from megatron.simulator.dry_run.allocation.reserved import runtime_memory
from megatron.simulator.machines import measure_device
from megatron.simulator.machines.machine import KINDS, Calibration, Link, Machine, Rate
from megatron.simulator.machines.machine_file import MACHINES, known, load, read_merged
from megatron.simulator.machines.measure_device import Effort
from megatron.simulator.machines.measure_links import Figures, figures, line, listen, measure_in_processes
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from tools import hardware_figures, measure_hardware

TINY = Effort(0.01, (16, 32), (16, 32), 2, 2**16, 2**16)
FAST = ["--device", "cpu", "--quick", "--gemm-sizes", "16", "32", "--attention-lengths", "16", "32"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use windows of a hundredth of a second, and restore PyTorch's number of threads."""
    monkeypatch.setattr(measure_device, "effort", lambda device, quick: TINY)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_measured_file_is_a_machine(tmp_path, capsys):
    path = tmp_path / "new" / "here.json"
    assert measure_hardware.main(["--output", str(path), "--processes", "1", *FAST]) == 0
    machine = load(path)
    assert machine.host_memory > machine.reserved and path.read_text().endswith("}\n")
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
def test_an_output_that_cannot_be_written_is_refused_before_measuring(tmp_path, capsys, monkeypatch, full):
    monkeypatch.setattr(hardware_figures, "measured", never)
    (tmp_path / "file").write_text("")
    path = tmp_path / ("here.json" if full else "file/here.json")
    if full:

        def no_space(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", no_space)
    assert measure_hardware.main(["--output", str(path), *FAST]) == 2
    notice = capsys.readouterr().err
    assert notice.startswith("error: cannot write") if full else "cannot be listed and written to" in notice
    assert ("the disk is full" in notice) == full and notice.count("\n") == 1
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "flags, notice",
    [
        (["--processes", "0"], "--processes 0: give a number above 0"),
        (["--gemm-sizes", "4", "2"], "--gemm-sizes: give sizes above 0 in increasing order"),
    ],
)
def test_bad_settings_are_refused(tmp_path, capsys, flags, notice):
    with pytest.raises(SystemExit, match="2"):
        measure_hardware.main(["--output", str(tmp_path / "x.json"), *flags])
    assert notice in capsys.readouterr().err


def test_block_sizes_are_measured_on_a_gpu_only(tmp_path, capsys):
    assert measure_hardware.main(["--output", str(tmp_path / "x.json"), "--attention", *FAST]) == 2
    assert "--attention: measures kernels of Triton, which need a GPU" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused(tmp_path, capsys):
    assert measure_hardware.main(["--output", str(tmp_path / "x.json"), "--device", "cuda"]) == 2
    assert "--device cuda: no GPU is visible" in capsys.readouterr().err


def measure_here(per_node: int) -> Figures:
    """Measure the links on a rank of the pool."""
    notice = []
    result = figures(torch.device("cpu"), per_node, TINY, notice.append)
    assert notice[-1] == "copies to the host, all at once"
    return result


def test_processes_measure_the_links_between_them(pool):
    results = pool.run(measure_here, 4, 2)[0]
    assert set(results.node) == set(KINDS) and results.processes == results.nodes == 2
    for seconds, bandwidth in [*results.node.values(), *results.network.values()]:
        assert seconds >= 0 and bandwidth > 0  # a busy machine may have measured no latency
    assert set(results.network) == set(KINDS) and results.alone > 0
    alone = pool.run(measure_here, 1, 1)[0]
    assert alone.node == alone.network == {} and alone.host[0] > 0


@pytest.mark.parametrize(
    "few, small, sent, took, expected",
    [
        (1e3, 3e-6, 1e6, 1002e-6, (2e-6, 1e9)),
        (1e3, 1e-6, 1e6, 2000e-6, (0.0, 0.999e6 / 1999e-6)),  # more than its share of bytes
        (1e3, 9e-6, 1e6, 5e-6, (9e-6 - 1e3 * 0.5e-6 / 0.999e6, 0.999e6 / 0.5e-6)),  # faster than the small message
        (1e3, 3e-6, 1e3, 4e-6, (3e-6, 2.5e8)),
    ],
)
def test_two_messages_give_latency_and_bandwidth(few, small, sent, took, expected):
    assert line(few, small, sent, took) == pytest.approx(expected, rel=1e-9)


def test_measured_collectives_become_a_link_with_kinds():
    node = {"all_gather": (9e-6, 8e9), "all_to_all": (9e-6, 5e9), "p2p": (5e-6, 10e9)}
    link, collective = hardware_figures.node_link(Figures(node, {}, (1e9, 0.0), 4, 1), {})
    assert (link["bandwidth"], link["latency"]) == (10e9, pytest.approx(2e-6))
    assert {kind: one["bandwidth"] for kind, one in link["kinds"].items()} == {k: rate for k, (_, rate) in node.items()}
    assert link["kinds"]["all_gather"]["latency"] == pytest.approx(3e-6) == link["kinds"]["p2p"]["latency"] - 2e-6
    assert collective == pytest.approx(3e-6)


@pytest.mark.parametrize("alone, sharing", [(10e6, 1), (13e6, 1), (19e6, 2), (33e6, 4), (90e6, 4)])
def test_processes_that_share_a_card_are_recognised(alone, sharing):
    """A process that sends alone has the bandwidth of all processes that share its card."""
    network = {"p2p": (1e-3, 10e6), "all_reduce": (4e-3, 8e6)}
    link = hardware_figures.network_link(Figures({}, network, (1e9, 0.0), 4, 3, alone))
    assert link.get("gpus_per_card", 1) == sharing and link["bandwidth"] == 10e6
    assert link["kinds"]["all_reduce"] == {"bandwidth": 8e6, "latency": 2e-3}
    assert hardware_figures.network_link(Figures({}, {}, (1e9, 0.0), 4, 1)) is None


class Gpu:
    """A stand-in for torch.cuda: memory outside PyTorch grows with the first product and each communicator."""

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
        monkeypatch.setattr(torch.distributed, collectives.ALL_GATHER, lambda *_, group: None)

    @property
    def reserved(self) -> int:
        return 2 * self.allocated

    def product(self, *_: torch.Tensor, out: torch.Tensor) -> None:
        self.others, self.allocated = 500, 32

    def reduce(self, x: torch.Tensor, group: object) -> None:
        self.others, self.allocated = self.others + 128, self.allocated + 1


def test_memory_of_a_gpu_outside_of_tensors_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """This test uses stand-ins for torch.cuda; the measurement itself has not run on a GPU."""
    device, _ = torch.device("cpu"), Gpu(monkeypatch)
    results = measure_device.context_and_workspace(device)
    assert results == {"context": 500, "cublas": 32}
    assert measure_device.communicator(None, device) == 128
    links = Figures({}, {}, (1.0, 0.0), 4, 1, buffers={"nccl": 128})
    raw = hardware_figures.named({"sources": {}} | hardware_figures.runtime_fields(results, links), "x.json", device)
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
def test_the_tools_processes_are_started_and_ended():
    notice: list[str] = []
    results = measure_in_processes(2, "cpu", TINY, 200, notice.append)
    assert set(results.node) == set(KINDS) and len(notice) == len(KINDS) + 1
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("Spawn")]


@pytest.mark.parametrize(
    "output, code, notice",
    [
        ([], None, "--processes 2: not done after 1 s; give --timeout more, or give --processes 1"),
        ([], 9, "--processes 2: one ended with code 9; give --processes 1 to leave the links out"),
        (["p2p", RuntimeError("no route")], None, "--processes 2: no route; give --processes 1"),
    ],
)
def test_processes_that_fail_or_hang_are_reported(output, code, notice):
    messages: queue.Queue = queue.Queue()
    for message in output:
        messages.put(message)
    with pytest.raises(Refusal, match=notice):
        listen([SimpleNamespace(exitcode=code), SimpleNamespace(exitcode=None)], messages, 0.6, lambda text: None)


# Machine files: shipped ones are complete and have sources; a user's file is read, or refused with the field's name.


ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, file: str = "mine.json", /, **raw: object) -> Path:
    path = folder / file
    path.write_text(json.dumps(raw))
    return path


def test_a_rate_is_interpolated_between_logarithms_and_falls_to_a_constant_time():
    rate = Rate(((10.0, 100.0), (1000.0, 400.0)), power=2.0)
    assert [rate(size) for size in (10, 100, 1000, 5000)] == pytest.approx([100, 200, 400, 400])
    assert rate(5) == pytest.approx(25)  # a quarter of the FLOPs in the same time
    assert Rate(((8.0, 3.0),))(1e9) == 3


@pytest.mark.parametrize("name", known())
def test_shipped_machines_are_complete_and_every_figure_has_a_source(name):
    machine = load(name)
    assert machine.name == name and load(name.lower()) == machine and len({machine, load(name)}) == 1
    assert 0 < machine.reserved < machine.memory
    for rates in (machine.gemm, machine.attention, machine.attention_backward):
        assert all(rate <= machine.peak["bf16"] for _, rate in rates.points)
    sources = set(machine.sources)
    for field in fields(Machine):
        value = getattr(machine, field.name)
        if field.name in ("name", "sources", "dtype", "capability", "attention_kernel") or value == {}:
            continue
        parts = [part.name for part in fields(value)] if isinstance(value, Link | Calibration) else []
        same = {p for p in parts if p == "name" or isinstance(value, Calibration) and getattr(value, p) == 1.0}
        same |= {p for p in ("kinds", "gpus_per_card") if isinstance(value, Link) and getattr(value, p) in ({}, 1)}
        missing = [part for part in parts if part not in same and f"{field.name}.{part}" not in sources]
        assert field.name in sources or (parts and not missing), f"{name}: no source for {field.name} {missing}"


def test_attention_is_priced_by_the_kernel_that_runs():
    """The default is PyTorch's first kernel for the GPU; a machine file can name another."""
    from megatron.simulator.cost.operations import tile
    from megatron.simulator.cost.seconds import kernel_seconds

    def share(machine):
        return machine.kernels.get(machine.plain_kernel(), 1.0)

    assert all(share(load(name)) == 1 for name in ("A100-80G", "B200-192G", "L20-48G"))
    hopper = load("H100-80G")
    assert share(hopper) == hopper.kernels["cudnn"] == share(load("H200-141G")) < 1
    flash = replace(hopper, attention_kernel="flash")
    assert share(flash) == hopper.kernels["flash"]
    one = tile(32768, 32768, 32, 128, 32768**2 / 2)
    ratio = kernel_seconds(one, flash) / kernel_seconds(one, hopper)
    assert ratio == pytest.approx(hopper.kernels["cudnn"] / hopper.kernels["flash"])
    assert share(replace(hopper, attention_kernel="cpu")) == 1  # the file has no figure for it


# Seconds of attention on one H200, forward and both passes, 32 heads of 128 (docs/inside/performance.md), and the
# error that is left where a rate lies between measured lengths.
MEASURED = [
    ("cudnn", 32768, 1.0, 13.52e-3, 54.87e-3, 0.01),
    ("cudnn", 65536, 1.0, 57.77e-3, 219.9e-3, 0.05),
    ("flash", 131072, 1.0, 438.9e-3, 1512e-3, 0.01),
    ("triton", 8192, 1.0, 1.319e-3, 6.479e-3, 0.01),
    ("triton", 32768, 0.0615, 2.44e-3, 9.83e-3, 0.02),  # a window of 1,024 keys
    ("triton", 32768, 0.2344, 5.19e-3, 22.73e-3, 0.02),  # of 4,096
    ("triton", 32768, 0.0365, 1.64e-3, 6.99e-3, 0.02),  # 64 documents
]


@pytest.mark.parametrize("kernel, length, pairs, forward, both, error", MEASURED)
def test_what_one_h200_took_is_what_its_file_says(kernel, length, pairs, forward, both, error):
    from megatron.simulator.cost.operations import tile
    from megatron.simulator.cost.seconds import attention_named, kernel_seconds

    machine = load("H200-141G")
    work = (length, length, 32, 128, pairs * length * length / 2)
    passes = [tile(*work, backward=way, name=attention_named(kernel)) for way in (False, True)]
    seconds = [kernel_seconds(one, machine) for one in passes]
    assert seconds[0] == pytest.approx(forward, rel=error)
    assert sum(seconds) == pytest.approx(both, rel=error)


def test_common_machines_are_known_and_ship_with_the_package(monkeypatch):
    assert {"A100-40G", "A100-80G", "A800-80G", "H100-80G", "H200-141G", "B200-192G", "L20-48G"} <= set(known())

    setup_options = {}
    monkeypatch.setattr("setuptools.setup", lambda **options: setup_options.update(options))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    patterns = setup_options["package_data"]["megatron.simulator.machines"]
    shipped = {path for pattern in patterns for path in (ROOT / "megatron" / "simulator" / "machines").glob(pattern)}
    assert "megatron.simulator.machines" in setup_options["packages"] and shipped == set(MACHINES.glob("*.json"))


def test_peaks_equal_those_that_training_uses_for_mfu():
    from megatron.training.report.mfu import GPU_PEAKS

    for name in known():
        word = name.split("-")[0]
        assert load(name).peak["bf16"] == pytest.approx(1e12 * GPU_PEAKS[word])


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(Refusal, match="--gpu A100-81G: unknown; the nearest is A100-80G; use .*A100-80G.*H100-80G"):
        load("A100-81G")
    with pytest.raises(Refusal, match="--gpu H100 PCIe: unknown; the nearest is H100-80G"):
        load("H100 PCIe")
    with pytest.raises(Refusal, match="^--gpu a100: one of several: use A100-40G or A100-80G$"):
        load("a100")
    assert load("b200") == load("B200-192G")
    assert {load(name).name for name in ("h100", "NVIDIA H100 80GB HBM3", "H100-SXM5-80GB")} == {"H100-80G"}
    with pytest.raises(Refusal, match="cannot be read: No such file"):
        load("no/such/machine.json")


def test_a_file_can_extend_another_and_drops_the_sources_of_replaced_figures(tmp_path):
    network = {"bandwidth": 6.25e9, "latency": 5e-6}
    path = write(tmp_path, extends="A100-80G", gpus=4, network=network, calibration={"gemm": 0.9})
    machine, base = load(path), load("A100-80G")
    assert machine.name == "mine" and machine.gpus == 4 and machine.network.bandwidth == 6.25e9
    assert machine.network.name == base.network.name  # objects are merged
    assert machine.calibration.gemm == 0.9 and machine.calibration.link == base.calibration.link
    assert machine.gemm == base.gemm and machine.memory == base.memory
    assert "gpus" not in machine.sources and "network.bandwidth" not in machine.sources
    assert machine.sources["memory"] == base.sources["memory"]
    twice = write(tmp_path, "twice.json", extends="mine.json", gpus=2)  # a file in the same folder
    assert load(str(twice)).gpus == 2 and load(twice).calibration.gemm == 0.9


@pytest.mark.parametrize("name, message", [("V100", "extends: V100: unknown; use A100"), ("v.json", "No such")])
def test_extends_never_reads_from_the_working_directory(tmp_path, monkeypatch, name, message):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    write(elsewhere, name, **whole_file())
    with pytest.raises(Refusal, match=message):
        load(write(tmp_path, extends=name))


def whole_file() -> dict:
    return read_merged(MACHINES / "A100-80G.json")


def test_a_whole_file_needs_no_base(tmp_path):
    assert load(write(tmp_path, **(whole_file() | {"name": "B"}))).memory == load("A100-80G").memory


@pytest.mark.parametrize(
    "change, notice",
    [
        ({"memory": "80 GB"}, "memory: must be a number above 0, not '80 GB'"),
        ({"memory": True}, "memory: must be a number above 0"),
        ({"memory": float("inf")}, "memory: must be a number above 0"),
        ({"reserved": -1}, "reserved: must be a number of 0 or more"),
        ({"gpus": 2.5}, "gpus: must be a whole number"),
        ({"memry": 1}, "memry: no such field; do you mean memory?"),
        ({"zzz": 1}, "zzz: no such field; fields are name, memory"),
        ({"link": 3}, "link: must be an object with bandwidth, latency, name"),
        ({"link": {"bandwidth": 1}}, "link.latency: missing"),
        ({"link": {"bandwidth": 0, "latency": 0}}, "link.bandwidth: must be a number above 0, not 0"),
        ({"link": {"bandwidth": 1, "latency": 0, "lanes": 4}}, "link.lanes: no such field"),
        ({"link": {"bandwidth": 1, "latency": 0, "gpus_per_card": 2}}, "link.gpus_per_card: no such field"),
        ({"network": {"bandwidth": 1, "latency": 0, "gpus_per_card": 3}}, "network.gpus_per_card: 3 does not divide"),
        ({"network": {"bandwidth": 1, "latency": 0, "gpus_per_card": 0}}, "network.gpus_per_card: must be a number"),
        ({"network": {"bandwidth": 1, "latency": 0, "kinds": 1}}, "network.kinds: must be an object with all_gather"),
        ({"link": {"bandwidth": 1, "latency": 0, "kinds": {"allreduce": {}}}}, "link.kinds.allreduce: no such field"),
        ({"host_link": {"bandwidth": 1, "latency": 0, "kinds": {}}}, "host_link.kinds: no such field"),
        ({"link": {"bandwidth": 1, "latency": 0, "kinds": {"p2p": {"latency": 1}}}}, "link.kinds.p2p.bandwidth:"),
        ({"gemm": []}, "gemm: must be a list of"),
        ({"gemm": [[1, 2, 3]]}, "gemm: must be a list of"),
        ({"gemm": [[2, 1], [1, 2]]}, "gemm: sizes must rise, these are 2, 1"),
        ({"peak": {"bf16": 1}}, "peak.fp32: missing"),
        ({"calibration": {"gemm": 0}}, "calibration.gemm: must be a number above 0"),
        ({"calibration": {"link": 70}}, "calibration.link: is a share"),
        ({"sources": "NVIDIA"}, "sources: must be an object"),
        ({"sources": {"memory": 3}}, "sources.memory: must be text"),
        ({"capability": 9}, "capability: must be [major, minor]"),
        ({"kernels": 1}, "kernels: must be an object"),
        ({"kernels": {"flash_atn": 1}}, "kernels.flash_atn: no such field; do you mean flash_attn?"),
        ({"kernels": {"flash": 3}}, "kernels.flash: is a share"),
        ({"attention_kernel": "fa3"}, "attention_kernel: must be auto, flash_attn"),
        ({"attention_blocks": [1]}, "attention_blocks: must be an object with forward, queries, keys"),
        ({"attention_blocks": {"dq": {}}}, "attention_blocks: may only have forward, queries, keys"),
        ({"attention_blocks": {"keys": {"96": {}}}}, "attention_blocks.keys: may only have 16, 32"),
        ({"attention_blocks": {"keys": {"64": {"block": 64}}}}, "attention_blocks.keys.64.step: missing"),
        ({"attention_blocks": {"keys": {"64": {"block": 48}}}},
         "attention_blocks.keys.64.block: must be one of 16, 32"),
        ({"attention_blocks": {"keys": {"64": {"warps": True}}}},
         "attention_blocks.keys.64.warps: must be one of 1, 2, 4, 8, 16"),
        ({"attention_blocks": {"keys": {"64": {"one_loop": 1}}}},
         "attention_blocks.keys.64.one_loop: must be one of false, true"),
        ({"attention_blocks": {"keys": {"64": {"registers": 300}}}}, "attention_blocks.keys.64.registers: must be"),
        ({"dtype": "int8"}, "dtype: must be bf16 or fp32"),
        ({"name": 3}, "name: must be text"),
        ({"extends": 3}, "extends: give a known machine's name, or that of a file in the same folder, not 3"),
        ({"extends": "/etc/passwd"}, "extends: give a known machine's name, or that of a file in the same folder"),
        ({"extends": "../mine.json"}, "extends: give a known machine's name, or that of a file in the same folder"),
        ({"extends": "V100"}, "extends: V100: unknown; use A100-40G"),
        ({"extends": "bad.json"}, "extends: a file cannot build on itself"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_by_file_and_field(tmp_path, change, notice):
    path = write(tmp_path, "bad.json", **(whole_file() | change))
    with pytest.raises(Refusal) as refusal:
        load(path)
    assert str(refusal.value).startswith(f"{path}: {notice}") and "\n" not in str(refusal.value)


@pytest.mark.parametrize("content, notice", [("{", "not JSON"), ("[]", "holds list"), ("[" * 100000, "not JSON")])
def test_a_file_that_is_no_machine_is_refused(tmp_path, content, notice):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(Refusal, match=f"bad.json: {notice}"):
        load(path)


def test_a_missing_field_is_named(tmp_path):
    raw = whole_file()
    del raw["host_link"]
    with pytest.raises(Refusal, match="host_link: missing; give it, or build on a known machine"):
        load(write(tmp_path, **raw))


def test_the_page_has_the_figures_of_the_files():
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs" / "use" / "machine-files.md").read_text().splitlines()]
    shown = {row[0].strip(): [float(cell) for cell in row[1:]] for row in rows if row and row[0].strip() in known()}
    assert sorted(shown) == known()
    for name, cells in shown.items():
        m = load(name)
        links = (m.link.bandwidth, m.host_link.bandwidth, m.network.bandwidth)
        expected = [m.memory / 1e9, m.peak["bf16"] / 1e12, m.memory_bandwidth / 1e9, *(b / 1e9 for b in links)]
        assert cells == pytest.approx(expected, abs=0.051), name
