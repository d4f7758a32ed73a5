#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A filter for `launch_script.py`: it replaces the output files of a shell text by calls of ``_elsewhere``.

It parses bash as far as needed to distinguish redirections from comparisons, quotations, comments and here-documents.
"""

from __future__ import annotations

import re
import shlex
import sys

REDIRECT = re.compile(r"(?:&>>|&>|>>|>\||>&(?![\d-])|>(?![(&]))[ \t]*(?![ \t(>])")
DOCUMENT = re.compile(r"<<(-?)\s*(['\"]?)(\w+)\2")
EXEC = re.compile(r"exec(?=[ \t]+[^\s<>&\d])")
COMMAND = re.compile(r"(?:\A|[\n;&|({]|\bthen|\bdo|\belse)[ \t]*\Z")  # what stands before a command


def elsewhere(text: str, source: str | None = None) -> str:
    """The text with output files replaced by calls of ``_elsewhere``; ``source``: its path, if it is a sourced file.

    Quotes, comments, tests and here-documents are not changed. ``BASH_SOURCE`` is replaced, since the text is no longer
    read from its file. So is ``exec`` of a program, which would bypass the shell's functions.

    Raises:
        ValueError: quotations and expansions are nested too deeply to follow.
    """
    try:
        return _renamed(text, source)
    except RecursionError:
        raise ValueError("quotations or $(...) are nested too deeply to follow") from None


def _renamed(text: str, source: str | None) -> str:
    own = "0"
    if source is not None:
        own = f"CHECK_SOURCE_{sum(map(ord, source))}"
        text = f"{own}={shlex.quote(source)}\n{text}"
    text = re.sub(r"\bBASH_SOURCE(\[0\]|\[-1\]|\[\$?0\])?", own, text)
    out: list[str] = []
    waiting: list[tuple[str, bool]] = []  # here-documents after this line: last line, whether tabs are removed
    at = 0
    while at < len(text):
        end, new = _stays(text, at), None
        if end > at:
            pass
        elif result := DOCUMENT.match(text, at):
            end = result.end()
            if not text.startswith("<<<", at):
                waiting.append((result[3], bool(result[1])))
        elif text[at] == "\n" and waiting:
            end, waiting = _documents(text, at, waiting), []
        elif text.startswith("<>", at):
            end, new = at + 2, "<"
        elif EXEC.match(text, at) and COMMAND.search(text, 0, at):
            end, new = at + 4, "_exec"
        elif result := REDIRECT.match(text, at):
            end = max(_word(text, result.end()), result.end())
            new = _redirected(result[0], text[result.end() : end])
        else:
            end = at + 1
        out.append(text[at:end] if new is None else new)
        at = end
    return "".join(out)


def _stays(text: str, at: int) -> int:
    """End of the escape, quotation, comment or test that begins at ``at``; ``at`` itself if there is none."""
    begins = at == 0 or text[at - 1] in " \t\n;!("
    if text[at] == "\\":
        return min(at + 2, len(text))
    if text[at] in "'\"" or text.startswith(("${", "$(("), at):
        return _end(text, at)
    for opening, closing, length in (("#", "\n", 0), ("[[", "]]", 2), ("((", "))", 2)):
        if begins and text.startswith(opening, at):
            end = text.find(closing, at)
            return len(text) if end < 0 else end + length
    return at


def _documents(text: str, at: int, waiting: list[tuple[str, bool]]) -> int:
    """End of the here-documents that begin after the line break at ``at``."""
    end = at + 1
    for word, tabs in waiting:
        while end < len(text):
            stop = text.find("\n", end)
            stop = len(text) if stop < 0 else stop
            line, end = text[end:stop], stop + 1
            if (line.lstrip("\t") if tabs else line) == word:
                break
    return min(end - 1, len(text))


def _redirected(operator: str, word: str) -> str:
    if not word or re.match(r"/dev/(null|std|fd/|tty)", word):
        return operator + word
    both = " 2>&1" if "&" in operator else ""  # &>| is not bash
    return f'{">>" if ">>" in operator else ">|"} "$(_elsewhere {word})"{both}'


def _word(text: str, at: int) -> int:
    """End of the word that begins at ``at``."""
    while at < len(text) and text[at] not in " \t\n;|&()<>":
        at = at + 2 if text[at] == "\\" else _end(text, at)
    return min(at, len(text))


def _end(text: str, at: int) -> int:
    """End of the quoted text, the ``${}`` or ``$()``, or the single character at ``at``."""
    if text[at] == "'":
        end = text.find("'", at + 1)
        return len(text) if end < 0 else end + 1
    if text[at] == '"':
        close, start = '"', at + 1
    elif text.startswith("${", at):
        close, start = "}", at + 2
    elif text.startswith("$((", at):
        close, start = "))", at + 3
    elif text.startswith("$(", at):
        close, start = ")", at + 2
    else:
        return at + 1
    at = start
    while at < len(text) and not text.startswith(close, at):
        if text[at] == "\\":
            at += 2
        elif text[at] == "'" and close == '"':
            at += 1
        elif text[at] == "(" and close == ")":
            at = _end_of_group(text, at)
        else:
            at = _end(text, at)
    return min(at + len(close), len(text))


def _end_of_group(text: str, at: int) -> int:
    at += 1
    while at < len(text) and text[at] != ")":
        at = at + 2 if text[at] == "\\" else _end(text, at)
    return min(at + 1, len(text))


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else None
    try:
        sys.stdout.write(elsewhere(sys.stdin.read(), given))
    except ValueError as error:  # the shell that runs this output prints the error and exits
        sys.stdout.write("echo " + shlex.quote(f"{given or 'bash -c'}: {error}") + " >&2; exit 1\n")
