#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the bytes that the kernels of one layer read and write, by purpose, from a dry run of the flags.

python tools/traffic.py --gpus 8 -- --model llama3-8b --seq-length 131072 --ulysses-parallel-size 4 --ring-parallel-size 2 --bf16
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
from rich.console import Console
from rich.table import Table

from megatron.system.whole_file import replace_file
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from tools.option_parser import OptionParser, in_one_line

PHASES = ("forward", "backward")


@in_one_line(Refusal, OSError)
def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(__doc__)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="size of the simulated cluster (default 1)")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="rank to count (default 0)")
    parser.add_argument("--torch-rope", action="store_true", help="RoPE by PyTorch's operations, as without Triton")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the bytes")
    parser.add_argument(
        "flags", nargs="+", metavar="-- FLAG", help="flags of pretrain_llama.py; --gpu is A100-80G by default"
    )
    options = parser.parse_args(argv)
    sizes = counted(options)
    if options.json:
        replace_file(options.json, json.dumps(sizes, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 100).print(table(sizes))
    return 0


def counted(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Bytes of one layer, by purpose and phase. Raises Refusal."""
    from megatron.simulator.dry_run.one_rank import vocabulary_of
    from megatron.simulator.dry_run.traffic import layer_traffic
    from megatron.simulator.machines.machine_file import load
    from megatron.training.settings.models import LLAMA_DEFAULTS

    words = [*options.flags, "--dry-run", "--world-size", str(options.gpus)]
    config = parse(words, LLAMA_DEFAULTS, options.gpus)
    if config.parallel.pipeline_model_parallel_size > 1:
        raise Refusal("--pipeline-model-parallel-size is not supported: leave it out")
    if not 0 <= options.rank < options.gpus:
        raise Refusal(f"--rank {options.rank}: there are {options.gpus} ranks, counted from 0; see --gpus")
    machine = load(config.simulation.gpu or "A100-80G")
    return layer_traffic(
        config, options.gpus, options.rank, vocabulary_of(config)[0], machine, fused_rope=not options.torch_rope
    )


def table(by_group: dict[str, dict[str, float]]) -> Table:
    out = Table("GB of one layer", *PHASES, "together", title="Bytes read and written by kernels", title_justify="left")
    for column in out.columns[1:]:
        column.justify = "right"
    rows = sorted(by_group.items(), key=lambda row: -sum(row[1].values()))
    for group, sizes in rows:
        out.add_row(group, *(gigabytes(sizes.get(phase, 0.0)) for phase in PHASES), gigabytes(sum(sizes.values())))
    sums = [sum(sizes.get(phase, 0.0) for sizes in by_group.values()) for phase in PHASES]
    out.add_row("all", *map(gigabytes, sums), gigabytes(sum(sums)), end_section=True)
    others = sum(sum(s.values()) for group, s in by_group.items() if group not in ("GEMM", "attention: its kernels"))
    out.add_row("all but products and attention's kernels", "", "", gigabytes(others))
    return out


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f}"


if __name__ == "__main__":
    sys.exit(main())
