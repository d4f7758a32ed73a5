#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens a second from JSON lines to .bin/.idx: ours, a pool as in Megatron-LM, and tokenizers.encode_batch alone.

    python benchmarks/tokenizing.py --input text.jsonl --tokenizer tokenizer.json --workers 2

Megatron-LM's way is written from its documentation: a pool of processes gets lines, parses and encodes each, and the
parent adds the documents one by one to megatron-core's builder. encode_batch is the limit: it gets the texts in memory,
has as many threads as the others have processes, and writes nothing. All load the tokenizer before the time starts.
Tokens per CPU second do not depend on other programs of the machine, except by its caches.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@functools.cache
def model(path: str) -> object:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def encode_line(path: str, line: str) -> list[int]:
    text = json.loads(line)["text"]
    return [*model(path).encode(text).ids, 0] if text.strip() else []


def ours(options: argparse.Namespace, folder: str) -> int:
    from megatron.training.data.encoding import Settings
    from megatron.training.data.sources.partitions import Work, write_tokens
    from megatron.training.data.text_files import Reader

    flags = (("tokenizer_type", "TokenizerFromFile"), ("tokenizer_model", options.tokenizer))
    work = Work((options.input,), Settings(flags, None, "int32", ("text",), True, 0), False)
    return write_tokens(work, f"{folder}/x", Reader([options.input]), options.workers, True).tokens["text"]


def pool(options: argparse.Namespace, folder: str) -> int:
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder, tokens = IndexedDatasetBuilder(f"{folder}/y.bin", dtype=np.int32), 0
    with multiprocessing.get_context("fork").Pool(options.workers) as workers, open(options.input) as lines:
        for ids in workers.imap(functools.partial(encode_line, options.tokenizer), lines, 32):
            if ids:
                builder.add_document(ids, [len(ids)])
            tokens += len(ids)
        workers.close()
        workers.join()
    builder.finalize(f"{folder}/y.idx")
    return tokens


def limit(options: argparse.Namespace, texts: list[str]) -> int:
    return sum(len(one.ids) + 1 for one in model(options.tokenizer).encode_batch(texts))


def measure(options: argparse.Namespace) -> None:
    """Measure one way in this process; prints its tokens, seconds and CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        if options.way == "limit":
            os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(options.workers)}
            texts = [text for line in open(options.input) if (text := json.loads(line)["text"]).strip()]
            action = functools.partial(limit, options, texts)
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            action = functools.partial({"ours": ours, "pool": pool}[options.way], options, folder)
        if options.way == "ours":
            from megatron.training.data.encoding import tokenizer_of

            tokenizer_of((("tokenizer_type", "TokenizerFromFile"), ("tokenizer_model", options.tokenizer)), None)
        else:
            import megatron.core.datasets.indexed_dataset  # noqa: F401

            model(options.tokenizer)
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        begin = time.monotonic()
        tokens = action()
        seconds = time.monotonic() - begin
        after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu = sum(b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime for a, b in zip(own, after))
        print(json.dumps([tokens, seconds, cpu]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=["ours", "pool", "limit"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        measure(options)
        return
    rates: dict[str, list[tuple[float, float]]] = {"limit": [], "ours": [], "pool": []}
    counts = set()
    for number in range(options.rounds):
        for way in list(rates)[:: 1 if number % 2 else -1]:
            words = [sys.executable, __file__, "--input", options.input, "--tokenizer", options.tokenizer]
            words += ["--way", way, "--workers", str(options.workers)]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            tokens, seconds, cpu = json.loads(done.stdout.splitlines()[-1])
            counts.add(tokens)
            rates[way].append((tokens / seconds, tokens / cpu))
    assert len(counts) == 1, f"the ways disagree: {counts}"
    wall, cpu = ({way: statistics.median(one[at] for one in rates[way]) for way in rates} for at in (0, 1))
    print(f"{counts.pop():,} tokens, {options.workers} workers, median of {options.rounds} rounds\n")
    print("| | tokens/s | of the limit | tokens per CPU second | of the limit |\n|---|---|---|---|---|")
    names = {"limit": "tokenizers.encode_batch", "ours": "tools/preprocess_data.py", "pool": "as Megatron-LM"}
    for way, name in names.items():
        print(f"| {name} | {wall[way]:,.0f} | {100 * wall[way] / wall['limit']:.0f} % | {cpu[way]:,.0f} | "
              f"{100 * cpu[way] / cpu['limit']:.0f} % |")  # fmt: skip


if __name__ == "__main__":
    main()
