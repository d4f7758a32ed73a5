# SPDX-License-Identifier: Apache-2.0
"""Published forms of rows: which one a row has, its messages where it holds a conversation, and what to do with it.

Read as conversations: ``messages``, ShareGPT's ``conversations``, Alpaca's ``instruction``, ``input`` and ``output``,
``prompt`` and ``completion`` (texts, or messages).
"""

from __future__ import annotations

from typing import Any

from megatron.training.refusal import Refusal, short

Row = dict[str, Any]
# Who speaks, in ShareGPT's words.
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
READ = '"messages", ShareGPT\'s "conversations", Alpaca\'s "instruction" and "output", "prompt" and "completion"'


def form_of(row: Row) -> str:
    """The name of a row's form; empty where it has none that is known."""
    if "messages" in row:
        return "messages"
    if "conversations" in row:
        return "ShareGPT"
    if "instruction" in row and "output" in row:
        return "Alpaca"
    if "prompt" in row and "completion" in row:
        return "prompt and completion"
    if "chosen" in row and "rejected" in row:
        return "preferences"
    return "text" if isinstance(row.get("text"), str) else ""


def advice(row: Row) -> str:
    """What to do with a row that has not the key that was asked for, as the end of a refusal."""
    form, keys = form_of(row), _keys(row)
    if form in ("messages", "ShareGPT", "Alpaca", "prompt and completion"):
        return (
            f"; the row is of the form {form}, which pretrain_gpt.py --sft reads as it is; to train on its texts "
            f"alone, name their keys with --json-keys: {keys}"
        )
    return f"; it has {keys}: name keys with --json-keys" if keys else ""


def _keys(row: Row) -> str:
    """The first keys of a row, for a line."""
    return short(", ".join(f'"{key}"' for key in list(row)[:8])).strip("'") if row else ""


def messages_of(row: Row, where: str) -> list[Any]:
    """The messages of a row, not checked yet.

    Raises:
        Refusal: the row is of no form that is a conversation; it says which forms are, or what to do.
    """
    form = form_of(row)
    if form == "Alpaca":
        return _alpaca(row, where)
    if form == "prompt and completion":
        return _completion(row, where)
    found = row.get("messages" if form == "messages" else "conversations")
    if isinstance(found, list) and found:
        return [_shared(message, f"{where}, message {number}") for number, message in enumerate(found, 1)]
    if form in ("messages", "ShareGPT"):
        hint = f"; its {'messages' if form == 'messages' else 'conversations'} are {short(found)}"
    elif form == "preferences":
        hint = (
            ': "chosen" and "rejected" are preferences, and --sft learns from answers alone: rename chosen to messages'
        )
    elif form == "text":
        hint = ": a plain text, which tools/preprocess_data.py tokenizes for training without --sft"
    else:
        keys = _keys(row)
        hint = f"; read are {READ}" + (f": rename the row's {keys}" if keys else "")
    raise Refusal(f'{where}: no list "messages" of {{"role", "content"}}{hint}')


def _shared(message: Any, where: str) -> Any:
    """A message of ShareGPT's form, ``from`` and ``value``, in our words; any other as it is."""
    if not isinstance(message, dict) or "role" in message or not {"from", "value"} <= set(message):
        return message
    speaker = message["from"]
    if speaker == "function_call":
        raise Refusal(f'{where}: a function_call: write it as {{"role": "assistant", "tool_calls": [...]}}')
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise Refusal(f"{where}: from {short(speaker)} is none of {', '.join(SPEAKERS)}")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": SPEAKERS[speaker], "content": message["value"], **rest}


def _alpaca(row: Row, where: str) -> list[Row]:
    """The instruction, an empty line and the input ask; the output answers. Earlier turns may stand in ``history``."""
    given, history = row.get("input"), row.get("history") or []
    texts = [row["instruction"], row["output"], given or ""]
    pairs = isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    if not pairs or not all(isinstance(text, str) for text in [*texts, *(text for pair in history for text in pair)]):
        raise Refusal(f'{where}: of Alpaca\'s form, and its "instruction", "input", "output" or "history" is no text')
    question = f"{row['instruction']}\n\n{given}" if given and given.strip() else row["instruction"]
    return [
        message
        for asked, answered in [*history, (question, row["output"])]
        for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": answered})
    ]


def _completion(row: Row, where: str) -> list[Any]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    if isinstance(prompt, list) and isinstance(completion, list) and prompt and completion:
        return [*prompt, *completion]
    raise Refusal(f'{where}: its "prompt" and "completion" are not two texts, nor two lists of messages')
