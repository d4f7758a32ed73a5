# SPDX-License-Identifier: Apache-2.0
"""The order of samples over any grid, the loader's processes, and what a rank moves to its device."""

import itertools
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from megatron.training.arguments.config import Config, DataConfig
from megatron.training.data.batches import KEYS, micro_batches, shard_batch
from megatron.training.data.datasets import MockDataset
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.refusal import Refusal
from tests.patience import patience
from tests.properties import examples


class Numbers(Dataset):
    """Sample i holds i everywhere."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        tokens = torch.full((4,), i)
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(4), "position_ids": torch.arange(4)}


def numbers(size, *, consumed=0, micro=1, rank=0, ranks=1, take=None, **options):
    """The samples that a rank gets, a list a micro-batch."""
    batches = micro_batches(
        Numbers(size),
        consumed_samples=consumed,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        **options,
    )
    return [batch["tokens"][:, 0].tolist() for batch in itertools.islice(batches, take)]


@examples(60)
@given(data=st.data(), kind=st.sampled_from(["single", "cyclic"]))
def test_global_batches_do_not_depend_on_the_grid(data, kind):
    """A step of G samples is the next G of one order, for any cut into ranks and micro-batches, G growing or not."""
    ranks, micro, rounds = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    accumulation = data.draw(st.lists(st.integers(1, 4), min_size=rounds, max_size=rounds))
    consumed = data.draw(st.integers(0, 30))
    steps = [m * micro * ranks for m in accumulation]
    size = consumed + sum(steps) + data.draw(st.integers(0, 5))
    if kind == "cyclic":
        size = data.draw(st.integers(1, size))
    options = {"consumed": consumed, "dataloader_type": kind, "seed": 5}
    plain = [i for (i,) in numbers(size, take=sum(steps), **options)]
    if kind == "single":
        assert plain == list(range(consumed, consumed + sum(steps)))
    streams = [
        iter(numbers(size, micro=micro, rank=r, ranks=ranks, take=sum(accumulation), **options)) for r in range(ranks)
    ]
    start = 0
    for count, step in zip(accumulation, steps):
        batch = [sample for _ in range(count) for stream in streams for sample in next(stream)]
        assert batch == plain[start : start + step]
        start += step


def test_the_end_of_the_data():
    assert numbers(11, micro=2, rank=1, ranks=2) == [[2, 3], [6, 7]]
    assert numbers(8, consumed=4, micro=2, rank=0, ranks=2) == [[4, 5]]
    assert numbers(8, consumed=8) == []
    with pytest.raises(Refusal, match="9 samples were consumed"):
        numbers(8, consumed=9)
    rest = [
        list(
            micro_batches(
                Numbers(11),
                consumed_samples=8,
                micro_batch_size=2,
                data_parallel_rank=rank,
                data_parallel_size=3,
                drop_last=False,
            )
        )
        for rank in range(3)
    ]
    masks = [batch["loss_mask"][:, 0].tolist() for (batch,) in rest]
    assert masks == [[1, 1], [1, 0], [0, 0]]
    assert [rest[0][0]["tokens"][:, 0].tolist(), rest[1][0]["tokens"][0, 0].item()] == [[8, 9], 10]


def test_cyclic_epochs_are_shuffled_anew():
    drawn = [i for (i,) in numbers(10, take=30, dataloader_type="cyclic", seed=3)]
    epochs = [drawn[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and len(set(map(tuple, epochs))) == 3
    assert [i for (i,) in numbers(10, take=17, consumed=13, dataloader_type="cyclic", seed=3)] == drawn[13:]


def test_workers_and_resume():
    """Worker processes, and a start in the middle, change nothing; nor does a loader draw random numbers of ours."""
    config = Config(data=DataConfig(seq_length=16))
    train = MockDataset(config, build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 1000), 0, 43)
    options = {"micro_batch_size": 2, "data_parallel_rank": 1, "data_parallel_size": 2}
    state = torch.get_rng_state()
    plain = list(micro_batches(train, consumed_samples=0, **options))
    for workers, consumed in [(2, 0), (0, 12), (1, 12)]:
        resumed = list(micro_batches(train, consumed_samples=consumed, num_workers=workers, **options))
        assert len(resumed) == len(plain) - consumed // 4
        for one, other in zip(resumed, plain[consumed // 4 :]):
            assert all(torch.equal(one[key], other[key]) for key in one) and set(one) == {*KEYS, "numbers"}
    assert torch.equal(torch.get_rng_state(), state)
    numbers = list(micro_batches(train, consumed_samples=12, numbers_only=True, **options))
    assert [batch["numbers"].tolist() for batch in numbers] == [batch["numbers"].tolist() for batch in plain[3:]]
    assert set(numbers[0]) == {"numbers"} and numbers[0]["numbers"].tolist() == [14, 15]


def test_a_sigterm_to_the_group_leaves_the_loader_alive():
    """The trainer answers SIGTERM by saving; its data must not end before."""

    def trainer(channel):
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, lambda *_: None)
        batches = micro_batches(
            Numbers(10**6),
            consumed_samples=0,
            micro_batch_size=1,
            data_parallel_rank=0,
            data_parallel_size=1,
            num_workers=2,
        )
        first = [next(batches)["tokens"][0, 0].item() for _ in range(2)]  # one of each worker: both are up
        os.killpg(0, signal.SIGTERM)
        time.sleep(0.2)
        channel.send(first + [next(batches)["tokens"][0, 0].item() for _ in range(100)])

    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=trainer, args=(there,), daemon=False)
    process.start()
    there.close()
    assert here.poll(60) and here.recv() == list(range(102))
    process.join(patience(60))
    assert process.exitcode == 0


@examples(40)
@given(data=st.data())
def test_shard_batch(data):
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 24))
    chosen = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=length, unique=True))
    batch = {
        "tokens": torch.randint(100, (rows, length)),
        "labels": torch.randint(100, (rows, length)),
        "loss_mask": torch.rand(rows, length),
    }
    local = shard_batch(batch, SimpleNamespace(positions=torch.tensor(chosen)), "cpu")
    for key, tensor in batch.items():
        assert torch.equal(local[key], tensor[:, chosen])
    assert local["position_ids"].tolist() == [chosen] * rows and local["position_ids"].dtype == torch.int64
    assert set(local) == {*KEYS, "position_ids"}
    assert "labels" not in shard_batch({"tokens": batch["tokens"]}, SimpleNamespace(positions=torch.tensor([0])), "cpu")
