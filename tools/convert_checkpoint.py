#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turn weights of older forms into a checkpoint that --load takes: Megatron-LM's format torch, DeepSpeed's universal.

    python tools/convert_checkpoint.py --from old --to new           # then train with --load new --finetune

    old/iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt      Megatron-LM's, of any TP x PP, core's layers or older ones
    old/global_step100_universal/zero/NAME/fp32.pt            Megatron-DeepSpeed's, by DeepSpeed's ds_to_universal.py

Weights alone: no optimizer, no schedule. Nothing that a file holds is run, and memory holds a weight, not the model.
What Megatron-LM has written with torch_dist needs no conversion.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron.training.refusal import Refusal


def convert(args: argparse.Namespace) -> list[str]:
    """Do what the flags ask for; returns the closing lines. Raises Refusal."""
    from tqdm import tqdm

    from megatron.training.checkpoint.convert.write import convert as write
    from megatron.training.checkpoint.hugging_face.llama import DTYPES

    begin = time.monotonic()
    with ExitStack() as stack:

        def bar(total: int) -> Callable[[], Any]:
            return stack.enter_context(tqdm(total=total, unit=" tensors", disable=None)).update

        lines = write(args.from_, args.to, DTYPES.get(args.dtype), bar, args.ckpt_step)
    return [f"{lines[0]}; {time.monotonic() - begin:.1f} s", *lines[1:]]


class _Parser(argparse.ArgumentParser):
    """Errors in one line."""

    def error(self, message: str) -> Any:
        raise Refusal(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--from", dest="from_", type=Path, metavar="DIR", required=True, help="folder to read")
    parser.add_argument("--to", type=Path, metavar="DIR", required=True, help="folder to write; must be new or empty")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="dtype to write (default: as it is)")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to read (default: the latest)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed")
    try:
        print("\n".join(convert(build_parser().parse_args(argv))))
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that unfinished folders go
    sys.exit(main())
