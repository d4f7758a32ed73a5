# SPDX-License-Identifier: Apache-2.0
"""Fill in the middle: the changed sample, each flag, and that only the sample's number determines the cuts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.training.arguments.parser import parse
from megatron.training.data.datasets import build_datasets
from megatron.training.data.samples.fill_in_middle import Fim, fill_in, fim_of
from megatron.training.data.tokenizer import END_OF_TEXT, Tokenizer, build_tokenizer
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config, DataConfig
from tests.properties import examples

# One token per character; A to F are the special tokens.
SPECIAL = dict(zip(("prefix", "middle", "suffix", "pad", "eod", "split"), map(ord, "ABCDEF")))
LETTERS = Tokenizer(
    "letters", "letters", 128, ord("E"), lambda text: [ord(c) for c in text], lambda ids: "".join(map(chr, ids))
)


def generator(number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([1, number])))


def settings(rate: float = 1.0, spm_rate: float = 0.0, split: bool = False, **more: object) -> Fim:
    ids = SPECIAL if split else {name: id for name, id in SPECIAL.items() if name != "split"}
    return Fim(LETTERS, rate, spm_rate, **ids, **more)


def filled(text: str, number: int = 0, **options: object) -> str:
    result = fill_in(np.array([ord(c) for c in text]), settings(**options), generator(number))
    return LETTERS.detokenize(result)


def restored(text: str) -> str:
    """The original text, restored."""
    if not text.startswith("A"):
        return text
    if text.startswith("AC"):  # suffix first, or an empty prefix in the other order
        suffix, _, remainder = text[2:].partition("B")
        return remainder + suffix
    prefix, _, remainder = text[1:].partition("C")
    suffix, _, middle = remainder.partition("B")
    return prefix + middle + suffix


@examples(60)
@given(st.lists(st.text("xyz", min_size=1, max_size=9), min_size=1, max_size=4), st.integers(0, 99), st.booleans())
def test_every_document_is_kept_in_a_shuffled_order(texts: list[str], number: int, spm: bool):
    sample = "E".join(texts)
    result = filled(sample + "w" * 40, number, spm_rate=float(spm))  # the w at the end may be cut off
    assert len(result) == len(sample) + 40
    parts = result.split("E")
    assert [restored(part) for part in parts[:-1]] == texts[:-1]
    assert all(part.startswith("AC") for part in parts) or not spm
    assert parts[-1].startswith("A")


def test_the_order_of_the_parts():
    """As in Megatron-LM: prefix, suffix, middle; or suffix, then prefix and middle as one part."""
    draw = generator(5)
    draw.random()
    first, second = sorted(draw.integers(0, 9, 2))
    text = "abcdefgh"
    before, middle, after = text[:first], text[first:second], text[second:]
    assert filled(text + "E", 5).startswith(f"A{before}C{after}"[: len(text) + 1])
    assert filled(text + "E", 5, spm_rate=1.0).startswith(f"AC{after}B{before}{middle}"[: len(text) + 1])


def test_rates():
    text = "xxxxyyyyzzzz"
    cut = [filled(text, number, rate=0.3).startswith("A") for number in range(2000)]
    assert np.mean(cut) == pytest.approx(0.3, abs=0.03)
    first = [filled(text, number, spm_rate=0.7).startswith("AC") for number in range(2000)]
    assert np.mean(first) == pytest.approx(0.7 + 0.3 / 13 * 1.9, abs=0.04)  # including those with an empty prefix
    assert filled(text, rate=0.0) == text


def test_fragments_of_a_text_are_changed_separately():
    text = "xxxxFyyyyFzzzz" + "E" + "w" * 9
    result = filled(text, rate=1.0, split=True, fragment_rate=1.0).split("E")[0].split("F")
    assert [restored(part) for part in result] == ["xxxx", "yyyy", "zzzz"] and all(part[0] == "A" for part in result)
    assert filled(text, rate=1.0, split=True, fragment_rate=0.0).split("E")[0] == text.split("E")[0]
    assert filled(text, rate=0.0, split=True, fragment_rate=1.0) == text


def test_a_text_that_begins_with_no_prefix_is_unchanged():
    assert filled("xxyyE" + "z" * 20, no_prefix="xx").startswith("xxyyEA")


def test_missing_tokens_at_the_end_are_padded():
    """Empty texts are dropped together with the end-of-document token after them."""
    assert filled("EEExy", rate=0.0) == "xyDDD" and filled("xyEzE", rate=0.0) == "xyEzE"


# ---- flags


RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --lr 1e-3 "
    "--micro-batch-size 1 --train-iters 2 --data-path a --tokenizer-type HuggingFaceTokenizer --tokenizer-model b"
)
FLAGS = (
    "--fim-rate 0.25 --fim-spm-rate 0.75 --fim-split-sample <s> --fim-fragment-rate 0.125 --fim-no-prefix no "
    "--fim-prefix-token <p> --fim-middle-token <m> --fim-suffix-token <q> --fim-pad-token <d> --fim-eod-token <e>"
)
IDS = {"<s>": 1, "<p>": 2, "<m>": 3, "<q>": 4, "<d>": 5, "<e>": 6}
NAMED = Tokenizer("named", "a file", 9, 6, lambda text: [0, 0], str, IDS.get)


def test_every_flag_reaches_its_setting():
    data = parse(f"{RUN} --fim-data {FLAGS}".split(), world_size=1).data
    expected = {"rate": 0.25, "spm_rate": 0.75, "fragment_rate": 0.125, "no_prefix": "no", "prefix": 2, "middle": 3}
    result = fim_of(data, NAMED)
    assert result == Fim(NAMED, **expected, suffix=4, pad=5, eod=6, split=1)
    assert fim_of(parse(RUN.split(), world_size=1).data, NAMED) is None
    assert fim_of(DataConfig(fim_data=True), LETTERS_WITH_DEFAULTS).split is None


LETTERS_WITH_DEFAULTS = Tokenizer("x", "x", 9, 0, list, str, lambda text: len(text))


def test_flags_that_nobody_reads_are_noted():
    notes = parse(f"{RUN} {FLAGS}".split(), world_size=1).notes
    notes = [note for note in notes if "read only with --fim-data" in note]
    assert len(notes) == 1 and all(flag in notes[0] for flag in FLAGS.split() if flag.startswith("--"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fim-rate 1.5", ("--fim-rate 1.5", "from 0 to 1")),
        ("--fim-spm-rate -1", ("--fim-spm-rate -1",)),
        ("--fim-split-sample x", ("--fim-split-sample", "--fim-fragment-rate")),
        ("--fim-fragment-rate 0.5", ("--fim-split-sample", "--fim-fragment-rate")),
        ("--mock-data --tokenizer-type NullTokenizer --vocab-size 9", ("--fim-data", "--mock-data")),
        ("--tokenizer-type NullTokenizer --vocab-size 9", ("--fim-data", "NullTokenizer")),
    ],
)
def test_refusals(flags: str, words: tuple[str, ...]):
    run = RUN.replace("--data-path a", "") if "--mock-data" in flags else RUN
    with pytest.raises(Refusal) as caught:
        parse(f"{run} --fim-data {flags}".split(), world_size=1)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_a_token_that_the_tokenizer_lacks_is_refused():
    with pytest.raises(Refusal, match="--fim-middle-token <fim_middle> is not a token of a file"):
        fim_of(DataConfig(fim_data=True, fim_prefix_token="<p>"), NAMED)


# ---- through the datasets


def test_samples_of_files(tmp_path: Path):
    """For one seed, samples do not depend on the order of reading, and keep the data's text."""
    from tests.unit.test_genome import make

    data, _ = make("TokenizerFromFileWithFIM", tmp_path, special=())
    tokenizer = build_tokenizer(data, None)
    builder = IndexedDatasetBuilder(f"{tmp_path}/text.bin", dtype=np.uint16)
    for number in range(40):
        ids = [*tokenizer.tokenize(f"the cat {number} sat on the mat " * (number % 5 + 1)), tokenizer.eod]
        builder.add_document(np.array(ids), [len(ids)])
    builder.finalize(f"{tmp_path}/text.idx")

    def samples(seed: int = 7, **more: object) -> list:
        config = Config()
        config.data = DataConfig(seq_length=64, data_path=[f"{tmp_path}/text"], split="1", num_workers=0, **more)
        config.run.seed = seed
        return build_datasets(config, tokenizer, (30, 0, 0))[0]

    plain, fim, again = samples(), samples(fim_data=True, fim_rate=1.0), samples(fim_data=True, fim_rate=1.0)
    backwards = [fim[number]["tokens"].tolist() for number in reversed(range(30))][::-1]
    assert backwards == [again[number]["tokens"].tolist() for number in range(30)]
    prefix = tokenizer.special("<fim_prefix>")
    changed = sum(prefix in tokens for tokens in backwards)
    assert changed == 30 and not any(prefix in plain[number]["tokens"] for number in range(30))
    assert backwards != [samples(8, fim_data=True, fim_rate=1.0)[n]["tokens"].tolist() for n in range(30)]
    sample = fim[3]
    assert sample["tokens"].tolist()[1:] == sample["labels"].tolist()[:-1] and len(sample["tokens"]) == 64
    text = [t for t in backwards[0] if t != tokenizer.eod][:20]
    assert set("".join(tokenizer.detokenize(text).split())) <= set("thecatsonm0123456789<fim_prxulde>|")
    assert tokenizer.special(END_OF_TEXT) == tokenizer.eod and tokenizer.special("the cat sat") is None
