# SPDX-License-Identifier: Apache-2.0
"""--record-memory-history asks PyTorch for a GPU's history in the chosen steps, and writes its snapshot.

PyTorch keeps this history of GPUs only: here its calls are stand-ins; tests/gpu has the true ones.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.training.arguments.validate.check_memory import NO_HISTORY
from megatron.training.features.measuring.profiler import ENTRIES, Profiler
from megatron.training.settings.job_settings import LoggingConfig


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    """What PyTorch's stand-in was asked for."""
    made: list = []

    def record(enabled: str | None = "all", max_entries: int = 0) -> None:
        made.append(max_entries if enabled else "off")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: made.append("snapshot") or {"device_traces": [[7]]})
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    return made


def run(path: Path, device: str = "cuda", ranks: tuple[int, ...] = (0, 1), steps: int = 5) -> tuple[list[int], str]:
    """(The iterations that saw the snapshot, what was printed); iterations 3 and 4 are recorded."""
    settings = LoggingConfig(
        record_memory_history=True, memory_snapshot_path=str(path), profile_step_start=2, profile_step_end=4,
        profile_ranks=list(ranks),
    )  # fmt: skip
    printed: list[str] = []
    job = SimpleNamespace(
        config=SimpleNamespace(logging=settings, run=SimpleNamespace(device="auto")),
        progress=SimpleNamespace(iteration=0), runtime=SimpleNamespace(device=torch.device(device)),
    )  # fmt: skip
    feature, written = Profiler(job, SimpleNamespace(say=printed.append)), []
    for iteration in range(1, steps + 1):
        feature.before_step()
        job.progress.iteration = iteration
        feature.after_step(SimpleNamespace(iteration=iteration))
        if path.with_name(f"rank-1-{path.name}").exists():
            written.append(iteration)
    feature.stop()
    return written, "".join(printed)


def test_the_snapshot_of_the_chosen_steps_is_written(tmp_path: Path, calls: list):
    written, printed = run(tmp_path / "folder" / "memory.pickle")
    assert calls == [ENTRIES, "snapshot", "off"] and written == [4, 5]
    file = tmp_path / "folder" / "rank-1-memory.pickle"
    assert pickle.loads(file.read_bytes()) == {"device_traces": [[7]]}
    assert printed == f" > --record-memory-history: rank 1 wrote {file}"


def test_a_run_that_ends_earlier_writes_what_it_has(tmp_path: Path, calls: list):
    assert run(tmp_path / "memory.pickle", steps=3)[0] == [] and calls == [ENTRIES, "snapshot", "off"]
    assert os.listdir(tmp_path) == ["rank-1-memory.pickle"]


@pytest.mark.parametrize("device, ranks", [("cpu", (0, 1)), ("cuda", (0,))])
def test_cpus_and_other_ranks_record_nothing(device: str, ranks: tuple[int, ...], tmp_path: Path, calls: list):
    said = f" > {NO_HISTORY}" if device == "cpu" else ""
    assert run(tmp_path / "memory.pickle", device, ranks) == ([], said) and calls == []


def test_a_folder_that_cannot_be_made_does_not_end_the_run(tmp_path: Path, calls: list):
    (tmp_path / "file").touch()
    _, printed = run(tmp_path / "file" / "memory.pickle")
    assert printed.startswith(" WARNING: --record-memory-history: ") and "going on without it" in printed
    assert calls[-1] == "off"
