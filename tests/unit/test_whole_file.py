# SPDX-License-Identifier: Apache-2.0
"""Results of tools are written completely or not at all: on a full disk, none is left, and one line says so."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron.simulator.planner import memory_table
from megatron.system.whole_file import replace_file, save_figure, whole_file
from megatron.training.report import memory_picture
from tools import plot_run

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_file_is_replaced_at_once(tmp_path: Path, monkeypatch) -> None:
    (file := tmp_path / "a").write_text("old")
    (tmp_path / "link").symlink_to(file)
    replace_file(tmp_path / "link", "new")
    assert file.read_text() == "new" and (tmp_path / "link").is_symlink()
    replace_file(os.devnull, "x")
    assert not os.path.isfile(os.devnull)
    monkeypatch.setattr(os, "replace", lambda *_: os.stat("missing"))
    with pytest.raises(FileNotFoundError):
        replace_file(file, "newer")
    assert file.read_text() == "new" and {path.name for path in tmp_path.iterdir()} == {"a", "link"}


def test_after_an_error_the_old_file_stays(tmp_path: Path) -> None:
    replace_file(file := tmp_path / "a", "old")
    with pytest.raises(KeyError), whole_file(file) as out:
        out.write(b"half")
        raise KeyError
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["a"]


@contextmanager
def full_disk(most: int):
    """A file may have ``most`` bytes, as if the disk were full then."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def figure() -> Any:
    made = memory_picture.pyplot_for_files().figure()
    made.add_subplot().plot(range(99))
    return made


def profile(path: Path) -> None:
    sizes = {kind: 10 for kind in memory_picture.KINDS}
    one = {"rank": 0, "iteration": 1, "device": "cpu", "seconds": 2.5, "kinds": list(memory_picture.KINDS),
           "phases": [["forward", 0.0], ["backward", 1.0]], "start": sizes, "events": [[0.5, 3, 100]]}  # fmt: skip
    memory_picture.draw([one], ["a"], path)


def log(path: Path) -> None:
    row = {"iteration": 1, "lm_loss": 5.5, "tokens": 64, "iteration_ms": 3.5, "tokens_per_second": 9.5, "mfu": 0.4,
           "device_peak_bytes": 4096, "validation_loss": None}  # fmt: skip
    plot_run.draw({"a": [row, {**row, "iteration": 2, "validation_loss": 5.0}]}, path)


def memory(path: Path) -> None:
    shape = memory_table.shape_of("llama3-8b", 4096)
    sizes = {"gpus": 8, "tensor": 1, "pipeline": 1, "seq_length": 4096}
    rows = memory_table.rows(shape, 4096, iter(list(memory_table.strategies(shape, **sizes))[:2]))
    memory_table.draw(list(rows), "a", path)


@pytest.mark.parametrize("draw", [lambda path: save_figure(figure(), path), profile, log, memory])
def test_pictures_on_a_full_disk(tmp_path: Path, draw: Callable[[Path], None]) -> None:
    draw(path := tmp_path / "a.png")
    whole = path.read_bytes()
    with full_disk(3000), pytest.raises(OSError) as error:
        draw(path)
    assert error.value.filename == str(path) and error.value.strerror
    assert path.read_bytes() == whole and os.listdir(tmp_path) == ["a.png"]


def test_only_one_place_writes_pictures() -> None:
    found = [
        str(path.relative_to(ROOT))
        for place in ("megatron", "tools")
        for path in (ROOT / place).rglob("*.py")
        if re.search(r"\.savefig\(", path.read_text())
    ]
    assert sorted(found) == ["megatron/system/whole_file.py", "tools/data.py"]  # the latter within atomic_files
