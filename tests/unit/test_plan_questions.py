# SPDX-License-Identifier: Apache-2.0
"""The ten questions of docs/use/planner.md: each command runs, and says what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tools import plan

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "planner.md").read_text().split("## Ten questions")[1]
ASKED = re.findall(r"\*\*(\d+)\. (.*?)```bash( refused)?\n(.*?)```", PAGE, re.DOTALL)
AT_ONCE = {"1", "3"}  # in the usual run; the others with --full


def cases() -> list:
    return [pytest.param(*one, id=one[0], marks=[pytest.mark.full] * (one[0] not in AT_ONCE)) for one in ASKED]


def test_there_are_ten() -> None:
    assert [number for number, *_ in ASKED] == [str(number) for number in range(1, 11)]


@pytest.mark.parametrize("number, text, refused, command", cases())
def test_the_answer_is_what_the_page_says(
    number: str, text: str, refused: str, command: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    program, tool, *words = shlex.split(command.replace("\\\n", " "))
    assert (program, tool) == ("python", "tools/plan.py")
    assert plan.main(words) == (2 if refused else 0)
    said = re.sub(r"\s+", " ", "".join(capsys.readouterr()))
    if refused:
        assert "66 GiB" in text and "65.7 GiB optimizer states" in said and "--gpus 16" in said
        return
    for figure in re.findall(r"\d+\.\d+ (?:GiB|TB|s|days|hours|M tokens)\b", text):
        amount = figure.removesuffix(" GiB")
        assert amount in said or figure in converted(said), (number, figure)
    if "--longest" in words:
        longest = re.search(r"(\d+)M tokens", text)[1]
        assert f"The plan for {longest}M:" in said


def converted(said: str) -> set[str]:
    """Steps in hours, and host memory in TB, as a page may round them."""
    hours = {f"{float(seconds) / 3600:.1f} hours" for seconds in re.findall(r"(\d+(?:\.\d+)?) s a step", said)}
    sizes = {float(size.replace(",", "")) for size in re.findall(r"Offloading needs ([\d,.]+) GiB", said)}
    return hours | {f"{size * 2**30 / 1e12:.1f} TB" for size in sizes}
