# SPDX-License-Identifier: Apache-2.0
"""Data that become unusable during training: one line on all ranks, on every grid."""

import json
import math
import os
import re
import subprocess
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from safetensors.torch import load_file
from torch.utils.data import Dataset

from megatron.training.arguments.parser import parse
from megatron.training.data.datasets import build_datasets
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config, DataConfig
from megatron.training.watch import LEAST, Watch
from tests.distributed.test_program import FLAGS, PROGRAM, ROOT
from tests.distributed.training_runs import make_job, run_loop
from tests.pairs import full_but
from tests.patience import patience
from tests.program import ENVIRONMENT, run_ranks

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
    """Write documents of equal length that end with the end-of-document token; returns the prefix of their files."""
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
    """Fill a document that the check at the start does not read with a token id; returns its number."""
    config = Config()
    config.data = DataConfig(seq_length=64, data_path=[str(corpus)], split="1,0,0", data_cache_path=f"{corpus}-other")
    config.run.seed = SEED
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 100)
    dataset, _, _ = build_datasets(config, tokenizer, (2 * steps, 0, 0))
    seen = set(np.linspace(0, DOCUMENTS - 1, 64).astype(np.int64).tolist())
    read = [set(dataset.tokens_and_documents(n)[1].tolist()) for n in range(2 * step)]
    document = min(read[2 * step - 1] - seen.union(*read[: 2 * step - 1]))
    with open(f"{corpus}.bin", "r+b") as file:
        file.seek(4 * document * LENGTH)
        file.write(np.full(LENGTH, token, np.int32).tobytes())  # a sample may contain any part of it
    return document


def run(words: list[str], ranks: int, program: Path = PROGRAM) -> list[subprocess.CompletedProcess]:
    return run_ranks(program, words, ENVIRONMENT, ranks)


def line_of(done: list[subprocess.CompletedProcess]) -> str:
    """The one line of errors of a run that failed on all ranks, without the rank."""
    printed = "".join(one.stderr for one in done)
    assert [one.returncode for one in done] == [1] * len(done), printed
    (line,) = printed.splitlines()
    return re.sub(r" \(rank \d+ on .*\)$", "", line)


@pytest.mark.parametrize("grid, workers", full_but(product(GRIDS, (0, 2)), *product(USUAL, (0,))))
@pytest.mark.usual(0)
def test_an_id_beyond_the_vocabulary(corpus, grid, workers):
    """The same line on every grid after the same steps, also with loader processes."""
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
def test_a_negative_id_is_refused_with_a_remedy_on_one_process(corpus):
    """core treats -1 as padding and would silently train on it."""
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
    """Run a program and change its data after the third step."""

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
    """With a mapped file, the process would end by SIGBUS and without a message."""

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
    """The files stay open, so training continues."""
    cache = corpus.parent / "index-cache"

    def delete() -> None:
        for path in (*corpus.parent.glob("corpus.*"), *cache.glob("*/*")):
            path.unlink()

    done = while_running(flags(corpus, 60, "--num-workers 2"), corpus.parent / "log.jsonl", delete, 2)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    assert not Path(f"{corpus}.bin").exists() and not list(cache.glob("*/*"))
    assert len((corpus.parent / "log.jsonl").read_text().splitlines()) == 60


@pytest.mark.full
def test_evaluation_names_the_same_bad_document(corpus, tmp_path):
    save = ["--save", str(tmp_path / "c")]
    assert run([*flags(corpus, 1), *save], 1)[0].returncode == 0
    document = spoil(corpus, 4, 2, 5000)
    words = f"--load {tmp_path}/c --seq-length 64 --eval-tasks loss-by-position --valid-data-path {corpus} "
    words += "--tokenizer-type NullTokenizer --vocab-size 100 --eval-iters 150 --global-batch-size 2 --device cpu "
    words += f"--num-workers 0 --eval-output {tmp_path}/e --tensor-model-parallel-size 2"
    line = line_of(run(words.split(), 2, ROOT / "tools" / "evaluate.py"))
    assert line.startswith(f"error: {corpus}.bin: document {document} holds token id 5000")


# The same bad batches are left out on every grid, and the run continues as if they did not exist.


BAD_BATCH_FLAGS = "--num-layers 2 --train-iters 7 --global-batch-size 2 --micro-batch-size 1 --log-interval 1"
BAD_BATCH_GRIDS = (
    (2, "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1"),
    (4, "--pipeline-model-parallel-size 2 --ring-parallel-size 2"),
    (2, "--zero-stage 3"),  # only with --full
)


class Poisoned(Dataset):
    """A dataset of which one sample makes the loss infinite, or has only one label."""

    def __init__(self, dataset: Any, number: int, kind: str) -> None:
        self.dataset, self.number, self.kind = dataset, number, kind

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        sample = dict(self.dataset[number])
        if number == self.number and self.kind == "infinite":
            sample["loss_mask"] = sample["loss_mask"] * 1e38
        elif number == self.number:
            sample["labels"] = torch.full_like(sample["labels"], 7)
        return sample


def train(flags: str, folder: str, number: int = 9, kind: str = "infinite") -> tuple[dict[int, float], str, list]:
    """Losses by iteration, how the run ended, and its weights."""
    from megatron.training.report.reporter import Reporter
    from megatron.training.step import Diverged

    job = make_job(f"{BAD_BATCH_FLAGS} --log-jsonl {folder}/log.jsonl {flags}")
    if job.datasets[0] is not None:
        job.datasets = (Poisoned(job.datasets[0], number, kind), None, None)
    first = job.progress.iteration
    reporter = Reporter(job.config, active=dist.get_rank() == 0, first_iteration=first, last_iteration=job.iterations)
    ended = ""
    try:
        run_loop(job, reporter)
    except Diverged as error:
        ended = str(error)
    finally:
        reporter.close()
    dist.barrier()
    rows = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    weights = [parameter.detach().clone() for chunk in job.model_chunks for parameter in chunk.parameters()]
    return {row["iteration"]: row["lm_loss"] for row in rows}, ended, weights if dist.get_world_size() == 1 else []


def same_weights(one: tuple, other: tuple) -> bool:
    return all(map(torch.equal, one[2], other[2]))


@pytest.mark.lab
def test_a_bad_batch_is_left_out_and_written_on_every_grid(pool, tmp_path: Path, long_runs):
    skip = "--skip-bad-batches 1"
    alone = pool.run(train, 1, skip, str(tmp_path / "alone"))[0]
    assert list(alone[0]) == list(range(1, 8)) and alone[0][5] is None and alone[1] == ""
    by_hand = pool.run(train, 1, "--iterations-to-skip 4", str(tmp_path / "by_hand"))[0]
    assert by_hand[0] == {iteration: loss for iteration, loss in alone[0].items() if iteration != 5}
    assert same_weights(alone, by_hand)
    grids = BAD_BATCH_GRIDS if long_runs else BAD_BATCH_GRIDS[:1]
    for number, (ranks, grid) in enumerate(grids):
        losses = pool.run(train, ranks, f"{skip} {grid}", str(tmp_path / str(number)))[0][0]
        assert losses.pop(5) is None
        assert losses == {iteration: pytest.approx(alone[0][iteration], rel=1e-5) for iteration in losses}, grid
    message = json.loads((tmp_path / "alone" / "bad_batches" / "iter_0000005.json").read_text())
    assert message["samples"] == [8, 9] and message["reason"] == "the loss is inf" and message["lm_loss"] == "inf"
    for folder in ("alone", *map(str, range(len(grids)))):
        batch = load_file(tmp_path / folder / "bad_batches" / "iter_0000005.safetensors")
        assert batch["numbers"].tolist() == [8, 9] and batch["tokens"].shape == (2, 64)
        assert batch["loss_mask"].max() > 1e37


def test_one_more_than_allowed_ends_the_run(pool, tmp_path: Path):
    losses, ended, _ = pool.run(train, 1, "", str(tmp_path))[0]
    assert list(losses) == [1, 2, 3, 4] and ended == "the loss is inf"


@pytest.mark.full
def test_a_spike_of_the_gradient_norm(pool, tmp_path: Path):
    flags = "--train-iters 14 --check-for-large-grads --spike-factor 1.5"
    message = pool.run(train, 1, flags, str(tmp_path / "reported"), 24, "labels")[0]
    assert None not in message[0].values() and not (tmp_path / "reported" / "bad_batches").exists()
    for ranks, grid in ((1, ""), (2, "--ulysses-parallel-size 2")):
        folder = tmp_path / f"skipped{ranks}"
        pool.run(train, ranks, f"{flags} --skip-bad-batches 1 {grid}", str(folder), 24, "labels")
        (path,) = (folder / "bad_batches").glob("*.json")
        result = json.loads(path.read_text())
        assert result["iteration"] == 13 and result["reason"].startswith("the gradient norm is "), result


OVERLAP = "1 --overlap-grad-reduce --overlap-param-gather"


@pytest.mark.full
@pytest.mark.parametrize("zero", ["0", OVERLAP])
def test_a_rolled_back_run_equals_one_resumed_without_the_skipped_samples(pool, tmp_path: Path, zero: str):
    flags = f"--zero-stage {zero} --save-interval 3 --save"
    back = f"{flags} {tmp_path}/c --skip-bad-batches 1 --rollback-on-bad-batch --exit-interval 7"
    ranks = 1 if zero == "0" else 2
    rolled = pool.run(train, ranks, back, str(tmp_path / "rolled"))[0]
    assert rolled[0][5] is None and math.isfinite(rolled[0][7])
    again = f"{flags} {tmp_path}/d --load {tmp_path}/c --ckpt-step 3 --iterations-to-skip 3 4"
    by_hand = pool.run(train, ranks, again, str(tmp_path / "by_hand"))[0]
    assert by_hand[0] == {6: rolled[0][6], 7: rolled[0][7]} and same_weights(rolled, by_hand)


def test_without_a_checkpoint_a_run_cannot_roll_back(pool, tmp_path: Path):
    flags = f"--skip-bad-batches 1 --rollback-on-bad-batch --save-interval 5 --save {tmp_path}/c"
    losses, ended, _ = pool.run(train, 1, flags, str(tmp_path))[0]
    assert list(losses) == [1, 2, 3, 4] and ended == "the loss is inf"


def judged(watch: Watch, values: list[tuple[float, float]]) -> list[str]:
    return [watch.judge(loss, norm, torch.device("cpu")) for loss, norm in values]


def watch(flags: str) -> Watch:
    return Watch(parse(flags.split()))


def test_spikes_are_measured_by_good_steps():
    loss = watch("--check-for-spiky-loss --skip-bad-batches 9 --spike-factor 2")
    assert not any(judged(loss, [(3.0, 1.0)] * (LEAST - 1) + [(100.0, 1.0)]))  # too few steps for a median
    result = judged(loss, [(3.0, 100.0), (6.1, 1.0), (6.1, 1.0), (5.9, 1.0)])
    assert [bool(one) for one in result] == [False, True, True, False]
    assert result[1] == "the loss is 6.1, 2.0 times the 3 of the 11 steps before"
    message = watch("--check-for-spiky-loss --check-for-large-grads")
    assert not any(judged(message, [(3.0, 1.0)] * LEAST + [(31.0, 11.0)]))
    assert len(message.take_spikes()) == 2 and message.take_spikes() == []
    assert not any(judged(watch(""), [(3.0, 1.0)] * LEAST + [(31.0, 11.0)]))
    assert judged(watch("--no-check-for-nan-in-loss-and-grad"), [(math.nan, math.inf)]) == [""]
    assert judged(watch(""), [(3.0, math.inf)]) == ["the gradient norm is inf"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--skip-bad-batches 1 --fp16", ["--skip-bad-batches", "--fp16"]),
        ("--skip-bad-batches 1 --no-check-for-nan-in-loss-and-grad", ["leave one out"]),
        ("--rollback-on-bad-batch", ["--skip-bad-batches"]),
        ("--rollback-on-bad-batch --skip-bad-batches 2", ["--save-interval"]),
        (
            "--rollback-on-bad-batch --skip-bad-batches 2 --save c --save-interval 2 --no-save-optim",
            ["--no-save-optim"],
        ),
        ("--check-for-spiky-loss --spike-factor 1", ["--spike-factor"]),
    ],
)
def test_contradictions_are_refused(flags: str, words: list[str]):
    given = (
        "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
        f"--micro-batch-size 1 --train-iters 2 --lr 1e-3 --mock-data "
        f"--tokenizer-type NullTokenizer --vocab-size 9 {flags}"
    )
    with pytest.raises(Refusal) as refused:
        parse(given.split(), world_size=1)
    assert all(word in str(refused.value) for word in words)
