# SPDX-License-Identifier: Apache-2.0
"""tools/move.py plans a launch script's run at a longer sequence and writes the changes into the script."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.training.arguments.parser import parse
from tests import moved_scripts
from tools import check_script, move
from tools.script_edits import edited, on_nodes, with_allocator

SCRIPTS = Path(__file__).parent / "data" / "scripts"
TO = "--seq-length 32K --gpus 8 --gpu H100"


def moved(script: str, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = move.main([script, *TO.split(), *flags])
    return code, "".join(capsys.readouterr())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(SCRIPTS, tmp_path / "folder")
    monkeypatch.chdir(tmp_path / "folder")
    return tmp_path / "folder"


@pytest.mark.parametrize(
    "before, after",
    [
        ("S=4096\nx --seq-length $S", "S=8192\nx --seq-length $S"),
        ('S=${S:-4096}\nx --seq-length "${S}"', 'S=${S:-8192}\nx --seq-length "${S}"'),
        ("x --seq-length ${S:-4096} --b", "x --seq-length ${S:-8192} --b"),
        ("S=$((4*K))\nx --seq-length $S", "S=$((4*K))\nx --seq-length 8192"),
        ("# --seq-length 1\nx --seq-length=4096", "# --seq-length 1\nx --seq-length=8192"),
        ("A=(\n  --seq-length $((2 * K))\n)", "A=(\n  --seq-length 8192\n)"),
    ],
)
def test_a_value_is_changed_where_it_is_written(before: str, after: str):
    assert edited(before, {"--seq-length": ["8192"]}, {"--seq-length": 1}, ["--seq-length"] * ("((" in before)) == after


@pytest.mark.parametrize("text", ["S=$((4*K))\nx --seq-length $S", "x --seq-length $((4 * K))"])
def test_what_the_script_computes_stays_at_first(text: str):
    assert edited(text, {"--seq-length": ["8192"]}, {"--seq-length": 1}) == text


@pytest.mark.parametrize(
    "before, after",
    [
        ("x --seq-length 1 --tp 8", "x --seq-length 1 --ring 2"),
        ("A=(\n  --seq-length 1\n  --tp 8\n)", "A=(\n  --seq-length 1\n  --ring 2\n)"),
        ("x --seq-length 1 \\\n  --tp 8 \\\n  --b", "x --seq-length 1 \\\n  --ring 2 \\\n  --b"),
        ('A="--switch $A"\nx --seq-length 1 $A', 'A=" $A"\nx --seq-length 1 --ring 2 $A'),
        ('A="--tp 8"\nx --seq-length 1 $A', 'A=""\nx --seq-length 1 --ring 2 $A'),
    ],
)
def test_flags_appear_and_disappear(before: str, after: str):
    changes = {"--tp": None, "--switch": None, "--ring": ["2"]}
    assert edited(before, changes, {"--seq-length": 1, "--tp": 1, "--switch": 0}) == after


def test_nodes_of_a_job():
    text = "#SBATCH --nodes=4\nN=4\ntorchrun --nnodes $N --nproc-per-node 8"
    words = "torchrun --nnodes 4 --nproc-per-node 8".split()
    assert on_nodes(text, words, 2, 8) == "#SBATCH --nodes=2\nN=2\ntorchrun --nnodes $N --nproc-per-node 8"


def test_the_allocator_is_set_as_plans_assume_it():
    line = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
    assert with_allocator("#!/bin/bash\n#SBATCH -N 2\n\nx\n") == f"#!/bin/bash\n#SBATCH -N 2\n\n{line}x\n"
    assert with_allocator("export PYTORCH_ALLOC_CONF=a:1\nx\n") == "export PYTORCH_ALLOC_CONF=a:1\nx\n"


def test_a_script_is_moved_and_is_accepted(folder: Path, capsys: pytest.CaptureFixture[str]):
    before = (folder / "gpt_slurm.sbatch").read_text()
    changes = {"layers 48": "layers 4", "size 8192": "size 1024", "parallel-size 3": "parallel-size 1"}
    computed = "S=4096\nTOKENS=4096000000\nBATCH=$((TOKENS / 8000000))\nCMD="
    changes |= {"CMD=": computed, "length 4096": "length $S --wandb-exp-name run_$S --wandb-project p"}
    changes |= {"size 512": "size $BATCH"}
    changes |= {"samples 1000000": "samples $((TOKENS / S)) --lr-warmup-samples $((BATCH * 10))"}
    for old, new in changes.items():
        before = before.replace(old, new)
    (folder / "gpt_slurm.sbatch").write_text(before)
    code, text = moved("gpt_slurm.sbatch", capsys, "--no-dry-run", "--output", "moved.sbatch")
    assert code == 0 and (folder / "gpt_slurm.sbatch").read_text() == before
    assert "32 processes, 4K tokens a sample -> 32K on 8 x H100-80G" in text and "Plan: " in text
    assert "dropout is not in the plan" in text
    assert "USD (prices: round example numbers: use your own prices)" in text and "GPU-hours" in text
    assert "\n-#SBATCH --nodes=4\n+#SBATCH --nodes=1\n" in text and "\n+S=32768\n" in text
    assert "--train-samples $((TOKENS / S))" in (folder / "moved.sbatch").read_text()  # as before, at another length
    assert "--wandb-exp-name run_$S " in (folder / "moved.sbatch").read_text()  # a name made of settings
    assert "--global-batch-size 64 " in text  # no longer what the script computes
    kept = [line for line in before.splitlines() if "srun" in line or "LAUNCHER" in line or "--data-path" in line]
    result = (folder / "moved.sbatch").read_text()
    assert all(line in result for line in kept) and str(folder) not in result
    assert check_script.main(["moved.sbatch"]) == 0 and "(8 processes)" in capsys.readouterr().out


def test_the_short_runs_folders_are_left_to_the_user():
    def said(flags: str) -> list[str]:
        return move.short_runs_folders(SimpleNamespace(launch=SimpleNamespace(flags=flags.split())))

    assert said("--save new --load old --lr 1")[0].startswith("--save new --load old: these are the short run's.")
    assert "--load out --finetune and a new --save" in said("--save out")[0] and not said("--lr 1")


def test_a_missing_file_is_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "reads.sh").write_text("set -e\nB=$(cat $DATA/blend.txt)\ntorchrun pretrain_gpt.py --num-layers 2 $B")
    code, text = moved("reads.sh", capsys)
    assert code == 2 and "error: reads.sh reads /blend.txt, which does not exist on this machine: copy it here" in text


@pytest.mark.parametrize(
    "flags, rope, expected",
    [
        ("--position-embedding-type rope", "yarn", {"--position-embedding-type": ["yarn"],
                                                    "--yarn-rotary-scaling-factor": ["16"]}),
        ("--position-embedding-type rope --kv-channels 64", "base", {"--rotary-base": ["174970"]}),
        ("--position-embedding-type rope", "keep", {}),
        ("--model llama3.1-8b --seq-length 8192", "yarn", {}),
        ("--position-embedding-type yarn --yarn-rotary-scaling-factor 2", "yarn",
         {"--yarn-rotary-scaling-factor": ["32"]}),
    ],
)  # fmt: skip
def test_positions_reach_the_length(flags: str, rope: str, expected: dict[str, list[str]]):
    sizes = "" if "--model" in flags else "--hidden-size 64 --num-attention-heads 1 --max-position-embeddings 8192 "
    config = parse(f"{sizes}{flags} --seq-length 8192".split()[0 if "--model" not in flags else 0 :])
    positions = move.positions_at(config, 131072, rope)
    changes = positions.changes
    assert expected.items() <= changes.items() and positions.stretched == bool(expected)
    assert changes["--seq-length"] == changes["--max-position-embeddings"] == ["131072"]
    rotary = [flag for flag in changes if "yarn" in flag or "rot" in flag or "type" in flag]
    assert bool(rotary) == bool(expected)


def test_a_script_whose_model_knows_the_length_is_told_of_rope_keep():
    words = "--hidden-size 64 --num-attention-heads 1 --max-position-embeddings 40960 --position-embedding-type rope"
    config = parse(f"{words} --seq-length 4096".split())
    said = {length: move.positions_at(config, length, "yarn").words for length in (32768, 65536)}
    assert "knows 40,960 positions, as the script says: --rope keep" in said[32768]
    assert "as the script says" not in said[65536]


@pytest.mark.lab
def test_a_moved_scripts_dry_run(folder: Path, capsys: pytest.CaptureFixture[str]):
    code, text = moved("llama_torchrun.sh", capsys, "--html", "plans.html")
    assert code == 0 and "Plan and dry run" in text and "│ fits" in text and "+    --seq-length" not in text
    page = (folder / "plans.html").read_text()
    assert "GPU-hours" in page and "--mock-data" in page  # the script's own data
    script = (folder / "llama_torchrun.sh").read_text().replace("--mock-data", "--data-path $(python blend.py)")
    (folder / "blend.sh").write_text(script)
    assert moved("blend.sh", capsys, "--no-dry-run", "--html", "blend.html")[0] == 0
    page = (folder / "blend.html").read_text()
    assert "--data-path DATA" in page and "--mock-data" not in page  # of which only the user knows


FITTING = [one for one in json.loads(moved_scripts.RECORD.read_text()) if "; fits" in one.get("dry_run", "")]


@pytest.mark.parametrize("script", FITTING, ids=lambda one: Path(one["path"]).name)
def test_moved_commands_of_published_scripts_are_accepted(script: dict):
    words = shlex.split(script["command"])
    if "transformer_engine" in words:  # it need not be installed here
        words[words.index("transformer_engine")] = "local"
    data = parse(words, None, script["gpus"]).data
    assert data.seq_length == 32768 and data.mock_data
