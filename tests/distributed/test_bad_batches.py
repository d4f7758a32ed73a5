# SPDX-License-Identifier: Apache-2.0
"""Bad batches are left out, the same ones on every grid, and the rest of the run is as if they had never been."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils.data import Dataset

from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from megatron.training.watch import LEAST, Watch
from tests.distributed.training_runs import make_job

FLAGS = "--num-layers 2 --train-iters 7 --global-batch-size 2 --micro-batch-size 1 --log-interval 1"
GRIDS = (
    (2, "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1"),
    (4, "--pipeline-model-parallel-size 2 --ring-parallel-size 2"),
    (2, "--zero-stage 3"),  # in full alone
)


class Poisoned(Dataset):
    """One sample has a weight with which no loss is finite, or labels of one kind only."""

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
    from megatron.training.features.stopping import Stopper
    from megatron.training.loop import training_loop
    from megatron.training.report.reporter import Reporter
    from megatron.training.step import Diverged

    job = make_job(f"{FLAGS} --log-jsonl {folder}/log.jsonl {flags}")
    if job.datasets[0] is not None:
        job.datasets = (Poisoned(job.datasets[0], number, kind), None, None)
    first = job.progress.iteration
    reporter = Reporter(job.config, active=dist.get_rank() == 0, first_iteration=first, last_iteration=job.iterations)
    stopper, ended = Stopper(job.runtime.device, None), ""
    try:
        training_loop(job, reporter, stopper)
    except Diverged as error:
        ended = str(error)
    finally:
        stopper.restore()
        reporter.close()
    dist.barrier()
    rows = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    weights = [parameter.detach().clone() for chunk in job.chunks for parameter in chunk.parameters()]
    return {row["iteration"]: row["lm_loss"] for row in rows}, ended, weights if dist.get_world_size() == 1 else []


def same_weights(one: tuple, other: tuple) -> bool:
    return all(map(torch.equal, one[2], other[2]))


def test_a_bad_batch_is_left_out_and_written_on_every_grid(pool, tmp_path: Path, long_runs):
    skip = "--skip-bad-batches 1"
    alone = pool.run(train, 1, skip, str(tmp_path / "alone"))[0]
    assert list(alone[0]) == list(range(1, 8)) and alone[0][5] is None and alone[1] == ""
    by_hand = pool.run(train, 1, "--iterations-to-skip 4", str(tmp_path / "by_hand"))[0]
    assert by_hand[0] == {iteration: loss for iteration, loss in alone[0].items() if iteration != 5}
    assert same_weights(alone, by_hand)
    grids = GRIDS if long_runs else GRIDS[:2]
    for number, (ranks, grid) in enumerate(grids):
        losses = pool.run(train, ranks, f"{skip} {grid}", str(tmp_path / str(number)))[0][0]
        assert losses.pop(5) is None
        assert losses == {iteration: pytest.approx(alone[0][iteration], rel=1e-5) for iteration in losses}, grid
    told = json.loads((tmp_path / "alone" / "bad_batches" / "iter_0000005.json").read_text())
    assert told["samples"] == [8, 9] and told["reason"] == "the loss is inf" and told["lm_loss"] == "inf"
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
    told = pool.run(train, 1, flags, str(tmp_path / "told"), 24, "labels")[0]
    assert None not in told[0].values() and not (tmp_path / "told" / "bad_batches").exists()
    for ranks, grid in ((1, ""), (2, "--ulysses-parallel-size 2")):
        folder = tmp_path / f"skipped{ranks}"
        pool.run(train, ranks, f"{flags} --skip-bad-batches 1 {grid}", str(folder), 24, "labels")
        (path,) = (folder / "bad_batches").glob("*.json")
        found = json.loads(path.read_text())
        assert found["iteration"] == 13 and found["reason"].startswith("the gradient norm is "), found


OVERLAP = "1 --overlap-grad-reduce --overlap-param-gather"


@pytest.mark.parametrize("zero", [pytest.param("0", marks=pytest.mark.full), OVERLAP])
def test_rolling_back_is_resuming_without_the_samples_since_then(pool, tmp_path: Path, zero: str):
    flags = f"--zero-stage {zero} --save-interval 3 --save"
    back = f"{flags} {tmp_path}/c --skip-bad-batches 1 --rollback-on-bad-batch --exit-interval 7"
    ranks = 1 if zero == "0" else 2
    rolled = pool.run(train, ranks, back, str(tmp_path / "rolled"))[0]
    assert rolled[0][5] is None and math.isfinite(rolled[0][7])
    again = f"{flags} {tmp_path}/d --load {tmp_path}/c --ckpt-step 3 --iterations-to-skip 3 4"
    by_hand = pool.run(train, ranks, again, str(tmp_path / "by_hand"))[0]
    assert by_hand[0] == {6: rolled[0][6], 7: rolled[0][7]} and same_weights(rolled, by_hand)


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(pool, tmp_path: Path):
    flags = f"--skip-bad-batches 1 --rollback-on-bad-batch --save-interval 5 --save {tmp_path}/c"
    losses, ended, _ = pool.run(train, 1, flags, str(tmp_path))[0]
    assert list(losses) == [1, 2, 3, 4] and ended == "the loss is inf"


def judged(watch: Watch, values: list[tuple[float, float]]) -> list[str]:
    return [watch.judge(loss, norm, torch.device("cpu")) for loss, norm in values]


def watch(flags: str) -> Watch:
    return Watch(parse(flags.split()))


def test_spikes_are_measured_by_good_steps():
    loss = watch("--check-for-spiky-loss --skip-bad-batches 9 --spike-factor 2")
    assert not any(judged(loss, [(3.0, 1.0)] * (LEAST - 1) + [(100.0, 1.0)]))  # too few to measure by
    found = judged(loss, [(3.0, 100.0), (6.1, 1.0), (6.1, 1.0), (5.9, 1.0)])
    assert [bool(one) for one in found] == [False, True, True, False]
    assert found[1] == "the loss is 6.1, 2.0 times the 3 of the 11 steps before"
    told = watch("--check-for-spiky-loss --check-for-large-grads")
    assert not any(judged(told, [(3.0, 1.0)] * LEAST + [(31.0, 11.0)]))
    assert len(told.take_spikes()) == 2 and told.take_spikes() == []
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
