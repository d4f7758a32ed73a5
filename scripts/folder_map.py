#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the list of folders in docs/inside/architecture.md, from the first sentence of each folder's __init__.py.

    python scripts/folder_map.py

tests/unit/test_docs.py checks that the page is up to date.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "inside" / "architecture.md"
START, END = "<!-- written by scripts/folder_map.py -->", "<!-- end -->"
MIN_WORDS = 4  # the part before a colon stands alone if it has this many words


def table() -> str:
    """Markdown: a line for each folder of megatron/, two deep, with how its docstring begins."""
    lines = []
    files = [file for depth in ("*", "*/*") for file in (ROOT / "megatron").glob(f"{depth}/__init__.py")]
    for file in sorted(files, key=lambda file: file.parent):
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        sentence = " ".join(text.split("\n\n")[0].split()).split(". ")[0].split(";")[0].rstrip(".")
        beginning, _, _ = sentence.partition(": ")
        if sentence:
            short = beginning if len(beginning.split()) >= MIN_WORDS else sentence
            lines.append(f"- `{file.parent.relative_to(ROOT)}/`: {short}")
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """A page with the table as it is today."""
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
