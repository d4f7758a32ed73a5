# SPDX-License-Identifier: Apache-2.0
"""Fill in the middle: a text is cut in three parts, and the model learns to write the middle after the other two.

As in Megatron-LM's GPTFIMDataset (megatron/training/datasets/fim_dataset.py), each text between ends of documents is
cut with probability --fim-rate at two of its characters. It becomes `<prefix> a <suffix> c <middle> b`, or with
probability --fim-spm-rate `<prefix> <suffix> c <middle> a b`. The sample is then cut or padded to its former length.
The random numbers depend on the sample's number; in Megatron-LM, on the worker and on what it has read before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron.training.data.tokenizer import Tokenizer
from megatron.training.refusal import Refusal
from megatron.training.settings.config import DataConfig


@dataclass(frozen=True)
class Fim:
    """The settings of fill in the middle, with tokens as ids."""

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
    """The settings of the flags; None without --fim-data.

    Raises:
        Refusal: the tokenizer does not have the token that a flag names.
    """
    if not data.fim_data:
        return None
    ids: dict[str, int] = {}
    for name in ("prefix_token", "middle_token", "suffix_token", "pad_token", "eod_token", "split_sample"):
        text = getattr(data, f"fim_{name}")
        if text is None:
            continue
        token = tokenizer.special(text)
        if token is None:
            flag = f"--fim-{name.replace('_', '-')}"
            raise Refusal(f"{flag} {text} is not a token of {tokenizer.source}: name one that it has")
        ids[name.split("_")[0]] = token
    return Fim(tokenizer, data.fim_rate, data.fim_spm_rate, **ids, fragment_rate=data.fim_fragment_rate or 0.0,
               no_prefix=data.fim_no_prefix)  # fmt: skip


def fill_in(sample: np.ndarray, fim: Fim, draw: np.random.Generator) -> np.ndarray:
    """The sample [n] with its texts rearranged, in its former length."""
    filled = _changed(sample, fim.eod, lambda text: _text(text, fim, draw)).astype(np.int64)[: len(sample)]
    return np.pad(filled, (0, len(sample) - len(filled)), constant_values=fim.pad)


def _changed(ids: np.ndarray, mark: int, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Change each text between marks. An empty one, but not the last, is dropped with its mark, as in Megatron-LM."""
    ends = [*np.flatnonzero(ids == mark), len(ids)]
    texts = [ids[start:end] for start, end in zip([0, *(end + 1 for end in ends)], ends)]
    kept = [text for text in texts[:-1] if len(text)]
    return np.concatenate([*(part for text in kept for part in (change(text), [mark])), change(texts[-1])])


def _text(ids: np.ndarray, fim: Fim, draw: np.random.Generator) -> np.ndarray:
    """Rearrange one text; if it has several parts, each part separately."""
    if fim.split is None or not (ids == fim.split).any():
        return _cut(ids, fim.rate, fim, draw)
    if draw.random() >= fim.rate:
        return ids
    return _changed(ids, fim.split, lambda part: _cut(part, fim.fragment_rate, fim, draw))


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
