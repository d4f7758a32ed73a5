#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw the memory of a training step from the JSON files of --profile-memory, several of them side by side.

python tools/plot_memory.py out/memory/memory_rank0.json --output out/memory.png
python tools/plot_memory.py --files out/a/memory_rank0.json out/b/memory_rank0.json --titles whole chunked
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
from pathlib import Path

from megatron.training.report.memory_picture import draw, peak_of, read, readable
from tools.option_parser import OptionParser, in_one_line


@in_one_line(OSError, ValueError)
def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(__doc__)
    parser.add_argument("file", nargs="*", type=Path, metavar="FILE", help="files of --profile-memory")
    parser.add_argument("--files", nargs="+", type=Path, default=[], metavar="FILE", help="more such files")
    parser.add_argument("--titles", nargs="+", metavar="TEXT", help="one for each file")
    parser.add_argument("--by", choices=["time", "events"], default="time", help="the x axis (default: time)")
    parser.add_argument("--output", type=Path, metavar="PNG", help="default: the first file's name with .png")
    options = parser.parse_args(argv)
    files = [*options.file, *options.files]
    if not files:
        raise ValueError("give at least one file of --profile-memory")
    profiles = [read(path) for path in files]
    titles = options.titles or [f"step {profile['iteration']}, rank {profile['rank']}" for profile in profiles]
    if len(titles) != len(files):
        raise ValueError(f"{len(titles)} --titles for {len(files)} files: give one for each")
    output = options.output or files[0].with_suffix(".png")
    draw(profiles, titles, output, options.by)
    for title, profile in zip(titles, profiles):
        most, kinds = peak_of(profile)
        print(f"{title}: at most {readable(most)}: {', '.join(f'{k} {readable(size)}' for k, size in kinds.items())}")
    print(f"picture: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
