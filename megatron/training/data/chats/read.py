# SPDX-License-Identifier: Apache-2.0
"""Conversations from JSON lines, JSON arrays and Parquet, and what is wrong with them, by file and line or row.

A row is an object with ``messages``, a list of {role, content}, or of another form that ``row_forms`` knows; beside it
may stand ``system`` (a text that comes first), ``tools`` (what a template shows of tools) and ``chat_template_kwargs``
(variables of a template). As in Megatron-LM (megatron/training/datasets/sft_dataset.py), a row may hold several
conversations, one after another: each begins with a system message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron.training.data.row_forms import messages_of
from megatron.training.data.text_files import Reader, Record
from megatron.training.json_file import parse_json
from megatron.training.refusal import Refusal, one_line, short

SYSTEM = ("system", "developer")
# Who may speak after whom; "" is the beginning.
AFTER = {
    "": (*SYSTEM, "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
Message = dict[str, Any]
LONGEST = 32 << 20  # bytes of a line; to tokenize it takes about 200 bytes of memory for each


@dataclass(frozen=True)
class Chat:
    """One conversation, checked.

    Attributes:
        where: file and line, for messages.
        variables: of the template.
    """

    where: str
    messages: list[Message]
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


def read_chats(path: str, flag: str) -> Iterator[Chat]:
    """The conversations of a file, in its order; blank lines are none.

    Raises:
        Refusal: a row is no conversation, with file and line.
    """
    try:
        for record in Reader([path]):
            yield from chats_of(record)
    except Refusal as refusal:
        raise Refusal(str(refusal).replace("--input", flag, 1)) from None


def chats_of(record: Record) -> list[Chat]:
    """The conversations of one row."""
    where = record.where()
    if len(record.content) > LONGEST:
        raise Refusal(
            f"{where}: a {record.unit} of {len(record.content):,} bytes; at most {LONGEST:,} are read: split it"
        )
    line = _object(record, where)
    if line is None:
        return []
    messages, tools = messages_of(line, where), line.get("tools")
    system = line.get("system")
    if system is not None and not isinstance(system, str):
        raise Refusal(f'{where}: "system" is no text')
    if isinstance(tools, str):  # as many data sets have it, whose columns hold one type alone
        tools = _json(tools, f'{where}: "tools"') or None
    if tools is not None and not isinstance(tools, list):
        raise Refusal(f'{where}: "tools" is no list')
    variables = line.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise Refusal(f'{where}: "chat_template_kwargs" is no object')
    checked = [_message(message, f"{where}, message {number}") for number, message in enumerate(messages, 1)]
    if system is not None:
        if checked[0]["role"] in SYSTEM:
            raise Refusal(f'{where}: both "system" and a first message of the role {checked[0]["role"]}: keep one')
        checked.insert(0, {"role": "system", "content": system})
    chats = []
    for part in _parts(checked):
        _check_order(part, where)
        chats.append(Chat(where, part, tools or None, variables))
    return chats


def _object(record: Record, where: str) -> dict[str, Any] | None:
    try:
        text = bytes(record.content).decode("utf-8-sig" if record.line <= 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(f"{where}: not UTF-8 at byte {error.start}") from None
    if not text.strip():
        return None
    line = _json(text, where)
    if not isinstance(line, dict):
        raise Refusal(f"{where}: not a JSON object")
    return line


def _json(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise Refusal(f"{where}: not JSON: {one_line(error, 200)}") from None


def _message(message: Any, where: str) -> Message:
    """A message whose role and content are what templates can take."""
    if not isinstance(message, dict):
        raise Refusal(f"{where}: not a JSON object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in AFTER or not role:
        raise Refusal(f"{where}: role {short(role)} is none of {', '.join(filter(None, AFTER))}")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise Refusal(f"{where}: its content has parts that are no text, and models here read text alone")
    elif not isinstance(content, str) and not (content is None and role == "assistant" and message.get("tool_calls")):
        raise Refusal(f"{where}: its content is {'missing' if content is None else 'no text'}")
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


def _check_order(messages: list[Message], where: str) -> None:
    before = ""
    for message in messages:
        role = message["role"]
        if role not in AFTER[before]:
            after = f"follows {before}" if before else "comes first"
            raise Refusal(f"{where}: roles out of order: {role} {after}, where {' or '.join(AFTER[before])} should")
        before = role
    if before != "assistant":
        raise Refusal(f"{where}: the conversation ends with {before}, and there is no answer to learn: end it with one")
