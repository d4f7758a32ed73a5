#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Convert weights in Megatron-LM's format torch, or DeepSpeed's universal format, to a checkpoint for --load.

    python tools/convert_checkpoint.py --from old --to new           # then train with --load new --finetune

    old/iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt      Megatron-LM's, of any TP x PP, core's layers or older ones
    old/global_step100_universal/zero/NAME/fp32.pt            Megatron-DeepSpeed's, by DeepSpeed's ds_to_universal.py

Only weights are converted, without optimizer and schedule. No code from the files is run, and memory holds one weight,
not the model. Megatron-LM's torch_dist checkpoints need no conversion.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
from pathlib import Path

from tools.convert_command import exit_on_signals, run, timed
from tools.option_parser import RefusingParser


def convert(argv: list[str] | None) -> list[str]:
    """Convert the checkpoint; returns lines to print. Raises Refusal."""
    args = build_parser().parse_args(argv)
    from megatron.training.checkpoint.converting.from_older import convert as write
    from megatron.training.families.llama.llama_settings import DTYPES

    return timed(lambda bar: write(args.from_, args.to, DTYPES.get(args.dtype), bar, args.ckpt_step))


def build_parser() -> argparse.ArgumentParser:
    parser = RefusingParser(__doc__)
    parser.add_argument("--from", dest="from_", type=Path, metavar="DIR", required=True, help="folder to read")
    parser.add_argument("--to", type=Path, metavar="DIR", required=True, help="folder to write; must be new or empty")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="dtype to write (default: the source's)")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to read (default: the latest)")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run(convert, argv)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
