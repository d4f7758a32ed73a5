#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokenize JSON lines, JSON arrays, .txt, FASTA (plain, .gz, .zst) and Parquet into PREFIX_KEY_document.bin/.idx.

    python tools/preprocess_data.py --input data/*.jsonl.gz --output-prefix my/corpus --append-eod \\
        --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --workers 8

A document is the "text" of a line or a row, a complete .txt file, or a record of a FASTA file. Documents keep the
order of the input for any number of --workers, and the outputs get their names only when they are complete.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron.training.data.encoding import Encoded, Settings, encode_all, tokenizer_of
from megatron.training.data.text_files import Reader, atomic_files, expand, is_fasta, is_plain_text, no_memory
from megatron.training.refusal import Refusal
from tools.convert_command import TOKENIZER_FIELDS, add_tokenizer_options

REFUSED = {
    "--split-sentences": "only BERT needs sentences; documents are not split",
    "--keep-newlines": "belongs to --split-sentences",
    "--lang": "belongs to --split-sentences",
    "--partitions": "not needed: --workers reads any number of files, in order",
    "--keep-sequential-samples": "not needed: the order of the input is always kept",
    "--find-optimal-num-workers": "not supported: try --workers",
    "--workers-to-check": "belongs to --find-optimal-num-workers",
    "--max-documents": "belongs to --find-optimal-num-workers",
    "--performance-dir": "belongs to --find-optimal-num-workers",
}


class Bar(tqdm):
    """A progress bar without a thread, because workers are forked while it exists."""

    monitor_interval = 0


def core() -> Any:
    """megatron-core's module of .bin/.idx files. Its import takes seconds, so --help and refusals do not import it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # core warns at import about packages that are not installed
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def preprocess(args: argparse.Namespace, method: str = "fork" if sys.platform == "linux" else "spawn") -> list[str]:
    """Tokenize the inputs; returns the lines of a summary."""
    paths = expand(args.input)
    if list(args.json_keys) != ["text"] and any(is_plain_text(path) or is_fasta(path) for path in paths):
        raise Refusal(f"--json-keys {' '.join(args.json_keys)} does not go with .txt and FASTA, which have no keys")
    if args.codon_frame and args.tokenizer_type != "CodonTokenizer":
        raise Refusal(
            f"--codon-frame {args.codon_frame} needs --tokenizer-type CodonTokenizer: add it, or leave it out"
        )
    tokenizer_flags = tuple((field.name, getattr(args, field.name)) for field in TOKENIZER_FIELDS)
    keys = tuple(dict.fromkeys(args.json_keys))
    tokenizer = tokenizer_of(tokenizer_flags, args.vocab_size)
    dtype = core().DType.optimal_dtype(tokenizer.vocab_size)
    settings = Settings(tokenizer_flags, args.vocab_size, np.dtype(dtype).name, keys, args.append_eod, args.codon_frame)
    prefixes = [f"{args.output_prefix}_{key}_document" for key in settings.keys]
    reader, total, start = Reader(paths, keys), Encoded(), time.monotonic()
    documents, tokens = dict.fromkeys(settings.keys, 0), dict.fromkeys(settings.keys, 0)
    with atomic_files([f"{p}.{end}" for p in prefixes for end in ("bin", "idx")], args.overwrite) as names:
        with ExitStack() as stack:
            builders = {key: core().IndexedDatasetBuilder(name, dtype) for key, name in zip(settings.keys, names[::2])}
            for builder in builders.values():
                stack.callback(_close, builder.data_file)
            encoded_batches = encode_all(settings, reader, args.workers, method)
            stack.callback(encoded_batches.close)
            quiet, size = not sys.stderr.isatty(), reader.bytes_total or None
            bar = stack.enter_context(Bar(total=size, unit="B", unit_scale=True, desc="read", disable=quiet))
            for encoded, position in encoded_batches:
                if encoded.bad and not args.skip_bad_lines:
                    raise Refusal(f"{encoded.bad[0]}; give --skip-bad-lines to count such lines and go on")
                before = sum(documents.values())
                for key, builder in builders.items():
                    pieces = np.split(encoded.tokens[key], np.cumsum(encoded.lengths[key])[:-1])
                    for piece in pieces if encoded.lengths[key] else ():
                        builder.add_document(piece, [piece.size])
                    documents[key] += len(encoded.lengths[key])
                    tokens[key] += encoded.tokens[key].size
                total.text_bytes += encoded.text_bytes
                total.empty += encoded.empty
                total.bad += encoded.bad
                done, seconds = sum(documents.values()), time.monotonic() - start
                rate = f"{done / seconds:,.0f} docs/s, {total.text_bytes / seconds / 1e6:.1f} MB/s"
                bar.set_postfix_str(rate, refresh=False)
                bar.update(position - bar.n)
                if quiet and done // args.log_interval > before // args.log_interval:
                    print(f"{done} documents, {position / 1e6:.1f} MB read ({rate})", file=sys.stderr)
            empty_keys = [key for key in settings.keys if not documents[key]]
            if empty_keys:
                raise Refusal(f'--input: no document with text under the key "{empty_keys[0]}"')
            for builder, name in zip(builders.values(), names[1::2]):
                builder.finalize(name)
    seconds = time.monotonic() - start
    summary = [
        f"{prefix}.bin/.idx: {documents[key]:,} documents, {tokens[key]:,} tokens as {dtype.__name__}, "
        f"{os.path.getsize(prefix + '.bin') / 1e6:,.1f} MB"
        for prefix, key in zip(prefixes, settings.keys)
    ]
    summary.append(f"skipped: {total.empty} empty, {len(total.bad)} bad" + "".join(f"; {x}" for x in total.bad[:3]))
    done = sum(documents.values())
    summary.append(
        f"{seconds:.1f} s with {args.workers} worker{'s' * (args.workers > 1)}: {done / seconds:,.0f} docs/s, "
        f"{total.text_bytes / seconds / 1e6:.1f} MB/s, {sum(tokens.values()) / seconds:,.0f} tokens/s"
    )
    return summary


def _close(file: object) -> None:
    """Close an output; a full disk was reported already."""
    with suppress(OSError):
        file.close()


def _stopper(patience: float = 5.0) -> Callable[..., None]:
    """A handler of SIGTERM that exits by an exception, so that temporary files are removed.

    More signals within ``patience`` seconds are ignored. Later ones count again, because an exception that is raised
    inside a finalizer is lost.
    """
    last = -patience

    def stop(*_: object) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= patience:
            last = now
            sys.exit(143)

    return stop


class _Refuse(argparse.Action):
    """A flag of Megatron-LM that is refused with a reason; --partitions 1 is permitted, as it has no effect."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, values: object, option: str | None = None) -> None:
        if (option, values) != ("--partitions", ["1"]):
            parser.error(f"{option} is not supported: {REFUSED[option]}")


def build_parser() -> argparse.ArgumentParser:
    """Megatron-LM's options; the tokenizer's are those of the training program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="files or globs")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to tokenize")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="PREFIX_KEY_document.bin and .idx")
    add_tokenizer_options(parser)
    parser.add_argument("--vocab-size", type=int, help="for NullTokenizer, or to cut a TikTokenizer")
    parser.add_argument(
        "--codon-frame", type=int, choices=[0, 1, 2], default=0, help="bases before the first codon of a document"
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--workers", type=int, default=cores, help="processes (default: %(default)s)")
    parser.add_argument(
        "--log-interval", type=int, default=1000, help="documents per line of progress without a terminal"
    )
    parser.add_argument("--skip-bad-lines", action="store_true", help="count lines that cannot be read, and go on")
    parser.add_argument("--overwrite", action="store_true", help="replace existing outputs")
    for name in REFUSED:
        parser.add_argument(name, nargs="*", action=_Refuse, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _stopper())
    try:
        if args.workers < 1 or args.log_interval < 1:
            raise Refusal("--workers and --log-interval must be at least 1")
        print("\n".join(preprocess(args)))
    except (Refusal, MemoryError) as error:
        line = no_memory("the tokens of a batch") if isinstance(error, MemoryError) else error
        print(f"preprocess_data.py: error: {line}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("preprocess_data.py: interrupted, nothing written", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
