# SPDX-License-Identifier: Apache-2.0
"""Changes flags in the text of a launch script. Its variables, arrays, line breaks and comments stay as they are.

A value that a variable holds is changed where the variable is assigned, if that is one place with a plain value. The
text is not interpreted: the caller runs the changed script with stand-ins and looks what it starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from megatron.training.arguments.argv import options

QUOTED = r"\"[^\"\n]*\"|'[^'\n]*'"
TOKEN = rf"(?:{QUOTED}|(?:\$\{{[^}}\n]*\}}|\$\(\([^\n]*?\)\)|\$\([^)\n]*\)|[^\s\"'\\;|&<>()])+)"
VARIABLE = re.compile(r"\"?\$\{?(\w+)\}?\"?")
DEFAULT = re.compile(r"(\"?\$\{\w+:?[-=])([^}]*)(\}\"?)")
PLAIN = re.compile(rf"{QUOTED}|[\w.,+:/-]+")
ANCHORS = ("--seq-length", "--micro-batch-size", "--num-layers", "--hidden-size", "--lr", "--train-iters")
NODES = ("nnodes", "num_nodes", "num-nodes", "nodes", "N")
ALLOCATOR = "PYTORCH_ALLOC_CONF"  # since PyTorch 2.9; before, with CUDA_ in the middle
PER_NODE = ("nproc_per_node", "nproc-per-node", "num_gpus")

Changes = dict[str, list[str] | None]
"""For each flag its new values; None: the flag is left out."""


def edited(text: str, changes: Changes, known: Mapping[str, int], literal: Iterable[str] = ()) -> str:
    """The script with changed flags.

    Args:
        known: flags of the script's command, with their numbers of values; new flags are inserted after one of them.
        literal: flags whose value is written in place of a variable that the script computes.
    """
    added = []
    for flag, values in changes.items():
        if values is None:
            text = _without(text, flag, known.get(flag, 0))
        elif flag not in known or not _places(text, flag):
            added += [flag, *values]
        else:
            text = _with(text, flag, values, flag in literal)
    wanted = [flag for flag in (*ANCHORS, *known) if flag in known and changes.get(flag, "") is not None]
    count = {flag: len(_places(text, flag)) for flag in wanted}
    anchor = next((flag for most in (1, 99) for flag in count if 0 < count[flag] <= most), "")  # better in one place
    return _inserted(text, anchor, known[anchor], added) if added and anchor else text


def on_nodes(text: str, launcher: Iterable[str], nodes: int, per_node: int) -> str:
    """The script with another number of nodes and of GPUs in each, in its #SBATCH lines and its launcher's options."""
    text = re.sub(r"(?m)^(#SBATCH\s+(?:--nodes[= ]|-N[= ]?)\s*)\d+", rf"\g<1>{nodes}", text)
    for flag, *values in options(launcher):
        number = nodes if flag.strip("-") in NODES else per_node if flag.strip("-") in PER_NODE else None
        if number is not None and values[:1] not in ([str(number)], [f"{number}:{number}"]):
            text = _with(text, flag, [str(number)], False)
    return text


def with_allocator(text: str) -> str:
    """The script with the allocator's setting that plans assume, unless it has settings of its own."""
    if ALLOCATOR in text.replace("CUDA_", ""):
        return text
    start = re.search(r"(?m)^(?!\s*(?:#|$))", text)
    at = start.start() if start else len(text)
    return f"{text[:at]}export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n{text[at:]}"


def _places(text: str, flag: str, values: int = 1) -> list[re.Match]:
    """Where a flag is in the text outside of comments, with at most this many values."""
    pattern = rf"(?<![\w-]){re.escape(flag)}(?![\w-])((?:(?:=|[ \t]+)(?!-{{1,2}}[A-Za-z]){TOKEN}){{0,{values}}})"
    return [found for found in re.finditer(pattern, text) if not _in_comment(text, found.start())]


def _in_comment(text: str, at: int) -> bool:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line.lstrip().startswith("#") or " # " in line


def _with(text: str, flag: str, values: list[str], literal: bool) -> str:
    """The text with other values of a flag."""
    for found in reversed(_places(text, flag, max(len(values), 1))):
        old = found[1].strip().lstrip("=")
        if old and len(values) == 1 and not literal:
            if part := DEFAULT.fullmatch(old):
                text = (
                    text[: found.start(1)] + found[1].replace(old, part[1] + values[0] + part[3]) + text[found.end() :]
                )
                continue
            if name := VARIABLE.fullmatch(old):
                text = _assigned(text, name[1], values[0]) or text
            if name or "$(" in old:
                continue  # what is computed, or comes from #SBATCH, may follow from the other changes
        between = "=" if found[1].startswith("=") else " "
        text = text[: found.start(1)] + "".join(between + value for value in values) + text[found.end() :]
    return text


def _assigned(text: str, name: str, value: str) -> str | None:
    """The text with another value of a variable; None unless one line assigns it a plain value, or a default."""
    pattern = rf"(?m)^(?!\s*#)(.*?(?<![\w$])(?:{name}=|:\s*\"?\$\{{{name}:?=))({TOKEN})"
    places = list(re.finditer(pattern, text))
    if len(places) != 1:
        return None
    start, end = places[0].span(2)
    old = places[0][2]
    if part := DEFAULT.fullmatch(old):
        new = part[1] + value + part[3]
    elif PLAIN.fullmatch(old) and "$" not in old:
        new = f"{old[0]}{value}{old[0]}" if old[0] in "\"'" else value
    elif old.endswith("}") and PLAIN.fullmatch(old[:-1]):  # : ${NAME:=value}
        new = value + "}"
    else:
        return None
    return text[:start] + new + text[end:]


def _without(text: str, flag: str, values: int) -> str:
    """The text without a flag and its values, and without a line on which nothing else was."""
    for found in reversed(_places(text, flag, values)):
        start, stop = found.start(), found.end()
        while start and text[start - 1] in " \t":
            start -= 1
        if start == 0 or text[start - 1] == "\n":  # it begins a line, whose indentation stays
            start, stop = found.start(), stop + len(text[stop:]) - len(text[stop:].lstrip(" \t"))
        begin, end = text.rfind("\n", 0, start) + 1, text.find("\n", stop)
        end = len(text) if end < 0 else end
        rest = (text[begin:start] + text[stop:end]).strip()
        text = text[:begin] + text[end + 1 :] if rest in ("", "\\") else text[:start] + text[stop:]
    return text


def _inserted(text: str, anchor: str, values: int, words: list[str]) -> str:
    """The text with new flags after ``anchor``, on their own line where each line begins with a flag."""
    found = _places(text, anchor, values)[0]
    begin, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    end = len(text) if end < 0 else end
    line, following = text[begin:end], text[end + 1 :]
    goes_on = " \\" if line.rstrip().endswith("\\") else ""
    in_array = line.lstrip().startswith("--") and following.lstrip(" \t").startswith(("--", ")"))
    if goes_on or in_array:
        like = line if in_array else following
        indent = like[: len(like) - len(like.lstrip(" \t"))]
        return f"{text[:end]}\n{indent}{' '.join(words)}{goes_on}{text[end:]}"
    return f"{text[: found.end()]} {' '.join(words)}{text[found.end() :]}"
