#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Collect the text files below a folder into JSON lines, one {"text": ..., "path": ...} per file.

Without --input, the sources of Python's standard library are used, real text that every machine has. Files are ordered
by a hash of their relative paths, so any part of the output is a random sample, and the same in every run.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
import hashlib
import json
import sysconfig

from tqdm import tqdm

from megatron.training.ownership.atomic import atomic_files
from megatron.training.refusal import Refusal
from tools.convert_command import one_line_errors
from tools.option_parser import OptionParser

SKIP = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", ".git")


def find(root: str, suffixes: tuple[str, ...], skip: tuple[str, ...]) -> list[str]:
    """Relative paths of the files below a folder, in the order of their hashes."""
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skip]
        paths += [os.path.relpath(os.path.join(folder, name), root) for name in files if name.endswith(suffixes)]
    return sorted(paths, key=lambda path: hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest())


def collect(args: argparse.Namespace) -> str:
    """Write the JSON lines; returns a summary to print."""
    if not os.path.isdir(args.input):
        raise Refusal(f"--input {args.input}: no such folder")
    paths = find(args.input, tuple(args.suffixes), tuple(args.skip))
    files = total = unreadable = left_out = 0
    with atomic_files([args.output], args.overwrite) as (name,), open(name, "w", encoding="utf-8") as out:
        for path in tqdm(paths, desc="collect", unit="file", disable=None):
            try:
                with open(os.path.join(args.input, path), encoding="utf-8") as file:
                    text = file.read()
            except (OSError, UnicodeDecodeError):
                unreadable += 1
                continue
            size = len(text.encode("utf-8"))
            if args.max_bytes is not None and total + size > args.max_bytes:
                left_out += 1
                continue
            json.dump({"text": text, "path": path.encode("utf-8", "replace").decode()}, out, ensure_ascii=False)
            out.write("\n")
            files, total = files + 1, total + size
        if not files:
            raise Refusal(f"--input {args.input}: no text files ending in {' '.join(args.suffixes)}")
    return (
        f"{args.output}: {files:,} files, {total / 1e6:.1f} MB of text "
        f"({left_out:,} left out by --max-bytes, {unreadable:,} not readable as UTF-8)"
    )


def main(argv: list[str] | None = None) -> None:
    parser = OptionParser(__doc__)
    stdlib = sysconfig.get_paths()["stdlib"]
    parser.add_argument("--input", default=stdlib, metavar="DIR", help="folder to search (default: %(default)s)")
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON-lines file to write")
    parser.add_argument("--suffixes", nargs="+", default=[".py", ".txt", ".md", ".rst"], help="suffixes of file names")
    parser.add_argument("--skip", nargs="*", default=list(SKIP), help="folders to leave out (default: %(default)s)")
    parser.add_argument("--max-bytes", type=int, help="maximum size of the text")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    args = parser.parse_args(argv)
    with one_line_errors("collect_text.py"):
        print(collect(args))


if __name__ == "__main__":
    main()
