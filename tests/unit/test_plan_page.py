# SPDX-License-Identifier: Apache-2.0
"""The page of plans, in a real browser: it draws, sorts, filters and chooses, without a network."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import patience
from tools import plan

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# What a user does, and what is then to be seen, as text in the page's title.
USER = """
<script>
addEventListener("load", () => {
  const rows = () => [...document.querySelectorAll("tbody tr")];
  const cells = row => [...row.cells].map(cell => cell.textContent);
  const told = { all: rows().length, dots: document.querySelectorAll("circle").length };
  const head = [...document.querySelectorAll("th")].find(one => one.dataset.key === "memory");
  head.click(); told.least = cells(rows()[0])[7];
  head.click(); told.most = cells(rows()[0])[7];
  $("fitting").click(); told.with_failing = rows().length;
  $("filter").value = "ring"; $("filter").dispatchEvent(new Event("input"));
  told.filtered = rows().length; told.of_them = rows().filter(row => cells(row)[1].includes("Ring")).length;
  const first = $("name").textContent; rows()[0].click(); told.chosen = $("name").textContent !== first;
  $("filter").value = ""; $("filter").dispatchEvent(new Event("input")); choose(0);
  document.querySelector("circle[data-at='1']").dispatchEvent(new MouseEvent("mousemove", { clientX: 9, clientY: 9 }));
  told.tip = $("tip").style.display === "block" && $("tip").textContent.startsWith("1. ");
  told.blocks = document.querySelectorAll("rect.block").length;
  told.command = $("command").textContent.includes("pretrain_llama.py");
  told.errors = window.failed || 0; document.title = "TOLD " + JSON.stringify(told);
});
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plans.html"
    words = "--model llama3-8b --gpus 4 --gpu A100-80G --seq-length 64K --pipeline 1 --micro-batch 1 --top 5 --html"
    assert plan.main([*words.split(), str(path)]) == 0
    return path


def test_the_page_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    assert "/*DATA*/null" not in text and "const data = {" in text
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|fetch\(|XMLHttp""", text)
    assert set(re.findall(r"https?://[^\"'\s)]+", text)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_sorts_filters_and_chooses(page: Path, tmp_path: Path) -> None:
    catch = "<script>addEventListener('error', () => { window.failed = 1; });"
    watched = page.read_text().replace("<script>", catch, 1)
    (tmp_path / "used.html").write_text(watched.replace("</body>", USER + "</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom",
               f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=2000"]  # fmt: skip
    done = subprocess.run(
        [*command, (tmp_path / "used.html").as_uri()], capture_output=True, text=True, timeout=patience(60)
    )
    found = re.search(r"<title>TOLD (.*?)</title>", done.stdout)
    assert found, done.stderr[-2000:]
    told = json.loads(html.unescape(found[1]))
    assert told["errors"] == 0 and told["all"] > 5 and told["dots"] >= told["all"] - 2
    assert float(told["least"]) < float(told["most"]) and told["with_failing"] > told["all"]
    assert 0 < told["filtered"] == told["of_them"] < told["with_failing"]
    assert told["chosen"] and told["tip"] and told["command"] and told["blocks"] > 10
