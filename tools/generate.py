#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generate text from prompts with a checkpoint (ours, Megatron-LM's or a Hugging Face folder), on any grid.

    python tools/generate.py --load out/llama --prompt "def main(" --max-new-tokens 64
    python tools/generate.py --load out/chatty --chat
    torchrun --nproc-per-node 4 tools/generate.py --load out/llama --prompts prompts.jsonl --max-new-tokens 256 \\
        --ulysses-parallel-size 2 --ring-parallel-size 2 --temperature 0.8 --top-p 0.95 --output answers.jsonl

Decoding is greedy unless --temperature, --top-k or --top-p is given; every grid generates the same tokens. Model, mask
and tokenizer come from the checkpoint. Flags for grid, tokenizer, kernel and --seed are those of the training program:
docs/use/generation.md lists them.
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

from megatron.training.refusal import Refusal
from tools.option_parser import RefusingParser


def build_parser() -> argparse.ArgumentParser:
    parser = RefusingParser(__doc__)
    parser.add_argument("--load", required=True, metavar="DIR", help="folder of a checkpoint")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load (default: the latest)")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be given again")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one prompt per line; in a .jsonl file, as a JSON object"
    )
    chat = "prompts are what a user says, rendered by the chat template; without prompts, read them line by line"
    parser.add_argument("--chat", action="store_true", help=chat)
    tools = "tools of the conversations of --chat: a JSON list of functions, as in a row of --prompts"
    parser.add_argument("--tools", type=Path, metavar="FILE", help=tools)
    longest = "maximum length of an answer (default: %(default)s)"
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help=longest)
    parser.add_argument("--greedy", action="store_true", help="always take the most likely token (the default)")
    parser.add_argument("--temperature", type=float, metavar="X", help="sample from logits divided by X")
    parser.add_argument("--top-k", type=int, metavar="N", help="sample from the N most likely tokens")
    parser.add_argument("--top-p", type=float, metavar="X", help="sample from the most likely tokens of probability X")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="to compute in (default: the checkpoint's)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write answers as JSON lines: prompt, text, tokens")
    return parser


def order_of(args: argparse.Namespace) -> Any:
    """The generation that the flags describe. Raises Refusal if a value is invalid, or two flags contradict."""
    from megatron.inference.generate import Sampling
    from megatron.inference.prompts import Order

    drawn = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p") if getattr(args, name) is not None}
    if args.greedy and drawn:
        flags = ", ".join("--" + name.replace("_", "-") for name in drawn)
        raise Refusal(f"--greedy does not sample, but {flags} say how to sample: leave one out")
    if args.max_new_tokens < 1:
        raise Refusal(f"--max-new-tokens {args.max_new_tokens} must be at least 1")
    if not drawn.get("temperature", 1.0) > 0 or drawn.get("temperature") == float("inf"):
        raise Refusal(f"--temperature {args.temperature:g} must be above 0; for the most likely token use --greedy")
    if drawn.get("top_k", 1) < 1:
        raise Refusal(f"--top-k {args.top_k} must be at least 1; without it, all tokens can be sampled")
    if not 0 < drawn.get("top_p", 1.0) <= 1:
        raise Refusal(f"--top-p {args.top_p:g} must be above 0 and at most 1")
    same = ("load", "prompt", "prompts", "max_new_tokens", "ckpt_step", "dtype", "output", "chat", "tools")
    return Order(**{name: getattr(args, name) for name in same}, sampling=Sampling(greedy=not drawn, **drawn))


def main(argv: list[str] | None = None) -> int:
    from megatron.training.pretrain import EXIT_REFUSED, print_refusal, quiet

    try:
        args, words = build_parser().parse_known_args(argv)
        quiet()
        order = order_of(args)
        from megatron.inference.prompts import run

        return run(order, words)
    except Refusal as refusal:
        print_refusal(refusal)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
