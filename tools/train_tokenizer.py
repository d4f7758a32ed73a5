#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a SentencePiece model (BPE with byte fallback, bos and eos) on JSON lines or .txt files.

    python tools/train_tokenizer.py --input corpus.jsonl --model-prefix tokenizer --vocab-size 2048

writes tokenizer.model and tokenizer.vocab. Decoding gives back any encoded text, including white space and line ends.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
import time
from collections.abc import Iterator

from tqdm import tqdm

from megatron.training.data.text_files import BadRecord, Reader, expand, fields_of, texts_of
from megatron.training.ownership.atomic import atomic_files
from megatron.training.refusal import Refusal
from tools.convert_command import one_line_errors
from tools.option_parser import OptionParser

LONGEST_LINE = 4192  # bytes; SentencePiece drops longer lines
# These settings make decoding give the same text.
EXACT = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False,
         "allow_whitespace_only_pieces": True, "byte_fallback": True}  # fmt: skip
SETTINGS = {"model_type": "bpe", "split_digits": True, "max_sentence_length": LONGEST_LINE, "num_threads": 1,
            "minloglevel": 2, "unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}  # fmt: skip


def lines(args: argparse.Namespace) -> Iterator[str]:
    """The first lines of the input, up to --input-bytes and --max-sentences, with a progress bar."""
    size = count = 0
    reader = Reader(expand(args.input))
    with tqdm(total=min(args.input_bytes, reader.bytes_total), unit="B", unit_scale=True, disable=None) as bar:
        for record in reader:
            try:
                fields = fields_of(record, args.json_key)
                text = "" if fields is None else texts_of(fields, (args.json_key,))[args.json_key]
            except BadRecord as error:
                raise Refusal(f"{record.where()}: {error}") from None
            for line in text.splitlines():
                length = len(line.encode("utf-8", "replace"))
                if not line.strip() or length > LONGEST_LINE or "\0" in line:
                    continue
                if size + length > args.input_bytes or count == args.max_sentences:
                    return
                size, count = size + length, count + 1
                yield line
            bar.update(min(size, bar.total) - bar.n)


def train(args: argparse.Namespace) -> str:
    """Train and write the model; returns a summary to print."""
    import sentencepiece

    start = time.monotonic()
    targets = [f"{args.model_prefix}.{end}" for end in ("model", "vocab")]
    with atomic_files(targets, args.overwrite) as names:
        sample = list(lines(args))
        print(f"training on {len(sample):,} lines ...", file=sys.stderr)
        with open(names[0], "wb") as model:
            try:
                how = {"vocab_size": args.vocab_size, "character_coverage": args.character_coverage}
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=iter(sample), model_writer=model, **how, **EXACT, **SETTINGS
                )
            except (RuntimeError, OSError) as error:
                raise Refusal(f"--vocab-size {args.vocab_size}: {str(error).split(') ')[-1].strip()}") from error
        processor = sentencepiece.SentencePieceProcessor(model_file=names[0])
        with open(names[1], "w", encoding="utf-8") as vocab:
            for i in range(processor.vocab_size()):
                vocab.write(f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}\n")
        text = "\n".join(sample[:2000])
        bytes_per_token = len(text.encode()) / max(1, len(processor.encode(text)))
    return (
        f"{targets[0]}: {processor.vocab_size():,} pieces, {bytes_per_token:.2f} bytes per token, "
        f"trained in {time.monotonic() - start:.1f} s"
    )


def main(argv: list[str] | None = None) -> None:
    parser = OptionParser(__doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="files or globs")
    parser.add_argument("--json-key", default="text", help="key of the text")
    parser.add_argument("--model-prefix", required=True, help="PREFIX.model and PREFIX.vocab are written")
    parser.add_argument("--vocab-size", type=int, default=2048, help="pieces (default: %(default)s)")
    parser.add_argument("--input-bytes", type=int, default=4_000_000, help="maximum size of the text to train on")
    parser.add_argument("--max-sentences", type=int, default=200_000, help="maximum number of lines to train on")
    parser.add_argument(
        "--character-coverage", type=float, default=0.9995, help="share of characters with tokens; others become bytes"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model")
    args = parser.parse_args(argv)
    with one_line_errors("train_tokenizer.py"):
        print(train(args))


if __name__ == "__main__":
    main()
