#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Merge, split, show, check, sample and measure token files (.bin/.idx), and remove repeated documents.

python tools/data.py inspect my/corpus_text_document
python tools/data.py lengths my/corpus_text_document --plot lengths.png
python tools/data.py merge --input my/corpus.parts --output-prefix my/corpus
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
from contextlib import nullcontext

import numpy as np

from megatron.training.data.index_files import check_token_ids, open_prefix
from megatron.training.data.read_tokens import check_ids
from megatron.training.data.sources.partitions import merge_parts
from megatron.training.data.sources.token_files import merge, read_manifest, same_documents, verify, write_documents
from megatron.training.data.tokenizer import Tokenizer, build_tokenizer
from megatron.training.ownership.atomic import atomic_files
from megatron.training.ownership.own_files import one_job
from megatron.training.refusal import Refusal, printable
from megatron.training.settings.config import DataConfig
from tools.convert_command import TOKENIZER_FIELDS, add_tokenizer_options, one_line_errors
from tools.option_parser import OptionParser


def merged(args: argparse.Namespace) -> list[str]:
    folders = [path for path in args.input if os.path.isdir(path)]
    if folders and len(args.input) > 1:
        raise Refusal(f"--input {folders[0]}: merge the parts of one folder at a time, then the files")
    if folders:
        with nullcontext() if args.keep_parts else one_job(os.path.realpath(folders[0])):
            totals, outputs, notes = merge_parts(folders[0], args.output_prefix, args.overwrite, args.keep_parts)
        return [*(_line(outputs[key], totals.documents[key], totals.tokens[key]) for key in outputs), *notes]
    if os.path.realpath(args.output_prefix) in map(os.path.realpath, args.input):
        raise Refusal(f"--output-prefix {args.output_prefix} is an input too: give another name")
    manifest = merge(args.input, args.output_prefix, args.overwrite)
    return [_line(args.output_prefix, manifest["documents"], manifest["tokens"])]


def _line(prefix: str, documents: int, tokens: int) -> str:
    return f"{prefix}: {documents:,} documents, {tokens:,} tokens"


def split(args: argparse.Namespace) -> list[str]:
    """Documents in order, in parts with shares of all tokens."""
    if min(args.shares) <= 0:
        raise Refusal(f"--shares {' '.join(map(str, args.shares))}: must be positive")
    lengths = np.asarray(open_prefix(args.prefix, "split").lengths())
    before = np.cumsum(lengths, dtype=np.int64) - lengths
    bounds = np.cumsum([0, *args.shares]) / sum(args.shares) * int(lengths.sum(dtype=np.int64))
    places = np.searchsorted(before, bounds[1:-1])
    pieces = np.split(np.arange(len(lengths)), places)
    if not all(map(len, pieces)):
        raise Refusal(f"--shares: one part would have none of the {len(lengths)} documents: give fewer or other shares")
    chosen = {f"{args.output_prefix}_{number}": piece for number, piece in enumerate(pieces)}
    manifests = write_documents(args.prefix, chosen, args.overwrite)
    return [_line(output, one["documents"], one["tokens"]) for output, one in zip(chosen, manifests)]


def inspect(args: argparse.Namespace) -> list[str]:
    file = open_prefix(args.prefix, "inspect")
    lengths, manifest = np.asarray(file.lengths()), read_manifest(f"{args.prefix}.json")
    name, tokens = np.dtype(file.dtype).name, int(lengths.sum(dtype=np.int64))
    lines = [
        f"{args.prefix}: {len(lengths):,} documents, {tokens:,} tokens as {name}",
        f"tokens per document: mean {tokens / len(lengths):,.1f}, median {int(np.median(lengths)):,}, "
        f"shortest {lengths.min():,}, longest {lengths.max():,}",
        "manifest: " + (f"SHA-256 of the .bin is {manifest['bin']['sha256']}" if manifest else "none"),
    ]
    return lines + _shown(args, range(min(args.documents, len(lengths))))


def sample(args: argparse.Namespace) -> list[str]:
    count = open_prefix(args.prefix, "sample").sequences
    chosen = np.random.default_rng(args.seed).choice(count, min(args.documents, count), replace=False)
    return _shown(args, sorted(chosen.tolist()))


def _tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    if not args.tokenizer_type:
        return None
    return build_tokenizer(DataConfig(**{f.name: getattr(args, f.name) for f in TOKENIZER_FIELDS}), args.vocab_size)


def _shown(args: argparse.Namespace, documents: range | list[int]) -> list[str]:
    """Documents as text, or as ids without a tokenizer; of each at most ``--tokens``."""
    tokenizer, reader, lines = _tokenizer(args), open_prefix(args.prefix, args.command).open(), []
    for document in documents:
        total = reader.lengths.number(document)
        ids = reader.get(document, 0, min(total, args.tokens))
        if tokenizer:
            check_ids(ids, tokenizer.vocab_size, tokenizer.source, lambda at=document: reader.where(at))
        text = tokenizer.detokenize(ids.tolist()) if tokenizer else " ".join(map(str, ids.tolist()))
        shown = "\n".join(map(printable, text.split("\n")))
        lines.append(f"--- document {document}, {total:,} tokens\n{shown}{' ...' if total > len(ids) else ''}")
    return lines


def verified(args: argparse.Namespace) -> list[str]:
    lines = verify(args.prefix)
    if tokenizer := _tokenizer(args):
        file = open_prefix(args.prefix, "verify")
        check_token_ids(file, tokenizer.vocab_size, tokenizer.source, file.sequences, 2**31)
        lines.append(f"all ids are among the {tokenizer.vocab_size} of {tokenizer.source}")
    return lines


def lengths(args: argparse.Namespace) -> list[str]:
    """A histogram: each bin reaches from a power of two to the next."""
    result = np.asarray(open_prefix(args.prefix, "lengths").lengths()).astype(np.int64)
    octave = np.frexp(np.maximum(result, 1))[1] - 1
    documents = np.bincount(octave)
    tokens = np.bincount(octave, result)
    work = np.bincount(octave, result.astype(float) ** 2)
    lines = ["| tokens per document | documents | share of documents | share of tokens | share of attention |",
             "|---|---|---|---|---|"]  # fmt: skip
    for at in range(octave.min(), octave.max() + 1):
        shares = (documents[at] / len(result), tokens[at] / tokens.sum(), work[at] / work.sum())
        lines.append(f"| {_short(2**at)} to {_short(2 ** (at + 1))} | {documents[at]:,} | "
                     + " | ".join(f"{100 * share:.2f} %" for share in shares) + " |")  # fmt: skip
    if args.plot:
        _plot(args, documents, tokens, work, int(octave.min()))
        lines.append(f"{args.plot}: the same as a picture")
    return lines


def _short(count: int) -> str:
    for size, name in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= size:
            return f"{count // size}{name}"
    return str(count)


def _plot(args: argparse.Namespace, documents: np.ndarray, tokens: np.ndarray, work: np.ndarray, first: int) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    places, width = np.arange(first, len(documents)), 0.28
    figure, axis = pyplot.subplots(figsize=(max(6.4, 0.6 * len(places)), 4), layout="constrained")
    for number, (values, name) in enumerate(((documents, "documents"), (tokens, "tokens"), (work, "attention's work"))):
        axis.bar(places + (number - 1) * width, 100 * values[first:] / values.sum(), width, label=name)
    axis.set_xticks(places, [_short(2**at) for at in places], rotation=45 if len(places) > 12 else 0)
    axis.set(xlabel="tokens per document, from this number to twice as many", ylabel="share (%)")
    axis.set_title(os.path.basename(args.prefix), fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    with atomic_files([args.plot], True) as (name,):
        figure.savefig(name, format=os.path.splitext(args.plot)[1][1:] or "png", dpi=120)
    pyplot.close(figure)


def dedup_exact(args: argparse.Namespace) -> list[str]:
    file = open_prefix(args.prefix, "dedup-exact")
    kept, dropped = same_documents(file)
    write_documents(args.prefix, {args.output_prefix: kept}, args.overwrite)
    return [f"{args.output_prefix}: {len(kept):,} of {file.sequences:,} documents; {file.sequences - len(kept):,} were "
            f"repeated, {dropped:,} tokens"]  # fmt: skip


COMMANDS = {
    "merge": (merged, "one pair of files from several, in the order given, or from the parts of preprocess_data.py"),
    "split": (split, "several pairs of files with shares of the tokens; documents stay whole and in order"),
    "inspect": (inspect, "counts, and the first documents as text"),
    "verify": (verified, "complete, and as the manifest says; with a tokenizer, all ids are checked"),
    "sample": (sample, "documents at random, as text"),
    "lengths": (lengths, "a histogram of the lengths, by documents, tokens and attention's work"),
    "dedup-exact": (dedup_exact, "a copy without documents whose tokens occurred before"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == "merge":
            command.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help="or one folder of parts")
            command.add_argument("--keep-parts", action="store_true", help="do not remove the parts")
        else:
            command.add_argument("prefix", metavar="PREFIX", help="the path of the .bin and the .idx, without ending")
        if name in ("merge", "split", "dedup-exact"):
            command.add_argument("--output-prefix", required=True, metavar="PREFIX", help="of the files to write")
            command.add_argument("--overwrite", action="store_true", help="replace existing outputs")
        if name == "split":
            command.add_argument("--shares", nargs="+", type=float, required=True, help="for example 98 1 1")
        if name == "lengths":
            command.add_argument("--plot", metavar="FILE", help="a picture to write: .png, .svg or .pdf")
        if name in ("inspect", "sample"):
            command.add_argument("--documents", type=int, default=3, help="how many (default: %(default)s)")
            command.add_argument("--tokens", type=int, default=200, help="of each at most (default: %(default)s)")
        if name == "sample":
            command.add_argument("--seed", type=int, default=0)
        if name in ("inspect", "sample", "verify"):
            add_tokenizer_options(command)
            command.add_argument("--vocab-size", type=int, help="for NullTokenizer")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    with one_line_errors("data.py"):
        print("\n".join(COMMANDS[args.command][0](args)))


if __name__ == "__main__":
    main()
