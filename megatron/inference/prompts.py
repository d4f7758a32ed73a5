# SPDX-License-Identifier: Apache-2.0
"""Reads prompts from the command line or a file, and runs tools/generate.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.inference.chat import Conversation, Stream, Template, chat_of, converse, line_of, read_tools, said
from megatron.inference.generate import Answer, Counts, Request, Sampling, generate
from megatron.inference.load import check_length, configure, load_decoder
from megatron.platform.collectives import gathered_objects
from megatron.system.whole_file import replace_file
from megatron.training import pretrain
from megatron.training.checkpoint.arguments_of import unchecked, vocabulary
from megatron.training.checkpoint.megatron_lm.places import checkpoint_path
from megatron.training.data.chat_template import Chat, Message
from megatron.training.data.tokenizer import Tokenizer, build_tokenizer
from megatron.training.json_file import parse_json, read_text
from megatron.training.ownership.own_files import one_job_of_ranks
from megatron.training.refusal import Refusal, one_line, refuse_together, refusing, short
from megatron.training.settings.config import Config
from megatron.training.setup import Runtime


@dataclass(frozen=True)
class Prompt:
    """A prompt: ``where`` names it in messages; ``text`` is None if it was given as tokens or as a conversation."""

    where: str
    text: str | None
    tokens: tuple[int, ...]
    messages: list[Message] | None = None


Given = str | list[int] | Chat


def read_prompts(
    texts: Sequence[str],
    file: Path | None,
    tokenizer: Tokenizer,
    vocab_size: int,
    chat: bool = False,
    tools: list[Any] | None = None,
) -> list[Prompt]:
    """All prompts of the command line or of a file.

    A .jsonl or .json file has one JSON object per line with "prompt" (or "text"), "tokens", a list of ids, or a
    conversation: "messages" and perhaps "tools". Other files have one prompt per line. No tokens are added before a
    prompt.

    Args:
        chat: a text is what a user says.
        tools: of the conversations that such texts begin.

    Raises:
        Refusal: a prompt cannot be read, is empty, or has ids outside the vocabulary; the message names it.
    """
    if bool(texts) == (file is not None):
        raise Refusal("give the prompts once: --prompt TEXT, as often as needed, or --prompts FILE")
    given = [(f"--prompt {number}", text) for number, text in enumerate(texts, 1)] if texts else list(_lines(file))
    if not given:
        raise Refusal(f"--prompts {file} has no prompts")
    if chat:
        given = [(where, said(value, where, tools) if isinstance(value, str) else value) for where, value in given]
    chats = [value for _, value in given if isinstance(value, Chat)]
    rendered = iter(Template(tokenizer).prompts(chats) if chats else ())
    return [
        replace(_prompt(where, list(next(rendered)), tokenizer, vocab_size), messages=value.messages)
        if isinstance(value, Chat)
        else _prompt(where, value, tokenizer, vocab_size)
        for where, value in given
    ]


def _lines(file: Path) -> Iterator[tuple[str, Given]]:
    for number, line in enumerate(read_text(file, "--prompts").splitlines(), 1):
        where = f"{file}:{number}"
        if file.suffix not in (".jsonl", ".json"):
            yield where, line
        elif line.strip():
            yield where, _object(where, line)


def _object(where: str, line: str) -> Given:
    """The text, the tokens or the conversation in one line of JSON."""
    try:
        row = parse_json(line)
    except ValueError as error:
        raise Refusal(f"{where}: not JSON: {one_line(error, 100)}") from None
    if isinstance(row, dict) and ("messages" in row or "conversations" in row):
        return chat_of(row, where)
    known = [name for name in ("prompt", "text", "tokens") if isinstance(row, dict) and name in row]
    if len(known) != 1:
        raise Refusal(f'{where}: a prompt must be a JSON object with one of "prompt", "text", "tokens" and "messages"')
    name, value = known[0], row[known[0]]
    if name == "tokens" and not (isinstance(value, list) and all(type(token) is int for token in value)):
        raise Refusal(f'{where}: "tokens" must be a list of token ids')
    if name != "tokens" and not isinstance(value, str):
        raise Refusal(f'{where}: "{name}" must be a text')
    return value


def _prompt(where: str, value: str | list[int], tokenizer: Tokenizer, vocab_size: int) -> Prompt:
    tokens = value
    if isinstance(value, str):
        try:
            tokens = tokenizer.tokenize(value) if value else []
        except ValueError as error:
            raise Refusal(f"{where}: {tokenizer.source} cannot read the prompt: {one_line(error, 100)}") from None
    if not tokens:
        raise Refusal(f"{where}: the prompt is empty, and generation needs at least one token: write one")
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise Refusal(f"{where}: token {short(wrong[0])} is outside the vocabulary of {vocab_size}")
    return Prompt(where, value if isinstance(value, str) else None, tuple(tokens))


UNKNOWN = 1 << 15  # tokens of a conversation whose length is unknown
PRINTED = ("this run changes the network", "WARNING: checkpoint", "not checked")  # beginnings of the printed notes


@dataclass(frozen=True)
class Order:
    """The flags of tools/generate.py in addition to those of training."""

    load: str
    prompt: Sequence[str]
    prompts: Path | None
    max_new_tokens: int
    sampling: Sampling
    ckpt_step: int | None = None
    dtype: str | None = None
    output: Path | None = None
    chat: bool = False
    tools: Path | None = None

    @property
    def by_line(self) -> bool:
        """Whether a conversation is read line by line from standard input."""
        return self.chat and not self.prompt and self.prompts is None


def run(order: Order, words: Sequence[str]) -> int:
    """Answer the prompts on all processes of torchrun; returns the exit code.

    Raises:
        Refusal: before the model reads a prompt, if the flags, the checkpoint or a prompt cannot be used.
    """
    pretrain.follow_srun()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    config, saved = configure(words, order.load, order.ckpt_step, order.dtype, world)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    latest = checkpoint_path(Path(order.load), order.ckpt_step)
    tokenizer, vocab_size = vocabulary(latest and unchecked(latest), tokenizer, config)
    if order.tools and not order.chat:
        raise Refusal(f"--tools {order.tools} needs --chat, whose template renders them")
    tools = read_tools(order.tools) if order.tools else None
    if order.by_line:
        if order.output is not None:
            raise Refusal(f"--output {order.output} needs --prompt or --prompts: a conversation line by line has none")
        prompts, most = [], config.model.max_position_embeddings or UNKNOWN
    else:
        prompts = read_prompts(order.prompt, order.prompts, tokenizer, vocab_size, order.chat, tools)
        longest = max(prompts, key=lambda prompt: len(prompt.tokens))
        check_length(config, len(longest.tokens), order.max_new_tokens, longest.where)
        most = len(longest.tokens)
    stop = frozenset((tokenizer.eod,) if saved.stop is None else saved.stop)
    chats = order.chat or any(prompt.messages is not None for prompt in prompts)
    template = Template(tokenizer) if chats else None
    request = Request(
        order.max_new_tokens,
        replace(order.sampling, seed=config.run.seed),
        stop if template is None else stop | template.turn_end(),
        config.data.micro_batch_size,
    )

    def answer(config: Config, runtime: Runtime, _: Any) -> int:
        with one_job_of_ranks(order.output, runtime.is_rank_zero):
            return answered(config, runtime)

    def answered(config: Config, runtime: Runtime) -> int:
        # The longest sequence limits a window of -1, and decides whether masks of pairs are made in host memory.
        config.data.seq_length = most + order.max_new_tokens
        decoder = load_decoder(config, runtime, vocab_size)
        first = runtime.is_rank_zero
        for note in (note for note in config.notes if first and note.startswith(PRINTED)):
            print(f"note: {note}", file=sys.stderr)
        if order.by_line:
            converse(decoder, Conversation(config, template, tokenizer, request, line_of(first), tools), first)
            return 0
        stream, tokens = Stream(tokenizer, first and len(prompts) == 1), len(prompts) * order.max_new_tokens
        hidden = None if first and not stream.active else True
        with tqdm(total=tokens, unit=" tokens", disable=hidden, leave=False) as bar:
            answers, counts = generate(decoder, [prompt.tokens for prompt in prompts], request, bar.update, stream)
        by_rank = gathered_objects(counts)
        refuse_together(lambda: report(order, prompts, answers, tokenizer, stream) if first else None)
        if first:
            print(summary(runtime, by_rank), file=sys.stderr)
        return 0

    return pretrain.run(config, answer, "more Ring ranks or a smaller --micro-batch-size need less on each rank")


def report(
    order: Order, prompts: Sequence[Prompt], answers: Sequence[Answer], tokenizer: Tokenizer, stream: Stream
) -> None:
    """Print the answers, or the rest of the one that is being printed, and write them to ``--output``.

    Raises:
        Refusal: the file cannot be written.
    """
    rows: list[dict[str, Any]] = []
    for prompt, answer in zip(prompts, answers):
        text = tokenizer.detokenize(answer.tokens[: len(answer.tokens) - answer.stopped])
        if len(prompts) == 1:
            stream.finish(text)
        else:
            print(f"[{answer.number + 1}] {text}", flush=True)
        rows.append(
            {
                **({"prompt": prompt.text} if prompt.messages is None else {"messages": prompt.messages}),
                "prompt_tokens": list(prompt.tokens),
                "text": text,
                "tokens": answer.tokens,
                "stopped": answer.stopped,
            }
        )
    if order.output is not None:
        with refusing(f"--output {order.output}", OSError):
            order.output.parent.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps(row, ensure_ascii=False) for row in rows)
            replace_file(order.output, "".join(f"{line}\n" for line in lines))


def summary(runtime: Runtime, by_rank: Sequence[Counts]) -> str:
    """One line: tokens read and generated, their rates, and the bytes of the largest cache.

    Args:
        by_rank: the counts of each rank; ranks of a replica have the same.
    """
    grid = runtime.grid
    # Ranks are numbered in the order TP, CP, DP, PP.
    replicas = [by_rank[data * grid.tensor.size * grid.context.size] for data in range(grid.data.size)]
    read, written = (sum(getattr(counts, name) for counts in replicas) for name in ("prompt_tokens", "new_tokens"))
    slow = max(counts.decode_seconds for counts in replicas)
    decoded = written - sum(counts.first_tokens for counts in replicas)
    speed = f" ({decoded / slow:,.1f} tokens/s)" if decoded else ""
    waited, most = max(counts.prefill_seconds for counts in replicas), max(counts.cache_bytes for counts in by_rank)
    return (
        f"{grid}: {read:,} tokens read in {waited:.2f} s, {written:,} written, the later ones in {slow:.2f} s{speed}; "
        f"keys and values: {most:,} bytes per rank"
    )
