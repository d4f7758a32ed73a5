# SPDX-License-Identifier: Apache-2.0
"""A start prints what concerns the user: no report of the launcher after a refusal, no warnings of libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from megatron.training.settings.same_network import differences, of_run
from tools import plot_memory, torchrun

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("code", [2, 1, -9])
def test_after_a_refusal_the_launcher_ends_with_its_code(code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(tmp_path / "none"))

    def failed(_: list[str] | None) -> None:
        raise ChildFailedError("pretrain_gpt.py", {0: failure})

    monkeypatch.setattr(run, "main", failed)
    if code == 2:
        assert torchrun.main([]) == 2
    else:
        with pytest.raises(ChildFailedError):
            torchrun.main([])


def test_an_intended_yarn_is_one_difference():
    sizes = "--num-layers 1 --hidden-size 64 --num-attention-heads 1 --seq-length 64"
    before = of_run(parse(f"{sizes} --position-embedding-type rope".split()))
    yarn = "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64"
    after = of_run(parse(f"{sizes} {yarn}".split()))
    assert differences(before, after).function == ["--position-embedding-type rope in the checkpoint, yarn in this run"]
    assert len(differences(after | {"yarn_rotary_scaling_factor": 2.0}, after).function) >= 1


@pytest.mark.lab
def test_a_refusal_of_two_processes_is_one_line():
    words = "--nproc-per-node 2 --standalone pretrain_llama.py --model llama3-8b --lora-targets x".split()
    done = subprocess.run([sys.executable, "tools/torchrun.py", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 6


@pytest.mark.lab
def test_tokenizing_with_core_prints_none_of_its_warnings(tmp_path: Path):
    table = [{"rank": i, "token_bytes": b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    (tmp_path / "t.json").write_text(json.dumps(table))
    (tmp_path / "a.txt").write_text("some text")
    words = "--input a.txt --output-prefix out --tokenizer-type TikTokenizer --tokenizer-model t.json --vocab-size 300"
    program = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *words.split()]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert "Warning" not in done.stderr


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--outptu x", "--outptu is not an option; did you mean --output?"),
        ("--output x --by tiem f", "argument --by: tiem is not supported; did you mean time? choose from time, events"),
    ],
)
def test_a_wrong_option_of_a_tool_is_answered_in_one_line(words: str, answer: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        plot_memory.main(words.split())
    assert end.value.code == 2 and capsys.readouterr().err == f"error: {answer}\n"


def test_lengths_may_be_written_as_the_planner_takes_them():
    assert parse("--seq-length 128K --max-position-embeddings 1M".split()).data.seq_length == 131072
    with pytest.raises(Refusal, match="--seq-length: invalid tokens value: '0.3K'"):
        parse("--seq-length 0.3K".split())


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        ("--load x", "--use-checkpoint-args takes the model from --load"),
        ("--num-layers 1 --hidden-size 64 --num-attention-heads 1 --seq-length 64 --max-position-embeddings 64 "
         "--micro-batch-size 1 --mock-data --vocab-size 99 --use-checkpoint-args --load x "
         "--yarn-rotary-scaling-factor 4", "keeps the checkpoint's positions; add --finetune to change them"),
    ],
)  # fmt: skip
def test_what_a_checkpoint_gives_is_said_where_it_is_missing(flags: str, answer: str):
    with pytest.raises(Refusal, match=answer):
        parse(flags.split(), world_size=1)
