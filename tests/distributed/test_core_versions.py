# SPDX-License-Identifier: Apache-2.0
"""Runs and checkpoints do not depend on the version of megatron-core, from 0.16 to 0.19."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.training.checkpoint.checksums import list_files
from megatron.training.checkpoint.megatron_lm.checked import COMMON, examine, open_unchecked
from megatron.training.checkpoint.megatron_lm.file_list import CHECKSUMS, INTEGRITY, Damaged
from megatron.training.checkpoint.megatron_lm.places import place_of_state, run_of
from megatron.training.refusal import Refusal
from tests import core_folders, core_losses
from tests.patience import patience

DATA = Path(__file__).parent / "data"
# Written by megatron-core 0.19.2's own saver with verify_integrity, on two processes: ``python -m tests.core_folders``.
CORE_0_19 = DATA / "megatron_core_0.19.txz"
ITS_LOSSES = [3.264238193631172, 3.150227878242731, 3.064189102500677]
OTHER_PYTHON = os.environ.get("OTHER_PYTHON", "")  # of an environment with another megatron-core


@pytest.mark.usual(0, 21, 42, 63, 80, 102, 126, 147)
@pytest.mark.parametrize("kind, grid", core_losses.CASES)
def test_losses_are_those_of_core_0_16(pool, kind, grid):
    """Recorded on another machine, so the last bits may differ. On one machine all bits are equal."""
    expected = core_losses.recorded()[kind][grid]
    for losses in pool.run(core_losses.losses, core_losses.GRIDS[grid][0], kind, grid, timeout=120):
        assert losses == (expected if isinstance(expected, str) else pytest.approx(expected, rel=1e-6))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the folder that core 0.19 has written."""
    with tarfile.open(CORE_0_19) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize(
    "world, grid", [(1, ""), (4, f"{core_losses.T2} {core_losses.P2}"), (2, f"{core_losses.R2} --zero-stage 3")]
)
def test_a_checkpoint_of_core_0_19_continues(pool, folder, world, grid):
    for result in pool.run(core_folders.read, world, "ours", str(folder), grid, timeout=120):
        assert result["iteration"] == 2
        assert result["losses"] == pytest.approx(ITS_LOSSES, rel=1e-5)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def without_sums(path: Path) -> None:
    (path / INTEGRITY).unlink()


def without_sums_and_the_state_changed(path: Path) -> None:
    without_sums(path)
    name, offset, length = place_of_state(path)
    flip(path / name, offset + length // 2)


def without_sums_and_shorter(path: Path) -> None:
    without_sums(path)
    os.truncate(path / "__0_0.distcp", 1000)


def with_other_sums(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        table = json.loads((path / INTEGRITY).read_text())
        change(table)
        (path / INTEGRITY).write_text(json.dumps(table))

    return rewrite


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda path: flip(path / "__1_0.distcp", 9000), "__1_0.distcp is not what was written .its SHA-256 differs"),
        (lambda path: flip(path / ".metadata", 200), r"\.metadata"),
        (lambda path: flip(path / "metadata.json", 1), "metadata.json"),
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda path: (path / ".metadata").unlink(), "common.pt is missing"),
        (lambda path: (path / INTEGRITY).write_text("[]"), "integrity.json cannot be read"),
        (with_other_sums(lambda table: table["files"].pop("__1_0.distcp")), "integrity.json does not name __1_0"),
        (with_other_sums(lambda table: table["files"].update({"../a": "0"})), "integrity.json cannot be read"),
        (with_other_sums(lambda table: table.update(algorithm="md5")), "integrity.json cannot be read"),
        (without_sums_and_the_state_changed, "is not what was written"),
        (without_sums_and_shorter, "has 1000 bytes"),
    ],
)
def test_damage_to_a_checkpoint_of_core_0_19_is_refused(folder, damage, message):
    path = folder / "iter_0000002"
    damage(path)
    with pytest.raises(Damaged, match=message) as caught:
        examine(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [lambda path: None, without_sums, list_files])
def test_a_checkpoint_of_core_0_19_is_read_at_a_glance(folder, change):
    path = folder / "iter_0000002"
    change(path)
    checked = examine(path)
    assert not checked.unchecked and COMMON not in checked.files
    for one in (checked, open_unchecked(path, COMMON)):
        assert one.common()["iteration"] == 2 and one.common()["args"].num_layers == 2
    assert run_of(path) == ""
    with pytest.raises(Refusal, match=r"__1_0\.distcp: it is not in"):
        open_unchecked(path, COMMON).file("__1_0.distcp")


def test_a_listed_checkpoint_of_core_0_19_shows_damage(folder):
    path = folder / "iter_0000002"
    list_files(path)
    flip(path / "__1_0.distcp", 9000)
    assert open_unchecked(path, COMMON).common()["iteration"] == 2
    with pytest.raises(Damaged, match="CRC-32 differs"):
        examine(path)
    name, offset, length = place_of_state(path)
    flip(path / name, offset + length // 2)
    with pytest.raises(Refusal, match="is not what was written"):
        open_unchecked(path, COMMON)
    assert (path / CHECKSUMS).exists()


def elsewhere(*command: str) -> dict:
    """What ``tests.core_folders`` prints in the other environment."""
    environment = os.environ | {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    words = [OTHER_PYTHON, "-m", "tests.core_folders", *command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=patience(300))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not OTHER_PYTHON, reason="OTHER_PYTHON names no environment with another megatron-core")
@pytest.mark.parametrize("who", ["ours", "core"])
def test_checkpoints_cross_versions(pool, tmp_path, who):
    """Every bit of weights and states, and the losses of the run that was not disturbed, in both directions."""
    from megatron.core import package_info

    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    written, theirs = pool.run(core_folders.write, 1, who, here, timeout=120)[0], elsewhere("write", who, there)
    assert theirs.pop("core") != package_info.__version__
    assert theirs == written
    for read in (pool.run(core_folders.read, 1, "ours", there, timeout=120)[0], elsewhere("read", "ours", here)):
        assert read["iteration"] == 2 and read["digest"] == written["digest"]
        assert read["losses"] == (written["losses"] if who == "ours" else pytest.approx(written["losses"], rel=1e-6))
    if who == "ours":  # core 0.16 itself cannot read what core 0.19 has written, but both read ours
        for read in (pool.run(core_folders.read, 1, "core", there, timeout=120)[0], elsewhere("read", "core", here)):
            assert read["digest"] == written["digest"]
            assert read["losses"] == pytest.approx(written["losses"], rel=1e-6)
