# SPDX-License-Identifier: Apache-2.0
"""The site of docs/ builds without a warning: every link leads somewhere, every name of the API page exists."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import megatron.context_parallel as cp

ROOT = Path(__file__).resolve().parents[2]


def test_the_api_page_has_every_public_name() -> None:
    lines = (ROOT / "docs" / "use" / "python-api.md").read_text().splitlines()
    listed = [line.removeprefix("::: megatron.context_parallel.") for line in lines if line.startswith("::: ")]
    assert sorted(listed) == sorted(cp.__all__)


def test_the_list_of_folders_is_what_the_folders_say() -> None:
    names = runpy.run_path(str(ROOT / "scripts" / "folder_map.py"), run_name="docs")
    page = names["PAGE"].read_text()
    assert names["filled"](page) == page, "python scripts/folder_map.py"


@pytest.mark.full
def test_the_site_builds(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="the packages of the extra `docs` are not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "initialize_grid" in (tmp_path / "site" / "use" / "python-api.html").read_text()
