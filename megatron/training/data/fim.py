# SPDX-License-Identifier: Apache-2.0
"""Fill in the middle: texts are cut in three, and the model learns to write the middle after what surrounds it.

As Megatron-LM's GPTFIMDataset has it (megatron/training/datasets/fim_dataset.py): every text of a sample, between ends
of documents, is with --fim-rate cut at two of its characters and becomes `<prefix> a <suffix> c <middle> b`, or with
--fim-spm-rate `<prefix> <suffix> c <middle> a b`; the sample is then cut, or filled up, to its old length. But what is
drawn there depends on the worker and on what it read before; here it is drawn by the number of the sample alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.training.arguments.config import DataConfig
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.refusal import Refusal


@dataclass(frozen=True)
class Fim:
    """What to do with a sample, in ids."""

    tokenizer: Tokenizer
    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None = None
    fragment_rate: float = 0.0
    no_prefix: str | None = None


def fim_of(data: DataConfig, tokenizer: Tokenizer) -> Fim | None:
    """What the flags ask for; None without --fim-data.

    Raises:
        Refusal: the tokenizer has not the token that a flag names.
    """
    if not data.fim_data:
        return None
    ids: dict[str, int] = {}
    for name in ("prefix_token", "middle_token", "suffix_token", "pad_token", "eod_token", "split_sample"):
        text = getattr(data, f"fim_{name}")
        if text is None:
            continue
        found = tokenizer.special(text)
        if found is None:
            flag = f"--fim-{name.replace('_', '-')}"
            raise Refusal(f"{flag} {text} is no token of {tokenizer.source}: name one that it has")
        ids[name.split("_")[0]] = found
    return Fim(tokenizer, data.fim_rate, data.fim_spm_rate, **ids, fragment_rate=data.fim_fragment_rate or 0.0,
               no_prefix=data.fim_no_prefix)  # fmt: skip


def fill_in(sample: np.ndarray, fim: Fim, draw: np.random.Generator) -> np.ndarray:
    """The sample [n] with its texts cut and put together anew, as long as it was."""
    found = [part for text in _between(sample, fim.eod) for part in (_text(text, fim, draw), [fim.eod])]
    filled = np.concatenate(found[:-1]).astype(np.int64)[: len(sample)]
    return np.pad(filled, (0, len(sample) - len(filled)), constant_values=fim.pad)


def _between(ids: np.ndarray, mark: int) -> Iterator[np.ndarray]:
    """The stretches between marks. Empty ones go, with the mark behind them, save the last, as in Megatron-LM."""
    ends = [*np.flatnonzero(ids == mark), len(ids)]
    for start, end in zip([0, *(end + 1 for end in ends)], ends):
        if end > start or end == len(ids):
            yield ids[start:end]


def _text(ids: np.ndarray, fim: Fim, draw: np.random.Generator) -> np.ndarray:
    """One text; of one in several parts, each part alone."""
    if fim.split is None or not (ids == fim.split).any():
        return _cut(ids, fim.rate, fim, draw)
    if draw.random() >= fim.rate:
        return ids
    parts = [
        part for text in _between(ids, fim.split) for part in (_cut(text, fim.fragment_rate, fim, draw), [fim.split])
    ]
    return np.concatenate(parts[:-1])


def _cut(ids: np.ndarray, rate: float, fim: Fim, draw: np.random.Generator) -> np.ndarray:
    if draw.random() >= rate:
        return ids
    special = (fim.prefix, fim.middle, fim.suffix, fim.pad, fim.eod)
    text = fim.tokenizer.detokenize(ids[~np.isin(ids, special)])
    if fim.no_prefix is not None and text.startswith(fim.no_prefix):
        return ids
    first, second = sorted(draw.integers(0, len(text) + 1, 2))
    before, middle, after = (fim.tokenizer.array(part) for part in (text[:first], text[first:second], text[second:]))
    if draw.random() < fim.spm_rate:
        return np.concatenate([[fim.prefix, fim.suffix], after, [fim.middle], before, middle])
    return np.concatenate([[fim.prefix], before, [fim.suffix], after, [fim.middle], middle])


def generator(*key: Any) -> np.random.Generator:
    """Random numbers that are a function of whole numbers, not below 0, alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([int(part) for part in key])))
