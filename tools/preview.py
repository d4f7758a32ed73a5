# SPDX-License-Identifier: Apache-2.0
"""preprocess_data.py --preview: the first documents or chats as the model sees them, with the trained tokens marked."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from megatron.training.data.chat_dataset import chosen_template
from megatron.training.data.chat_template import Chat, ChatTemplate, checked_chats, rendered_apart
from megatron.training.data.encoding import tokenizer_of
from megatron.training.data.row_files import form_of, messages_of
from megatron.training.data.sources.partitions import Work
from megatron.training.data.text_files import BadRecord, Reader, Record, fields_of, texts_of
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.refusal import Refusal, printable

OPEN, CLOSE = "[[", "]]"
MOST = 2000  # tokens that are shown of a document
CHATS = ("messages", "ShareGPT", "Alpaca", "prompt and completion")
Shown = tuple[str, list[int], list[bool]]  # name, ids, whether each is trained


def preview(args: argparse.Namespace, work: Work) -> list[str]:
    """The lines to print. Raises Refusal if a document cannot be read or rendered."""
    if args.preview < 1:
        raise Refusal(f"--preview {args.preview}: show at least 1")
    tokenizer = tokenizer_of(work.settings.tokenizer, args.vocab_size)
    lines = [f"tokens between {OPEN} and {CLOSE} are trained"]
    for where, ids, spoken in itertools.islice(_documents(args, work, tokenizer), args.preview):
        counted = sum(spoken)
        lines.append(f"--- {where}: {len(ids):,} tokens, {counted:,} trained")
        lines.append("\n".join(map(printable, marked(tokenizer, ids[:MOST], spoken).split("\n"))))
        if len(ids) > MOST:
            lines.append(f"... {len(ids) - MOST:,} more")
    if len(lines) == 1:
        raise Refusal(f"--input {' '.join(args.input)}: no documents")
    return lines


def marked(tokenizer: Tokenizer, ids: list[int], spoken: list[bool]) -> str:
    """The text of tokens, with marks around runs of those that are trained."""
    text = ""
    for trained, run in itertools.groupby(zip(ids, spoken), key=lambda pair: pair[1]):
        part = "".join(_words(tokenizer, [token for token, _ in run]))
        text += f"{OPEN}{part}{CLOSE}" if trained else part
    return text


def _words(tokenizer: Tokenizer, ids: list[int]) -> Iterator[str]:
    """Texts of tokens with the special ones, which a tokenizer of Hugging Face names and others leave out."""
    if tokenizer.transformers is not None:
        yield tokenizer.transformers.decode(ids, skip_special_tokens=False)
        return
    for end, group in itertools.groupby(ids, key=lambda token: token == tokenizer.eod):
        run = list(group)
        yield "<end of document>" * len(run) if end else tokenizer.detokenize(run)


def _documents(args: argparse.Namespace, work: Work, tokenizer: Tokenizer) -> Iterator[Shown]:
    records, template = Reader(list(work.paths), ()), None
    for record in records:
        try:
            fields = fields_of(record, work.settings.keys[0])
            if fields is None:
                continue
            if form_of(fields) in CHATS:
                template = template or _template(args, tokenizer)
                chats = checked_chats(fields, messages_of(fields, record.where()), record.where())
                yield from _rendered(chats, template)
                continue
            texts = texts_of(fields, work.settings.keys)
        except BadRecord as error:
            raise Refusal(f"{record.where()}: {error}") from None
        for key, text in texts.items():
            ids = [*tokenizer.tokenize(text), *([tokenizer.end_for("--append-eod")] if args.append_eod else [])]
            yield _name(record, key, work.settings.keys), ids, [True] * len(ids)


def _name(record: Record, key: str, keys: Iterable[str]) -> str:
    return record.where() + (f", {key}" if len(list(keys)) > 1 else "")


def _template(args: argparse.Namespace, tokenizer: Tokenizer) -> ChatTemplate:
    if tokenizer.transformers is None:
        raise Refusal("chats need --tokenizer-type HuggingFaceTokenizer, whose chat template renders them")
    return chosen_template(args.sft_tokenizer_prompt_format or "default", tokenizer)


def _rendered(chats: list[Chat], template: ChatTemplate) -> Iterator[Shown]:
    def parts_of(chat: Chat) -> tuple[bytes, bytes]:
        found = template(chat)
        return found.ids.tobytes(), found.spoken.tobytes()

    for where, (ids, spoken) in rendered_apart(((chat,) for chat in chats), parts_of):
        yield where, np.frombuffer(ids, np.int32).tolist(), np.frombuffer(spoken, bool).tolist()
