#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""CPU time to read a sample: this package (reads, checks every id) and megatron-core (maps, does not check).

    python benchmarks/data.py --lengths 4096 131072 1048576 --documents 500 1000000

Files are in a temporary folder and in the page cache, so that all time is CPU time of this process. Both are measured
in every round; figures are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.training.data.datasets import LocalBuilder
from megatron.training.data.read_tokens import first_outside
from megatron.training.data.samples.token_dataset import LocalConfig, TokenDataset
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.settings.config import DataConfig

VOCABULARY = 128_000
NO_MASKS = dict.fromkeys(
    ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"), False
)


def write(prefix: str, document: int, total: int) -> None:
    """Documents of about ``document`` random int32 tokens each, ``total`` in all."""
    random = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    while total > 0:
        length = int(random.integers(document // 2, document * 3 // 2)) + 1
        builder.add_document(random.integers(0, VOCABULARY, length), [length])
        total -= length
    builder.finalize(f"{prefix}.idx")


def datasets(prefix: str, length: int, samples: int, cache: str) -> dict[str, GPTDataset]:
    """Datasets of both packages with the same samples and cached indices, as in a run."""
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), VOCABULARY)
    result = {}
    for name, builder, kind in (
        ("core", BlendedMegatronDatasetBuilder, GPTDataset),
        ("ours", LocalBuilder, TokenDataset),
    ):
        for _ in range(2):  # the first builds the indices, the second reads them from the cache
            data = {"blend": ([prefix], None), "split": "1,0,0", "path_to_cache": os.path.join(cache, name)}
            config = LocalConfig(random_seed=1, sequence_length=length, tokenizer=tokenizer, **data, **NO_MASKS)
            result[name] = builder(kind, [samples, 0, 0], lambda: True, config).build()[0]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 131072, 1048576])
    parser.add_argument("--documents", type=int, nargs="+", default=[500, 1000000])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    print("| tokens per sample | tokens per document | core, mapped | ours, read and checked | the check only |")
    print("|---|---|---|---|---|")
    for document in options.documents:
        with tempfile.TemporaryDirectory() as folder:
            prefix = os.path.join(folder, "data")
            write(prefix, document, 24 * max(options.lengths))
            for length in options.lengths:
                both = datasets(prefix, length, options.rounds, os.path.join(folder, str(length)))
                took = {name: [] for name in (*both, "check")}
                for number in range(options.rounds):
                    samples = {}
                    for name in list(both)[:: 1 if number % 2 else -1]:
                        begin = time.process_time()
                        samples[name] = both[name][number % len(both[name])]
                        took[name].append(time.process_time() - begin)
                    assert samples["core"]["tokens"].equal(samples["ours"]["tokens"])
                    ids = samples["ours"]["tokens"].numpy().astype(np.int32)
                    begin = time.process_time()
                    first_outside(ids, VOCABULARY)
                    took["check"].append(time.process_time() - begin)
                core, ours, check = (1000 * statistics.median(took[name]) for name in ("core", "ours", "check"))
                print(f"| {length:,} | {document:,} | {core:.3f} ms | {ours:.3f} ms | {check:.3f} ms |", flush=True)


if __name__ == "__main__":
    main()
