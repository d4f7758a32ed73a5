# SPDX-License-Identifier: Apache-2.0
"""Convert a conversation to tokens with the tokenizer's chat template, and find the tokens that the assistant says.

If a template marks the assistant's words by ``{% generation %} ... {% endgeneration %}``, transformers finds them.
Otherwise the conversation is rendered up to each of the assistant's turns, with the generation prompt, and to the end
of the turn; the difference is the turn. This requires that the template renders the beginning of a conversation
independently of what follows; otherwise the conversation is refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from megatron.system.own_process import Ended, Item, in_own_process
from megatron.training.data.row_files import messages_of
from megatron.training.data.text_files import BadRecord, Reader, Record, fields_of
from megatron.training.json_file import parse_json
from megatron.training.refusal import Refusal, one_line, refusing, short

# Conversations from JSON lines, JSON arrays and Parquet. A row is an object with ``messages``, a list of
# {role, content}, or in another format of row_files.py. It may also have ``system`` (a text that comes first),
# ``tools`` (for the template) and ``chat_template_kwargs`` (variables of the template). As in Megatron-LM
# (megatron/training/datasets/sft_dataset.py), a row may have several conversations; each begins with a system message.
SYSTEM = ("system", "developer")
# The roles that may follow each role; "" is the beginning.
AFTER = {
    "": (*SYSTEM, "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
Message = dict[str, Any]
LONGEST = 32 << 20  # limit of a line in bytes; tokenization takes about 200 bytes of memory for each
# A template is a program, whose loops and texts may have any size. Limits of the process that renders chats:
MEMORY, BYTES_RENDERED, SECONDS = 2 << 30, 250, 600  # bytes, besides some a byte of the longest chat; CPU time of one


@dataclass(frozen=True)
class Chat:
    """One conversation, checked."""

    where: str  # file and line, for error messages
    messages: list[Message]
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)  # of the template


def read_chats(path: str, flag: str) -> Iterator[Chat]:
    """The conversations of a file in its order, without blank lines.

    Raises:
        Refusal: a row is not a conversation; with file and line.
    """
    for line, where in rows_of(path, flag):
        yield from checked_chats(line, messages_of(line, where), where)


def rows_of(path: str, flag: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of a file in its order, and file and line of each, without blank lines."""
    try:
        for record in Reader([path]):
            if (line := row_of(record)) is not None:
                yield line, record.where()
    except Refusal as refusal:
        raise Refusal(str(refusal).replace("--input", flag, 1)) from None


def row_of(record: Record) -> dict[str, Any] | None:
    """The object of one row; None if the row is blank."""
    where = record.where()
    if len(record.content) > LONGEST:
        raise Refusal(f"{where}: a {record.unit} of {len(record.content):,} bytes; the limit is {LONGEST:,}: split it")
    try:
        return fields_of(record, "text", parse_json)
    except BadRecord as error:
        raise Refusal(f"{where}: {error}") from None


def checked_chats(line: dict[str, Any], messages: list[Any], where: str, answered: bool = True) -> list[Chat]:
    """The conversations of a row with these messages; ``answered``: the assistant is last, otherwise it is not."""
    tools, system = line.get("tools"), line.get("system")
    if system is not None and not isinstance(system, str):
        raise Refusal(f'{where}: "system" is not text')
    if isinstance(tools, str):  # as in data sets whose columns have one type
        with refusing(f'{where}: "tools": not JSON', ValueError):
            tools = parse_json(tools) or None
    if tools is not None and not isinstance(tools, list):
        raise Refusal(f'{where}: "tools" is not a list')
    variables = line.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise Refusal(f'{where}: "chat_template_kwargs" is not an object')
    checked = [_message(message, f"{where}, message {number}") for number, message in enumerate(messages, 1)]
    if system is not None:
        if checked[0]["role"] in SYSTEM:
            raise Refusal(f'{where}: both "system" and a first message of the role {checked[0]["role"]}: keep one')
        checked.insert(0, {"role": "system", "content": system})
    chats = []
    for part in _parts(checked):
        _check_order(part, where, answered)
        chats.append(Chat(where, part, tools or None, variables))
    return chats


def _message(message: Any, where: str) -> Message:
    """Check the role and the content of a message."""
    if not isinstance(message, dict):
        raise Refusal(f"{where}: not a JSON object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in AFTER or not role:
        raise Refusal(f"{where}: role {short(role)} is none of {', '.join(filter(None, AFTER))}")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise Refusal(f"{where}: its content has parts that are not text, and only text is supported")
    elif not isinstance(content, str) and not (content is None and role == "assistant" and message.get("tool_calls")):
        raise Refusal(f"{where}: its content is {'missing' if content is None else 'not text'}")
    if role == "assistant" and not (content or message.get("tool_calls")):
        raise Refusal(f"{where}: the assistant says nothing")
    return message


def _parts(messages: list[Message]) -> list[list[Message]]:
    parts: list[list[Message]] = []
    for message in messages:
        if not parts or message["role"] in SYSTEM:
            parts.append([])
        parts[-1].append(message)
    return parts


def _check_order(messages: list[Message], where: str, answered: bool) -> None:
    before = ""
    for message in messages:
        role = message["role"]
        if role not in AFTER[before]:
            after = f"follows {before}" if before else "comes first"
            raise Refusal(f"{where}: roles out of order: {role} {after}, instead of {' or '.join(AFTER[before])}")
        before = role
    if not answered and before not in ("user", "tool"):
        raise Refusal(f"{where}: the conversation ends with {before}: end it with what the user says, or a tool")
    if answered and before != "assistant":
        raise Refusal(f"{where}: the conversation ends with {before}, so there is no answer to learn: end it with one")


OTHER_TEMPLATE = "give one that shows them, --sft-tokenizer-prompt-format FILE, or remove them from the data"
MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """A conversation of n tokens: ``ids`` [n] int32, and ``spoken`` [n] bool, whether the assistant says it."""

    ids: np.ndarray
    spoken: np.ndarray


def _with_message(chat: Chat, number: int, message: Message) -> Chat:
    """The same conversation with another message ``number``."""
    return replace(chat, messages=[*chat.messages[:number], message, *chat.messages[number + 1 :]])


class ChatTemplate:
    """Renders conversations.

    Args:
        tokenizer: a fast tokenizer of transformers.
        template: Jinja that replaces the tokenizer's template.
        source: name of the tokenizer in messages.

    Raises:
        Refusal: there is no template, or the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any, template: str | None, source: str) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise Refusal(f"--sft: {source} is not a fast tokenizer, which --sft needs to match tokens with words")
        self.tokenizer, self.given = tokenizer, template
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise Refusal(
                f"--sft: {source} has no chat template: give --sft-tokenizer-prompt-format FILE, a Jinja template, or "
                "put chat_template.jinja in its folder"
            )

    def template_of(self, chat: Chat) -> str:
        """The template for a conversation. Some tokenizers have a second one for tools."""
        return self.tokenizer.get_chat_template(self.given, chat.tools)

    def __call__(self, chat: Chat) -> Rendered:
        """Tokens of a conversation.

        Raises:
            Refusal: the template fails, or the assistant's words cannot be found; with file and line.
        """
        if wrong := sorted(self.parameters & set(chat.variables)):
            raise Refusal(
                f'{chat.where}: "chat_template_kwargs" sets {wrong[0]}, which is not a variable of a template: '
                "leave it out"
            )
        try:
            self._check_shown(chat)
            if MARKED.search(self.template_of(chat)):
                ids, spoken = self._marked(chat)
            else:
                ids, spoken = self._by_turns(chat)
        except Refusal:
            raise
        except Exception as error:  # a template, Jinja and the tokenizer may raise anything
            raise Refusal(f"{chat.where}: the chat template fails: {one_line(error, 200)}") from error
        rendered = Rendered(np.asarray(ids, np.int32), np.asarray(spoken, bool))
        if not rendered.spoken[1:].any():
            raise Refusal(f"{chat.where}: the chat template renders no words of the assistant")
        return rendered

    def prompt(self, chat: Chat) -> list[int]:
        """Tokens of a conversation up to the beginning of the assistant's answer. Raises Refusal as a call."""
        try:
            text = self._text(chat, len(chat.messages), generation_prompt=True)
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # a template, Jinja and the tokenizer may raise anything
            raise Refusal(f"{chat.where}: the chat template fails: {one_line(error, 200)}") from error

    @property
    def special_ids(self) -> list[int]:
        """The ids of the special tokens."""
        added = (number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special)
        return [*added, *self.tokenizer.all_special_ids]

    def _check_shown(self, chat: Chat) -> None:
        """Refuse a template that does not show tools or their calls, or fails for an answer that has only calls."""
        calls = [number for number, message in enumerate(chat.messages) if message.get("tool_calls")]
        nulls = [number for number in calls if chat.messages[number].get("content") is None]
        if nulls:
            self._check_nulls(chat, nulls)
        if not calls and not chat.tools:
            return
        whole, count = self._text(chat, len(chat.messages)), len(chat.messages)
        if chat.tools and whole == self._text(replace(chat, tools=None), count):
            raise Refusal(f'{chat.where}: the chat template shows nothing of "tools": {OTHER_TEMPLATE}')
        for number in calls:
            message = {key: value for key, value in chat.messages[number].items() if key != "tool_calls"}
            if whole == self._text(
                _with_message(chat, number, message | {"content": message.get("content") or ""}), count
            ):
                raise Refusal(
                    f'{chat.where}, message {number + 1}: the chat template shows nothing of "tool_calls": '
                    f"{OTHER_TEMPLATE}"
                )

    def _check_nulls(self, chat: Chat, numbers: list[int]) -> None:
        empty = chat
        for number in numbers:
            empty = _with_message(empty, number, chat.messages[number] | {"content": ""})
        expected = self._text(empty, len(chat.messages))
        try:
            text = self._text(chat, len(chat.messages))
            wrong = "prints None for" if text.count("None") > expected.count("None") else ""
        except Exception as error:  # a template may raise anything; with content "" it did not
            wrong = f"fails ({one_line(error, 100)}) on"
        if wrong:
            raise Refusal(
                f'{chat.where}, message {numbers[0] + 1}: the chat template {wrong} "content": null with '
                '"tool_calls": write "content": "" in the data, or give a template that handles it, '
                "--sft-tokenizer-prompt-format FILE"
            )

    def _marked(self, chat: Chat) -> tuple[list[int], list[int]]:
        out = self.tokenizer.apply_chat_template(
            chat.messages,
            tools=chat.tools,
            chat_template=self.given,
            return_assistant_tokens_mask=True,
            return_dict=True,
            **chat.variables,
        )
        return out["input_ids"], out["assistant_masks"]

    def _by_turns(self, chat: Chat) -> tuple[list[int], np.ndarray]:
        whole = self._text(chat, len(chat.messages))
        spans = [
            self._turn(chat, n, whole) for n, message in enumerate(chat.messages) if message["role"] == "assistant"
        ]
        out = self.tokenizer(whole, add_special_tokens=False)
        spoken = np.zeros(len(out["input_ids"]), bool)
        for start, stop in spans:  # as in transformers: from the token of the first character to that of the last
            first, last = out.char_to_token(start), out.char_to_token(stop - 1)
            if first is None or last is None:
                raise Refusal(f"{chat.where}: the tokenizer drops the first or the last character of a turn")
            spoken[first : last + 1] = True
        return out["input_ids"], spoken

    def _turn(self, chat: Chat, number: int, whole: str) -> Span:
        """The span of characters in ``whole`` that the assistant says in message ``number``.

        It begins after the generation prompt and includes the special token that ends the turn, if there is one, but
        not the white space after that, which belongs to the template.
        """
        message = chat.messages[number]
        prompt, before = self._text(chat, number, generation_prompt=True), self._text(chat, number)
        after = self._text(chat, number + 1)
        turn = f"{chat.where}, message {number + 1}"
        if not whole.startswith(after) or not after.startswith(prompt):
            cause = "what follows" if after.startswith(prompt) else "the generation prompt"
            raise Refusal(
                f"{turn}: the chat template renders it differently depending on {cause}, so its words cannot be found: "
                "mark them in the template, {% generation %} ... {% endgeneration %}"
            )
        text, content = after[len(prompt) :], message.get("content")
        if prompt == before and isinstance(content, str) and not text.lstrip().startswith(content.strip()[:20]):
            raise Refusal(
                f"{turn}: the chat template has no add_generation_prompt, so its words cannot be separated from their "
                "heading: mark them in the template, {% generation %} ... {% endgeneration %}"
            )
        stripped = text.rstrip()
        if stripped.endswith(self.special):
            text = stripped
        return len(prompt), len(prompt) + len(text)

    @cached_property
    def parameters(self) -> set[str]:
        """Arguments of transformers that are not variables of a template; data must not set them."""
        return set(inspect.signature(self.tokenizer.apply_chat_template).parameters) - {"documents"}

    @cached_property
    def special(self) -> tuple[str, ...]:
        """The special tokens, as text."""
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return tuple(token for token in {*added, *self.tokenizer.all_special_tokens} if token)

    def _text(self, chat: Chat, messages: int, generation_prompt: bool = False) -> str:
        """The first ``messages`` of a conversation, as text."""
        return self.tokenizer.apply_chat_template(
            chat.messages[:messages],
            tools=chat.tools,
            chat_template=self.given,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **chat.variables,
        )


def rendered_apart(
    chats: Iterable[tuple[Any, ...]], render: Callable[..., Item], where: str = "", longest: int = LONGEST
) -> Iterator[tuple[str, Item]]:
    """The name of each chat and what ``render`` returns for it; ``render`` runs in another process.

    Args:
        chats: arguments of ``render``, of which the first is the chat.
        where: what is read, to be named if the process ends before the first chat.
        longest: bytes of the longest chat.

    Raises:
        Refusal: of ``render``; or the process took too much, or ended.
    """

    def items() -> Iterator[Item]:
        for chat, *more in chats:
            yield (chat.where,)
            yield render(chat, *more)

    memory = MEMORY + BYTES_RENDERED * min(longest, LONGEST)
    received = in_own_process(items, memory=memory, seconds=SECONDS, errors=(Refusal, OSError))
    try:
        for (where,) in received:
            yield where, next(received)
    except Ended as ended:
        raise Refusal(f"{where}: the chat template cannot be rendered: {ended}") from None
