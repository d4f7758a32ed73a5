# SPDX-License-Identifier: Apache-2.0
"""``longcontext NAME`` runs the programs of tools/, in a clone and as a wheel lays them out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import longcontext

ROOT = Path(__file__).parents[2]
ARGUMENTS = ["memory", "--model", "llama3-8b", "--gpus", "8", "--gpu", "A100-80G", "--seq-length", "32K"]


@pytest.fixture(params=["clone", "wheel"])
def command(request, tmp_path: Path) -> list[str]:
    if request.param == "clone":
        return [sys.executable, str(ROOT / "longcontext.py")]
    shutil.copy(ROOT / "longcontext.py", tmp_path)
    programs = tmp_path / "longcontext_programs"
    shutil.copytree(ROOT / "tools", programs / "tools")
    for path in ROOT.glob("pretrain_*.py"):
        shutil.copy(path, programs)
    return [sys.executable, str(tmp_path / "longcontext.py")]


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


def test_a_program_prints_what_its_file_prints(command, tmp_path):
    there = run([sys.executable, str(ROOT / "tools" / ARGUMENTS[0]) + ".py", *ARGUMENTS[1:]])
    here = run([*command, *ARGUMENTS])
    assert not here.returncode and here.stdout == there.stdout and "8" in here.stdout
    refused = run([*command, "memory", "--model", "none"])
    assert refused.returncode and "error" in refused.stderr and len(refused.stderr.splitlines()) <= 3


def test_every_program_is_listed_with_a_sentence(capsys):
    longcontext.main(["--help"])
    lines = capsys.readouterr().out.splitlines()[2:]
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert set(longcontext.FIRST) < set(listed) and all(len(sentence) > 20 for sentence in listed.values())
    assert not {name for name in listed if name.startswith("launch")}


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(SystemExit, match="no program is named 'pln'; did you mean plan"):
        longcontext.main(["pln"])
    with pytest.raises(SystemExit, match="longcontext --help lists them"):
        longcontext.main(["zzzz"])
