# SPDX-License-Identifier: Apache-2.0
"""The commands of README's table run as they are written, on small stand-ins for what a reader has."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.hugging_face import save_model
from tests.program import run_forked

ROOT = Path(__file__).resolve().parents[2]
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
    said = run("tools/evaluate.py", as_written(command, trained / "checkpoint"))
    assert "--seq-length 256, the longest of the checkpoint" in said and "256 tokens a row" in said
    assert "--tokenizer-type ByteLevelTokenizer" in said and "data_text_document" in said
    assert "--attention-mask window, the checkpoint's" in said
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
