# SPDX-License-Identifier: Apache-2.0
"""A log that cannot be written any more is told once, and training and the other logs go on."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.training.arguments.parser import parse
from megatron.training.features import bad_batches
from megatron.training.report import memory_profile, reporter
from megatron.training.report.memory_picture import DEVICE_KINDS, KINDS
from tests.unit.test_refusals import GOOD, MOCK

STEPS = 40


def run(flags: str, between=lambda: None) -> None:
    """All that a run's logs see of it."""
    config = parse(f"{GOOD} {MOCK} --log-interval 100 {flags}".split(), world_size=1)
    reports = reporter.Reporter(config, active=True, first_iteration=0, last_iteration=STEPS)
    between()
    for iteration in range(1, STEPS + 1):
        row = {"iteration": iteration, "lm_loss": 1.0, "grad_norm": 1.0, "iteration_ms": 1.0, "tokens": 64}
        reports.step(row, learning_rate=1.0, loss_scale=1.0, extra={})
    reports.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 KiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a full disk is a small one that root mounts: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    with pytest.raises(OSError), open(folder / "rest", "wb", buffering=0) as file:
        while file.write(bytes(1024)):
            pass


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # its thread prints no traceback
def test_a_full_disk_under_tensorboard_ends_that_log_alone(tiny_disk, tmp_path, capfd):
    log = tmp_path / "log.jsonl"
    run(f"--tensorboard-dir {tiny_disk}/board --log-jsonl {log}", lambda: fill(tiny_disk))
    said = capfd.readouterr()
    assert said.out.count("WARNING: --tensorboard-dir: No space left on device; going on without it") == 1
    assert "Traceback" not in said.err and "Exception" not in said.err
    assert [json.loads(line)["iteration"] for line in log.open()] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_weights_and_biases_may_fail_at_any_time(where, tmp_path, monkeypatch, capsys):
    calls = []

    def called(name: str):
        def call(*_: object, **__: object) -> SimpleNamespace:
            calls.append(name)
            if name == where and len(calls) > 5 * (name == "log"):
                raise RuntimeError("the server\ndoes not answer")
            return SimpleNamespace(log=called("log"), finish=called("finish"))

        return call

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=called("init")))
    run(f"--wandb-project p --tensorboard-dir {tmp_path}/board --log-jsonl {tmp_path}/log.jsonl")
    told = "WARNING: --wandb-project: the server does not answer; going on without it"
    assert capsys.readouterr().out.count(told) == 1
    assert calls.count("log") == {"init": 0, "log": 5, "finish": STEPS}[where]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == STEPS and list((tmp_path / "board").iterdir())


def test_a_log_that_fails_as_it_ends_is_told(tmp_path, capsys, monkeypatch):
    from torch.utils.tensorboard import SummaryWriter

    def fail(writer: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(SummaryWriter, "close", fail)
    run(f"--tensorboard-dir {tmp_path}")
    assert "WARNING: --tensorboard-dir: Input/output error; going on without it" in capsys.readouterr().out


def test_a_full_disk_leaves_no_picture_and_no_batch_and_nothing_ends(tiny_disk, monkeypatch):
    monkeypatch.setattr(memory_profile.dist, "get_rank", lambda: 0)
    profile = {
        "start": dict.fromkeys(KINDS, 0),
        "kinds": list(DEVICE_KINDS),
        "events": [[second, 0, 2**20] for second in range(9)],
        "phases": [["forward", 0.0]],
        "seconds": 9.0,
    }
    line = memory_profile.write_profile(str(tiny_disk), 2, profile, "cpu")  # there is room for the numbers alone
    assert line == f" WARNING: --profile-memory {tiny_disk}: No space left on device; going on without it"
    assert (tiny_disk / "memory_rank0.json").stat().st_size
    fill(tiny_disk)
    batch = {"tokens": torch.ones((64, 1024))}
    monkeypatch.setattr("megatron.training.data.batches.micro_batches", lambda *_, **__: iter([batch]))
    settings = SimpleNamespace(
        logging=SimpleNamespace(log_jsonl=str(tiny_disk / "log.jsonl")),
        data=SimpleNamespace(dataloader_type="single"),
        run=SimpleNamespace(seed=1),
    )
    job = SimpleNamespace(
        config=settings,
        progress=SimpleNamespace(iteration=3, consumed_train_samples=8),
        batch_sizes=SimpleNamespace(get_current_running_global_batch_size=lambda: 64),
        datasets=[None],
    )
    result = SimpleNamespace(bad="the loss is nan", lm_loss=math.nan, grad_norm=1.0)
    assert "No space left on device" in bad_batches.write_batch(job, result)
