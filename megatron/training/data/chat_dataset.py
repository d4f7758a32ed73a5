# SPDX-License-Identifier: Apache-2.0
"""Samples of packed conversations, which do not attend to each other, with loss only on the assistant's words.

Sample n depends on the files, the tokenizer, the seed and the sequence length, but not on the grid or the length of the
run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from megatron.training.arguments.data_paths import parse_split
from megatron.training.data import index_files as data_files
from megatron.training.data.chat_template import LONGEST, Chat, ChatTemplate, read_chats, rendered_apart
from megatron.training.data.index_files import load_numbers
from megatron.training.data.packing.packing_plans import best_fit
from megatron.training.data.read_tokens import DataError, FileArray, check_ids, unmapped
from megatron.training.data.sources.answer_pairs import Pairs, last_turns, read_pairs
from megatron.training.data.sources.contents import content_of
from megatron.training.data.sources.remote import is_remote
from megatron.training.data.text_files import unit_of
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.json_file import read_text
from megatron.training.ownership.atomic import atomic_folder, check_complete
from megatron.training.refusal import Refusal, one_line, refuse_together
from megatron.training.settings.config import Config, DataConfig

# Conversations share a sample by best-fit packing, in a new random order for each epoch.
GROUP = 64  # samples packed together: few enough that each epoch has different samples


def epoch(lengths: np.ndarray, capacity: int, key: tuple[int, ...]) -> list[np.ndarray]:
    """The samples of one pass over all conversations, each as indices [n] of its conversations.

    Args:
        lengths: tokens of each conversation.
        capacity: tokens of a sample.
        key: the seed, the split, the number of the epoch; the order depends on it.
    """
    generator = torch.Generator().manual_seed(int(hashlib.sha256(repr(key).encode()).hexdigest()[:14], 16))
    order = torch.randperm(len(lengths), generator=generator).numpy()
    group = np.cumsum(lengths[order]) // (GROUP * capacity)
    samples = []
    for part in np.split(order, np.flatnonzero(np.diff(group)) + 1):
        samples += [part[items] for items in best_fit(lengths[part], capacity)]
    return [samples[number] for number in torch.randperm(len(samples), generator=generator).tolist()]


# The first rank renders the tokens of a file of chats once and keeps them next to the data.

logger = logging.getLogger(__name__)
PARTS = {"tokens": np.int32, "spoken": np.bool_, "starts": np.int64, "lines": np.int64, "margins": np.float64}


@dataclass(frozen=True)
class Store:
    """The conversations of one file, one after another."""

    path: str
    tokens: np.ndarray | FileArray  # int32 [all tokens]
    spoken: np.ndarray | FileArray  # bool [all tokens], whether the assistant says it
    starts: np.ndarray | FileArray  # int64 [conversations + 1], the first token of each, and the end
    lines: np.ndarray | FileArray  # int64 [conversations], the line in the file
    margins: np.ndarray | FileArray  # float64 [conversations], of pairs of answers

    def __len__(self) -> int:
        return len(self.lines)

    def lengths(self) -> np.ndarray:
        """Tokens of each conversation."""
        return np.diff(self.starts)


def render(path: str, flag: str, template: ChatTemplate, pairs: bool, bar: bool = False) -> Store:
    """All conversations of a file as tokens.

    Args:
        pairs: the file has pairs of answers, of which the last turns are the assistant's.

    Raises:
        Refusal: a conversation is invalid or the template cannot render it (with file and line); or there is none.
    """
    tokens, spoken, starts, lines, margins = array("i"), bytearray(), array("q", [0]), array("q"), array("d")

    def parts_of(chat: Chat, turns: int, margin: float) -> tuple[bytes, bytes, float]:
        rendered = template(chat)
        mask = last_turns(rendered.spoken, turns) if turns else rendered.spoken
        return rendered.ids.tobytes(), mask.tobytes(), margin

    chats = read_pairs(path, flag) if pairs else ((chat, 0, 0.0) for chat in read_chats(path, flag))
    longest = os.path.getsize(path) if path.endswith((".json", ".jsonl")) and not is_remote(path) else LONGEST
    with tqdm(unit=" chats", desc=os.path.basename(path), disable=None if bar else True) as progress:
        for where, (ids, mask, margin) in rendered_apart(chats, parts_of, path, longest):
            lines.append(int(where.rpartition(" ")[2]))
            tokens.frombytes(ids)
            spoken += mask
            margins.append(margin)
            starts.append(len(tokens))
            progress.update()
    if not lines:
        raise Refusal(f"{flag} {path}: it has no conversations")
    parts = (np.frombuffer(part, kind) for part, kind in zip((tokens, spoken, starts, lines, margins), PARTS.values()))
    return Store(path, *parts)


def folder_of(path: str, template: ChatTemplate, data: DataConfig, pairs: bool) -> str:
    """The folder for the tokens of a file; its name depends on everything that the tokens depend on."""
    import transformers

    tokenizer = template.tokenizer
    text = json.dumps(
        [
            os.path.abspath(path),
            content_of(path),
            tokenizer.backend_tokenizer.to_str(),
            str(sorted(tokenizer.special_tokens_map.items())),
            template.given or tokenizer.chat_template,
            transformers.__version__,
            "5",  # version of the folder's format and of how the assistant's words are marked
            *(["pairs"] if pairs else []),
        ],
        sort_keys=True,
    )
    root = data.data_cache_path or os.path.join(os.path.dirname(os.path.abspath(path)), "index-cache")
    return os.path.join(root, "chats-" + hashlib.sha256(text.encode()).hexdigest()[:24])


def write_store(store: Store, folder: str) -> None:
    """Write a store into a folder. If the folder cannot be written, every rank renders the chats."""
    try:
        with atomic_folder(folder) as temporary:
            for name in PARTS:
                np.save(os.path.join(temporary, f"{name}.npy"), getattr(store, name))
    except OSError as error:
        if not os.path.isdir(folder):  # otherwise another run was faster
            logger.warning("no cache of tokens in %s (%s): every rank renders the chats", folder, error.strerror)


def read_store(path: str, folder: str) -> Store | None:
    """The store in a folder; None if there is no folder. Raises Refusal if the folder is damaged."""
    if not os.path.isdir(folder):
        return None
    try:
        parts = [unmapped(load_numbers(os.path.join(folder, f"{name}.npy"), "iubf")) for name in PARTS]
        store = Store(path, *parts)
        same = [(part.dtype, part.ndim) for part in parts] == [(np.dtype(kind), 1) for kind in PARTS.values()]
        if not same or not len(store.margins) + 1 == len(store.starts) == len(store.lines) + 1 > 1:
            raise ValueError("its parts have different lengths or types")
        if not len(store.tokens) == len(store.spoken) == store.starts[-1]:
            raise ValueError("its parts have different lengths or types")
        if store.starts[0] != 0 or (store.starts[1:] <= store.starts[:-1]).any():
            raise ValueError("its conversations are not in order")
    except (OSError, ValueError, DataError) as error:
        raise Refusal(f"{folder} does not hold tokens of chats ({one_line(error, 100)}): remove it") from None
    check_complete(folder)
    return store


SPLITS = ("train", "valid", "test")
FILLER = 1024  # limit of the tokens in a document of padding, so that attention within it is cheap


class Conversations:
    """Some conversations of some files, cut to a length.

    Args:
        stores: the conversations of each file.
        chosen: numbers [n] of the conversations, counted over all files.
        longest: limit of the tokens of a conversation.
        over_length: what to do with longer ones: "refuse", "truncate", "skip".

    Raises:
        Refusal: a conversation is longer, and ``over_length`` is "refuse".
    """

    def __init__(self, stores: list[Store], chosen: np.ndarray, longest: int, over_length: str) -> None:
        self.stores = stores
        firsts = np.cumsum([0, *map(len, stores)])
        self.file = np.searchsorted(firsts, chosen, side="right") - 1
        self.number = chosen - firsts[self.file]
        of_all = np.concatenate([store.lengths() for store in stores])
        self.lengths = of_all[chosen]
        long = np.flatnonzero(self.lengths > longest)
        self.truncated = self.skipped = 0
        if len(long) and over_length == "refuse":
            store, number = stores[self.file[long[0]]], self.number[long[0]]
            more = f" and {len(long) - 1} more" if len(long) > 1 else ""
            raise Refusal(
                f"{store.path}, {unit_of(store.path)} {store.lines[number]}: a conversation of "
                f"{self.lengths[long[0]]} tokens{more}, but --seq-length {longest - 1} allows {longest}: raise "
                "it, or give --sft-over-length truncate or skip"
            )
        self.lengths = np.minimum(self.lengths, longest)
        drop = long if over_length == "skip" else np.array([n for n in long if not self.of(n)[1][1:].any()], np.int64)
        self.skipped, self.truncated = len(drop), len(long) - len(drop)
        remaining = np.delete(np.arange(len(chosen)), drop)
        self.file, self.number = self.file[remaining], self.number[remaining]
        self.lengths = self.lengths[remaining]

    def __len__(self) -> int:
        return len(self.number)

    @property
    def inputs(self) -> np.ndarray:
        """Tokens that each conversation takes in a sample: its last one is only a label."""
        return self.lengths - 1

    def parts(self, index: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """What is packed together: one conversation."""
        return [self.of(index)]

    def of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [n] of a conversation, whether the assistant says each [n])."""
        store, number = self.stores[self.file[index]], self.number[index]
        start = store.starts[number]
        span = slice(start, start + self.lengths[index])
        return store.tokens[span], store.spoken[span]

    def where(self, index: int) -> str:
        """The name of a conversation in messages."""
        store = self.stores[self.file[index]]
        return f"{store.path}, {unit_of(store.path)} {store.lines[self.number[index]]}"


class ChatDataset(Dataset):
    """Samples of ``seq_length`` tokens, epoch after epoch, each packed in another order.

    Args:
        key: the seed and the split.
        size: the number of samples.
        tokenizer: its vocabulary must contain all ids; its end of document is the padding.
    """

    def __init__(
        self,
        conversations: Conversations | Pairs,
        seq_length: int,
        key: tuple[int, int],
        size: int,
        tokenizer: Tokenizer,
    ) -> None:
        self.conversations, self.seq_length, self.size = conversations, seq_length, size
        self.filler = tokenizer.end_for("--sft")
        self.vocab_size, self.source = tokenizer.vocab_size, tokenizer.source
        inputs = conversations.inputs
        self.samples, self.epochs = [], 0
        while len(self.samples) < size:
            self.samples += epoch(inputs, seq_length, (*key, self.epochs))
            self.epochs += 1
        self.samples_per_epoch = len(self.samples) / self.epochs
        self.share_filled = float(inputs.sum()) / (self.samples_per_epoch * seq_length)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``tokens``, ``labels``, ``loss_mask`` [s]; ``document_ends`` [n], including those of the padding.

        Of pairs also ``groups`` [s], the number of each token's answer: answers 2n (chosen) and 2n + 1 are a pair. If
        they share their prompts, ``document_ends`` [n, 2] has the ends and the parents of a tree's segments.
        For a reward model, the mask has the last token of each answer, where ``margins`` [s] has that of a chosen one.

        Raises:
            DataError: an id is outside the vocabulary, or a file cannot be read.
        """
        tokens = np.full(self.seq_length, self.filler, np.int64)
        labels, spoken, at, answers = tokens.copy(), np.zeros(self.seq_length, np.float32), 0, 0
        ends: list[tuple[int, int]] = []  # with the number of the segment that each continues
        groups, margins = np.zeros(self.seq_length, np.int64), np.zeros(self.seq_length, np.float32)
        pairs = isinstance(self.conversations, Pairs)
        whole = pairs and self.conversations.whole
        for number in self.samples[index]:
            shared, parent = (self.conversations.shared[number] if pairs else 0), -1
            for ids, mask in self.conversations.parts(number):
                check_ids(ids, self.vocab_size, self.source, partial(self.conversations.where, number))
                if parent >= 0:
                    ids, mask = ids[shared:], mask[shared:]
                elif shared:
                    parent = len(ends)
                    ends.append((at + shared, -1))
                stop = at + len(ids) - (not whole)
                tokens[at:stop] = ids[: stop - at]
                if whole:
                    spoken[stop - 1] = 1
                    margins[stop - 1] = 0 if answers % 2 else self.conversations.margin(number)
                else:
                    labels[at:stop], spoken[at:stop] = ids[1:], mask[1:]
                groups[at:stop] = answers
                at, answers = stop, answers + 1
                ends.append((at, parent))
        while at < self.seq_length:
            at = min(at + FILLER, self.seq_length)
            ends.append((at, -1))
        documents = np.array(ends) if pairs and self.conversations.trees else np.array(ends)[:, 0].copy()
        sample = {"tokens": tokens, "labels": labels, "loss_mask": spoken, "document_ends": documents}
        if pairs:
            sample["groups"] = groups
            if whole:
                sample["margins"] = margins
        return {name: torch.from_numpy(part) for name, part in sample.items()}


def build_chat_datasets(
    config: Config, tokenizer: Tokenizer, samples: tuple[int, int, int]
) -> tuple[ChatDataset | None, ChatDataset | None, ChatDataset | None]:
    """As :func:`megatron.training.data.datasets.build_datasets`, for chats. Every rank calls it.

    It adds lines about the data, and about conversations that were left out, to ``config.notes``.
    """
    path = config.data.sft_tokenizer_prompt_format
    template, sources = refuse_together(lambda: (chosen_template(path, tokenizer), _sources(config, samples)))
    flags = {path: flag for paths, flag, _ in sources for path in paths or ()}
    first = not dist.is_initialized() or dist.get_rank() == 0

    def write() -> None:
        for path, flag in flags.items() if first else ():
            folder = folder_of(path, template, config.data, config.pairs)
            if not os.path.isdir(folder):
                write_store(render(path, flag, template, config.pairs, config.logging.progress), folder)

    def read() -> dict[str, Store]:
        pairs = config.pairs
        stores = {path: read_store(path, folder_of(path, template, config.data, pairs)) for path in flags}
        return {path: store or render(path, flags[path], template, pairs) for path, store in stores.items()}

    refuse_together(write)
    stores = refuse_together(read)
    return refuse_together(lambda: _build(config, tokenizer, sources, samples, stores))


def chosen_template(path: str, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of --sft-tokenizer-prompt-format, or the tokenizer's. Raises Refusal if there is none."""
    try:
        given = None if path == "default" else read_text(path, "--sft-tokenizer-prompt-format")
    except Refusal as refusal:
        advice = "give a file with a Jinja template, or leave it out for the tokenizer's template"
        raise Refusal(f"{refusal}: {advice}") from None
    return ChatTemplate(tokenizer.transformers, given, tokenizer.source)


Source = tuple[list[str] | None, str, tuple[float, float]]  # files, the flag that named them, the share of a split


def _sources(config: Config, samples: tuple[int, int, int]) -> list[Source]:
    """The files of each split; None if it has none."""
    blend, blends = data_files.parse_blends(config.data)
    shares = [(0.0, 1.0)] * 3
    if blend:
        parts = [float(part) for part in parse_split(config.data.split).split(",")]
        bounds = np.cumsum([0.0, *parts, *[0.0] * (3 - len(parts))]) / sum(parts)
        shares = list(zip(bounds[:-1], bounds[1:]))
    sources: list[Source] = []
    for split, share, count in zip(SPLITS, shares, samples):
        of_split, flag = (blend, "--data-path") if blend else (blends[SPLITS.index(split)], f"--{split}-data-path")
        if of_split and of_split[1] is not None:
            raise Refusal(
                f"--sft with weights in {flag} is not supported: name only the files; all are read in each epoch"
            )
        if of_split is None and split == "train" and count:
            raise Refusal(f"no training data: give {flag}")
        paths = of_split[0] if of_split and count and (share[0] < share[1] or split == "train") else None
        for path in paths or ():
            if not os.path.isfile(path):
                raise Refusal(
                    f"{flag} {path}: no such file; --sft reads a file of chats: JSON lines, a JSON array or Parquet"
                )
        sources.append((paths, flag, share))
    return sources


def _build(
    config: Config, tokenizer: Tokenizer, sources: list[Source], samples: tuple[int, int, int], stores: dict[str, Store]
) -> tuple[ChatDataset | None, ...]:
    data, pairs, built = config.data, config.pairs, []
    for split, (paths, flag, share), count in zip(SPLITS, sources, samples):
        files = [stores[path] for path in paths or ()]
        total = sum(map(len, files)) // (2 if pairs else 1)
        unit, whose = ("pairs", "answers'") if pairs else ("conversations", "assistant's")
        chosen = np.arange(*(round(bound * total) for bound in share))
        if not files or (not len(chosen) and split != "train" and data.split is None):
            if files:
                config.notes.append(f"--sft: {total} {unit} are too few for a {split} split: no {split} data")
            built.append(None)
            continue
        if pairs:
            rule = data.sft_over_length, config.model.reward_model, data.separate_prompts
            chats = Pairs(files, chosen, data.seq_length, *rule)
        else:
            chats = Conversations(files, chosen, data.seq_length + 1, data.sft_over_length)
        if not len(chats):
            raise Refusal(f"{flag}: the {split} split gets none of {total} {unit}: change --split")
        dataset = ChatDataset(chats, data.seq_length, (config.run.seed, SPLITS.index(split)), count, tokenizer)
        built.append(dataset)
        spoken = sum(int(mask[1:].sum()) for number in range(len(chats)) for _, mask in chats.parts(number))
        tokens = (chats.inputs if pairs else chats.lengths).sum()
        config.notes.append(
            f"{split} data: {len(chats):,} {unit} of {tokens:,} tokens, {spoken:,} of them the "
            f"{whose}; an epoch is {dataset.samples_per_epoch:,.0f} samples, {dataset.share_filled:.1%} full"
        )
        if pairs and chats.shared.any():
            config.notes.append(f"{split} data: prompts are shared, so that {chats.saving}")
        if chats.truncated or chats.skipped:
            config.notes.append(
                f"--sft-over-length {data.sft_over_length}: of the {split} data, {chats.truncated} {unit} "
                f"truncated, {chats.skipped} skipped"
            )
    return tuple(built)
