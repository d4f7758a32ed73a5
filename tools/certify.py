#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that a parallel program computes what one process computes: losses, every gradient, norm and update.

    python tools/certify.py torchrun --nproc-per-node 8 pretrain_llama.py --ring-parallel-size 8 ...
    python tools/certify.py --grid ulysses=2 --grid ulysses=2,ring=2 program.py:step
    python tools/certify.py --grid ranks=2 --loss "train loss" train.py --batch-size {8/ranks}
    python tools/certify.py Qwen/config.json

A training command runs with its flags and a small model of the same kind, on this machine's CPU. Each axis that the
command uses is tested with size 2, alone and with each other axis. A function is called with the sizes of a grid and
returns cp.Outcome, or (model, loss). Any other script runs as torchrun would start it, until its second step; in its
arguments {ranks} is a size of the grid, and {8/ranks} is 8 over this size. A config.json of transformers makes a small
random model, which cp's parallelize splits.

The limit for a difference is measured: how far rounding moves each number on one process. The first module beyond its
limit is named. Exit code 0: all agree; 1: something differs; 2: the program cannot be checked.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
from pathlib import Path
from typing import Any

from megatron.training.json_file import read_json
from megatron.training.refusal import Refusal
from megatron.training.untrusted.largest_numbers import check_numbers
from tools.launch_command import grid as size_of_grid
from tools.launch_command import launch
from tools.option_parser import OptionParser

EXIT_REFUSED = 2
BOTH = [{"ulysses": 2}, {"ring": 2}, {"ulysses": 2, "ring": 2}]


def main(argv: list[str] | None = None, run: Any = None) -> int:
    """Check the program and print the result; returns the exit code.

    Args:
        run: see ``cp.certify``.
    """
    args = parser().parse_args(argv)
    from megatron.certifying.of_file import sizes_of

    try:
        program, grids, notes = program_of(args)
        grids = [sizes_of(text) for text in args.grid] or grids
        if not grids:
            raise Refusal("the command uses one process: give a grid to compare with it, --grid ulysses=2")
    except ValueError as error:
        print(f"error: {error.render() if isinstance(error, Refusal) else error}", file=sys.stderr)
        return EXIT_REFUSED
    import megatron.context_parallel as cp
    from megatron.certifying.__main__ import report

    for note in notes:
        print(f"note: {note}")
    return report(
        lambda: cp.certify(program, grids, sees=args.sees, loss=args.loss, loss_file=args.loss_file, run=run),
        args.picture,
    )


def parser() -> argparse.ArgumentParser:
    options = OptionParser(__doc__, allow_abbrev=False)
    options.add_argument(
        "--grid", action="append", default=[], metavar="AXIS=N,...", help="a grid to compare; may be given again"
    )
    options.add_argument("--sees", action="store_true", help="also change single tokens, to see which outputs change")
    options.add_argument("--loss", metavar="TEXT", help="compare the numbers that the program prints after this text")
    options.add_argument("--loss-file", metavar="FILE", help="the file in which it writes them, if it prints none")
    options.add_argument("--picture", metavar="FILE", help="write a picture: parameters by grids, coloured by error")
    options.add_argument("--processes", type=int, default=4, metavar="N", help="most processes of a grid (default: 4)")
    options.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="command, FILE.py:NAME or file")
    return options


def program_of(args: argparse.Namespace) -> tuple[Any, list[dict[str, int]], list[str]]:
    """(program to call with the sizes of a grid, grids to compare, notes to print)."""
    words = args.program
    if not words:
        raise Refusal("no program: give a training command, FILE.py:NAME or a config.json")
    from megatron.certifying.of_file import program_of as program_of_file

    program = program_of_file(words) if launch(words) is None else None
    if program is not None:
        if not args.grid:
            raise Refusal(f"{words[0]}: give its grids, for example --grid ranks=2")
        return program, [], []
    if len(words) == 1 and Path(words[0]).exists() and not words[0].endswith(".py"):
        from megatron.certifying.programs.hugging_face_model import HuggingFace

        _check_config(Path(words[0]))
        return HuggingFace(words[0]), BOTH, []
    return training_command(words, args.processes)


def _check_config(path: Path) -> None:
    """Refuse a config.json, or a folder with one, that cannot be read or that asks for code."""
    path = path / "config.json" if path.is_dir() else path
    config = read_json(path)
    if not isinstance(config, dict) or "auto_map" in config:
        asks = "auto_map asks for code from its folder, which is never run"
        why = asks if isinstance(config, dict) else "not a JSON object"
        raise Refusal(f"{path}: {why}")
    check_numbers(config, path)


def training_command(words: list[str], processes: int) -> tuple[Any, list[dict[str, int]], list[str]]:
    """As :func:`program_of`, for a training command, whose model becomes small."""
    command = launch(words)
    if command is None:
        raise Refusal(f"{words[0]}: no training command such as torchrun pretrain_llama.py --num-layers ..., no "
                      "FILE.py:NAME and no file")  # fmt: skip
    from megatron.certifying.programs.small_shape import grids_of, left_out, small_flags
    from megatron.certifying.programs.training_program import TrainingProgram
    from megatron.training.arguments.parser import LARGEST, parse
    from megatron.training.settings.models import LLAMA_DEFAULTS

    world = command.processes or size_of_grid(command.flags)
    config = parse(
        command.flags, LLAMA_DEFAULTS if "llama" in Path(command.program).name else None, world, iteration=LARGEST
    )  # of a schedule of lengths, the last stage
    return TrainingProgram(tuple(small_flags(config))), grids_of(config, world, processes), left_out(config)


if __name__ == "__main__":
    sys.exit(main())
