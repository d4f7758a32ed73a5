# SPDX-License-Identifier: Apache-2.0
"""Datasets and blends that megatron-core builds, the checks of their files, their cache, and mock data."""

import dataclasses
import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron.training.data.datasets import build_datasets
from megatron.training.data.index_files import named_sets, parse_blends
from megatron.training.data.samples.mock_data import MockDataset
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.ownership.atomic import atomic_files, atomic_folder
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config, DataConfig
from tests.properties import examples
from tests.token_files import write_documents

NULL = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 1000)


def write(prefix, documents=20, low=0, high=1000, seed=0):
    """A small .bin/.idx; returns its prefix and its tokens."""
    random = np.random.default_rng(seed)
    texts = [random.integers(low, high, random.integers(5, 60)) for _ in range(documents)]
    return write_documents(prefix, texts), np.concatenate(texts)


def configure(**data):
    config = Config()
    config.data = DataConfig(seq_length=16, num_workers=0, **data)
    config.run.seed = 7
    return config


def samples_of(dataset, count=None):
    return [tuple(dataset[i]["tokens"].tolist()) for i in range(len(dataset) if count is None else count)]


# --- datasets


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path / "corpus")


def test_the_same_samples_as_cores_own_builder(corpus):
    config = configure(data_path=[corpus[0]], split="80,10,10")
    ours = build_datasets(config, NULL, (100, 5, 5))
    core = GPTDatasetConfig(
        random_seed=7,
        sequence_length=16,
        blend=([corpus[0]], None),
        split="80,10,10",
        path_to_cache="",
        tokenizer=NULL,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    theirs = BlendedMegatronDatasetBuilder(GPTDataset, [100, 5, 5], lambda: True, core).build()
    for mine, other, n in zip(ours, theirs, (100, 5, 5)):
        assert samples_of(mine) == samples_of(other) and len(mine) >= n
    sample = ours[0][3]
    assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids"}  # no mask
    assert (
        sample["tokens"].tolist()[1:] == sample["labels"].tolist()[:-1] and sample["loss_mask"].tolist() == [1.0] * 16
    )


def test_every_training_token_occurs_once_per_epoch(corpus):
    train, valid, test = build_datasets(configure(data_path=[corpus[0]], split="1,0,0"), NULL, (1, 3, 0))
    assert valid is None and test is None
    seen = np.sort([token for sample in samples_of(train) for token in sample])
    assert len(seen) > len(corpus[1]) - 17
    counts = np.bincount(corpus[1], minlength=1000) - np.bincount(seen, minlength=1000)
    assert counts.min() >= 0


def test_no_token_is_taken_for_padding(tmp_path):
    """core masks labels and zeroes tokens that equal the tokenizer's pad; Llama's pad is often a real token."""
    prefix, _ = write(tmp_path / "few", high=4)
    train, *_ = build_datasets(configure(data_path=[prefix], split="1"), NULL, (20, 0, 0))
    assert (
        all(train[i]["loss_mask"].min() == 1 for i in range(20)) and len({t for s in samples_of(train) for t in s}) == 4
    )


@pytest.mark.parametrize("grouped", [False, True])
def test_blends(tmp_path, grouped):
    """Weights are kept, with and without a process group."""
    low, _ = write(tmp_path / "low", high=500)
    high, _ = write(tmp_path / "high", low=500)
    other, _ = write(tmp_path / "other", low=990)
    if grouped:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for threads in (1, 3):
            config = configure(data_path=["3", low, "1", high], split="1", num_dataset_builder_threads=threads)
            train, *_ = build_datasets(config, NULL, (400, 0, 0))
            share = np.mean([max(sample) < 500 for sample in samples_of(train, 400)])
            assert len(train) >= 400 and abs(share - 0.75) < 0.02
        again, *_ = build_datasets(config, NULL, (400, 0, 0))
        assert samples_of(again) == samples_of(train)
        config = configure(train_data_path=["1", low, "1", high], valid_data_path=[other], test_data_path=["1", other])
        train, valid, test = build_datasets(config, NULL, (40, 10, 10))
        assert min(map(min, samples_of(valid) + samples_of(test))) >= 990 and len(train) >= 40
        config = configure(data_path=[low, high], split="1")
        train, *_ = build_datasets(config, NULL, (20, 0, 0))
        assert {max(sample) < 500 for sample in samples_of(train)} == {True, False}
        with pytest.raises(Refusal, match="the train data hold .* 5000 are needed: repeat the data as a blend"):
            build_datasets(config, NULL, (5000, 0, 0))
        config.data.split, config.run.eval_iters = "0,1,0", 100  # 300 samples, 3 a batch
        with pytest.raises(Refusal) as refused:
            build_datasets(config, NULL, (0, 300, 0))
        held = int(re.search(r"the valid data hold (\d+) samples", str(refused.value))[1])
        assert f"300 are needed: use --eval-iters {held // 3}, or repeat the data" in str(refused.value)
    finally:
        if grouped:
            torch.distributed.destroy_process_group()


@examples(20)
@given(data=st.data())
def test_blends_of_few_samples(tmp_path_factory, data):
    """With long sequences there are few samples, for which core's margin for blends is too small."""
    folder = tmp_path_factory.mktemp("blend")
    count, size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 60))
    path = []
    for i in range(count):  # each document is one sample, so there is no reserve
        write_documents(f"{folder}/{i}", [np.arange(17)] * data.draw(st.integers(1, 9)))
        path += [str(data.draw(st.sampled_from([1, 50, 1000]))), f"{folder}/{i}"]
    config = configure(data_path=path, split="1")
    config.data.seq_length = 17
    for _ in range(2):  # built, then from the cache
        train, *_ = build_datasets(config, NULL, (size, 0, 0))
        assert len(train) >= size and len(train[size - 1]["tokens"]) == 17


def test_containers_that_agree_in_host_name_and_process_number_do_not_write_into_each_others_files(tmp_path):
    target = str(tmp_path / "folder")
    with pytest.raises(OSError), atomic_folder(target) as one:
        Path(one, "first").write_text("1")
        with atomic_folder(target) as other:  # this process plays both: same host name and process id
            Path(other, "second").write_text("2")
    assert sorted(os.listdir(target)) == ["files.json", "second"]
    target = str(tmp_path / "file")
    with pytest.raises(Refusal, match="file is not this job's any more"), atomic_files([target], False) as (one,):
        Path(one).write_text("1")
        with atomic_files([target], overwrite=False) as (other,):  # as if it were the next job of this process
            Path(other).write_text("2")
    assert Path(target).read_text() == "2" and len(os.listdir(tmp_path)) == 2


def test_cache(corpus, tmp_path, monkeypatch, caplog):
    """The cache is built once, complete or not at all, never confused with another one, and not required."""
    config = configure(data_path=[corpus[0]], split="9,1")
    first = samples_of(build_datasets(config, NULL, (50, 5, 0))[0])
    (folder,) = (tmp_path / "index-cache").iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert samples_of(build_datasets(config, NULL, (50, 5, 0))[0]) == first
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

    write(tmp_path / "corpus", documents=8, seed=3)  # other data under the same name
    fresh, _ = write(tmp_path / "fresh", documents=8, seed=3)
    elsewhere = configure(data_path=[fresh], split="9,1", data_cache_path=str(tmp_path / "c"))
    train = build_datasets(config, NULL, (50, 5, 0))[0]
    assert samples_of(train) == samples_of(build_datasets(elsewhere, NULL, (50, 5, 0))[0])
    assert not list(tmp_path.glob("**/*.tmp"))

    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    config.data.data_cache_path = str(blocked / "cache")
    assert samples_of(build_datasets(config, NULL, (50, 5, 0))[0]) == samples_of(train)
    assert "every rank builds in memory" in caplog.text
    assert build_datasets(config, NULL, (50, 5, 0), needed=False) == (None, None, None)

    config.data.data_cache_path = str(tmp_path / "interrupted")
    monkeypatch.setattr(np, "save", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build_datasets(config, NULL, (50, 5, 0))
    assert not list((tmp_path / "interrupted").iterdir())


def test_eod_mask_loss(tmp_path):
    prefix, _ = write(tmp_path / "eod", low=990, high=1001)
    train, *_ = build_datasets(configure(data_path=[prefix], split="1", eod_mask_loss=True), NULL, (20, 0, 0))
    for i in range(20):
        assert torch.equal(train[i]["loss_mask"], (train[i]["tokens"] != NULL.eod).float())


def cut(path, size):
    with open(path, "r+b") as file:
        file.truncate(size)


def test_refused_files(corpus, tmp_path):
    def refused(match, **data):
        with pytest.raises(Refusal, match=match) as refusal:
            build_datasets(configure(**data), NULL, (10, 1, 1))
        assert "\n" not in str(refusal.value)

    prefix, path = corpus[0], [corpus[0]]
    size = os.path.getsize(f"{prefix}.bin")
    refused("--data-path /no/data: no such file: /no/data.bin", data_path=["/no/data"])
    refused(f"no such file: {tmp_path}.bin; {tmp_path} itself is no tokens: tools/pre", data_path=[str(tmp_path)])
    refused("--train-data-path /no/data: no such file", train_data_path=["/no/data"])
    refused("no data: give --data-path")
    refused("exclude each other", data_path=path, valid_data_path=path)
    refused("exclude each other", train_data_path=path, split="1,1,1")
    refused("exclude each other", data_path=path, mock_data=True)
    refused("is empty", data_path=[])
    refused("weight 0 of .* must be above 0", data_path=["0", prefix, "1", prefix])
    for split in ("0,0,0", "9,-1", "1,2,3,4", "a,b", ""):
        refused(f"--split {split}: give up to three", data_path=path, split=split)
    refused("no training data: give train a share", data_path=path, split="0,1,1")
    refused("the valid split gets 0 of 20 documents", data_path=path, split="99.9,0.05,0.05")
    refused("no training data: give --train-data-path", valid_data_path=path)
    cut(f"{prefix}.bin", size - 3)
    refused(f"corpus.bin holds {size - 3} bytes, expected {size} from the .idx: truncated", data_path=path)
    cut(f"{prefix}.bin", size + 10)
    refused("not the file of this .idx", data_path=path)
    cut(f"{prefix}.bin", size)
    cut(f"{prefix}.idx", os.path.getsize(f"{prefix}.idx") - 1)
    refused("corpus.idx holds .* bytes, expected .*: damaged", data_path=path)
    cut(f"{prefix}.idx", 20)
    refused("corpus.idx is not a Megatron index", data_path=path)
    os.unlink(f"{prefix}.idx")
    refused("no such file: .*corpus.idx", data_path=path)
    wide, _ = write(tmp_path / "wide", high=3000)
    refused(r"wide.bin: document \d+ holds token id \d{4}, outside the 1001 ids of NullTokenizer", data_path=[wide])
    short = write_documents(tmp_path / "short", [[1, 2, 3]])
    refused("1 of 1 documents with 3 tokens, at least 17 are needed", train_data_path=[short, short])


@pytest.mark.parametrize("document", [0, 7, 19])
@pytest.mark.parametrize("what", ["length", "start"])
def test_a_flipped_bit_in_an_index_is_refused(corpus, document, what):
    prefix = corpus[0]
    at = 34 + 4 * document if what == "length" else 34 + 4 * 20 + 8 * document
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 2]))
    with pytest.raises(Refusal, match=r"corpus\.idx, document .* damaged|corpus\.bin holds .* from the \.idx"):
        build_datasets(configure(data_path=[prefix]), NULL, (10, 0, 0))


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("form", ["array of objects", "bare pickle", "truncated"])
def test_a_cached_index_that_is_not_numbers_is_refused_and_not_unpickled(corpus, tmp_path, form):
    config, harm = configure(data_path=[corpus[0]], split="1,0,0"), tmp_path / "harm"
    build_datasets(config, NULL, (10, 0, 0))
    (folder,) = (tmp_path / "index-cache").iterdir()
    file = next(folder.glob("*shuffle_index.npy"))
    if form == "array of objects":
        np.save(file, np.array([Harmful(harm)], dtype=object), allow_pickle=True)
    elif form == "bare pickle":
        file.write_bytes(pickle.dumps(Harmful(harm)))
    else:
        cut(file, os.path.getsize(file) - 1)
    with pytest.raises(Refusal, match="is not an index of data .* remove .*index-cache"):
        build_datasets(config, NULL, (10, 0, 0))
    assert not harm.exists()


@pytest.mark.parametrize("flag", ["reset_attention_mask", "reset_position_ids"])
def test_packed_documents_need_an_end_token(tmp_path, flag):
    open_ended, _ = write(tmp_path / "open")
    with pytest.raises(Refusal, match=r"open.bin: no document ends with token 1000, .* --append-eod"):
        build_datasets(configure(data_path=[open_ended], **{flag: True}), NULL, (10, 0, 0))
    closed = write_documents(tmp_path / "closed", [[*range(length), NULL.eod] for length in (5, 40, 20)])
    config = configure(data_path=[closed], split="1,0,0", **{flag: True})
    (train, _, _) = build_datasets(config, NULL, (10, 0, 0))
    assert len(train) >= 10


def test_a_single_document_trains_without_evaluation(tmp_path, caplog):
    prefix, _ = write(tmp_path / "one", documents=1)
    train, valid, test = build_datasets(configure(data_path=[prefix]), NULL, (10, 1, 1))
    assert len(train) >= 10 and valid is None and test is None and "too few documents" in caplog.text


# --- mock data


def test_mock_data():
    config = configure(mock_data=True)
    train, valid, test = build_datasets(config, NULL, (50, 10, 0))
    assert (len(train), len(valid), test) == (50, 10, None)
    again, *_ = build_datasets(config, NULL, (70, 10, 0))
    assert samples_of(again, 50) == samples_of(train)  # a sample depends on its index, not on the number of samples
    assert len(set(samples_of(train) + samples_of(valid))) == 60
    other = dataclasses.replace(config, run=dataclasses.replace(config.run, seed=8))
    assert samples_of(build_datasets(other, NULL, (50, 0, 0))[0]) != samples_of(train)


@examples(20)
@given(vocab=st.integers(2, 200_000), length=st.sampled_from([1, 17, 5000]), index=st.integers(0, 2**40))
def test_mock_data_of_any_vocabulary(vocab, length, index):
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), vocab)
    config = configure(mock_data=True, eod_mask_loss=True)
    config.data.seq_length = length
    sample = MockDataset(config, tokenizer, 0, 1)[index]
    tokens, labels = sample["tokens"], sample["labels"]
    assert len(tokens) == len(labels) == length and torch.equal(tokens[1:], labels[:-1])
    assert 0 <= int(tokens.min()) and int(tokens.max()) < tokenizer.vocab_size
    assert torch.equal(sample["loss_mask"] == 0, tokens == tokenizer.eod)
    if length == 5000 and vocab > 100:
        assert (
            int(tokens.max()) > vocab / 2 and 0.8 < float((labels == (tokens + 1) % (vocab + 1)).float().mean()) < 0.95
        )


# --- portions of documents, several sets


def test_portions_contain_the_documents_of_a_split(tmp_path):
    """--train-weighted-split-paths gives the documents and blend of core's split with the same bounds."""
    a, b = (write(tmp_path / name, seed=seed)[0] for seed, name in enumerate("ab"))
    text = f"TRAIN: 0.3 0:0.6 {a}, 0.7 0.5:1 {b}"
    one = [f"ONE: 1 0.6:0.8 {a}", f"BOTH: 1 .6:.8 {a}, 3 0.6:0.8 {b}"]
    config = configure(train_weighted_split_paths=[text], valid_weighted_split_paths=one)
    train, valid, test = build_datasets(config, NULL, (60, 8, 8))
    assert test is None and named_sets(config.data, "valid") == ["ONE", "BOTH"] and not named_sets(config.data, "train")
    assert [set(part.indices) for part in train.datasets] == [set(range(12)), set(range(10, 20))]
    assert set(valid.indices) == set(range(12, 16))
    split = build_datasets(configure(data_path=[a], split="60,20,20"), NULL, (0, 8, 0))[1]
    assert samples_of(valid) == samples_of(split)
    both = build_datasets(config, NULL, (0, 8, 0), number=1)[1]
    assert [set(part.indices) for part in both.datasets] == [set(range(12, 16))] * 2
    assert both.weights == pytest.approx([0.25, 0.75])


def test_two_portions_of_one_file_in_one_blend(tmp_path):
    a, _ = write(tmp_path / "a")
    config = configure(train_weighted_split_paths=[f"T: 1 0:0.3 {a}, 1 0.6:0.9 {a}"])
    for _ in range(2):  # built, then from the cache
        train = build_datasets(config, NULL, (20, 0, 0))[0]
        assert [set(part.indices) for part in train.datasets] == [set(range(6)), set(range(12, 18))]
        assert len({part.unique_description_hash for part in train.datasets}) == 2


def test_groups_from_a_file(tmp_path):
    a, _ = write(tmp_path / "a")
    file = tmp_path / "train.txt"
    file.write_text(f'"TRAIN: 1 0:0.5 {a}"\n')
    train = build_datasets(configure(train_weighted_split_paths_path=str(file)), NULL, (20, 0, 0))[0]
    assert set(train.indices) == set(range(10))
    file.write_text(f'"X: 1 0:0.5 {a}" "Y: 1 0:1 {a}"\n')
    config = configure(train_weighted_split_paths=[f"T: 1 0:1 {a}"], test_weighted_split_paths_path=str(file))
    assert named_sets(config.data, "test") == ["X", "Y"]
    assert set(build_datasets(config, NULL, (0, 0, 4), number=1)[2].indices) == set(range(20))
    config = configure(train_weighted_split_paths=[f"T: 1 0:1 {a}"], valid_weighted_split_paths_path=str(file))
    assert named_sets(config.data, "valid") == ["X", "Y"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A: 1 0:0.5", "must have the form"),
        ("1 0:0.5 a", "must have the form"),
        ("A: 1 0:0.5 a 1 0:1 b", "must have the form"),
        ("A: 1 0.5:0.5 a", "0 <= START < STOP <= 1"),
        ("A: 0 0:1 a", "a weight above 0"),
        ("A: 1 0:1.5 a", "0 <= START < STOP <= 1"),
    ],
)
def test_groups_that_are_refused(text, words):
    with pytest.raises(Refusal, match=f"--train-weighted-split-paths.*{words}"):
        build_datasets(configure(train_weighted_split_paths=[text]), NULL, (1, 0, 0))


def test_more_groups_that_are_refused(tmp_path):
    good = "A: 1 0:1 a"
    for data, words in (
        ({"train_weighted_split_paths": [good, "B: 1 0:1 b"]}, "names 2 groups"),
        ({"valid_weighted_split_paths": [good, good]}, "two groups the same name"),
        ({"test_weighted_split_paths": [good, good]}, "two groups the same name"),
        ({"train_weighted_split_paths": [good], "train_weighted_split_paths_path": "x"}, "name the same data"),
        ({"train_weighted_split_paths_path": str(tmp_path / "x")}, "No such file"),
    ):
        with pytest.raises(Refusal, match=words):
            build_datasets(configure(**data), NULL, (1, 0, 0))
    (tmp_path / "x").write_text(good)
    with pytest.raises(Refusal, match="not one line of groups in double quotes"):
        build_datasets(configure(train_weighted_split_paths_path=str(tmp_path / "x")), NULL, (1, 0, 0))


# --- blends that files name


def test_files_that_name_the_data(tmp_path):
    """--data-args-path, --data-file-list and --per-split-data-args-path equal the flags that their files contain."""
    low, _ = write(tmp_path / "low", high=500)
    high, _ = write(tmp_path / "high", low=500)
    words, lines, splits = tmp_path / "words", tmp_path / "lines", tmp_path / "splits.json"
    words.write_text(f"3 {low}\n1 {high}\n")
    lines.write_text(f"3 {low}.bin books\n\n1 {high} arxiv\n")
    splits.write_text(json.dumps({"train": ["3", low, 1, high], "valid": high, "test": []}))
    blend = ([low, high], [3.0, 1.0])
    named = dict(data_path=["3", low, "1", high])
    assert parse_blends(DataConfig(**named)) == (blend, None)
    assert parse_blends(DataConfig(data_args_path=str(words))) == (blend, None)
    assert parse_blends(DataConfig(data_file_list=str(lines))) == (blend, None)
    assert parse_blends(DataConfig(per_split_data_args_path=str(splits))) == (None, [blend, ([high], None), None])
    ours, *_ = build_datasets(configure(data_args_path=str(words), split="1"), NULL, (40, 0, 0))
    theirs, *_ = build_datasets(configure(**named, split="1"), NULL, (40, 0, 0))
    assert samples_of(ours, 40) == samples_of(theirs, 40)
    for flag, text, output in (
        ("data_args_path", None, "--data-args-path .*: No such file"),
        ("data_file_list", "1 a", "--data-file-list .*: each line must be WEIGHT PREFIX CORPUS"),
        ("per_split_data_args_path", "[1]", "--per-split-data-args-path .*: must be a JSON object"),
        ("per_split_data_args_path", '{"train": []}', "--per-split-data-args-path .*: must be a JSON object"),
    ):
        path = tmp_path / "wrong"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        with pytest.raises(Refusal, match=output):
            parse_blends(DataConfig(**{flag: str(path)}))
