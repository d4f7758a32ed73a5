#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the memory that training a model takes, by ZeRO stage, recompute, context parallelism and FPDT.

python tools/memory.py --model llama3-8b --seq-length 128K --gpus 8 --gpu A100-80G
python tools/memory.py --params 7B --papers
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
from rich.console import Console

from megatron.formulas.parameters import stage_parameters
from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner import memory_table as tables
from megatron.system.whole_file import replace_file
from megatron.training.refusal import Refusal, refusing
from megatron.training.untrusted.largest_numbers import MOST_RANKS
from tools.option_parser import OptionParser, in_one_line


@in_one_line(Refusal, OSError)
def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="NAME", help="a named shape, such as llama3-8b")
    which.add_argument("--params", metavar="N", help="a Llama of about this many parameters, such as 7B")
    parser.add_argument("--seq-length", default="4K", metavar="N", help="tokens, K = 1024 (default 4K)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="total number of GPUs (default 1)")
    parser.add_argument("--tensor", type=int, default=1, metavar="N", help="TP, with TP-sp (default 1)")
    parser.add_argument("--pipeline", type=int, default=1, metavar="N", help="PP (default 1)")
    parser.add_argument("--expert", type=int, default=0, metavar="N", help="EP (default: as many ranks as possible)")
    parser.add_argument("--fp32", action="store_true", help="compute in fp32, not bf16")
    parser.add_argument("--gpu", metavar="NAME", help="mark what fits this GPU (a name, or a machine's JSON file)")
    parser.add_argument("--papers", action="store_true", help="compare with the papers' formulas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--output", type=Path, metavar="PNG", help="write a picture")
    options = parser.parse_args(argv)
    if min(options.gpus, options.tensor, options.pipeline) < 1:
        raise Refusal("--gpus, --tensor and --pipeline must be at least 1")
    if options.gpus > MOST_RANKS:
        raise Refusal(f"--gpus {options.gpus}: exceeds {MOST_RANKS:,}; use a smaller number")
    length = tables.size("--seq-length", options.seq_length)
    if options.model:
        shape, name = tables.shape_of(options.model, length), options.model
    else:
        shape = tables.shape_of_size(tables.size("--params", options.params, binary=False))
        name = f"a Llama of {shape.layers} layers of {shape.hidden}"
    machine = load(options.gpu) if options.gpu else None
    sizes = {"gpus": options.gpus, "tensor": options.tensor, "pipeline": options.pipeline}
    if options.expert and not shape.mixture:
        raise Refusal(f"--expert {options.expert}: the model has no experts: leave it out")
    strategies = list(tables.strategies(shape, **sizes, seq_length=length, expert=options.expert))
    rows = tables.rows(shape, length, iter(strategies), itemsize=4 if options.fp32 else 2, machine=machine)
    numel = stage_parameters(shape, 1, 1, 0).numel
    grid = f"TP {options.tensor} x PP {options.pipeline}, " if options.tensor * options.pipeline > 1 else ""
    if shape.mixture:
        grid += f"EP {strategies[0].expert}, "
    title = f"{name} ({numel / 1e9:.2f}B parameters), {length:,} tokens, {grid}{options.gpus} GPUs"
    if machine is not None:
        title += f" {machine.name}"
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(tables.table(rows, title))
    if options.papers:
        for table in tables.papers_tables(shape, length):
            console.print(table)
    if options.json:
        with refusing(f"--json {options.json}: cannot be written", OSError):
            options.json.parent.mkdir(parents=True, exist_ok=True)
            replace_file(options.json, json.dumps([row.as_json() for row in rows], indent=1) + "\n")
        console.print(f"rows: {options.json}")
    if options.output:
        tables.draw(rows, title, options.output, machine)
        console.print(f"picture: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
