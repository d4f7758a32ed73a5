# SPDX-License-Identifier: Apache-2.0
"""Bytes by kind: exact for programs whose tensors are known, on devices and in host buffers."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.formulas.parameters import stage_parameters
from megatron.simulator.planner.memory_table import shape_of_size, size
from megatron.training.refusal import Refusal
from megatron.training.report.memory_picture import COLUMNS, KINDS, draw, peak_of, read, series
from megatron.training.report.memory_profile import MemoryProfile, check_profile
from megatron.training.report.tensor_memory import PeakBytes, TensorMeter
from megatron.training.settings.config import Config
from tests.properties import examples
from tests.unit.test_refusals import GOOD, MOCK, pretrain, refused
from tools import plot_memory
from tools.memory import main


def host_buffer(numbers: int) -> torch.Tensor:
    """A host buffer as the offload engine makes it."""
    buffer = torch.empty(numbers)
    buffer.untyped_storage().is_host_buffer = True
    return buffer


def profiled(program: Callable) -> tuple[dict, TensorMeter]:
    """(profile, meter) of ``program(profile, layer, adam)``; the layer has 20 parameters, and Adam has its states."""
    layer = torch.nn.Linear(4, 4)
    adam = torch.optim.Adam(layer.parameters(), foreach=False)
    layer(torch.ones(2, 4)).sum().backward()
    adam.step()
    adam.zero_grad(set_to_none=False)
    gc.collect()
    with TensorMeter(record=True) as meter:
        profile = MemoryProfile(meter, [layer], SimpleNamespace(optimizer=adam))
        before = meter.now
        program(profile, layer, adam)
        result = profile.finish()
    assert sum(result["start"].values()) == before
    return result, meter


def changes(result: dict) -> list[tuple[str, int]]:
    return [(result["kinds"][kind], change) for _, kind, change in result["events"]]


def test_every_tensor_of_a_known_program_has_its_kind():
    def program(profile, layer, adam):
        profile.mark("forward")
        kept, freed = torch.empty(1000), torch.empty(500)
        view = kept[10:]
        del freed, kept
        profile.mark("backward")
        scratch = torch.empty(700)
        del view
        buffer = host_buffer(300)
        profile.mark("optimizer")
        del scratch, buffer

    result, _ = profiled(program)
    assert changes(result) == [
        ("activations", 4000),
        ("temporary", 2000),
        ("temporary", -2000),
        ("temporary", 2800),
        ("activations", -4000),
        ("host", 1200),
        ("temporary", -2800),
        ("host", -1200),
    ]
    steps = 2 * 4  # Adam's two counters
    assert result["start"] | {"temporary": 0} == {
        **dict.fromkeys(KINDS, 0),
        "parameters": 80,
        "gradients": 80,
        "optimizer": 160 + steps,
    }
    assert [name for name, _ in result["phases"]] == ["forward", "backward", "optimizer"]
    others = result["start"]["temporary"]
    most, kinds = peak_of(result)
    assert most == 80 + 80 + 168 + others + 4000 + 2800 and kinds["activations"] == 4000


def test_activations_of_several_micro_batches():
    """Two forward passes before two backward passes, as in a pipeline: each activation lives until its backward."""

    def program(profile, layer, adam):
        profile.mark("forward")
        first = torch.empty(10)
        profile.mark("forward")
        second, gone = torch.empty(20), torch.empty(30)
        del gone
        profile.mark("backward")
        del first
        again = torch.empty(40)  # as recompute does
        profile.mark("backward")
        del second, again
        profile.mark("forward")
        late = torch.empty(50)  # a forward without a backward after it
        profile.mark("optimizer")
        del late

    result, _ = profiled(program)
    made = [(kind, change) for kind, change in changes(result) if change > 0]
    forward = [("activations", 40), ("activations", 80), ("temporary", 120)]
    assert made == [*forward, ("temporary", 160), ("temporary", 200)]
    assert [name for name, _ in result["phases"]] == ["forward", "forward", "backward", "forward", "optimizer"]


def test_gradients_and_states_made_in_the_step_are_known_too():
    def program(profile, layer, adam):
        adam.zero_grad()  # to None
        adam.state.clear()
        profile.mark("forward")
        loss = layer(torch.ones(2, 4)).sum()
        profile.mark("backward")
        loss.backward()
        profile.mark("optimizer")
        adam.step()
        del loss

    result, meter = profiled(program)
    seconds, sizes = series(result)
    assert dict(zip(KINDS, sizes[-1])) == result["start"]
    assert sizes[:, KINDS.index("gradients")].min() == 0 and sizes[:, KINDS.index("optimizer")].min() == 0
    assert (seconds[1:] >= seconds[:-1]).all() and sizes.min() >= 0
    assert sizes[:, :-1].sum(axis=1).max() == meter.peak


@examples(12)
@given(
    st.lists(st.tuples(st.sampled_from(["device", "host", "free", "view", "forward", "backward"]), st.integers(1, 50)))
)
def test_the_kinds_add_up_to_the_actual_bytes_at_every_moment(actions):
    actual = []

    def program(profile, layer, adam):
        held: list[torch.Tensor] = []
        events, first = profile.meter.history.events, profile.meter.now
        for action, number in actions:
            if action in ("forward", "backward"):
                profile.mark(action)
            elif action == "free" and held:
                held.pop(number % len(held))
            elif action == "view" and held:
                held.append(held[number % len(held)][:1])
            elif action in ("device", "host"):
                held.append(torch.empty(number) if action == "device" else host_buffer(number))
            sizes = {t.untyped_storage()._cdata: t.untyped_storage() for t in held}.values()
            host = sum(s.nbytes() for s in sizes if hasattr(s, "is_host_buffer"))
            device = sum(s.nbytes() for s in sizes) - host
            actual.append((len(events) - profile.first_event, first + device, host))
            assert (profile.meter.now, profile.meter.host_now) == (first + device, host)

    result, meter = profiled(program)
    _, sizes = series(result)
    for index, device, host in actual:
        assert (sizes[index, :-1].sum(), sizes[index, -1]) == (device, host)
    if actual:
        assert meter.peak == max(sizes[0].sum(), *(device for _, device, _ in actual))
        assert meter.host_peak == max(host for _, _, host in actual)


def test_a_host_buffer_never_counts_on_the_device_not_even_before_it_is_marked():
    with TensorMeter() as meter:
        before = meter.now
        buffer = host_buffer(1000)
        part = buffer[5:]
        del buffer
        gc.collect()
        assert part.untyped_storage().is_host_buffer  # PyTorch keeps the storage's Python object
        part = torch.empty(1000)  # the old buffer is freed between the allocation and the mark
        part.untyped_storage().is_host_buffer = True
        assert (meter.now - before, meter.host_now, meter.peak - before) == (0, 4000, 0)
        assert meter.host_peak == 8000  # both existed for a moment
        other = torch.ones(10)
        assert (meter.now - before, meter.peak - before) == (40, 40)
        del part
        assert (meter.host_now, meter.host_peak) == (0, 8000) and other.sum() == 10


def test_on_another_device_ordinary_cpu_tensors_do_not_count():
    with TensorMeter("meta") as meter:  # in place of a GPU; its tensors have storages too
        before = meter.now
        ordinary, counted, marked = torch.ones(10), torch.ones(20, device="meta"), host_buffer(30)
        assert (meter.now - before, meter.host_now) == (80, 120)
        del counted
        assert (meter.now - before, meter.host_now, meter.peak - before) == (0, 120, 80)
        del ordinary, marked
        assert meter.host_now == 0 and meter.host_peak == 120


def test_peaks_of_recorded_steps(monkeypatch):
    peaks = PeakBytes(torch.device("cpu"))
    for number in (100, 200, 300):
        with peaks.step() as meter:
            buffer = host_buffer(number)
        assert (meter is None) == (number == 300) and peaks.host_bytes == 4 * min(number, 200)
        del buffer
    with peaks.step(record=True) as meter:
        buffer = host_buffer(400)
    assert meter.history is not None and peaks.host_bytes == 1600 and buffer.numel() == 400

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 77)
    peaks = PeakBytes(torch.device("cuda"), host_bytes=lambda: 55)
    with peaks.step() as meter:
        pass
    assert meter is None and (peaks.bytes, peaks.host_bytes) == (77, 55)


def write(path: Path, events: int = 60, host: int = 0) -> Path:
    start = dict.fromkeys(KINDS, 2**20) | {"host": host}
    rows = [(0.001 * n, n % 3 + 3 if host else n % 2 + 3, 2**18 * (-1 if n % 12 > 5 else 1)) for n in range(events)]
    phases = [(name, 0.001 * at) for name, at in (("forward", 0), ("backward", events // 2), ("optimizer", events - 3))]
    known = {"rank": 0, "iteration": 2, "kinds": KINDS, "seconds": 0.001 * events, "phases": phases}
    path.write_text(json.dumps({**known, "start": start, "events": rows}))
    return path


@pytest.mark.parametrize("by", ["time", "events"])
@pytest.mark.usual(1)
def test_pictures_of_several_files(tmp_path, capsys, by):
    from matplotlib.image import imread

    files = [write(tmp_path / "a.json"), write(tmp_path / "b.json", 15 * COLUMNS, host=2**22)]
    picture = tmp_path / "new" / "both.png"
    argv = ["--files", *map(str, files), "--titles", "whole", "chunked", "--by", by, "--output", str(picture)]
    assert plot_memory.main(argv) == 0
    assert "whole: at most 6.5 MiB" in capsys.readouterr().out
    assert imread(picture).shape[1] > 1000
    draw([read(files[0])], ["one"], tmp_path / "one.png", by)
    assert imread(tmp_path / "one.png").shape[1] == 880


def test_a_file_that_is_no_profile_is_refused(tmp_path, capsys):
    (tmp_path / "log.json").write_text('{"iteration": 1}')
    for argv in ([], ["log.json"], ["nothing.json"], [str(write(tmp_path / "a.json")), "--titles", "a", "b"]):
        assert plot_memory.main([str(tmp_path / word) if word.endswith("g.json") else word for word in argv]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_a_run_writes_a_timeline_and_a_picture(tmp_path):
    from matplotlib.image import imread

    folder, log = tmp_path / "profile", tmp_path / "log.jsonl"
    flags = f"--train-iters 3 --profile-memory {folder} --log-interval 1 --log-jsonl {log}"
    done = pretrain(f"{GOOD.replace('--train-iters 1', '')} {MOCK} {flags}")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["memory_rank0.json", "memory_rank0.png"]
    assert imread(folder / "memory_rank0.png").shape[1] == 880
    profile = read(folder / "memory_rank0.json")
    assert profile["iteration"] == 2 and "memory of step 2: at most" in done.stdout
    assert [name for name, _ in profile["phases"]] == ["forward", "backward", "optimizer"]
    parameters = int(done.stdout.split(" parameters on rank 0")[0].split()[-1].replace(",", ""))
    start = profile["start"]
    assert start["parameters"] == 4 * parameters and start["activations"] == start["host"] == 0
    assert start["gradients"] == 4 * parameters  # one bucket, nothing to pad
    assert 8 * parameters < start["optimizer"] < 8 * parameters + 400  # a step counter per parameter tensor
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert peak_of(profile)[0] <= rows[1]["device_peak_bytes"] and peak_of(profile)[1]["activations"] > 0
    assert [row["host_peak_bytes"] for row in rows] == [0, 0, 0]


def test_a_resumed_run_with_too_few_steps_left_says_so(tmp_path):
    config = Config()
    check_profile(config, 0)
    assert not config.notes  # the flag is not set
    config.logging.profile_memory, config.logging.profile_memory_step = str(tmp_path / "p"), 2
    with pytest.raises(Refusal, match="step 2 of the run, which has 1"):
        check_profile(config, 1)
    config.checkpoint.load = "somewhere"
    check_profile(config, 2)
    assert not config.notes
    check_profile(config, 1)
    assert "step 2 after this start is to be recorded, but the run ends after 1" in config.notes[0]


def test_an_impossible_profile_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    three = f"{GOOD.replace('--train-iters 1', '--train-iters 3')} {MOCK}"
    refused(f"{three} --profile-memory {tmp_path}/file", f"--profile-memory {tmp_path}/file", "written")
    refused(f"{three} --profile-memory /proc/nowhere", "--profile-memory /proc/nowhere", "written")
    refused(f"{GOOD} {MOCK} --profile-memory {tmp_path}/p", "--profile-memory", "step 2", "--profile-memory-step 1")
    refused(f"{three} --profile-memory-step 1", "--profile-memory-step", "without --profile-memory: add")
    refused(f"{three} --profile-memory {tmp_path}/p --profile-memory-step 0", "--profile-memory-step 0", "at least 1")
    refused(f"{three} --profile-memory {tmp_path}/p --skip-train", "--profile-memory", "--skip-train")


# tools/memory.py: the table, the files it writes, and what it refuses.


def test_table_rows_and_picture(tmp_path, capsys):
    rows, picture = tmp_path / "new" / "rows.json", tmp_path / "new" / "memory.png"
    words = "--model llama3-8b --seq-length 128K --gpus 8 --gpu A100-80G --papers".split()
    assert main([*words, "--json", str(rows), "--output", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "131,072 tokens" in out and "8.03B" in out and "Qwen2 7B" in out and "3.9 + 4.0" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = json.loads(rows.read_text())
    assert len(result) == 24 and {row["strategy"]["zero"] for row in result} == {0, 1, 2, 3}
    for row in result:
        kinds = ("parameters", "gradients", "optimizer", "activations", "temporary")
        assert row["total"] == sum(row[kind] for kind in kinds)
        assert row["fits"] == (row["total"] < 78 * 2**30)  # host memory is sufficient in all rows
    assert any(row["fits"] for row in result) and not all(row["fits"] for row in result)


def test_experts_and_latents_have_rows_of_what_the_program_accepts(tmp_path, capsys):
    path = tmp_path / "rows.json"

    def rows(*words: str) -> list[dict]:
        assert main([*"--seq-length 8K --gpus 32 --json".split(), str(path), *words]) == 0
        return [row | row["strategy"] for row in json.loads(path.read_text())]

    every, four = rows("--model", "qwen3-30b-a3b"), rows("--model", "qwen3-30b-a3b", "--expert", "4")
    assert "EP 32, 32 GPUs" in capsys.readouterr().out
    assert {row["zero"] for row in every} == {0, 1, 2, 3} and {row["fpdt_chunk"] for row in every} == {0}
    assert {row["expert"] for row in every} == {32} and {row["expert"] for row in four} == {4}
    held = [sum(row[kind] for kind in ("parameters", "gradients", "optimizer")) for row in (every[0], four[0])]
    assert 3 < held[1] / held[0] < 8  # experts are 95 % of the parameters, and the others are not split
    assert main("--model qwen3-30b-a3b --gpus 32 --expert 3".split()) == 2
    assert "--expert 3: use one of 1, 2, 4, 8, 16, 32" in capsys.readouterr().err
    assert main("--model llama3-8b --gpus 32 --expert 4".split()) == 2
    assert "the model has no experts" in capsys.readouterr().err


@pytest.mark.parametrize("billions", [0.5, 7, 70])
def test_a_llama_of_a_size(billions):
    shape = shape_of_size(round(billions * 1e9))
    assert stage_parameters(shape, 1, 1, 0).numel == pytest.approx(billions * 1e9, rel=0.12)


def test_sizes_with_units():
    assert size("--x", "128K") == 131072 and size("--x", "1m") == 2**20 and size("--x", "1.5K") == 1536
    assert size("--x", "7B", binary=False) == 7_000_000_000 and size("--x", "4096") == 4096
    for text in ("", "K", "x", "-1K", "0", "1e99", "nan"):
        with pytest.raises(Refusal, match="--x .*not a size"):
            size("--x", text)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--model llama4", "did you mean llama3"),
        ("--model llama3-8b --seq-length long", "--seq-length long"),
        ("--model llama3-8b --gpu T1000", "A100-80G"),
        ("--model llama3-8b --gpus 6 --tensor 4", "--gpus 6 is not a multiple"),
        ("--model llama3-8b --gpus 7 --tensor 7", "--tensor 7 does not divide the 32 query heads"),
        ("--model llama3-8b --gpus 5 --pipeline 5", "--pipeline 5 does not divide the 32 layers"),
        ("--model llama3-8b --gpus 0", "at least 1"),
        ("--params 1K", "--params 1000"),
    ],
)
def test_refusals(words, message, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
