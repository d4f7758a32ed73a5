#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Convert a Hugging Face folder (config.json, *.safetensors, tokenizer) to a checkpoint for training, and back.

    python tools/convert_hf.py --from-hf Llama-3.1-8B --to llama-8b      # then train with --load llama-8b --finetune
    python tools/convert_hf.py --from checkpoints --to-hf my-llama      # merges adapters, if there are any
    python tools/convert_hf.py --from checkpoints --to-peft my-adapter  # writes only the adapters

Both directions are exact: without training in between, every file is the same again, byte for byte. Nothing is
downloaded, no code from a checkpoint is run, and memory holds one layer, not the model.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
from pathlib import Path

from megatron.training.refusal import Refusal
from tools.convert_command import exit_on_signals, run, timed
from tools.option_parser import RefusingParser


def convert(argv: list[str] | None) -> list[str]:
    """Convert the checkpoint; returns lines to print. Raises Refusal."""
    args = build_parser().parse_args(argv)
    check(args)
    from megatron.training.families.llama.llama_settings import DTYPES

    dtype = DTYPES.get(args.dtype)
    if args.from_hf:
        from megatron.training.checkpoint.converting.from_hugging_face import from_hugging_face

        return timed(lambda bar: from_hugging_face(args.from_hf, args.to, dtype, bar, args.mtp_num_layers))
    if args.to_peft:
        from megatron.training.checkpoint.converting.to_hugging_face import to_peft

        return timed(lambda bar: to_peft(args.from_, args.to_peft, bar, args.ckpt_step, args.base))
    from megatron.training.checkpoint.converting.to_hugging_face import to_hugging_face

    return timed(lambda bar: to_hugging_face(args.from_, args.to_hf, dtype, bar, args.ckpt_step, args.hf_files))


def build_parser() -> argparse.ArgumentParser:
    parser = RefusingParser(__doc__)
    parser.add_argument("--from-hf", type=Path, metavar="DIR", help="Hugging Face folder to read")
    parser.add_argument("--to", type=Path, metavar="DIR", help="checkpoint folder to write; must be new or empty")
    parser.add_argument("--from", dest="from_", type=Path, metavar="DIR", help="checkpoint folder to read")
    parser.add_argument("--to-hf", type=Path, metavar="DIR", help="Hugging Face folder to write; must be new or empty")
    parser.add_argument("--to-peft", type=Path, metavar="DIR", help="folder for PEFT to write; must be new or empty")
    parser.add_argument("--base", default="", metavar="NAME", help="with --to-peft: the model that adapters belong to")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="dtype to write (default: the source's)")
    ahead = "with --from-hf: convert the first N layers of multi-token prediction too (default: keep them untrained)"
    parser.add_argument("--mtp-num-layers", type=int, metavar="N", help=ahead)
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to read of --from (default: the latest)")
    files = "folder with config.json, tokenizer etc. for --to-hf (default: hf/ in --from; else a new config.json)"
    parser.add_argument("--hf-files", type=Path, metavar="DIR", help=files)
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuse flags that cannot be combined."""
    to_ours, from_ours = (args.from_hf, args.to), (args.from_, args.to_hf or args.to_peft)
    one_direction = (all(to_ours) and not any(from_ours)) or (all(from_ours) and not any(to_ours))
    if not one_direction or (args.to_hf and args.to_peft):
        raise Refusal("give --from-hf DIR --to DIR, or --from DIR --to-hf DIR, or --from DIR --to-peft DIR")
    if args.base and not args.to_peft:
        raise Refusal("--base goes with --from DIR --to-peft DIR")
    if args.to_peft and (args.dtype or args.hf_files):
        raise Refusal("--dtype and --hf-files go with --to-hf DIR: adapters are written in fp32")
    if args.mtp_num_layers is not None and (not args.from_hf or args.mtp_num_layers < 1):
        raise Refusal("--mtp-num-layers N goes with --from-hf DIR, and N is at least 1")
    if args.from_hf and (args.ckpt_step is not None or args.hf_files):
        raise Refusal("--ckpt-step and --hf-files go with --from DIR --to-hf DIR")
    if args.hf_files and not (args.hf_files / "config.json").exists():
        raise Refusal(f"--hf-files {args.hf_files}: no config.json there")


def main(argv: list[str] | None = None) -> int:
    return run(convert, argv)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
