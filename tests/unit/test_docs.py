# SPDX-License-Identifier: Apache-2.0
"""The pages are correct: links lead somewhere, flags and files exist, commands are accepted, code blocks run."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import megatron.context_parallel as cp
from megatron.training.arguments.foreign import megatron_flags
from megatron.training.arguments.parser import build_parser, parse, supported_flags
from megatron.training.refusal import Refusal
from tests.doc_blocks import code_blocks
from tests.hugging_face import save_model
from tests.patience import patience
from tests.program import run_forked

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
EXAMPLE = ROOT / "examples" / "context_parallel_attention.py"
# Flags in the pages that our programs lack: of torchrun, ruff, pytest, pip, docker, git, and of extending.md's example.
OTHERS = {"--standalone", "--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--gpus",
          "--full", "--lab", "--quick", "--schedules", "--signal", "--max-restarts", "--log-greeting"}  # fmt: skip
SETTINGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 99 --attention-dropout 0"
)

# The shape that --use-checkpoint-args would read from a checkpoint, which these tests do not have.
SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "position_embedding_type": "rope"}
SHAPE |= {"seq_length": 64, "max_position_embeddings": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0}

pages = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    return code_blocks(page.read_text(), language)


@pages
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*?) *$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_flags_are_known(page: Path) -> None:
    known = set(supported_flags()) | set(megatron_flags.rows()) | tool_flags() | OTHERS | {"--help"}
    known |= {option for action in build_parser()._actions for option in action.option_strings}
    for flag in set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text())):
        assert flag.rstrip("-_") in known, f"{page.name} names {flag}"


@cache
def tool_flags() -> set[str]:
    """Flags that our tools, benchmarks and examples add to their parsers."""
    files = [*ROOT.glob("tools/*.py"), *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/**/*.py")]
    words = (re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", file.read_text()) for file in files)
    return {flag for result in words for flag in result}


@pages
def test_files_that_pages_name_exist(page: Path) -> None:
    folders = "benchmarks|docs|examples|megatron|scripts|tests|tools"
    text = page.read_text()
    for name in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./-]*\w", text):
        exists = (ROOT / name).exists() or name.startswith("megatron/core") or f" file={name}\n" in text
        assert exists, f"{page.name} names {name}"


def test_the_path_of_one_token_names_existing_files_classes_and_functions() -> None:
    page, package = DOCS / "inside" / "context-parallelism.md", ROOT / "megatron" / "context_parallel"
    text = page.read_text().split("## One token's way through the code")[1]
    code = "".join(file.read_text() for file in package.rglob("*.py"))
    for name in re.findall(r"`([\w/.]+)`", text.replace("`megatron/context_parallel/`", "")):
        if "/" in name:
            assert (package / name).exists(), name
        else:
            parts = name.split(".")
            assert all(re.search(rf"\b(def|class) {part}\b|^    {part}: ", code, re.M) for part in parts), name


def test_every_page_is_in_the_index_and_has_a_command() -> None:
    index = (DOCS / "README.md").read_text()
    for page in DOCS.rglob("*.md"):
        assert page.name == "README.md" or f"]({page.relative_to(DOCS)})" in index, page.name
        assert blocks(page, "bash") or blocks(page, "python"), f"{page.name} has no command"


def test_the_number_of_words_is_limited() -> None:
    words = {page: len(page.read_text().split()) for page in PAGES}
    assert words.pop(ROOT / "README.md") < 900
    assert len(words) <= 36
    assert sum(words.values()) <= 40_000


def test_the_table_of_libraries_is_that_of_its_file() -> None:
    from benchmarks.certify import matrix

    known, text = json.loads(matrix.FILE.read_text()), matrix.PAGE.read_text()
    assert set(known) == set(matrix.SYSTEMS)
    assert all(set(row["cells"]) == set(matrix.CASES) for row in known.values())
    assert matrix.table(known) in text, "run benchmarks/certify/matrix.py --page"
    for name, row in known.items():
        for case in [case for case, cell in row["cells"].items() if cell["verdict"] == matrix.WRONG]:
            shown_by = matrix.SYSTEMS[name].shown_by
            program = matrix.FILE.parent / "programs" / shown_by.get(case, shown_by.get("", "missing"))
            assert len(program.read_text().splitlines()) <= 40, (name, case)


@pytest.mark.lab  # drawing the cases takes seconds
def test_the_table_of_combinations_counts_the_tests() -> None:
    from tests import what_works

    text = (DOCS / "use" / "what-works.md").read_text()
    assert what_works.table() in text, f"paste this table:\n{what_works.table()}"
    assert f" {len(what_works.commands())} configurations." in " ".join(text.split())


def test_combinations_that_do_not_work_yet_are_refused() -> None:
    text = (DOCS / "use" / "what-works.md").read_text().split("## What does not work yet")[1].split("\n## ")[0]
    flags = [span for span in re.findall(r"`(--[^`]+)`", text)]
    assert len(flags) >= 9
    for flag in flags:
        with pytest.raises(Refusal, match=flag.split()[0]):
            parse(f"{SETTINGS} {flag}".split(), world_size=1)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the launch scripts, and stubs that record what python and torchrun would be started with.

    A stub of pip does nothing: these pages are not to install anything into the Python that runs the tests.
    """
    folder = tmp_path_factory.mktemp("docs")
    for script in (*ROOT.glob("examples/*/*.sh"), *ROOT.glob("benchmarks/*.sh")):
        copy = folder / script.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(script, copy)
    (folder / "stubs").mkdir()
    for name in ("python", "python3", "torchrun"):
        stub = folder / "stubs" / name
        stub.write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" >>"$CAPTURED"\nprintf "\\0" >>"$CAPTURED"\n')
        stub.chmod(0o755)
    (folder / "stubs" / "pip").symlink_to(shutil.which("true"))
    return folder


@pages
def test_commands_are_accepted(page: Path, stubs: Path) -> None:
    """Every training command is accepted by the program's parser, or refused if the page says so."""
    for words, text in blocks(page, "bash"):
        if any(name in text for name in ("setup.sh", "quickstart.sh", "run.sh", "docker", "finetune.sh", "extend.sh")):
            continue
        for command in captured(text, stubs):
            assert command[0] == "torchrun" or (ROOT / command[1]).exists() or command[1].startswith("-")
            entry = next((n for n, word in enumerate(command) if Path(word).name.startswith("pretrain_")), None)
            if entry is None:
                continue
            world = int(command[command.index("--nproc-per-node") + 1]) if "--nproc-per-node" in command else 1
            if "--help" in command or "--attention-kernel cudnn" in text:  # refused later, by the device
                continue
            defaults = runpy.run_path(str(ROOT / command[entry]), run_name="docs").get("LLAMA")
            message = refusal_of(lambda: parse(command[entry + 1 :], defaults, world, lambda *_: SHAPE))  # noqa: B023
            assert bool(message) == ("refused" in words), f"{page.name}: {message}\n{text}"
            if message and f"error: {message}" not in page.read_text():
                raise AssertionError(f"{page.name} shows another message than: {message}")


def captured(text: str, stubs: Path) -> Iterator[list[str]]:
    """The words of each command of python or torchrun that a block of commands starts."""
    file = stubs / "captured"
    file.unlink(missing_ok=True)
    env = {"PATH": f"{stubs / 'stubs'}{os.pathsep}{os.environ['PATH']}", "CAPTURED": str(file)}
    done = subprocess.run(
        ["bash", "-e"], input=text, cwd=stubs, env=env, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.returncode == 0, done.stderr
    for command in file.read_text().split("\0") if file.exists() else ():
        if command:
            yield command.removesuffix("\n").split("\n")


def refusal_of(action: Callable[[], object]) -> str | None:
    try:
        action()
    except Refusal as refusal:
        return refusal.render()
    return None


def run_block(text: str) -> None:
    """Run a code block on a rank of the pool."""
    exec(compile(text, "block", "exec", dont_inherit=True), {"__name__": "block"})


RUNNABLE = [
    pytest.param(text, int(words[4:]), id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (words, text) in enumerate(blocks(page, "python"))
    if words.startswith("run=")
]


@pytest.mark.parametrize("text, processes", RUNNABLE)
def test_code_blocks_run(pool, text: str, processes: int) -> None:
    pool.run(run_block, processes, text)


EXTENDING = DOCS / "inside" / "extending.md"


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code with every file and line that docs/inside/extending.md adds."""
    copy = tmp_path_factory.mktemp("extended")
    for folder in ("megatron", "tools"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pretrain_gpt.py", copy)
    for words, text in (*blocks(EXTENDING, "python"), *blocks(EXTENDING, "json")):
        kind, _, name = words.partition("=")
        if kind == "file":
            assert not (copy / name).exists()
            (copy / name).write_text(text)
        elif kind == "line":
            first, new = text.splitlines(keepends=True)
            source = (copy / name).read_text()
            assert source.count(first) == 1 and new not in source, f"{name} has no line {first}"
            (copy / name).write_text(source.replace(first, first + new))
    return copy


def run_extended(extended: Path, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(extended), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=extended, env=environment, capture_output=True, text=True, timeout=patience(120)
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.lab
def test_each_extension_does_what_the_page_says(extended: Path) -> None:
    programs = [text for words, text in blocks(EXTENDING, "python") if words == "extended"]
    assert len(programs) == 4
    run_extended(extended, "-c", "\n".join(programs))


@pytest.mark.lab
def test_a_step_with_every_extension(extended: Path) -> None:
    """A new model trains with a new mask, kernel and flag."""
    words = (
        "pretrain_gpt.py --model llama-tiny --attention-kernel counting --attention-mask parity --log-greeting hi "
        "--seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --eval-iters 0 --log-jsonl log"
    )
    run_extended(extended, *words.split())
    assert json.loads((extended / "log").read_text())["lm_loss"] == pytest.approx(math.log(99), rel=0.1)


def test_memory_on_a_new_machine(extended: Path) -> None:
    run_extended(extended, *"tools/memory.py --model llama-tiny --seq-length 1K --gpus 4 --gpu mine".split())


def run_example(*options: str) -> int:
    """Run the example's main function on a rank of the pool; returns its exit code."""
    return runpy.run_path(str(EXAMPLE), run_name="docs")["main"](list(options))


@pytest.mark.parametrize("options", [(), ("--ulysses", "1", "--balance", "contiguous")], ids=["usp", "ring"])
@pytest.mark.usual(1)
def test_the_example_agrees_with_one_process(pool, options: tuple[str, ...]) -> None:
    assert pool.run(run_example, 4, *options) == [0] * 4


def test_the_example_runs_alone() -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = run_forked(EXAMPLE, [], env)
    assert done.returncode == 0, done.stderr
    assert "largest difference in dv" in done.stdout


@pytest.mark.parametrize("show", ["layout", "tiles", "ring", "maps"])
def test_pictures_are_drawn(show: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from tools import plot_tiles

    output = tmp_path / "picture.png"
    assert plot_tiles.main(["--show", show, "--ulysses", "2", "--ring", "3", "--output", str(output)]) == 0
    assert output.stat().st_size > 5000
    assert plot_tiles.main(["--show", show, "--seq-length", "30", "--output", str(output)]) == 2
    assert "use a multiple of 8" in capsys.readouterr().err


# The site of docs/ builds without a warning: every link leads somewhere, every name of the API page exists.


def test_the_api_page_has_every_public_name() -> None:
    lines = (ROOT / "docs" / "use" / "python-api.md").read_text().splitlines()
    listed = [line.removeprefix("::: megatron.context_parallel.") for line in lines if line.startswith("::: ")]
    assert sorted(listed) == sorted(cp.__all__)


def test_the_list_of_folders_is_up_to_date() -> None:
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


# The commands in README's table run as they are written, on small stand-ins for the reader's files.


COMMANDS = re.findall(r"`(python tools/[^`]+)`", (ROOT / "README.md").read_text())
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TRAIN = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 256 --micro-batch-size 4 --train-iters 2 "
    "--lr 1e-3 --eval-iters 1 --log-interval 1 --num-workers 0 --save-interval 2 --split 80,20,0 "
    "--tokenizer-type ByteLevelTokenizer --attention-mask window --window-size 8,0"
)
LLAMA = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip


def run(script: str, words: list[str]) -> str:
    done = run_forked(ROOT / script, words, ENVIRONMENT)
    assert done.returncode == 0, f"{script} {shlex.join(words)}\n{done.stdout[-500:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of ours, and the data that it was trained on."""
    folder = tmp_path_factory.mktemp("readme")
    inputs = [str(folder / f"{number}.txt") for number in range(20)]
    for file in inputs:
        Path(file).write_text((ROOT / "README.md").read_text())
    data = ["--tokenizer-type", "ByteLevelTokenizer", "--workers", "1", "--append-eod"]
    run("tools/preprocess_data.py", ["--input", *inputs, "--output-prefix", str(folder / "data"), *data])
    more = ["--data-path", f"{folder}/data_text_document", "--save", f"{folder}/checkpoint"]
    run("pretrain_llama.py", [*TRAIN.split(), *more])
    return folder


def test_an_evaluation_takes_mask_length_tokenizer_and_data_from_the_checkpoint(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = (command for command in COMMANDS if "evaluate.py" in command)
    printed = run("tools/evaluate.py", as_written(command, trained / "checkpoint"))
    assert "--seq-length 256, the longest of the checkpoint" in printed and "256 tokens a row" in printed
    assert "--tokenizer-type ByteLevelTokenizer" in printed and "data_text_document" in printed
    assert "checkpoint, with --window-size " in printed
    assert (tmp_path / "out" / "evaluation" / "evaluation.json").is_file()


def as_written(command: str, folder: Path) -> list[str]:
    stand_ins = {"DIR": str(folder), "TEXT": "Megatron", "SCRIPT.sh": "scripts/llama_torchrun.sh"}
    return [stand_ins.get(word, word) for word in shlex.split(command)[2:]]


@pytest.mark.full
def test_the_checkpoints_mask_is_that_of_the_flags(trained: Path, tmp_path: Path) -> None:
    scores = {}
    for mask in ("", "--attention-mask window --window-size 8,0", "--attention-mask causal"):
        folder = tmp_path / str(len(scores))
        words = f"--load {trained / 'checkpoint'} --eval-tasks loss-by-position --eval-output {folder} {mask}"
        run("tools/evaluate.py", words.split())
        scores[mask] = json.loads((folder / "evaluation.json").read_text())["tasks"]
    mine, window, causal = scores.values()
    assert mine == window != causal


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_as_written(
    command: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = as_written(command, trained / "checkpoint")
    if "convert_hf.py" in command:
        words[words.index("--from-hf") + 1] = str(save_model(tmp_path / "hf", "llama", LLAMA))
        words[words.index("--to") + 1] = str(tmp_path / "converted")
    if "check_script" in command:
        shutil.copytree(ROOT / "tests/unit/data/scripts", tmp_path / "scripts")
    run(shlex.split(command)[1], words)
