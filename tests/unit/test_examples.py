# SPDX-License-Identifier: Apache-2.0
"""The launch scripts of examples/: all their flags are accepted."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron.training.arguments.validate.check_memory import attention_chunks
from megatron.training.data.index_files import open_prefix
from tests.patience import patience
from tools import check_script
from tools.launch_confined import why_not

arguments = pytest.importorskip("megatron.training.arguments.parser")

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("quickstart", "extrapolation", "finetune", "extend", "longer")  # several commands, from data to a table
COMMON = ROOT / "examples" / "common"  # files that the scripts source
EXAMPLES = (path for path in ROOT.glob("examples/*/*.sh") if path.parent.name not in ("common", "reproduce"))
SCRIPTS = sorted(path for path in EXAMPLES if path.stem not in PROGRAMS)
FPDT, GENSLM = ROOT / "examples" / "fpdt", ROOT / "examples" / "genslm"
PAPER_MODELS = ("gpt-2.7b", "gpt-6.7b", "gpt-13b", "gpt-30b", "llama3-8b", "llama3-70b")
MODELS = {FPDT / "pretrain.sh": PAPER_MODELS, GENSLM / "pretrain.sh": ("genslm-25b", "genslm-33b")}
LAUNCHES = [(path, model) for path in SCRIPTS for model in MODELS.get(path, ("",))]
LAUNCH_IDS = [f"{path.parent.name}/{path.stem}{model and '-'}{model}" for path, model in LAUNCHES]
FPDT_LAUNCHES = [(path, model) for path, model in LAUNCHES if path.parent == FPDT]
STUBS = {
    "torchrun": 'printf "%s\\n" "$@" >"$CAPTURED"',
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": "printf 'node0\\nnode1\\n'",
}
REAL_DATA = {"DATA_PATH": "data/text_document", "TOKENIZER": "tokenizer", "VOCAB_FILE": "v.json", "MERGE_FILE": "m.txt"}


@pytest.mark.parametrize("data", [{}, REAL_DATA], ids=["mock", "real"])
@pytest.mark.parametrize("script, model", LAUNCHES, ids=LAUNCH_IDS)
def test_launch_script(script: Path, model: str, data: dict[str, str], tmp_path: Path) -> None:
    config, world_size = read(launch(script, tmp_path, data | of_model(model), "--seed", "7"))

    assert config.run.seed == 7
    assert config.data.mock_data == (not data or "tiny" in script.stem)
    parallel = config.parallel
    sizes = parallel.ulysses_parallel_size, parallel.ring_parallel_size, parallel.context_parallel_size
    assert sizes[0] * sizes[1] == sizes[2]
    grid = parallel.tensor_model_parallel_size * sizes[2] * parallel.pipeline_model_parallel_size
    assert world_size == grid, "the header of each script describes a grid without data parallelism"


@pytest.mark.parametrize("stream", ["", "1"], ids=["offload", "stream"])
@pytest.mark.parametrize("script, model", FPDT_LAUNCHES)
def test_variables_of_the_fpdt_scripts(script: Path, model: str, stream: str, tmp_path: Path) -> None:
    tiny = "tiny" in script.stem
    variables = {"SEQ_LENGTH": "262144", "CHUNK": "32768", "STREAM": stream} | of_model(model)
    variables |= {} if tiny else {"GPUS": "2", "NNODES": "2", "ZERO_STAGE": "1"}
    config, world_size = read(launch(script, tmp_path, variables))

    assert world_size == (2 if tiny else 4)
    assert attention_chunks(config) == 262144 // 32768
    assert config.chunks.fpdt_offload and config.parallel.zero_stage == 1
    assert (config.chunks.fpdt_stream_hidden, config.chunks.offload_checkpoints) == (bool(stream), not stream)


def test_every_model_of_the_fpdt_paper_has_a_launch(tmp_path: Path) -> None:
    result = [launch(path, tmp_path / f"{path.stem}{model}", of_model(model)) for path, model in FPDT_LAUNCHES]
    assert {option(words, "--model") for words in result} - {None} == set(PAPER_MODELS)
    assert all("--fpdt" in words for words in result)


@pytest.mark.parametrize("script", MODELS, ids=lambda path: path.parent.name)
def test_an_unknown_model_is_refused(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(script)],
        env={**os.environ, "MODEL": "gpt-9b", "CHECKPOINT_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.returncode == 2 and done.stderr.startswith(f"error: MODEL=gpt-9b: use {MODELS[script][0]}")


@pytest.mark.parametrize("model, length", [("genslm-25b", 524288), ("genslm-33b", 458752)])
def test_genslm_scripts_reach_the_published_lengths(model: str, length: int, tmp_path: Path) -> None:
    """The scripts use 64 GPUs and partitioned learned positions. In chunks they reach 4,194,304 tokens."""
    script = GENSLM / "pretrain.sh"
    plain, gpus = read(launch(script, tmp_path / "plain", of_model(model)))
    longer = {"SEQ_LENGTH": "4194304", "CHUNK": "131072"} | of_model(model)
    far, _ = read(launch(script, tmp_path / "far", longer))
    assert gpus == 64 and plain.model.model == model and plain.data.seq_length == length
    for config in (plain, far):
        assert config.model.position_embedding_type == "learned_absolute"
        assert config.model.max_position_embeddings == config.data.seq_length
        assert config.parallel.partition_position_embedding and config.parallel.sequence_parallel
        assert config.parallel.zero_stage == 3 and config.data.tokenizer_type == "CodonTokenizer"
    assert not plain.chunks.fpdt and attention_chunks(far) == 32


def test_genslm_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's commands are accepted and make the files that they read. Without a genome it prints one line."""
    tree, captured = tmp_path / "tree", tmp_path / "captured"
    script = tree / "examples" / "genslm" / "quickstart.sh"
    for name in (script, tree / "scripts" / "setup.sh"):
        name.parent.mkdir(parents=True)
    shutil.copy(GENSLM / "quickstart.sh", script)
    shutil.copytree(COMMON, tree / "examples" / "common")
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" "" >>{captured}\n')
    stub.chmod(0o755)
    (tree / "scripts" / "setup.sh").write_text(f"echo {stub}\n")
    (tmp_path / "genome.fa").write_text(">a\n" + "ACGTTGCAAC\n" * 300)
    monkeypatch.chdir(tmp_path)  # the genome's path is relative to this folder
    done = run_quickstart(script, "genome.fa", "out/new")
    assert done.returncode == 0, done.stderr
    preprocess, train, plot = (text.splitlines() for text in captured.read_text().strip().split("\n\n"))
    assert plot[0] == "tools/plot_run.py"
    monkeypatch.chdir(tree)
    runpy.run_path(str(ROOT / preprocess[0]), run_name="tool")["main"](preprocess[1:])
    config, _ = read(train)
    assert (config.parallel.ulysses_parallel_size, config.parallel.ring_parallel_size) == (2, 2)
    assert open_prefix(config.data.data_path[0], "").lengths()[:].tolist() == [1001]
    Path("out/new/log.jsonl").touch()
    again = run_quickstart(script, "genome.fa", "out/new")
    assert again.returncode == 2 and "already holds a run" in again.stderr
    script.write_text(re.sub(r"^LAMBDA=.*$", "LAMBDA=/no/such/genome.fa.gz", script.read_text(), flags=re.M))
    nothing = run_quickstart(script, "", "out/other")
    assert nothing.returncode == 2 and nothing.stderr.startswith("error: no genome: ")


def run_quickstart(script: Path, genome: str, out: str) -> subprocess.CompletedProcess:
    """Run the script with a stand-in for apt-get, which fails."""
    stub = script.parent / "apt-get"
    stub.write_text("#!/bin/sh\nexit 100\n")
    stub.chmod(0o755)
    env = {**os.environ, "PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", str(script), genome, out], env=env, capture_output=True, text=True, timeout=patience(120)
    )


def test_there_are_scripts_for_every_launcher() -> None:
    text = {path: path.read_text() for path in [*SCRIPTS, *COMMON.glob("*.sh")]}
    assert all("# SPDX-License-Identifier: Apache-2.0" in t.splitlines()[:2] for t in text.values())
    for launcher in ("--standalone", "--node-rank", "srun"):
        assert any(launcher in t for t in text.values()), launcher


@pytest.mark.parametrize("script, model", LAUNCHES, ids=LAUNCH_IDS)
def test_a_script_runs_from_any_folder_and_check_script_sees_the_same_command(
    script: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm starts a copy of the script. The copy looks for files to source in the folder in which ``sbatch`` ran."""
    words = launch(script, tmp_path / "here", of_model(model), "--seed", "7")
    cwd = tmp_path / "elsewhere"
    cwd.mkdir()
    assert launch(script, tmp_path / "there", of_model(model), "--seed", "7", cwd=cwd) == words
    monkeypatch.chdir(ROOT)
    for name, value in of_model(model).items():
        monkeypatch.setenv(name, value)
    if "slurm" in script.stem:
        assert launch(script, tmp_path / "spool", {}, "--seed", "7", cwd=cwd, spooled=True) == words
    trust = ["--trust-script"] if why_not() else []
    code = check_script.main([*trust, str(script.relative_to(ROOT)), "--seed", "7"])
    text = capsys.readouterr().out
    entry = next(n for n, word in enumerate(words) if word.startswith("pretrain_"))
    assert code == 0 and shlex.join(words[entry:]) in text.partition("start it with")[2]


def read(words: list[str]) -> tuple[Any, int]:
    """The configuration of a command, and the number of processes."""
    entry = next(n for n, word in enumerate(words) if word.startswith("pretrain_"))
    launcher, argv, defaults = words[:entry], words[entry + 1 :], entry_defaults(words[entry])
    world_size = int(option(launcher, "--nproc-per-node")) * int(option(launcher, "--nnodes", "1"))
    return arguments.parse(argv, defaults=defaults, world_size=world_size), world_size


def launch(
    script: Path, folder: Path, data: dict[str, str], *flags: str, cwd: Path | None = None, spooled: bool = False
) -> list[str]:
    """Run a script in a copy of the tree with stubs for the launchers; returns torchrun's arguments.

    Args:
        cwd: the working directory.
        spooled: run a copy of the script in another folder, as Slurm does.
    """
    copy = folder / "repository" / script.relative_to(ROOT)
    copy.parent.mkdir(parents=True)
    shutil.copytree(COMMON, folder / "repository" / "examples" / "common")
    if spooled:
        copy, data = folder / "slurm_script", {**data, "SLURM_SUBMIT_DIR": str(folder / "repository")}
    shutil.copy(script, copy)
    stubs = folder / "stubs"
    stubs.mkdir()
    for name, body in STUBS.items():
        (stubs / name).write_text(f"#!/bin/sh\n{body}\n")
        (stubs / name).chmod(0o755)
    nodes = re.search(r"#SBATCH --nodes=(\d+)", script.read_text())
    env = {
        "PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}",
        "CAPTURED": str((folder / "captured").resolve()),
        "SLURM_NNODES": nodes[1] if nodes else "",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "node[0-1]",
        **data,
    }
    done = subprocess.run(
        ["bash", str(copy), *flags], env=env, cwd=cwd, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.returncode == 0, done.stderr
    return (folder / "captured").read_text().splitlines()


def of_model(model: str) -> dict[str, str]:
    """The variable that names a script's model; empty for a script of one model."""
    return {"MODEL": model} if model else {}


def option(words: list[str], name: str, default: str | None = None) -> str | None:
    return words[words.index(name) + 1] if name in words else default


def entry_defaults(entry: str) -> dict[str, object]:
    """The defaults of an entry point (LLAMA in pretrain_llama.py)."""
    return runpy.run_path(str(ROOT / entry), run_name="entry").get("LLAMA", {})
