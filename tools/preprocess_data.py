#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokenize JSON, Parquet, Arrow, WebDataset, text and FASTA files, here or anywhere, into PREFIX_KEY_document.bin/.idx.

    python tools/preprocess_data.py --input data/ --output-prefix my/corpus --append-eod \\
        --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --workers 8
    python tools/preprocess_data.py --input chats.jsonl --preview 3 --tokenizer-type HuggingFaceTokenizer \\
        --tokenizer-model my/model

A document is the "text" of a line or a row, a complete .txt or .md file, or a record of a FASTA file. --preview writes
nothing: it shows texts, and chats as --sft renders them, with the trained tokens marked. Documents keep the
order of the input for any number of --workers and --partitions and any --engine, and the outputs get their names only
when they are complete.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
import time
from collections.abc import Iterable

from tqdm import tqdm

from megatron.system.processes import cores
from megatron.training.data.encoding import Settings, filter_of, tokenizer_of
from megatron.training.data.sources.columnar import saved_files
from megatron.training.data.sources.partitions import (
    METHOD,
    MOST_PARTS,
    Parts,
    Totals,
    Work,
    divide,
    dtype_for,
    make_here,
    make_with_ray,
    merge_parts,
    write_tokens,
)
from megatron.training.data.text_files import Reader, expand, in_folder, is_fasta, is_plain_text, no_memory
from megatron.training.ownership.own_files import one_job
from megatron.training.refusal import Refusal
from tools.convert_command import TOKENIZER_FIELDS, add_tokenizer_options, one_line_errors
from tools.option_parser import OptionParser

MOST_WORKERS = 32  # on a machine with fewer than eight CPUs
REFUSED = {
    "--split-sentences": "only BERT needs sentences; documents are not split",
    "--keep-newlines": "belongs to --split-sentences",
    "--lang": "belongs to --split-sentences",
    "--keep-sequential-samples": "not needed: the order of the input is always kept",
    "--find-optimal-num-workers": "not supported: try --workers",
    "--workers-to-check": "belongs to --find-optimal-num-workers",
    "--max-documents": "belongs to --find-optimal-num-workers",
    "--performance-dir": "belongs to --find-optimal-num-workers",
}


class Bar(tqdm):
    """A progress bar without a thread, because workers are forked while it exists."""

    monitor_interval = 0


def work_of(args: argparse.Namespace) -> Work:
    """What the options describe. Raises Refusal."""
    paths = expand(args.input)
    for folder in (path for path in args.input if os.path.isdir(path) and not saved_files(path)):
        print(in_folder(folder), file=sys.stderr)
    if list(args.json_keys) != ["text"] and any(is_plain_text(path) or is_fasta(path) for path in paths):
        raise Refusal(f"--json-keys {' '.join(args.json_keys)} does not go with .txt and FASTA, which have no keys")
    if args.codon_frame and args.tokenizer_type != "CodonTokenizer":
        raise Refusal(
            f"--codon-frame {args.codon_frame} needs --tokenizer-type CodonTokenizer: add it, or leave it out"
        )
    for key in args.json_keys:
        if "/" in key:
            raise Refusal(f"--json-keys {key}: a key is a part of the output's name, and must have no slash")
    filter_of(args.filter)
    tokenizer_flags = tuple((field.name, getattr(args, field.name)) for field in TOKENIZER_FIELDS)
    tokenizer = tokenizer_of(tokenizer_flags, args.vocab_size)
    if args.append_eod:
        tokenizer.end_for("--append-eod")
    dtype = dtype_for(tokenizer.vocab_size)
    metadata = None if args.keep_metadata is None else tuple(dict.fromkeys(args.keep_metadata))
    keys = tuple(dict.fromkeys(args.json_keys))
    settings = Settings(tokenizer_flags, args.vocab_size, dtype.name, keys, args.append_eod, args.codon_frame,
                        args.filter, metadata)  # fmt: skip
    return Work(tuple(paths), settings, args.skip_bad_lines)


def preprocess(args: argparse.Namespace, method: str = METHOD) -> list[str]:
    """Tokenize the inputs; returns the lines of a summary."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers says how many processes there are
    start, work, notes = time.monotonic(), work_of(args), []
    outputs = {key: f"{args.output_prefix}_{key}_document" for key in work.settings.keys}
    for prefix in outputs.values():
        for end in ("bin", "idx") if not args.overwrite else ():
            if os.path.exists(f"{prefix}.{end}"):
                raise Refusal(f"{prefix}.{end} exists: give --overwrite to replace it")
    if args.engine == "local" and args.partitions in (None, 1):
        totals = _whole(args, work, method, start)
    else:
        parts = divide(work, args.output_prefix, args.of if args.engine == "slurm" else args.partitions, args.overwrite)
        if args.engine == "slurm":
            return _shard(args, parts)
        with one_job(parts.folder):
            if args.overwrite:
                parts.remove_others()
            if args.engine == "ray":
                made = make_with_ray(parts, args.workers)
            else:
                made = make_here(parts, range(parts.count), args.workers)
            _progress(made, parts.count, start)
            totals, _, notes = merge_parts(parts.folder, args.output_prefix, args.overwrite)
    return [*summary(totals, outputs, work.settings.dtype, time.monotonic() - start, args.workers), *notes]


def _progress(made: Iterable[tuple[int, Totals]], count: int, start: float) -> None:
    """Make parts, with a line on stderr for each."""
    for done, (part, totals) in enumerate(made, 1):
        seconds, documents = time.monotonic() - start, sum(totals.documents.values())
        print(f"part {part} of {count} is complete: {documents:,} documents; {done} parts, {seconds:.1f} s, "
              f"{done / seconds:.2f} parts/s", file=sys.stderr)  # fmt: skip


def _shard(args: argparse.Namespace, parts: Parts) -> list[str]:
    """Make the part of one task of an array."""
    if args.overwrite:
        parts.remove_others()
    parts.check_first()
    _progress(make_here(parts, range(args.shard, args.shard + 1), args.workers), parts.count, time.monotonic())
    missing = sum(parts.done(part) is None for part in range(parts.count))
    merge = f"python tools/data.py merge --input {parts.folder} --output-prefix {args.output_prefix}"
    return [f"{parts.name(args.shard)}: complete; {missing} of {parts.count} parts are missing", f"then: {merge}"]


def _whole(args: argparse.Namespace, work: Work, method: str, start: float) -> Totals:
    """Tokenize in one piece, with a progress bar."""
    reader = Reader(list(work.paths), work.settings.columns())
    quiet, before = not sys.stderr.isatty(), 0
    with Bar(total=reader.bytes_total or None, unit="B", unit_scale=True, desc="read", disable=quiet) as bar:

        def report(totals: Totals, position: int) -> None:
            nonlocal before
            done, seconds = sum(totals.documents.values()), time.monotonic() - start
            rate = f"{done / seconds:,.0f} docs/s, {totals.text_bytes / seconds / 1e6:.1f} MB/s"
            bar.set_postfix_str(rate, refresh=False)
            bar.update(position - bar.n)
            if quiet and done // args.log_interval > before // args.log_interval:
                print(f"{done} documents, {position / 1e6:.1f} MB read ({rate})", file=sys.stderr)
            before = done

        return write_tokens(
            work, args.output_prefix, reader, args.workers, args.overwrite, method=method, report=report
        )


def summary(totals: Totals, outputs: dict[str, str], dtype: str, seconds: float, workers: int) -> list[str]:
    """The lines to print at the end."""
    lines = [
        f"{prefix}.bin/.idx: {totals.documents[key]:,} documents, {totals.tokens[key]:,} tokens as {dtype}, "
        f"{os.path.getsize(prefix + '.bin') / 1e6:,.1f} MB"
        for key, prefix in outputs.items()
    ]
    filtered = f", {totals.filtered} by --filter" if totals.filtered else ""
    lines.append(f"skipped: {totals.empty} empty, {totals.bad} bad{filtered}" + "".join(
        f"; {x}" for x in totals.messages))  # fmt: skip
    documents, tokens = sum(totals.documents.values()), sum(totals.tokens.values())
    lines.append(
        f"{seconds:.1f} s with {workers} worker{'s' * (workers > 1)}: {documents / seconds:,.0f} docs/s, "
        f"{totals.text_bytes / seconds / 1e6:.1f} MB/s, {tokens / seconds:,.0f} tokens/s"
    )
    return lines


class _Refuse(argparse.Action):
    """A flag of Megatron-LM that is refused with a reason."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, values: object, option: str | None = None) -> None:
        parser.error(f"{option} is not supported: {REFUSED[option]}")


def build_parser() -> argparse.ArgumentParser:
    """Megatron-LM's options; the tokenizer's are those of the training program."""
    parser = OptionParser(__doc__, allow_abbrev=False)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="FILE",
        help="files, URLs, globs, or folders, also those that Hugging Face's datasets has saved",
    )  # fmt: skip
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to tokenize")
    parser.add_argument("--output-prefix", metavar="PREFIX", help="PREFIX_KEY_document.bin and .idx")
    parser.add_argument("--preview", type=int, metavar="N", help="show the first N documents or chats; write nothing")
    parser.add_argument(
        "--sft-tokenizer-prompt-format", metavar="FILE", help="chat template of --preview (default: the tokenizer's)"
    )
    add_tokenizer_options(parser)
    parser.add_argument("--vocab-size", type=int, help="for NullTokenizer, or to cut a TikTokenizer")
    parser.add_argument(
        "--codon-frame", type=int, choices=[0, 1, 2], default=0, help="bases before the first codon of a document"
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--workers", type=int, default=cores(), help="processes (default: %(default)s)")
    parser.add_argument(
        "--log-interval", type=int, default=1000, help="documents per line of progress without a terminal"
    )
    parser.add_argument(
        "--skip-bad-lines", "--skip-bad", action="store_true", help="count records that cannot be read, and go on"
    )
    parser.add_argument(
        "--filter", metavar="EXPRESSION", help="keep only such rows, for example \"lang == 'en' and len(text) > 500\""
    )
    parser.add_argument(
        "--keep-metadata", nargs="*", metavar="COLUMN",
        help="write source, row, length and these columns of each document to PREFIX_KEY_document.metadata.jsonl",
    )  # fmt: skip
    parser.add_argument(
        "--engine", choices=["local", "ray", "slurm"], default="local",
        help="who makes the parts: this process, tasks of Ray, or the tasks of an array (--shard I --of N)",
    )  # fmt: skip
    parser.add_argument(
        "--partitions", type=int, metavar="N",
        help="make N parts, each with checksums, and merge them; a restart continues after the complete ones "
        "(default: 1, which is not kept; with --engine ray, one for each 64 MiB)",
    )  # fmt: skip
    parser.add_argument("--shard", type=int, metavar="I", help="--engine slurm: the part of this task, from 0")
    parser.add_argument("--of", type=int, metavar="N", help="--engine slurm: the number of tasks")
    parser.add_argument("--overwrite", action="store_true", help="replace existing outputs")
    for name in REFUSED:
        parser.add_argument(name, nargs="*", action=_Refuse, help=argparse.SUPPRESS)
    return parser


def check_engine(args: argparse.Namespace) -> None:
    """Refuse options that the engine does not use, and complete its own."""
    if args.engine == "slurm":
        if args.shard is None or args.of is None or not 0 <= args.shard < args.of:
            raise Refusal("--engine slurm needs --shard I --of N, with I from 0 to N - 1: $SLURM_ARRAY_TASK_ID")
        if args.partitions not in (None, args.of):
            raise Refusal(f"--partitions {args.partitions} with --engine slurm: --of says how many parts there are")
    elif args.shard is not None or args.of is not None:
        raise Refusal(f"--shard and --of need --engine slurm, not {args.engine}: add it, or leave them out")
    for flag, count in (("--partitions", args.partitions), ("--of", args.of)):
        if count is not None and not 1 <= count <= MOST_PARTS:
            raise Refusal(f"{flag} {count}: must be from 1 to {MOST_PARTS:,}")


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    with one_line_errors("preprocess_data.py", "only complete parts are kept"):
        if args.workers < 1 or args.log_interval < 1:
            raise Refusal("--workers and --log-interval must be at least 1")
        if args.workers > (most := max(MOST_WORKERS, 4 * cores())) and args.engine != "ray":
            raise Refusal(f"--workers {args.workers}: this machine has {cores()} CPUs: give at most {most}")
        check_engine(args)
        if args.preview is not None:
            from tools.preview import preview

            print("\n".join(preview(args, work_of(args))))
            return
        if args.output_prefix is None:
            raise Refusal("give --output-prefix PREFIX, the name of the files to write, or --preview N to look at some")
        if args.sft_tokenizer_prompt_format:
            raise Refusal("--sft-tokenizer-prompt-format goes with --preview: training with --sft renders chats itself")
        try:
            print("\n".join(preprocess(args)))
        except MemoryError:
            raise no_memory("the tokens of a batch") from None


if __name__ == "__main__":
    main()
