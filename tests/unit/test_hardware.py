# SPDX-License-Identifier: Apache-2.0
"""Machines as files: what is shipped is whole and has sources; what a user writes is read, or refused by field."""

from __future__ import annotations

import json
import runpy
from dataclasses import fields, replace
from pathlib import Path

import pytest

from megatron.simulator.machines.machine import Calibration, Link, Machine, Rate
from megatron.simulator.machines.machine_file import MACHINES, known, load, read_merged
from megatron.training.refusal import Refusal

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
def test_shipped_machines_are_whole_and_every_figure_has_a_source(name):
    machine = load(name)
    assert machine.name == name and load(name.lower()) == machine and len({machine, load(name)}) == 1
    assert 0 < machine.reserved < machine.memory
    for rates in (machine.gemm, machine.attention, machine.attention_backward):
        assert all(rate <= machine.peak["bf16"] for _, rate in rates.points)
    told = set(machine.sources)
    for field in fields(Machine):
        value = getattr(machine, field.name)
        if field.name in ("name", "sources", "dtype", "capability", "attention_kernel") or value == {}:
            continue
        parts = [part.name for part in fields(value)] if isinstance(value, Link | Calibration) else []
        same = {p for p in parts if p == "name" or isinstance(value, Calibration) and getattr(value, p) == 1.0}
        same |= {p for p in ("kinds", "gpus_per_card") if isinstance(value, Link) and getattr(value, p) in ({}, 1)}
        missing = [part for part in parts if part not in same and f"{field.name}.{part}" not in told]
        assert field.name in told or (parts and not missing), f"{name}: no source for {field.name} {missing}"


def test_attention_is_priced_by_the_kernel_that_runs():
    """Without a choice by the first that PyTorch brings for the GPU; a chosen one, and of a user's file, as it says."""
    from megatron.simulator.cost.operations import tile
    from megatron.simulator.cost.seconds import kernel_seconds

    assert all(load(name).attention_share() == 1 for name in ("A100-80G", "B200-192G", "L20-48G"))
    hopper = load("H100-80G")
    assert hopper.attention_share() == hopper.kernels["cudnn"] == load("H200-141G").attention_share() < 1
    flash = replace(hopper, attention_kernel="flash")
    assert flash.attention_share() == hopper.kernels["flash"]
    one = tile(32768, 32768, 32, 128, 32768**2 / 2)
    ratio = kernel_seconds(one, flash) / kernel_seconds(one, hopper)
    assert ratio == pytest.approx(hopper.kernels["cudnn"] / hopper.kernels["flash"])
    assert replace(hopper, attention_kernel="cpu").attention_share() == 1  # of which the file says nothing


def test_the_machines_of_the_issue_are_there_and_ship_with_the_package(monkeypatch):
    assert {"A100-40G", "A100-80G", "A800-80G", "H100-80G", "H200-141G", "B200-192G", "L20-48G"} <= set(known())
    told = {}
    monkeypatch.setattr("setuptools.setup", lambda **options: told.update(options))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    patterns = told["package_data"]["megatron.simulator.machines"]
    shipped = {path for pattern in patterns for path in (ROOT / "megatron" / "simulator" / "machines").glob(pattern)}
    assert "megatron.simulator.machines" in told["packages"] and shipped == set(MACHINES.glob("*.json"))


def test_peaks_are_those_that_training_logs_mfu_against():
    from megatron.training.report.mfu import GPU_PEAKS

    for name in known():
        word = name.split("-")[0]
        assert load(name).peak["bf16"] == pytest.approx(1e12 * GPU_PEAKS[word])


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(Refusal, match="--gpu A100-81G: unknown; known are .*A100-80G.*H100-80G"):
        load("A100-81G")
    with pytest.raises(Refusal, match="cannot be read: No such file"):
        load("no/such/machine.json")


def test_a_file_can_build_on_another_and_loses_the_sources_of_what_it_replaces(tmp_path):
    network = {"bandwidth": 6.25e9, "latency": 5e-6}
    path = write(tmp_path, extends="A100-80G", gpus=4, network=network, calibration={"gemm": 0.9})
    machine, base = load(path), load("A100-80G")
    assert machine.name == "mine" and machine.gpus == 4 and machine.network.bandwidth == 6.25e9
    assert machine.network.name == base.network.name  # objects are merged
    assert machine.calibration.gemm == 0.9 and machine.calibration.link == base.calibration.link
    assert machine.gemm == base.gemm and machine.memory == base.memory
    assert "gpus" not in machine.sources and "network.bandwidth" not in machine.sources
    assert machine.sources["memory"] == base.sources["memory"]
    twice = write(tmp_path, "twice.json", extends="mine.json", gpus=2)  # beside the file, from any folder
    assert load(str(twice)).gpus == 2 and load(twice).calibration.gemm == 0.9


@pytest.mark.parametrize("name, message", [("V100", "extends: V100: unknown; known are A100"), ("v.json", "No such")])
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
    "change, told",
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
        (
            {"network": {"bandwidth": 1, "latency": 0, "gpus_per_card": 3}},
            "network.gpus_per_card: 3 does not divide",
        ),
        (
            {"network": {"bandwidth": 1, "latency": 0, "gpus_per_card": 0}},
            "network.gpus_per_card: must be a number",
        ),
        ({"network": {"bandwidth": 1, "latency": 0, "kinds": 1}}, "network.kinds: must be an object with all_gather"),
        (
            {"link": {"bandwidth": 1, "latency": 0, "kinds": {"allreduce": {}}}},
            "link.kinds.allreduce: no such field",
        ),
        (
            {"link": {"bandwidth": 1, "latency": 0, "kinds": {"p2p": {"latency": 1}}}},
            "link.kinds.p2p.bandwidth:",
        ),
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
        ({"dtype": "int8"}, "dtype: must be bf16 or fp32"),
        ({"name": 3}, "name: must be text"),
        ({"extends": 3}, "extends: give a known machine's name, or that of a file in the same folder, not 3"),
        ({"extends": "/etc/passwd"}, "extends: give a known machine's name, or that of a file in the same folder"),
        ({"extends": "../mine.json"}, "extends: give a known machine's name, or that of a file in the same folder"),
        ({"extends": "V100"}, "extends: V100: unknown; known are A100-40G"),
        ({"extends": "bad.json"}, "extends: a file cannot build on itself"),
    ],
)
def test_bad_files_are_refused_by_file_and_field(tmp_path, change, told):
    path = write(tmp_path, "bad.json", **(whole_file() | change))
    with pytest.raises(Refusal) as refusal:
        load(path)
    assert str(refusal.value).startswith(f"{path}: {told}") and "\n" not in str(refusal.value)


@pytest.mark.parametrize("content, told", [("{", "not JSON"), ("[]", "holds list"), ("[" * 100000, "not JSON")])
def test_what_is_no_machine_is_refused(tmp_path, content, told):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(Refusal, match=f"bad.json: {told}"):
        load(path)


def test_a_missing_field_is_named(tmp_path):
    raw = whole_file()
    del raw["host_link"]
    with pytest.raises(Refusal, match="host_link: missing; give it, or build on a known machine"):
        load(write(tmp_path, **raw))


def test_the_page_shows_what_the_files_hold():
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs" / "use" / "machine-files.md").read_text().splitlines()]
    shown = {row[0].strip(): [float(cell) for cell in row[1:]] for row in rows if row and row[0].strip() in known()}
    assert sorted(shown) == known()
    for name, cells in shown.items():
        m = load(name)
        links = (m.link.bandwidth, m.host_link.bandwidth, m.network.bandwidth)
        held = [m.memory / 1e9, m.peak["bf16"] / 1e12, m.memory_bandwidth / 1e9, *(b / 1e9 for b in links)]
        assert cells == pytest.approx(held, abs=0.051), name
