# SPDX-License-Identifier: Apache-2.0
"""Plans of samples: every token once, no document cut that fits, even work; their datasets; blends by length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.training.arguments.config import Config, DataConfig
from megatron.training.arguments.parser import parse
from megatron.training.data.datasets import build_datasets
from megatron.training.data.packing.length_mixtures import read_mixture, repeated
from megatron.training.data.packing.packing_plans import Packing, cost_of, cut, greedy_plan, make_plan
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.refusal import Refusal
from tests.properties import examples

NULL = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 1000)
KINDS = ("best-fit", "by-work")
BASE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --lr 1"


def predicted(pieces: np.ndarray) -> list[tuple[int, int]]:
    """(document, token) of all tokens of some pieces that are predicted from an earlier one of their document."""
    return sorted((d, t) for d, begin, size in pieces.tolist() for t in range(begin + 1, begin + size))


@examples(60)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=60).filter(any),
    length=st.integers(1, 20),
    window=st.integers(1, 12),
    batch=st.integers(1, 4),
    kind=st.sampled_from(KINDS),
)
def test_an_epoch_predicts_every_token_once(lengths, length, window, batch, kind):
    lengths = np.array(lengths)
    plan = make_plan(np.arange(len(lengths)), lengths, length, None, Packing(kind, window, batch), 3)
    assert predicted(plan.pieces) == [(d, t) for d, n in enumerate(lengths) for t in range(1, n)]
    assert plan.tokens().max() <= length + 1 and (np.diff(plan.first) > 0).all()
    documents, begin, sizes = plan.pieces.T
    short = lengths[documents] <= length + 1
    assert (sizes[short] == lengths[documents][short]).all() and not begin[short].any()


@examples(40)
@given(kind=st.sampled_from(KINDS), window=st.integers(1, 8), samples=st.integers(1, 40), seed=st.integers(0, 9))
def test_longer_runs_begin_with_the_same_samples(kind, window, samples, seed):
    """A run of more samples, or of more epochs, continues the same order."""
    lengths = np.random.default_rng(seed).integers(1, 40, 30)
    plans = [make_plan(np.arange(30), lengths, 16, count, Packing(kind, window, 2), seed) for count in (samples, 90)]
    count = plans[0].first[samples]
    assert plans[0].first[: samples + 1].tolist() == plans[1].first[: samples + 1].tolist()
    assert plans[0].pieces[:count].tolist() == plans[1].pieces[:count].tolist()


@examples(40)
@given(kind=st.sampled_from(KINDS), window=st.integers(1, 6), seed=st.integers(0, 99))
def test_how_far_a_document_moves(kind, window, seed):
    """A piece is in the samples of its own window of the order, or of the next one."""
    lengths = np.random.default_rng(seed).integers(1, 30, 200)
    plan = make_plan(np.arange(200), lengths, 16, None, Packing(kind, window, 2), seed)
    order = np.random.default_rng([seed, 0, 0]).permutation(200)
    pieces = cut(order, lengths[order], 16)
    tokens = np.cumsum(pieces[:, 2]) - pieces[:, 2]
    place = {(d, begin): t / 17 for (d, begin, _), t in zip(pieces.tolist(), tokens)}
    sample_of = np.repeat(np.arange(len(plan.first) - 1), np.diff(plan.first))
    filled = np.cumsum(plan.tokens()) / 17
    for (document, begin, _), sample in zip(plan.pieces.tolist(), sample_of):
        assert abs(filled[sample] - place[document, begin]) <= 2 * window + 2


def test_the_plan_is_near_the_optimum():
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(np.log(8192), 1.5, 1000).astype(int) + 1, 4 * 131072)
    stream = random.permutation(1000)
    greedy = cost_of(greedy_plan(stream, lengths[stream], 131072), lengths, 131072, 8)
    assert greedy.cut_short > 0.1 and greedy.imbalance > 1.5
    for kind, imbalance in zip(KINDS, (2.2, 1.05)):
        plan = make_plan(np.arange(1000), lengths, 131072, None, Packing(kind, 1024, 8), 1)
        cost = cost_of(plan, lengths, 131072, 8)
        assert len(plan.first) - 1 == -(-int(plan.pieces[:, 2].sum()) // 131073)  # no plan has fewer samples
        assert not cost.cut_short and cost.imbalance < imbalance and cost.fill > 0.99


def write(prefix, seed: int = 0, documents: int = 60, longest: int = 50) -> list[np.ndarray]:
    """Documents that end with the end-of-document token."""
    random = np.random.default_rng(seed)
    texts = [np.append(random.integers(0, 1000, n), 1000) for n in random.integers(1, longest, documents)]
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for text in texts:
        builder.add_document(text, [len(text)])
    builder.finalize(f"{prefix}.idx")
    return texts


def configure(**data) -> Config:
    config = Config()
    config.data = DataConfig(seq_length=32, num_workers=0, global_batch_size=4, **data)
    config.run.seed = 7
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_plan(tmp_path, kind, caplog):
    texts = write(tmp_path / "a")
    config = configure(data_path=[str(tmp_path / "a")], split="8,2,0", packing=kind, packing_window=8)
    with caplog.at_level("INFO", "megatron.training.data.datasets"):
        train, valid, _ = build_datasets(config, NULL, (200, 5, 0))
    assert len(train) >= 200 and len(valid) >= 5 and f"train, --packing {kind}: " in caplog.text
    whole = {tuple(text.tolist()) for text in texts if len(text) <= 33}
    held_out, seen = {tuple(text.tolist()) for text in texts[48:]}, set()
    for number in range(200):
        sample = train[number]
        real = int(sample["loss_mask"].sum())
        assert sample["loss_mask"].tolist() == [1.0] * real + [0.0] * (32 - real)
        tokens = [*sample["tokens"].tolist()[:real], sample["labels"].tolist()[real - 1]]
        ends = [0, *(at + 1 for at, token in enumerate(tokens) if token == 1000)]
        documents = [tuple(tokens[begin:end]) for begin, end in zip(ends, ends[1:])]
        assert not held_out & set(documents)
        seen |= whole & set(documents)
    assert seen == whole - held_out
    again, *_ = build_datasets(config, NULL, (200, 5, 0))  # from the cache
    assert all(train[i]["tokens"].equal(again[i]["tokens"]) for i in range(200))
    other = configure(data_path=config.data.data_path, split="8,2,0", packing=kind, packing_window=9)
    assert any(not train[i]["tokens"].equal(build_datasets(other, NULL, (200, 5, 0))[0][i]["tokens"]) for i in range(9))


def test_by_work_needs_one_source(tmp_path):
    for name in "ab":
        write(tmp_path / name)
    blend = ["1", str(tmp_path / "a"), "1", str(tmp_path / "b")]
    with pytest.raises(Refusal, match="--packing by-work makes global batches of one source"):
        build_datasets(configure(data_path=blend, split="1", packing="by-work"), NULL, (20, 0, 0))
    train, *_ = build_datasets(configure(data_path=blend, split="1", packing="best-fit"), NULL, (40, 0, 0))
    assert len(train) >= 40


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--packing best-fit", "--packing best-fit with --mock-data is not supported"),
        ("--packing-window 0", "--packing-window 0 must be at least 1"),
        ("--packing by-work --rampup-batch-size 1 1 8", "with --mock-data"),
    ],
)
def test_settings_that_do_not_go_together(flags, line):
    with pytest.raises(Refusal, match=line):
        parse(f"{BASE} --micro-batch-size 1 --train-iters 1 --mock-data --vocab-size 99 {flags}".split(), world_size=1)


@pytest.mark.parametrize("flags", ["--fim-data", "--dataloader-type cyclic", "--rampup-batch-size 1 1 8"])
def test_settings_that_change_samples(flags):
    words = f"{BASE} --micro-batch-size 1 --data-path x --tokenizer-type ByteLevelTokenizer --packing by-work {flags}"
    samples = "--train-samples 20" if "rampup" in flags else "--train-iters 1"
    with pytest.raises(Refusal, match=f"--packing by-work with {flags.split()[0]}"):
        parse(f"{words} {samples}".split(), world_size=1)


# Blends by source and length.


def mixture(folder, text: str) -> str:
    (folder / "mix.yaml").write_text(text)
    return str(folder / "mix.yaml")


def test_long_documents_are_read_more_often(tmp_path):
    texts = write(tmp_path / "a")
    write(tmp_path / "b", seed=1)
    path = mixture(tmp_path, f"sources:\n  - path: {tmp_path}/a\n    weight: 3\n    repeat: {{20: 3, 40: 0}}\n"
                             f"  - path: {tmp_path}/b\n")  # fmt: skip
    config = configure(data_config=path, split="1,0,0", packing="best-fit", packing_window=200)
    train, *_ = build_datasets(config, NULL, (400, 0, 0))
    first = train.datasets[0]
    counts = np.bincount(first.indices, minlength=60)
    assert counts.tolist() == [0 if len(t) >= 40 else 3 if len(t) >= 20 else 1 for t in texts]
    assert np.bincount(train.datasets[1].indices).tolist() == [1] * 60
    share = np.mean(np.asarray(train.dataset_index)[:400] == 0)
    assert abs(share - 0.75) < 0.02
    plain, *_ = build_datasets(configure(data_config=path, split="1,0,0"), NULL, (400, 0, 0))
    assert np.bincount(plain.datasets[0].indices, minlength=60).tolist() == counts.tolist()


def test_fractions_of_documents():
    documents, lengths = np.arange(10_000), np.tile([5, 50], 5000)
    often = repeated(documents, lengths, ((0, 0.25), (50, 2.5)), 1)
    assert (np.diff(often) >= 0).all()
    counts = np.bincount(often, minlength=10_000).reshape(-1, 2)
    assert set(counts[:, 0]) == {0, 1} and set(counts[:, 1]) == {2, 3}
    assert np.allclose(counts.mean(0), [0.25, 2.5], atol=0.03)
    assert repeated(documents, lengths, (), 1) is documents


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [", "not YAML"), ("sources: &a []\nb: *a", "it has an alias"), ("- 1", "must have one key, sources"),
        ("sources: []", "must have one key"), ("sources: [{weight: 1}]", "source 1: must have path"),
        ("sources: [{path: a, weigth: 1}]", "source 1: must have path"),
        ("sources: [{path: a, weight: 0}]", "weight must be a positive number, not 0"),
        ("sources: [{path: a, weight: .nan}]", "weight must be a positive number"),
        ("sources: [{path: a, repeat: {8Q: 1}}]", "repeat '8Q': must be tokens"),
        ("sources: [{path: a, repeat: {8K: -1}}]", "repeat '8K' must be from 0 to 1000"),
        ("sources: [{path: a, repeat: {8K: 1, 8192: 2}}]", "repeat has one length twice"),
        ("sources: [{path: a}, {path: a}]", "a is named twice"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
    ],
)  # fmt: skip
def test_mixtures_that_cannot_be_read(tmp_path, text, line):
    with pytest.raises(Refusal, match=f"^--data-config .*{line}"):
        read_mixture(mixture(tmp_path, text))


def test_a_mixture_that_leaves_nothing(tmp_path):
    write(tmp_path / "a")
    path = mixture(tmp_path, f"sources: [{{path: {tmp_path}/a, repeat: {{0: 0}}}}]")
    with pytest.raises(Refusal, match="repeat leaves no document of"):
        build_datasets(configure(data_config=path, split="1,0,0"), NULL, (4, 0, 0))
