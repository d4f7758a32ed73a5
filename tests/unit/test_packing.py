# SPDX-License-Identifier: Apache-2.0
"""Plans of samples: every token once, no document cut that fits, even work; their datasets; blends by length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training import pretrain
from megatron.training.arguments.parser import parse
from megatron.training.arguments.schedule import LengthStageEnded, check_stage, spans
from megatron.training.data.datasets import build_datasets
from megatron.training.data.index_files import open_prefix
from megatron.training.data.packing.length_mixtures import read_mixture, repeated
from megatron.training.data.packing.packing_plans import (
    Packing,
    cost_of,
    cut,
    greedy_plan,
    make_plan,
    stage_plan,
    stage_starts,
)
from megatron.training.data.read_tokens import DataError, JoinedFiles, TokenFile
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.job import length_of_run
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config, DataConfig
from tests.properties import examples
from tests.token_files import write_documents

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
    window += kind == "by-work" and window % 2  # whole global batches
    order = np.random.default_rng([seed, 0, 0]).permutation(200)
    pieces = cut(order, lengths[order], 16)
    tokens = np.cumsum(pieces[:, 2]) - pieces[:, 2]
    place = {(d, begin): t / 17 for (d, begin, _), t in zip(pieces.tolist(), tokens)}
    sample_of = np.repeat(np.arange(len(plan.first) - 1), np.diff(plan.first))
    filled = np.cumsum(plan.tokens()) / 17
    for (document, begin, _), sample in zip(plan.pieces.tolist(), sample_of):
        assert abs(filled[sample] - place[document, begin]) <= 2 * window + 2


STAGES = [(12, 8), (6, 32), (5, 20)]  # (samples, tokens of each)


@examples(40)
@given(lengths=st.lists(st.integers(0, 90), min_size=1, max_size=40).filter(any), seed=st.integers(0, 9))
def test_stages_read_one_stream_on(lengths, seed):
    """With greedy, the samples of all stages are the stream's tokens, each predicted once and in its own stage."""
    lengths = np.array(lengths)
    packing, documents = Packing("greedy", 4, 2), np.arange(len(lengths))
    kept, stream = documents[lengths > 0], []
    while len(stream) <= 12 * 8 + 6 * 32 + 5 * 20:
        order = np.random.default_rng([seed, 0, len(stream) // lengths.sum()]).permutation(len(kept))
        stream += [(document, t) for document in kept[order].tolist() for t in range(lengths[document])]
    at = 0
    for number, (samples, length) in enumerate(STAGES):
        first = stage_starts(STAGES[:number], packing, ["a"], None)["a"]
        plan = stage_plan(documents, lengths, length, samples, packing, seed, [first])
        assert first == at and plan.tokens().tolist() == [length + 1] * samples
        texts = [[(d, t) for d, begin, size in plan.pieces[a:b].tolist() for t in range(begin, begin + size)]
                 for a, b in zip(plan.first, plan.first[1:])]  # fmt: skip
        own = [stream[start : start + length + 1] for start in range(at, at + samples * length, length)]
        assert sorted(texts) == sorted(own)
        at += samples * length


def test_samples_of_a_stage_are_shuffled():
    begins = stage_plan(np.arange(1), np.array([1000]), 8, 20, Packing("greedy", 4), 0, [0]).pieces[:, 1].tolist()
    assert begins != sorted(begins) == list(range(0, 160, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_stages_share_no_document(kind):
    """In one epoch; each stage has all its samples, nearly full, and reads nearly all documents of its interval."""
    lengths = np.random.default_rng(0).integers(1, 120, 4000)
    packing, stages, seen = Packing(kind, 64, 4), [(400, 64), (200, 256), (100, 1024)], []
    for number, (samples, length) in enumerate(stages):
        first = stage_starts(stages[:number], packing, ["a"], None)["a"]
        plan = stage_plan(np.arange(4000), lengths, length, samples, packing, 3, [first])
        assert len(plan.first) - 1 >= samples
        own = plan.pieces[: plan.first[samples]]
        assert own[:, 2].sum() > 0.97 * samples * (length + 1)
        seen.append(set(own[:, 0].tolist()))
    assert not seen[0] & seen[1] and not seen[1] & seen[2] and not seen[0] & seen[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_within_one_document(kind):
    """No document begins in the interval: the next one is read."""
    plan = stage_plan(np.arange(2), np.array([500, 500]), 16, 4, Packing(kind, 4, 2), 0, [100])
    assert set(plan.pieces[:, 0]) == {np.random.default_rng([0, 0, 0]).permutation(2)[1]}


def test_a_blend_begins_after_what_was_drawn():
    starts = stage_starts([(1000, 8), (10, 32)], Packing("best-fit", 4), ["a", "b"], [3, 1])
    assert starts == {"a": 750 * 9 + 8 * 33, "b": 250 * 9 + 3 * 33}
    starts = stage_starts([(1000, 8), (10, 32)], Packing("greedy", 4), ["a", "b"], [3, 1])  # core draws 0.5 % more
    assert starts == {"a": 754 * 8 + 9 * 32, "b": 252 * 8 + 4 * 32}
    with pytest.raises(Refusal, match="give weights"):
        stage_starts([(1, 8)], Packing("greedy", 4), ["a", "b"], None)


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


def test_windows_have_whole_global_batches():
    """Otherwise the work of all batches after the first window would be uneven."""
    lengths = np.maximum(np.random.default_rng(0).lognormal(7, 1.5, 9000).astype(int), 2)
    for batch in (6, 8):
        plan = make_plan(np.arange(9000), lengths, 16384, 600, Packing("by-work", 128, batch), 1)
        assert cost_of(plan, lengths, 16384, batch).imbalance < 1.05


def write(prefix, seed: int = 0, documents: int = 60, longest: int = 50) -> list[np.ndarray]:
    """Documents that end with the end-of-document token."""
    random = np.random.default_rng(seed)
    texts = [np.append(random.integers(0, 1000, n), 1000) for n in random.integers(1, longest, documents)]
    write_documents(prefix, texts)
    return texts


def write_ids(prefix, ids: list[int]) -> TokenFile:
    """Documents of nine equal tokens."""
    return open_prefix(write_documents(prefix, [np.full(9, token) for token in ids]), "--data-path").open()


def configure(**data) -> Config:
    config = Config()
    config.data = DataConfig(seq_length=32, num_workers=0, global_batch_size=4, **data)
    config.run.seed = 7
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_plan(tmp_path, kind, caplog):
    texts = write(tmp_path / "a")
    config = configure(data_path=[str(tmp_path / "a")], split="8,2,0", packing=kind, packing_window=8)
    with caplog.at_level("INFO", "megatron.training.data.samples.token_dataset"):
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


FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope --lr 1 --eval-iters 0 "
    "--micro-batch-size 1 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 1000"
)
SCHEDULE = "0:32 4:64 --global-batch-size 2 7:48"


def stage(flags: str, iteration: int, schedule: str = SCHEDULE) -> Config:
    words = f"{FLAGS} --train-iters 9 --save c --load c {flags}".split()
    return parse([*words, "--seq-length-schedule", schedule], None, 1, iteration=iteration)


def test_what_a_stage_is(tmp_path):
    """Its length, samples and flags; the samples' numbers in the run; the same model, and schedule, in each."""
    configs = [stage("--mock-data --lr-warmup-iters 5", iteration) for iteration in (0, 3, 4, 6, 7, 9)]
    assert [config.data.seq_length for config in configs] == [32, 32, 64, 64, 48, 48]
    assert {config.model.max_position_embeddings for config in configs} == {64}
    assert [config.stage.number for config in configs] == [1, 1, 2, 2, 3, 3]
    assert "stage 2 of 3: iterations 5 to 7, 64 tokens per sample, 2 samples per iteration" in configs[2].notes
    assert {(spans(config).warmup, spans(config).total) for config in configs} == {(18, 30)}
    assert [length_of_run(config, None) for config in configs[::2]] == [(4, 16), (7, 6), (9, 8)]
    plain = parse([*FLAGS.split(), *"--seq-length 64 --train-iters 1 --mock-data".split()], None, 1)
    (mock, *_), (whole, *_) = build_datasets(configs[2], NULL, (6, 0, 0)), build_datasets(plain, NULL, (30, 0, 0))
    assert len(mock) == 22 and mock[16]["tokens"].equal(whole[16]["tokens"])


@pytest.mark.parametrize("kind", ["greedy", *KINDS])
def test_data_of_stages(tmp_path, kind):
    """A stage's first sample has its number in the run; no stage repeats another's; what fills a sample may repeat."""
    write(tmp_path / "a", documents=3000)
    flags, seen = f"--data-path {tmp_path}/a --split 1,0,0 --packing {kind} --packing-window 8", []
    for iteration, first, count, length in ((0, 0, 16, 32), (4, 16, 6, 64), (7, 22, 8, 48)):
        train, *_ = build_datasets(stage(flags, iteration), NULL, (count, 0, 0))
        assert len(train) >= first + count and len(train[first]["tokens"]) == length
        own = [bytes(train[number]["tokens"].numpy()[:length]) for number in range(first, first + count)]
        assert not {*own} & {*seen} and len({*own}) >= count - (kind != "greedy")
        seen += own
        if first:
            with pytest.raises(IndexError, match="is of an earlier stage"):
                train[first - 1]
        again, *_ = build_datasets(stage(flags, iteration), NULL, (count, 0, 0))  # from the cache
        assert bytes(again[first]["tokens"].numpy()) == own[0]


def test_a_blend_in_stages(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        write(tmp_path / name, seed=seed, documents=900)
    train, *_ = build_datasets(stage(f"--data-path 3 {tmp_path}/a 1 {tmp_path}/b --split 1,0,0", 4), NULL, (6, 0, 0))
    assert train.samples.datasets[0].config.starts == {f"{tmp_path}/a": 13 * 32, f"{tmp_path}/b": 5 * 32}
    assert len(train[16]["tokens"]) == 64
    with pytest.raises(Refusal, match="give weights"):
        build_datasets(stage(f"--data-path {tmp_path}/a {tmp_path}/b --split 1,0,0", 4), NULL, (6, 0, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_blend_in_stages_of_one_plan(tmp_path, kind):
    """Each source goes on where its earlier stages ended: no stage repeats another's documents."""
    for name, seed in (("a", 0), ("b", 1)):
        write(tmp_path / name, seed=seed, documents=900)
    flags, seen = f"--data-path 3 {tmp_path}/a 1 {tmp_path}/b --split 1,0,0 --packing {kind} --packing-window 8", set()
    for iteration, first, count in ((0, 0, 16), (4, 16, 6), (7, 22, 8)):
        train, *_ = build_datasets(stage(flags, iteration), NULL, (count, 0, 0))
        plan = train.samples if first else train
        own = {document for document, *_ in np.asarray(plan.document_index)[: plan.sample_index[count]].tolist()}
        assert len(own) > count // 2 and not own & seen
        assert {document < 900 for document in own} == {True, False}
        seen |= own


def test_where_a_run_goes_on():
    check = stage("--mock-data", 4).stage
    check_stage(check, 6, 20, 16 * 32 + 4 * 64)
    for iteration, samples, tokens in ((0, 0, 0), (7, 22, 16 * 32 + 6 * 64)):
        with pytest.raises(LengthStageEnded) as another:
            check_stage(check, iteration, samples, tokens)
        assert another.value.iteration == iteration
    with pytest.raises(Refusal, match="gives 20 samples and 768 tokens by iteration 6, but the checkpoint has"):
        check_stage(check, 6, 20, 20 * 32)
    check_stage(stage("--mock-data", 9).stage, 9, 30, 16 * 32 + 6 * 64 + 8 * 48)


@pytest.mark.parametrize(
    ("flags", "schedule", "line"),
    [
        ("", "8K", "must be like"), ("", "1:8K", "must be like"), ("", "0:8K 5:1M 5:2M", "must be like"),
        ("", "0:8K 5:0", "cannot be of one stage alone"), ("", "0:'8K", "cannot be read: No closing quotation"),
        ("", "0:32 4:64 --hidden-size 8", "stage from iteration 4 of .*: --hidden-size 8 cannot be of one stage alone"),
        ("", "0:32 4:64 --ring-parallel-size 2", "stage from iteration 4 of .*is larger than the 1 processes"),
        ("", "0:32 4:64 --fpdt", "stage from iteration 4 of .*is more than --seq-length 64"),
        ("--num-layers 0", "0:32 4:64", "^--num-layers 0 must be at least 1"),
        ("", "0:32 9:64", "has a stage from iteration 9, and --train-iters 9 ends before it"),
        ("--seq-length 32", "0:32 4:64", "both give the length"), ("--load d", "0:32", "with the same folder"),
        *((f"{flag} 1 1 1" if "rampup" in flag else flag, "0:32 4:64", f"--seq-length-schedule with {flag.split()[0]}")
          for flag in ("--rampup-batch-size", "--rampup-seq-length", "--dataloader-type cyclic", "--finetune",
                       "--dry-run", "--reset-iteration", "--ckpt-step 1", "--no-load-optim", "--no-save-optim",
                       "--fim-data", "--lr-decay-tokens 9", "--lr-warmup-tokens 9", "--skip-train",
                       "--universal-checkpoint",
                       "--non-persistent-save-interval 1 --non-persistent-ckpt-type local",
                       "--sft --tokenizer-type HuggingFaceTokenizer --tokenizer-model d")),
    ],
)  # fmt: skip
def test_schedules_that_cannot_run(flags, schedule, line):
    chats_or_fim = "fim" in flags or "sft" in flags
    data = "--data-path x --tokenizer-type ByteLevelTokenizer" if chats_or_fim else "--mock-data"
    with pytest.raises(Refusal, match=line):
        stage(f"{data} {flags}", 0, schedule)


def test_the_time_limit_is_that_of_all_stages(monkeypatch):
    seen, now = [], iter([0.0, 120.0])

    def one_stage(config, *_):
        seen.append((config.stage.number, config.run.exit_duration_in_mins))
        if len(seen) < 2:
            raise LengthStageEnded(7)
        return 3

    monkeypatch.setattr(pretrain, "_run", one_stage)
    monkeypatch.setattr(pretrain, "follow_launcher", lambda launched: None)
    monkeypatch.setattr(pretrain.time, "monotonic", lambda: next(now))
    flags = "--mock-data --exit-duration-in-mins 5"
    assert pretrain.run(stage(flags, 0), config_at=lambda iteration: stage(flags, iteration)) == 3
    assert seen == [(1, 5), (3, 3.0)]


@pytest.mark.parametrize("length", ["--train-samples 8", "--train-tokens 800"])
def test_a_schedule_counts_iterations(length):
    words = f"{FLAGS} --save c --load c --mock-data {length}".split()
    with pytest.raises(Refusal, match=f"--seq-length-schedule with {length.split()[0]}"):
        parse([*words, "--seq-length-schedule", "0:32 4:64"], None, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_each_window_has_the_shares_of_a_blend(kind):
    """Books and notes, a token of books for three of notes; the slowest sample has hardly more work than the others."""
    random = np.random.default_rng(0)
    sizes = [random.lognormal(np.log(median), 1, count).astype(int) + 1 for median, count in ((3000, 300), (300, 9000))]
    lengths, blend = np.minimum(np.concatenate(sizes), 6000), [(300, 1.0), (9000, 3.0)]
    plans = [
        make_plan(np.arange(9300), lengths, 16384, samples, Packing(kind, 256, 8), 1, blend) for samples in (1024, 1500)
    ]
    plan = plans[0]
    for first in range(0, 1024, 256):
        pieces = plan.pieces[plan.first[first] : plan.first[first + 256]]
        books = pieces[pieces[:, 0] < 300, 2].sum() / pieces[:, 2].sum()
        assert abs(books - 0.25) < 2 / 256
    cost = cost_of(plan, lengths, 16384, 8)
    assert cost.fill > 0.99 and not cost.cut_short and (kind == "best-fit" or cost.imbalance < 1.05)
    count = plan.first[1024]
    assert plans[1].pieces[:count].tolist() == plan.pieces[:count].tolist()
    with pytest.raises(ValueError, match="no document has a token"):
        make_plan(np.arange(3), np.array([5, 0, 0]), 4, 9, Packing(kind, 4), 1, [(1, 1), (2, 1)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("separate", [False, True])
def test_a_blend_in_one_plan(tmp_path, kind, separate):
    """Documents of all files, in the blend's shares; a sample read in part; a wrong id is named by its own file."""
    texts = {name: write(tmp_path / name, seed=seed, documents=90) for seed, name in enumerate("abc")}
    whole = {tuple(text.tolist()): name for name in "abc" for text in texts[name][:81] if len(text) <= 33}
    names = [word for weight, name in ((2, "a"), (1, "b"), (1, "a"), (1, "c")) for word in (weight, tmp_path / name)]
    blend = [*map(str, names)]
    data = (
        {"train_data_path": blend, "valid_data_path": blend[:2]} if separate else {"data_path": blend, "split": "9,1,0"}
    )
    config = configure(**data, packing=kind, packing_window=20)
    train, valid, _ = build_datasets(config, NULL, (200, 4, 0))
    assert len(train) >= 200 and len(valid) >= 4
    tokens = dict.fromkeys("abc", 0)
    for sample in map(train.__getitem__, range(200)):
        real = int(sample["loss_mask"].sum())
        ids = [*sample["tokens"].tolist()[:real], sample["labels"].tolist()[real - 1]]
        ends = [0, *(at + 1 for at, token in enumerate(ids) if token == 1000)]
        for begin, end in zip(ends, ends[1:]):
            name = whole.get(tuple(ids[begin:end]))
            if name:
                tokens[name] += end - begin
    share = np.array([*tokens.values()]) / sum(tokens.values())
    assert share == pytest.approx([0.6, 0.2, 0.2], abs=0.05)
    half = train.part(7, [(0, 16)])["tokens"]
    assert half[:16].equal(train[7]["tokens"][:16]) and not half[20:].any()
    again, *_ = build_datasets(config, NULL, (200, 4, 0))  # from the cache
    assert all(train[i]["tokens"].equal(again[i]["tokens"]) for i in range(200))


def test_an_error_in_a_blend_names_the_file(tmp_path):
    files = [write_ids(tmp_path / name, ids) for name, ids in (("a", [1, 2]), ("b", [1, 2, 3]))]
    joined = JoinedFiles(files)
    assert len(joined) == 5 and joined.sequence_lengths.tolist() == [9] * 5
    assert [part.tolist() for part in joined.get_many([(4, 7, 2), (0, 0, 1), (2, 3, 1)])] == [[3, 3], [1], [1]]
    assert joined.where(3) == f"{tmp_path}/b.bin: document 1"
    for document, message in ((5, "b.bin has 3 documents, but no document 3"), (-1, "a.bin has 2 documents, but no")):
        with pytest.raises(DataError, match=message):
            joined.size(document)


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
    counts = np.bincount(train.indices, minlength=120)
    assert counts[:60].tolist() == [0 if len(t) >= 40 else 3 if len(t) >= 20 else 1 for t in texts]
    assert counts[60:].tolist() == [1] * 60
    pieces = np.asarray(train.document_index)
    assert abs(pieces[pieces[:, 0] < 60, 2].sum() / pieces[:, 2].sum() - 0.75) < 0.01
    plain, *_ = build_datasets(configure(data_config=path, split="1,0,0"), NULL, (400, 0, 0))
    assert np.bincount(plain.datasets[0].indices, minlength=60).tolist() == counts[:60].tolist()


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
