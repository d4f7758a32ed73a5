# SPDX-License-Identifier: Apache-2.0
"""Adapts the pages of docs/ to the site (a hook of mkdocs.yml)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w+) (?:run=\d+|refused|extended|(?:file|line)=\S+)$", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)\s]*)?\)")


ENTRY = re.compile(r"^\d+\. \[([^\]]+)\]\(([\w/-]+\.md)\)|^(\w.*):$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """The navigation is the index of docs/README.md: its headings end in a colon, its entries are numbered."""
    sections: list[dict[str, list]] = []
    index = (ROOT / "docs" / "README.md").read_text().split("\n## ")[0]
    for title, page, heading in ENTRY.findall(index):
        if heading:
            sections.append({heading: []})
        else:
            next(iter(sections[-1].values())).append({title: page})
    config["nav"] = [{"Documentation": "README.md"}, *sections]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page without words for tests after ``` and with file names instead of links to files outside docs/.

    Raises:
        FileNotFoundError: a link leads to no file of the repository.
    """
    folder = (ROOT / "docs" / page.file.src_uri).parent
    return OUTSIDE.sub(lambda link: _named(link, folder), FENCE.sub(r"```\1", markdown))


def _named(link: re.Match, folder: Path) -> str:
    path = (folder / link[2]).resolve()
    if not path.exists():
        raise FileNotFoundError(f"a page links to {link[2]}, which does not exist")
    if path.is_relative_to(ROOT / "docs"):
        return link[0]
    name = str(path.relative_to(ROOT))
    return f"`{name}`" if link[1].strip("`") in (name, path.name) else f"{link[1]} (`{name}`)"
