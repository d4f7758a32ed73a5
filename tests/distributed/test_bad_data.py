# SPDX-License-Identifier: Apache-2.0
"""Data that turn out to be unusable while a program trains: one line on all ranks, whatever the grid."""

import os
import re
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.training.arguments.config import Config, DataConfig
from megatron.training.data.datasets import build_datasets
from megatron.training.data.tokenizer import build_tokenizer
from tests.distributed.test_program import FLAGS, PROGRAM, ROOT
from tests.patience import patience
from tests.program import run_ranks

MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 100"
DOCUMENTS, LENGTH, SEED = 300, 40, 1234
GRIDS = {
    "TP 2": "--tensor-model-parallel-size 2",
    "DP 2": "",
    "CP 2": "--ring-parallel-size 2",
    "PP 2": "--pipeline-model-parallel-size 2",
    "ZeRO 3": "--zero-stage 3",
    "TP 2 x DP 2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "U 2, documents": "--ulysses-parallel-size 2 --reset-attention-mask",
}
USUAL = ("TP 2", "DP 2")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents of equal length that end with the end-of-document token; the prefix of their files."""
    random = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{tmp_path}/corpus.bin", dtype=np.int32)
    for _ in range(DOCUMENTS):
        builder.add_document([*random.integers(0, 100, LENGTH - 1), 100], [LENGTH])
    builder.finalize(f"{tmp_path}/corpus.idx")
    return tmp_path / "corpus"


def flags(corpus: Path, steps: int, more: str = "") -> list[str]:
    data = f"--data-path {corpus} --split 1,0,0 --tokenizer-type NullTokenizer --vocab-size 100 --seed {SEED}"
    log = f"--log-jsonl {corpus.parent}/log.jsonl --distributed-timeout-minutes 2"
    return f"{FLAGS.replace(MOCK, data)} --train-iters {steps} --eval-iters 0 {log} {more}".split()


def spoil(corpus: Path, steps: int, step: int, token: int) -> int:
    """Fill a document that is first read in a step, and not by the check at the start, with a token id; its number."""
    config = Config()
    config.data = DataConfig(seq_length=64, data_path=[str(corpus)], split="1,0,0", data_cache_path=f"{corpus}-other")
    config.run.seed = SEED
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 100)
    dataset, _, _ = build_datasets(config, tokenizer, (2 * steps, 0, 0))
    seen = set(np.linspace(0, DOCUMENTS - 1, 64).astype(np.int64).tolist())
    read = [set(dataset._query_document_sample_shuffle_indices(n)[1].tolist()) for n in range(2 * step)]
    document = min(read[2 * step - 1] - seen.union(*read[: 2 * step - 1]))
    with open(f"{corpus}.bin", "r+b") as file:
        file.seek(4 * document * LENGTH)
        file.write(np.full(LENGTH, token, np.int32).tobytes())  # a sample may hold any part of it
    return document


def run(words: list[str], ranks: int, program: Path = PROGRAM) -> list[subprocess.CompletedProcess]:
    return run_ranks(program, words, {**os.environ, "OMP_NUM_THREADS": "1"}, ranks)


def line_of(done: list[subprocess.CompletedProcess]) -> str:
    """The one line of errors of a run that failed on all ranks, without the rank."""
    said = "".join(one.stderr for one in done)
    assert [one.returncode for one in done] == [1] * len(done), said
    (line,) = said.splitlines()
    return re.sub(r" \(rank \d+ on .*\)$", "", line)


@pytest.mark.parametrize(
    ("grid", "workers"),
    [
        pytest.param(grid, workers, marks=() if grid in USUAL and not workers else pytest.mark.full)
        for grid in GRIDS
        for workers in (0, 2)
    ],
)
def test_an_id_beyond_the_vocabulary(corpus, grid, workers):
    """The same line on every grid, after the same steps; with a loader's processes too."""
    document = spoil(corpus, 8, 3, 5000)
    ranks = 4 if "x" in grid else 2
    line = line_of(run(flags(corpus, 8, f"{GRIDS[grid]} --num-workers {workers}"), ranks))
    assert line == (
        f"error: {corpus}.bin: document {document} holds token id 5000, outside the 101 ids of NullTokenizer "
        "--vocab-size 100: made with another tokenizer; after iteration 2: correct the data and start again, or "
        "leave a batch of training data out with --iterations-to-skip 2"
    )
    assert len((corpus.parent / "log.jsonl").read_text().splitlines()) == 2


@pytest.mark.full
def test_a_negative_id_on_one_process_and_its_way_out(corpus):
    """-1 is what core takes for padding: it would train in silence."""
    document = spoil(corpus, 4, 2, -1)
    line = line_of(run(flags(corpus, 4), 1))
    assert f"document {document} holds token id -1, outside the 101 ids" in line and "after iteration 1:" in line
    (done,) = run(flags(corpus, 4, "--iterations-to-skip 1"), 1)
    assert done.returncode == 0 and "iteration 2: its batch is left out" in done.stdout, done.stderr


@pytest.mark.full
def test_an_id_beyond_the_vocabulary_in_validation_data(corpus):
    document = spoil(corpus, 4, 2, 101)
    words = flags(corpus, 4, "--tensor-model-parallel-size 2")
    words[words.index("--data-path") : words.index("--split") + 2] = [
        *("--train-data-path", str(corpus), "--valid-data-path", str(corpus), "--eval-interval", "1")
    ]
    words[words.index("--eval-iters") + 1] = "8"
    assert f"document {document} holds token id 101" in line_of(run(words, 2))


def while_running(words: list[str], log: Path, action, ranks: int) -> list[subprocess.CompletedProcess]:
    """Run a program, and do something to its data after its third step."""

    def wait() -> None:
        end = time.monotonic() + patience(60)
        while time.monotonic() < end and not (log.exists() and len(log.read_text().splitlines()) > 2):
            time.sleep(0.01)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    done = run(words, ranks)
    thread.join()
    return done


@pytest.mark.parametrize(
    ("what", "ranks", "workers"),
    [
        (".bin", 2, 0),
        *[
            pytest.param(what, ranks, workers, marks=pytest.mark.full)
            for what in (".bin", ".idx", "document_index", "sample_index", "shuffle_index")
            for ranks, workers in ((1, 0), (2, 2))
        ],
    ],
)
def test_a_file_that_becomes_shorter(corpus, what, ranks, workers):
    """A page of a mapping behind the end of its file would end the process with SIGBUS, without a line."""

    def cut() -> None:
        path = f"{corpus}{what}"
        if not what.startswith("."):
            (path,) = corpus.parent.glob(f"index-cache/*/*{what}.npy")
        os.truncate(path, 0)

    words = flags(corpus, 100_000, f"--num-workers {workers} --exit-duration-in-mins 3")
    line = line_of(while_running(words, corpus.parent / "log.jsonl", cut, ranks))
    assert re.search(rf"{re.escape(what)}(\.npy)? ends before byte \d+.*it became shorter while in use", line)


@pytest.mark.full
def test_files_that_are_deleted_while_they_are_read(corpus):
    """They stay open: training goes on, as with any file."""
    cache = corpus.parent / "index-cache"

    def delete() -> None:
        for path in (*corpus.parent.glob("corpus.*"), *cache.glob("*/*")):
            path.unlink()

    done = while_running(flags(corpus, 60, "--num-workers 2"), corpus.parent / "log.jsonl", delete, 2)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    assert not Path(f"{corpus}.bin").exists() and not list(cache.glob("*/*"))
    assert len((corpus.parent / "log.jsonl").read_text().splitlines()) == 60


@pytest.mark.full
def test_evaluation_ends_in_the_same_line(corpus, tmp_path):
    save = ["--save", str(tmp_path / "c")]
    assert run([*flags(corpus, 1), *save], 1)[0].returncode == 0
    document = spoil(corpus, 4, 2, 5000)
    words = f"--load {tmp_path}/c --seq-length 64 --eval-tasks loss-by-position --valid-data-path {corpus} "
    words += "--tokenizer-type NullTokenizer --vocab-size 100 --eval-iters 150 --global-batch-size 2 --device cpu "
    words += f"--num-workers 0 --eval-output {tmp_path}/e --tensor-model-parallel-size 2"
    line = line_of(run(words.split(), 2, ROOT / "tools" / "evaluate.py"))
    assert line.startswith(f"error: {corpus}.bin: document {document} holds token id 5000")
