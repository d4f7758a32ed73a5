#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write training data for the needle task of tools/evaluate.py, with other names and haystacks than that task uses.

    python tools/make_needles.py --output-prefix out/needles --length 4096 --documents 1000 \\
        --tokenizer-type NullTokenizer --vocab-size 255

The output is PREFIX_text_document.bin/.idx. A document has exactly --length tokens, including the end of document, so
with --seq-length of the same value each sample is one document. It hides one to --needles needles at random depths and
asks for each of them at its end, once, or as often as fits into --questions. The more answers a document has, the
sooner a model learns to look for them.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
import warnings
from collections.abc import Iterator

import numpy as np

from megatron.training.data.tokenizer import build_tokenizer, check_vocab
from megatron.training.ownership.atomic import atomic_files
from megatron.training.refusal import Refusal
from megatron.training.settings.config import DataConfig
from tools.convert_command import TOKENIZER_FIELDS, add_tokenizer_options, exit_on_signals, run
from tools.option_parser import RefusingParser


def make(argv: list[str] | None) -> list[str]:
    """Write the files; returns lines to print. Raises Refusal."""
    args = build_parser().parse_args(argv)
    for name in ("length", "documents", "needles"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise Refusal(f"--{name} {value} must be at least 1")
    if not 0 <= args.questions < 1:
        raise Refusal(f"--questions {args.questions} is a share of a document: use 0 or more, and less than 1")
    if args.seed < 0:
        raise Refusal(f"--seed {args.seed} must not be negative")
    settings = DataConfig(**{field.name: getattr(args, field.name) for field in TOKENIZER_FIELDS})
    tokenizer = build_tokenizer(settings, args.vocab_size)
    check_vocab(args.vocab_size, tokenizer)
    from megatron.training.evaluation.haystack import make_words, pairs

    words = make_words(tokenizer, args.haystack)
    most = min(len(pairs(words.names, False)), len(pairs(words.numbers, None)))
    needles = args.needles or max(min(args.length // 64, most, 64), 1)
    if needles > most:
        raise Refusal(f"--needles {needles}: there are only {most} names for training: use at most as many")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # core warns at import about packages that are not installed
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    end = tokenizer.end_for("a document of needles")
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    prefix = f"{args.output_prefix}_text_document"
    with atomic_files([f"{prefix}.{end}" for end in ("bin", "idx")], args.overwrite) as names:
        builder = IndexedDatasetBuilder(names[0], dtype)
        try:
            for ids in documents(words, args, needles):
                builder.add_document(np.append(ids, end).astype(dtype), [args.length])
            builder.finalize(names[1])
        finally:
            builder.data_file.close()
    return [
        f"{prefix}.bin/.idx: {args.documents:,} documents of {args.length:,} tokens as {dtype.__name__}, "
        f"1 to {needles} needles each"
    ]


def documents(words: object, args: argparse.Namespace, needles: int) -> Iterator[np.ndarray]:
    """Documents without the end-of-document token, int64 [length - 1]; each depends on seed, length and its number."""
    from megatron.training.evaluation.samples import compose, many_needles, repeat_questions

    for number in range(args.documents):
        random = np.random.default_rng([args.seed, args.length, number, 1])
        count = int(random.integers(1, needles + 1))
        pieces = many_needles(words, random, count, count, False)
        once = sum(ids.size for ids, _ in pieces.tail)
        pieces = repeat_questions(pieces, random, max(1, int(args.questions * args.length) // once))
        if pieces.size > args.length - 1:
            raise Refusal(
                f"--length {args.length} does not hold {count} needles with their questions ({pieces.size} tokens and "
                "the end of document): use a longer one, fewer --needles or less --questions"
            )
        yield compose(pieces, words, random, args.length - 1).ids


def build_parser() -> argparse.ArgumentParser:
    parser = RefusingParser(__doc__)
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="PREFIX_text_document.bin and .idx")
    parser.add_argument("--length", type=int, required=True, metavar="N", help="tokens of a document")
    parser.add_argument("--documents", type=int, required=True, metavar="N", help="how many")
    parser.add_argument("--needles", type=int, metavar="N", help="limit per document (default: length / 64, up to 64)")
    parser.add_argument(
        "--questions", type=float, default=0.0, metavar="SHARE", help="of a document, at most (default: each once)"
    )
    parser.add_argument("--haystack", metavar="FILE", help="text file to hide in (default: plain sentences)")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="for NullTokenizer, or to cut a TikTokenizer")
    parser.add_argument("--overwrite", action="store_true", help="replace existing outputs")
    add_tokenizer_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    return run(make, argv)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
