# SPDX-License-Identifier: Apache-2.0
"""Prompts that are conversations, from a file or line by line, rendered by the tokenizer's chat template."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.inference.decoder import Decoder
from megatron.inference.generate import Answer, Request, generate
from megatron.inference.load import check_length
from megatron.training.data.chat_template import Chat, ChatTemplate, Message, checked_chats, rendered_apart
from megatron.training.data.row_files import messages_of
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.json_file import parse_json, read_bytes
from megatron.training.refusal import Refusal, one_line, reason
from megatron.training.settings.config import Config

CLEAR = "/clear"
HELP = f"write what the user says; {CLEAR} begins a new conversation, the end of the input (Ctrl-D) ends"


def chat_of(row: dict[str, Any], where: str) -> Chat:
    """The conversation of a row of JSON, which waits for an answer. Raises Refusal."""
    chats = checked_chats(row, messages_of(row, where), where, answered=False)
    if len(chats) > 1:
        raise Refusal(f"{where}: {len(chats)} conversations, each with a system message: give one in each line")
    return chats[0]


def said(text: str, where: str, tools: list[Any] | None = None) -> Chat:
    """A conversation in which the user has said ``text``."""
    row: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    return chat_of(row if tools is None else row | {"tools": tools}, where)


def read_tools(file: Path) -> list[Any] | None:
    """The tools in a file. Raises Refusal if they cannot be read."""
    where = f"--tools {file}"
    try:
        tools = parse_json(read_bytes(file))
    except (OSError, ValueError) as error:
        raise Refusal(f"{where}: {reason(error) if isinstance(error, OSError) else one_line(error, 100)}") from None
    return said("a", where, tools).tools


class Template:
    """The tokenizer's chat template, which runs in a process of its own.

    Raises:
        Refusal: the tokenizer has none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.transformers is None:
            raise Refusal(
                f"--chat needs a tokenizer of Hugging Face with a chat template, not {tokenizer.source}: "
                "--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER"
            )
        try:
            self._template = ChatTemplate(tokenizer.transformers, None, tokenizer.source)
        except Refusal as refusal:
            cause = str(refusal).removeprefix("--sft: ").split(": give --sft")[0]
            raise Refusal(f"--chat: {cause}: put chat_template.jinja into the tokenizer's folder") from None

    def prompts(self, chats: Sequence[Chat]) -> list[tuple[int, ...]]:
        """The tokens of conversations up to the beginning of the answer. Raises Refusal, by file and line."""
        return [tuple(ids) for ids in self._apart(chats, lambda chat: self._template.prompt(chat))]

    def turn_end(self) -> frozenset[int]:
        """The special token that ends an answer, if the template writes one."""
        chat = Chat("a chat", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])

        def last(chat: Chat) -> list[int]:
            rendered = self._template(chat)
            return [int(rendered.ids[rendered.spoken][-1])]

        try:
            ((token,),) = self._apart([chat], last)
        except Refusal:  # a template whose turns cannot be found still renders prompts
            return frozenset()
        return frozenset({token} & set(self._template.special_ids))

    def _apart(self, chats: Sequence[Chat], render: Callable[[Chat], Sequence[int]]) -> list[list[int]]:
        every = rendered_apart(((chat,) for chat in chats), lambda chat: tuple(render(chat)))
        return [list(ids) for _, ids in every]


class Stream:
    """Prints an answer while it is written."""

    def __init__(self, tokenizer: Tokenizer, active: bool) -> None:
        self.tokenizer, self.active, self.text = tokenizer, active, ""

    def __call__(self, answer: Answer) -> None:
        if self.active and not answer.stopped:
            text = self.tokenizer.detokenize(answer.tokens)
            if not text.endswith("\ufffd"):  # a part of a character
                self._show(text)

    def finish(self, text: str) -> None:
        """Print the rest of the complete answer."""
        if self.active:
            self._show(text)
            print(flush=True)
            self.text = ""

    def _show(self, text: str) -> None:
        if text.startswith(self.text):  # otherwise the tokenizer has changed its mind about white space
            print(text[len(self.text) :], end="", flush=True)
            self.text = text


@dataclass(frozen=True)
class Conversation:
    """What :func:`converse` needs besides the model."""

    config: Config
    template: Template
    tokenizer: Tokenizer
    request: Request
    lines: Callable[[], str]  # the next line; "" at the end
    tools: list[Any] | None = None


def line_of(first: bool) -> Callable[[], str]:
    """Reads standard input, with a prompt if it is a terminal."""

    def read() -> str:
        if sys.stdin.isatty() and first:
            print("> ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline()

    return read


def converse(decoder: Decoder, chat: Conversation, first: bool) -> list[Message]:
    """Answer what the first rank reads, line by line, until its input ends; returns the last conversation.

    All ranks call it. The first rank renders the conversation, and the others get its tokens.
    """
    messages: list[Message] = []
    if first and sys.stdin.isatty():
        print(HELP, file=sys.stderr)
    turn = 0
    while True:
        given: list[Any] = [_next_prompt(chat, messages) if first else None]
        dist.broadcast_object_list(given, src=0)
        if given[0] is None:
            return messages
        stream = Stream(chat.tokenizer, first)
        sampling = replace(chat.request.sampling, seed=chat.request.sampling.seed + turn)
        (answer,), _ = generate(decoder, [given[0]], replace(chat.request, sampling=sampling), seen=stream)
        text = chat.tokenizer.detokenize(answer.tokens[: len(answer.tokens) - answer.stopped])
        stream.finish(text)
        messages.append({"role": "assistant", "content": text or " "})
        turn += 1


def _next_prompt(chat: Conversation, messages: list[Message]) -> tuple[int, ...] | None:
    """The tokens of the conversation with the user's next line, which is added to it; None at the end of the input."""
    while line := chat.lines():
        if line.strip() == CLEAR:
            messages.clear()
        elif line.strip():
            messages.append({"role": "user", "content": line.rstrip("\n")})
            try:
                (tokens,) = chat.template.prompts([Chat("the conversation", messages, chat.tools)])
                check_length(chat.config, len(tokens), chat.request.max_new_tokens, "the conversation")
                return tokens
            except Refusal as refusal:
                print(f"error: {refusal}", file=sys.stderr)
                messages.pop()
    return None
