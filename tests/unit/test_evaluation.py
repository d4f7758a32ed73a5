# SPDX-License-Identifier: Apache-2.0
"""Samples of evaluations: exact lengths and depths, right answers, each token of a text scored once; result files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.arguments.parser import parse
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.evaluation import eval_report
from megatron.training.evaluation.eval_plan import Spec, make_plan
from megatron.training.evaluation.haystack import HALVES, MARKS, is_held_out, make_words, pairs
from megatron.training.evaluation.samples import pack, row_of, window, windows
from megatron.training.evaluation.tasks import metrics, position_bounds
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config, DataConfig
from tests.properties import examples
from tools import make_needles

TOKENIZERS = {
    "ByteLevelTokenizer": None,
    "NullTokenizer": 255,
    "NucleotideTokenizer": None,
    "CodonTokenizer": None,
}
BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 2048 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --mock-data --seq-length 2048 --attention-dropout 0 --hidden-dropout 0"
)
COMMON = "ruler-common-words"


def plan_of(kind: str, flags: str = "", vocab_size: int | None = None):
    size = vocab_size or TOKENIZERS[kind]
    words = f"{BASE} --tokenizer-type {kind} {flags} {f'--vocab-size {size}' if size else ''}".split()
    config = parse(words, world_size=1)
    return make_plan(config, build_tokenizer(config.data, size))


def answers(plan, spec: Spec) -> np.ndarray:
    sample = plan.sample(spec)
    return sample.ids[sample.scored]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_needle_lies_at_its_depth_in_a_haystack_of_its_length(kind):
    plan = plan_of(kind, "--eval-tasks needle --eval-lengths 300 1024 2048 --eval-depths 5 --eval-samples 2")
    assert len(plan.specs["needle"]) == 3 * 5 * 2
    for spec in plan.specs["needle"]:
        sample = plan.sample(spec)
        pieces, random = plan._pieces(spec)
        ((depth, needle),) = pieces.hidden
        assert sample.ids.size == spec.length and depth == spec.depth
        assert sample.ids.min() >= 0 and sample.ids.max() < plan.words.tokenizer.vocab_size
        at = round(depth * (spec.length - pieces.size))
        assert np.array_equal(sample.ids[at : at + needle.size], needle)
        hay = plan.words.haystack(spec.length - pieces.size, random)
        without_needle = np.concatenate((sample.ids[:at], sample.ids[at + needle.size :]))
        assert np.array_equal(without_needle[: hay.size], hay)
        answer = sample.ids[sample.scored]
        assert sample.scored[-answer.size :].all()  # the answer ends the sample and is part of the needle
        assert any(np.array_equal(needle[n : n + answer.size], answer) for n in range(needle.size))


def test_samples_are_functions_of_the_seed():
    plans = [
        plan_of("ByteLevelTokenizer", f"--eval-tasks needle {COMMON} --seed {seed} --eval-lengths 2048")
        for seed in (1, 1, 2)
    ]
    texts = [
        [plan.sample(spec).ids.tobytes() for task in plan.tasks for spec in plan.specs[task][:9]] for plan in plans
    ]
    assert texts[0] == texts[1] and not set(texts[0]) & set(texts[2])
    assert len(set(texts[0])) == 18


def test_a_needle_as_text():
    plan = plan_of("ByteLevelTokenizer", "--eval-tasks needle --eval-lengths 600")
    sample = plan.sample(Spec("needle", 600, 0.5, 0))
    text, answer = bytes(sample.ids.tolist()).decode(), bytes(sample.ids[sample.scored].tolist()).decode()
    question = text.splitlines()[-1]
    name = question.split("? The code of ")[1].removesuffix(f" is{answer}")
    assert question == f"What is the code of {name}? The code of {name} is{answer}" and int(answer) > 999
    assert f" The code of {name} is{answer}." in text


def test_variables_are_tracked():
    plan = plan_of("ByteLevelTokenizer", "--eval-tasks ruler-variable-tracking --eval-lengths 2048")
    for spec in plan.specs["ruler-variable-tracking"][:5]:
        text = bytes(plan.sample(spec).ids.tolist()).decode()
        values: dict[str, str] = {}
        for line in text.split(" Let ")[1:]:
            name, _, value = line.split(".")[0].partition(" be ")
            values[name] = values.get(value, value)
        number, listed = text.split("Which names are ")[1].split("? Answer: ")
        assert listed.split(", ") == [name for name, value in values.items() if value == number]
        assert len(listed.split(", ")) == 5 and len(set(values.values())) == 2


@pytest.mark.parametrize("length", [700, 2048])
def test_common_words_are_the_commonest(length):
    plan = plan_of("ByteLevelTokenizer", f"--eval-tasks {COMMON} --eval-lengths 2048")
    pieces = plan._pieces(Spec(COMMON, length, None, 3))[0]
    listed = bytes(pieces.hidden[0][1].tolist()).decode().strip(" ,").split(", ")
    counts = Counter(listed)
    wanted = [bytes(ids.tolist()).decode().strip() for ids, answer in pieces.tail if answer]
    assert {name for name, _ in counts.most_common(10)} == set(wanted)
    assert min(counts[name] for name in wanted) > max(counts[name] for name in counts.keys() - set(wanted))
    assert wanted == sorted(wanted, key=listed.index)


@pytest.mark.parametrize("kind, size", [("NullTokenizer", 30), ("NullTokenizer", 64), ("NullTokenizer", 50000)])
def test_symbols_of_every_vocabulary(kind, size):
    words = make_words(build_tokenizer(DataConfig(tokenizer_type=kind), size))
    assert 6 <= words.names <= HALVES and words.base == size
    assert max(part.max() for part in words.sentences) < size
    if words.width == 1:
        assert min(part.min() for part in words.sentences) >= MARKS + 4 * words.names


def test_a_haystack_from_a_file(tmp_path):
    (tmp_path / "hay.txt").write_text("abcdefg" * 10)
    plan = plan_of("ByteLevelTokenizer", f"--eval-tasks needle --eval-lengths 512 --eval-haystack {tmp_path}/hay.txt")
    text = bytes(plan.sample(Spec("needle", 512, 1.0, 0)).ids.tolist()).decode()
    hay = text.split(" The code of")[0]
    assert len(hay) > 300 and hay in "abcdefg" * 80


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40))
@examples(30)
def test_packing_holds_every_sample_once(lengths):
    rows = pack(lengths, 64, True)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= 64 for row in rows)
    assert len(pack(lengths, 64, False)) == len(lengths)


@given(st.integers(2, 200), st.integers(1, 32), st.data())
@examples(60)
def test_every_token_of_a_text_but_the_first_is_scored_once(tokens, length, data):
    stride = data.draw(st.integers(1, length))
    ids, seen = np.arange(tokens), []
    for start in windows(tokens, length, stride):
        row = window(ids, start, length, stride, 999, 0)
        labels, counts = row["labels"], row["loss_mask"].bool()
        assert (labels[counts] == row["tokens"][counts] + 1).all()
        seen += labels[counts].tolist()
    assert sorted(seen) == list(range(1, tokens))


def test_rows_say_where_samples_lie():
    plan = plan_of("ByteLevelTokenizer", "--eval-tasks needle --eval-lengths 300 400")
    samples = [(n, plan.sample(plan.specs["needle"][n])) for n in (0, 50)]
    row = row_of(samples, 1000, 256)
    assert row["document_ends"].tolist() == [300, 700, 1000]
    for (number, sample), start in zip(samples, (0, 300)):
        counts = (row["loss_mask"] != 0) & (row["groups"] == number)
        assert counts.sum() == sample.scored.sum()
        assert row["labels"][counts].tolist() == sample.ids[sample.scored].tolist()
        assert row["tokens"][start : start + sample.ids.size].tolist() == sample.ids.tolist()


def test_buckets_of_positions_double_in_length():
    assert position_bounds(1000) == [0, 128, 256, 512, 1000] and position_bounds(64) == [0, 64]
    assert position_bounds(256) == [0, 128, 256]


# ---- the training set


def test_training_and_evaluation_use_different_needles(tmp_path, capsys):
    prefix = str(tmp_path / "train")
    flags = "--length 512 --documents 20 --needles 7 --tokenizer-type NullTokenizer --vocab-size 255".split()
    assert make_needles.main(["--output-prefix", prefix, *flags]) == 0
    assert "20 documents of 512 tokens as uint16, 1 to 7 needles each" in capsys.readouterr().out
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(f"{prefix}_text_document")
    words = make_words(build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 255))
    counts, numbers = set(), set()
    for ids in dataset:
        assert ids.size == 512 and ids[-1] == 255
        at = np.flatnonzero(ids == 0)  # the mark of a needle
        result = ids[at[:, None] + np.arange(1, 5)].astype(int) - MARKS - words.names * np.arange(4)
        assert not any(is_held_out(tuple(row[:2])) for row in result.tolist())
        numbers |= {is_held_out(tuple(row[2:])) for row in result.tolist()}
        asked = np.flatnonzero(ids == 1)
        tails = ids[asked[:, None] + np.arange(1, 5)].astype(int) - MARKS - words.names * np.arange(4)
        assert sorted(tails.tolist()) == sorted(result.tolist())
        counts.add(len(at))
    assert counts <= set(range(1, 8)) and len(counts) > 3
    assert numbers == {True, False}  # otherwise a model would learn never to answer with some numbers
    assert {part for pair in pairs(words.names, False) for part in pair} == set(range(words.names))
    assert make_needles.main(["--output-prefix", prefix, *flags]) == 2
    assert "give --overwrite" in capsys.readouterr().err


def test_questions_are_asked_as_often_as_fits(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    flags = "--length 512 --documents 10 --needles 7 --questions 0.6 --tokenizer-type NullTokenizer --vocab-size 255"
    assert make_needles.main(["--output-prefix", str(tmp_path / "train"), *flags.split()]) == 0
    for ids in IndexedDataset(f"{tmp_path}/train_text_document"):
        needles, asked = ids[np.flatnonzero(ids == 0)[:, None] + np.arange(1, 5)], np.flatnonzero(ids == 1)
        answers = ids[asked[:, None] + np.arange(1, 5)].tolist()
        rounds, remainder = divmod(len(asked), len(needles))
        assert remainder == 0 and rounds == int(0.6 * 512) // (5 * len(needles))
        assert sorted(answers) == sorted(needles.tolist() * rounds) and asked[-1] == 512 - 1 - 5


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--length 99 --documents 9 --needles 9 --questions 0.9", "or less --questions"),
        ("--length 99 --documents 9 --questions 1", "--questions 1.0 is a share"),
        ("--length 50 --documents 9 --needles 9", "--length 50 does not hold"),
        ("--length 5000 --documents 1 --needles 9999", "--needles 9999: there are"),
        ("--length 0 --documents 1", "--length 0 must be at least 1"),
        ("--length 9 --documents 1 --seed -1", "--seed -1"),
    ],
)
def test_impossible_training_sets_are_refused(flags, message, tmp_path, capsys):
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 255"
    assert make_needles.main(f"--output-prefix {tmp_path}/x {flags} {tokenizer}".split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


# ---- refusals and results


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--eval-tasks needles", "needles: not a task; did you mean needle? choose from loss-by-position, needle"),
        ("--eval-lengths 64", "--eval-lengths does nothing without --eval-tasks needle or ruler-multi-key"),
        ("--eval-tasks needle --eval-files a", "--eval-files does nothing without --eval-tasks perplexity"),
        ("--eval-output a", "--eval-output does nothing without --eval-tasks:"),
        ("--eval-tasks needle --eval-lengths 4096", "--eval-lengths 4096 is above --seq-length 2048"),
        ("--eval-tasks perplexity", "needs text: add --eval-files FILE"),
        ("--eval-tasks perplexity --eval-files a --eval-stride 4096", "--eval-stride 4096 is above"),
        ("--eval-tasks loss-by-position --eval-iters 0", "--eval-iters"),
        ("--eval-tasks needle --attention-mask full", "--attention-mask full tokens see later ones"),
        ("--eval-tasks needle --eval-samples 0", "--eval-samples 0 must be at least 1"),
        ("--eval-tasks needle --eval-lengths 64", "--eval-lengths 64: needle needs at least"),
        (f"--eval-tasks {COMMON} --eval-lengths 300", f"--eval-lengths 300: {COMMON} needs at least"),
        ("--eval-tasks perplexity --eval-files /none", "--eval-files /none cannot be read: No such file"),
        ("--eval-tasks needle --eval-haystack /none", "--eval-haystack /none cannot be read"),
    ],
)
def test_refused(flags, message):
    with pytest.raises(Refusal) as refused:
        plan_of("ByteLevelTokenizer", flags)
    assert message in str(refused.value)


def test_tasks_without_their_files_are_left_out_of_several():
    assert plan_of("ByteLevelTokenizer", "--eval-tasks needle perplexity scores").tasks == ["needle"]


def test_a_text_that_cannot_be_scored(tmp_path):
    (tmp_path / "a").write_text("5 6 400\n7")
    with pytest.raises(Refusal, match="ids from 5 to 400, outside the 256 ids of"):
        plan_of("NullTokenizer", f"--vocab-size 255 --eval-tasks perplexity --eval-files {tmp_path}/a")
    (tmp_path / "a").write_text("five")
    with pytest.raises(Refusal, match="NullTokenizer cannot tokenize it"):
        plan_of("NullTokenizer", f"--vocab-size 255 --eval-tasks perplexity --eval-files {tmp_path}/a")
    (tmp_path / "a").write_text("5")
    with pytest.raises(Refusal, match="holds 1 tokens"):
        plan_of("NullTokenizer", f"--vocab-size 255 --eval-tasks perplexity --eval-files {tmp_path}/a")


def test_default_lengths():
    plan = plan_of("ByteLevelTokenizer", f"--eval-tasks needle {COMMON} --eval-depths 2")
    assert [spec.length for spec in plan.specs["needle"][::8]] == [512, 1024, 2048]
    assert [spec.length for spec in plan.specs[COMMON][::8]] == [1024, 2048]  # 512 tokens are too few
    assert {spec.depth for spec in plan.specs["needle"]} == {0.0, 1.0}


def results() -> dict:
    cell = {"hits": 0.75, "exact": 0.5, "loss": 1.0, "samples": 4}
    bucket = {"loss": 2.0, "perplexity": 7.39, "hits": 0.5, "tokens": 128}
    return {
        "loss-by-position": {
            "buckets": [{"from": 0, "to": 127, **bucket}, {"from": 128, "to": 255, **bucket}],
            **bucket,
        },
        "needle": {"cells": [{"length": n, "depth": d, **cell} for n in (512, 1024) for d in (0.0, 1.0)], **cell},
        "ruler-multi-key": {"cells": [{"length": n, **cell} for n in (512, 1024)], **cell},
        "perplexity": {"files": [{"file": "a.txt", "bytes": 9, "bits_per_byte": 2.5, **bucket}], **bucket},
    }


def test_results_as_files_lines_and_numbers(tmp_path: Path):
    written = eval_report.write(str(tmp_path / "out"), {"seed": 1}, results())
    assert [Path(path).name for path in written] == [
        "evaluation.json",
        "loss-by-position.png",
        "needle.png",
        "ruler.png",
    ]
    assert all(Path(path).stat().st_size > 5000 for path in written[1:])
    assert json.loads(Path(written[0]).read_text()) == {"seed": 1, "tasks": results()}
    assert [table.title.split(":")[0] for table in eval_report.tables(results())] == list(results())
    assert len(list(eval_report.lines(results()))) == 4
    flat = metrics(results())
    assert flat["loss_by_position_128_255"] == 2.0 and flat["needle_512_hits"] == 0.75 and flat["perplexity_0"] == 7.39
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="--eval-output .* cannot be written"):
        eval_report.write(str(tmp_path / "file" / "out"), {}, results())


@pytest.mark.parametrize("asked, fewer, taken", [(100, 42, 42), (100, 0, None), (50, 42, None)])
def test_all_of_small_data_is_evaluated(monkeypatch, asked: int, fewer: int, taken: int | None) -> None:
    """Unless --eval-iters asks for more; a rank that reads no data follows the others."""
    from megatron.training.data.datasets import TooFewSamples
    from megatron.training.evaluation import evaluated_model

    def build(config: Config, _: object, samples: tuple[int, ...], needed: bool) -> tuple[object, ...]:
        if needed and samples[1] > fewer * 2:
            raise TooFewSamples(fewer, "too few")
        return None, "data" if needed else None, None

    def gather(own: int) -> list[int]:
        return [own, fewer if config.run.eval_iters > fewer else 0]

    monkeypatch.setattr(evaluated_model, "build_datasets", build)
    monkeypatch.setattr(evaluated_model, "gathered_objects", gather)
    for reads in (True, False):
        config = Config()
        config.run.eval_iters, config.data.global_batch_size = asked, 2
        runtime = SimpleNamespace(reads_data=reads)
        if taken is None and reads:
            with pytest.raises(Refusal, match="too few"):
                evaluated_model._held_out(config, None, runtime)
        else:
            assert evaluated_model._held_out(config, None, runtime) == ("data" if reads else None)
            assert config.run.eval_iters == (taken or asked)
