# SPDX-License-Identifier: Apache-2.0
"""Prompts, from the command line or a file, as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.training.data.tokenizer import Tokenizer
from megatron.training.json_file import parse_json, read_bytes
from megatron.training.refusal import Refusal, one_line, reason, short


@dataclass(frozen=True)
class Prompt:
    """``where`` names it in messages; ``text`` is None where tokens were given."""

    where: str
    text: str | None
    tokens: tuple[int, ...]


def read_prompts(texts: Sequence[str], file: Path | None, tokenizer: Tokenizer, vocab_size: int) -> list[Prompt]:
    """All prompts, of the command line or of a file.

    A file whose name ends in .jsonl or .json has a JSON object a line, with "prompt" (or "text"), or with "tokens", a
    list of ids; any other file has a prompt a line, as it stands. Nothing is put before a prompt.

    Raises:
        Refusal: one that cannot be read, is empty, or has ids beyond the vocabulary; the line says which.
    """
    if bool(texts) == (file is not None):
        raise Refusal("give the prompts once: --prompt TEXT, as often as needed, or --prompts FILE")
    given = [(f"--prompt {number}", text) for number, text in enumerate(texts, 1)] if texts else list(_lines(file))
    if not given:
        raise Refusal(f"--prompts {file}: no prompt in it")
    return [_prompt(where, value, tokenizer, vocab_size) for where, value in given]


def _lines(file: Path) -> Iterator[tuple[str, str | list[int]]]:
    try:
        lines = read_bytes(file).decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise Refusal(f"--prompts {file}: {reason(error)}") from None
    for number, line in enumerate(lines, 1):
        where = f"{file}:{number}"
        if file.suffix not in (".jsonl", ".json"):
            yield where, line
        elif line.strip():
            yield where, _object(where, line)


def _object(where: str, line: str) -> str | list[int]:
    """The text or the tokens of one line of JSON."""
    try:
        row = parse_json(line)
    except ValueError as error:
        raise Refusal(f"{where}: not JSON: {one_line(error, 100)}") from None
    known = [name for name in ("prompt", "text", "tokens") if isinstance(row, dict) and name in row]
    if len(known) != 1:
        raise Refusal(f'{where}: a JSON object with one of "prompt", "text" and "tokens" is a prompt')
    name, value = known[0], row[known[0]]
    if name == "tokens" and not (isinstance(value, list) and all(type(token) is int for token in value)):
        raise Refusal(f'{where}: "tokens" is a list of token ids')
    if name != "tokens" and not isinstance(value, str):
        raise Refusal(f'{where}: "{name}" is a text')
    return value


def _prompt(where: str, value: str | list[int], tokenizer: Tokenizer, vocab_size: int) -> Prompt:
    tokens = value
    if isinstance(value, str):
        try:
            tokens = tokenizer.tokenize(value) if value else []
        except ValueError as error:
            raise Refusal(f"{where}: {tokenizer.source} cannot read it: {one_line(error, 100)}") from None
    if not tokens:
        raise Refusal(f"{where}: the prompt is empty, and the first token needs one before it: give at least one")
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise Refusal(f"{where}: token {short(wrong[0])} is none of the vocabulary's {vocab_size}")
    return Prompt(where, value if isinstance(value, str) else None, tuple(tokens))
