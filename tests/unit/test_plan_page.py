# SPDX-License-Identifier: Apache-2.0
"""The page of plans, in a real browser: it draws, sorts, filters and chooses, without a network."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron.simulator.dry_run.whole_step import Slot, begins, program
from tests.patience import patience
from tools import plan

Json = dict[str, Any]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# A user's actions and their visible results, written to the page's title.
USER = """
<script>
const SHAPES = /*SHAPES*/;
addEventListener("load", () => {
  const rows = () => [...document.querySelectorAll("tbody tr")];
  const cells = row => [...row.cells].map(cell => cell.textContent);
  const state = { all: rows().length, dots: document.querySelectorAll("circle").length };
  const head = [...document.querySelectorAll("th")].find(one => one.dataset.key === "memory");
  head.click(); state.least = cells(rows()[0])[7];
  head.click(); state.most = cells(rows()[0])[7];
  state.legend = $("scatterkeys").textContent;
  $("fitting").click(); state.with_failing = rows().length;
  $("filter").value = "ring"; $("filter").dispatchEvent(new Event("input"));
  state.filtered = rows().length; state.of_them = rows().filter(row => cells(row)[1].includes("Ring")).length;
  const first = $("name").textContent; rows()[0].click(); state.chosen = $("name").textContent !== first;
  $("filter").value = ""; $("filter").dispatchEvent(new Event("input")); choose(0);
  document.querySelector("circle[data-at='1']").dispatchEvent(new MouseEvent("mousemove", { clientX: 9, clientY: 9 }));
  state.tip = $("tip").style.display === "block" && $("tip").textContent.startsWith("1. ");
  state.schedules = SHAPES.map(schedule);
  const real = data.steps[0];
  data.steps[0] = { ...real, stages: 4, virtual: 1, batches: 8, message: 0 };
  state.drawn = drawStep(); state.total = data.plans[0].seconds;
  const drawn = what => [...document.querySelectorAll("#step " + what)];
  state.rows = drawn("rect.bubble").length; state.after = drawn("rect.after").length;
  const passes = drawn("path.passes");
  state.directions = passes.map(path => path.dataset.direction).sort().join(" ");
  state.pieces = passes.map(path => path.getAttribute("d").split("M").length - 1);
  const seen = $("stephover").getBoundingClientRect();
  const over = (x, y) => {
    const at = { clientX: seen.left + x * seen.width, clientY: seen.top + y * seen.height };
    $("stephover").dispatchEvent(new MouseEvent("mousemove", at));
    return $("tip").textContent;
  };
  state.overs = [over(0.002, 0.1), over(0.002, 0.9), over(0.9999, 0.5)];
  data.steps[0] = real; choose(0); state.note = $("stepnote").textContent;
  state.blocks = document.querySelectorAll("rect.block").length;
  state.command = $("command").textContent.includes("pretrain_llama.py");
  state.errors = window.failed || 0; document.title = "STATE " + JSON.stringify(state);
});
</script>
"""


def shape(stages: int, virtual: int, batches: int, message: float = 0.0, first: float = 1.0) -> Json:
    """``first``: time of the first stage's passes relative to others; a single stage counts as the last."""
    return {"stages": stages, "virtual": virtual, "batches": batches, "passes": [1.0, 2.0], "last": [1.5, 3.0],
            "first": [first, 2 * first], "message": message, "after": [["optimizer", 0.5]]}  # fmt: skip


SHAPES = [shape(1, 1, 3), shape(4, 1, 6, 0.25), shape(4, 1, 2), shape(2, 3, 6, 0.125), shape(4, 2, 8, 0.0, 0.75)]


def scheduled(step: Json) -> list[list[list[float]]]:
    """(begin, end, backward, micro-batch, chunk) of every stage's passes, as the page should compute them."""
    stages, virtual = step["stages"], step["virtual"]
    programs = [program(stage, stages, step["batches"], virtual) for stage in range(stages)]

    def took(stage: int, slot: Slot) -> tuple[float, float]:
        place, last = slot.chunk * stages + stage, stages * virtual - 1
        seconds = step["passes"][slot.backward] / virtual
        ends = {0: "first", last: "last"}
        seconds += step[ends.get(place, "passes")][slot.backward] - step["passes"][slot.backward]
        seconds += step["message"] * (place != (0 if slot.backward else last))
        return seconds, seconds

    return [
        [[begin, begin + took(stage, x)[0], int(x.backward), x.micro_batch, x.chunk] for begin, x in zip(row, slots)]
        for stage, (row, slots) in enumerate(zip(begins(programs, took), programs))
    ]


def test_parts_of_a_bar_have_different_colours() -> None:
    text = (Path(plan.__file__).parents[1] / "megatron/simulator/planner/page.html").read_text()
    colours = dict(re.findall(r"(\w+): \"(#\w{6})\"", text.split("const COLOURS = {")[1].split("forward:")[0]))
    assert len(colours) == len({*colours.values()}) >= 12


def test_a_plans_passes_end_when_its_step_does(tmp_path: Path) -> None:
    """The schedule of each step on the page takes as long as the closed form predicts independently."""
    words = "--model llama3-8b --gpus 16 --gpu A100-80G --seq-length 32K --global-batch 32 --pipeline 4 --top 3 --html"
    assert plan.main([*words.split(), str(tmp_path / "plans.html")]) == 0
    data = data_of((tmp_path / "plans.html").read_text())
    assert len(data["steps"]) == len(data["plans"]) > 20
    assert {step["virtual"] for step in data["steps"]} > {1, 2}
    for step, planned in zip(data["steps"][::7], data["plans"][::7]):
        end = max(row[-1][1] for row in scheduled(step)) + sum(seconds for _, seconds in step["after"])
        assert end == pytest.approx(planned["seconds"], rel=5e-3), planned["name"]


def test_passes_of_a_hybrid_have_the_names_of_its_layers(tmp_path: Path) -> None:
    words = "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 16 --vocab-size 32000 "
    words += "--is-hybrid-model --hybrid-override-pattern M-M*-MM- --gpus 8 --gpu H100-80G --seq-length 32K "
    words += "--global-batch 16 --pipeline 2 --tensor 1 --recompute none --html"
    assert plan.main([*words.split(), str(tmp_path / "plans.html")]) == 0
    data = data_of((tmp_path / "plans.html").read_text())
    names = {drawn["name"]: drawn["times"] for drawn in next(iter(data["layers"].values()))}
    kinds = {" of linear attention": 2, " with an FFN alone": 2}  # of the last stage
    assert {f"{name} pass of a layer{kind}": n for name in ("forward", "backward") for kind, n in kinds.items()} == {
        name: times for name, times in names.items() if "layer" in name
    }
    for step, planned in zip(data["steps"], data["plans"]):
        end = max(row[-1][1] for row in scheduled(step)) + sum(seconds for _, seconds in step["after"])
        assert end == pytest.approx(planned["seconds"], rel=5e-2), planned["name"]


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*)</script>\n', page)[1])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plans.html"
    words = "--model llama3-8b --gpus 4 --gpu A100-80G --seq-length 64K --pipeline 1 --micro-batch 1 --top 5 --html"
    assert plan.main([*words.split(), str(path)]) == 0
    return path


def test_the_page_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    assert "{{" not in text and data_of(text)["plans"]
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|fetch\(|XMLHttp""", text)
    assert set(re.findall(r"https?://[^\"'\s)]+", text)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed: apt-get install chromium")
def test_a_browser_sorts_filters_and_chooses(page: Path, tmp_path: Path) -> None:
    catch = "<script>addEventListener('error', () => { window.failed = 1; });"
    text, ran = page.read_text(), page.read_text().count("<script>")
    assert ran == 1
    # the test's script has no hash, so the policy would block it
    watched = re.sub(r"<meta http-equiv.*>\n", "", text).replace("<script>", catch, 1)
    user = USER.replace("/*SHAPES*/", json.dumps(SHAPES))
    (tmp_path / "used.html").write_text(watched.replace("</body>", user + "</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom",
               f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=2000"]  # fmt: skip
    done = subprocess.run(
        [*command, (tmp_path / "used.html").as_uri()], capture_output=True, text=True, timeout=patience(60)
    )
    result = re.search(r"<title>STATE (.*?)</title>", done.stdout)
    assert result, done.stderr[-2000:]
    state, plans = json.loads(html.unescape(result[1])), data_of(text)["plans"]
    assert state["all"] == min(500, sum(plan["fits"] == "yes" for plan in plans))
    legend = {"yes": "fits ", "near": "fits, but leaves less than the margin ", "no": "does not fit "}
    assert state["legend"] == "".join(legend[fits] for fits in legend if any(plan["fits"] == fits for plan in plans))
    assert state["errors"] == 0 and state["all"] > 5 and state["dots"] >= state["all"] - 2
    assert float(state["least"]) < float(state["most"]) and state["with_failing"] > state["all"]
    assert 0 < state["filtered"] == state["of_them"] < state["with_failing"]
    for step, rows in zip(SHAPES, state["schedules"], strict=True):
        for mine, theirs in zip(scheduled(step), rows, strict=True):
            assert [pass_[2:] for pass_ in theirs] == [pass_[2:] for pass_ in mine], step
            assert sum((pass_[:2] for pass_ in theirs), []) == pytest.approx(sum((pass_[:2] for pass_ in mine), []))
    assert state["rows"] == 4 and state["after"] % 4 == 0 and state["directions"] == "backward forward"
    assert state["pieces"] == [32, 32] and 0 < max(row[-1][1] for row in state["drawn"]) < state["total"]
    assert state["overs"][0].startswith("forward pass of micro-batch 0, stage 0")
    assert state["overs"][1] == "waiting for a neighbour, stage 3" and state["overs"][2].startswith("the optimizer")
    assert re.match(r"\d+ micro-batch", state["note"])
    assert state["chosen"] and state["tip"] and state["command"] and state["blocks"] > 10
