# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers to the same prompt, one of them preferred, for --dpo and --reward-model.

A row has ``chosen`` and ``rejected``, each a text or a list of messages, and their ``prompt``, a text or a list of
messages. Without ``prompt``, both are complete conversations, and the prompt is what they share at first. Other keys
are those of chats, and ``margin``, by how much the reward of the chosen answer should be ahead. A pair is packed whole,
so that both answers are in the same micro-batch on every grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from megatron.context_parallel.layout.shared_rows import LEAST, Saving
from megatron.training.data.chat_template import Chat, checked_chats, rows_of
from megatron.training.data.text_files import unit_of
from megatron.training.refusal import Refusal, short

ANSWERS = ("chosen", "rejected")


def read_pairs(path: str, flag: str) -> Iterator[tuple[Chat, int, float]]:
    """The two conversations of each row, the chosen one first; how many of its last turns are the answer; the margin.

    Raises:
        Refusal: a row is not a pair; with file and line.
    """
    for line, where in rows_of(path, flag):
        for name in ANSWERS:
            if line.get(name) in (None, "", []):
                has = "has no" if line.get(name) is None else "has an empty"
                raise Refusal(f'{where}: the pair {has} "{name}": pairs are "prompt", "chosen", "rejected"')
        margin = line.get("margin") or 0.0
        if type(margin) not in (int, float) or not math.isfinite(margin):
            raise Refusal(f'{where}, "margin": {short(margin)} is not a finite number')
        prompt = _messages(line["prompt"], "user", f'{where}, "prompt"') if line.get("prompt") else None
        answers = [_messages(line[name], "assistant" if prompt else "", f'{where}, "{name}"') for name in ANSWERS]
        if prompt is None:
            shared = 0
            while shared < min(map(len, answers)) - 1 and answers[0][shared] == answers[1][shared]:
                shared += 1
            prompt, answers = answers[0][:shared], [answer[shared:] for answer in answers]
        for name, answer in zip(ANSWERS, answers):
            chats = checked_chats(line, prompt + answer, f'{where}, "{name}"')
            if len(chats) > 1:
                raise Refusal(f'{where}, "{name}": a system message in the middle starts another conversation')
            yield replace(chats[0], where=where), sum(message["role"] == "assistant" for message in answer), margin


def _messages(value: Any, role: str, where: str) -> list[Any]:
    """Messages; a text is one message of this role."""
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if isinstance(value, str):
        raise Refusal(f'{where} is a text, but the row has no "prompt": add it, or write conversations')
    if not isinstance(value, list):
        raise Refusal(f"{where} is neither a text nor a list of messages: {short(value)}")
    return value


def _saving(lengths: np.ndarray, shared: np.ndarray) -> Saving:
    """What trees of pairs with these lengths [n, 2] save."""
    pairs = (lengths * (lengths + 1) // 2).sum()
    once = (shared * (shared + 1) // 2).sum()
    return Saving(int(lengths.sum()), int(lengths.sum() - shared.sum()), int(pairs), int(pairs - once))


def last_turns(spoken: np.ndarray, turns: int) -> np.ndarray:
    """The mask of only the last ``turns`` runs of a mask [tokens]."""
    begins = np.flatnonzero(np.diff(spoken.astype(np.int8), prepend=0) == 1)
    kept = spoken.copy()
    kept[: begins[-turns] if len(begins) >= turns else len(spoken)] = False
    return kept


class Pairs:
    """Some pairs of some files, as :class:`~megatron.training.data.chat_dataset.Conversations` is for chats.

    Args:
        stores: of each file, two conversations for each pair.
        chosen: numbers [n] of the pairs, counted over all files.
        longest: limit of a pair's tokens.
        over_length: what to do with longer ones: "refuse" or "skip".
        whole: whether a model reads the last token of an answer too, for its reward; else it is only a label.
        separate: whether each answer has its own prompt; else both share one, as a tree.

    Attributes:
        shared: [n], the first tokens of each pair that are computed once; what they predict is not part of the loss.
        inputs: [n], the tokens of each pair in a sample.
        saving: of all pairs.

    Raises:
        Refusal: a pair is longer, and ``over_length`` is "refuse"; or an answer has no tokens.
    """

    truncated = 0

    def __init__(
        self,
        stores: list[Any],
        chosen: np.ndarray,
        longest: int,
        over_length: str,
        whole: bool = False,
        separate: bool = False,
    ) -> None:
        self.whole, self.trees = whole, not separate
        firsts = np.cumsum([0, *(len(store) // 2 for store in stores)])
        self.stores = stores
        self.file = np.searchsorted(firsts, chosen, side="right") - 1
        self.number = chosen - firsts[self.file]
        lengths = np.concatenate([(store.lengths() - (not whole)).reshape(-1, 2) for store in stores])[chosen]
        self.shared = np.zeros(len(chosen), np.int64)
        for index in range(len(chosen) if self.trees else 0):
            self.shared[index] = self._shared(index)
        self.inputs = lengths.sum(1) - self.shared
        long = np.flatnonzero(self.inputs > longest)
        if len(long) and over_length == "refuse":
            more = f" and {len(long) - 1} more" if len(long) > 1 else ""
            raise Refusal(
                f"{self.where(long[0])}: a pair of {' + '.join(map(str, lengths[long[0]]))} tokens{more}, but both "
                f"answers must fit in --seq-length {longest}: raise it, or give --sft-over-length skip"
            )
        self.skipped = len(long)
        keep = np.delete(np.arange(len(chosen)), long)
        for name in ("file", "number", "inputs", "shared"):
            setattr(self, name, getattr(self, name)[keep])
        self.saving = _saving(lengths[keep], self.shared)
        for index in range(len(self)):
            for name, (_, mask) in zip(ANSWERS, self.parts(index)):
                if not mask[1:].any():
                    raise Refusal(f'{self.where(index)}, "{name}": the template gives the answer no tokens')

    def __len__(self) -> int:
        return len(self.number)

    def parts(self, index: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(tokens [n], which belong to the answer [n]) of both answers with the prompt, the chosen one first."""
        store, number = self.stores[self.file[index]], 2 * self.number[index]
        spans = [slice(store.starts[n], store.starts[n + 1]) for n in (number, number + 1)]
        return [(store.tokens[span], store.spoken[span]) for span in spans]

    def _shared(self, index: int) -> int:
        """How many first tokens of a pair both answers have, with the same next one, which is not an answer's."""
        (first, spoken), (second, also_spoken) = self.parts(index)
        length = min(len(first), len(second)) - 1
        differ = np.flatnonzero(first[:length] != second[:length])
        common = int(differ[0]) if len(differ) else length
        if not self.whole:
            answers = np.flatnonzero(spoken[1:length] | also_spoken[1:length])
            common = min(common - 1, int(answers[0]) if len(answers) else length)
        return common if common >= LEAST else 0

    def margin(self, index: int) -> float:
        """By how much the reward of the chosen answer should be ahead."""
        return float(self.stores[self.file[index]].margins[2 * self.number[index]])

    def where(self, index: int) -> str:
        """The name of a pair in messages."""
        store = self.stores[self.file[index]]
        return f"{store.path}, {unit_of(store.path)} {store.lines[2 * self.number[index]]}"
