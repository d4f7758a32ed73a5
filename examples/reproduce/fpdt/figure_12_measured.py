#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 12 of the FPDT paper, measured with a small model: speed and device memory over the chunk size.

    python examples/reproduce/fpdt/figure_12_measured.py [OUT_DIR]

A Llama of 2 layers, 256 wide, is trained on 4,096 tokens (SEQ_LENGTH), in 1 to 8 chunks and with full recompute without
chunks. Layer inputs are in host memory in all runs, as in the paper. benchmarks/fpdt.py measures, and has more options.
The paper uses other models and GPUs, so only ratios can be compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
from examples.reproduce.report import Row, command, write  # noqa: E402

CHUNKS = (1, 2, 4, 8)
PUBLISHED = {2: 18 / 27}  # activations of the 2.7B model: 27 GB in one piece, 18 GB in two chunks
MIB = 2**20


def sweep(prefix: Path, seq_length: int) -> list[dict]:
    """The rows of benchmarks/fpdt.py: the reference without chunks first, then one for each number of chunks."""
    sys.stdout.flush()
    shape = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --vocab-size 4000"
    how = f"--seq-length {seq_length} --modes fpdt --repeats 2 --threads 1 --chunks {' '.join(map(str, CHUNKS))}"
    words = [*shape.split(), *how.split(), "--output", str(prefix)]
    program = [sys.executable, str(ROOT / "benchmarks" / "fpdt.py")]
    subprocess.run([*program, *words, "--", "--offload-checkpoints"], check=True, stdout=subprocess.DEVNULL)
    from benchmarks.fpdt import merged

    return merged(json.loads(prefix.with_suffix(".json").read_text()))


def rows_of(result: list[dict]) -> list[Row]:
    """Rows for each number of chunks, as shares of the reference, and in bytes and tokens per second."""
    reference, rows = result[0], []
    for row in result:
        chunks = row["chunks"] or 0
        label = {"layers": "in chunks (FPDT)" if chunks else "whole, recomputed", "chunks": max(chunks, 1)}
        rows.append(Row(label, None, row["activations"] / MIB, "measured", "MiB of activations on the device"))
        rows.append(Row(label, None, row["tokens_per_second"], "measured", "tokens per second"))
        if chunks:
            share, note = row["activations"] / reference["activations"], ""
            if chunks in PUBLISHED:
                note = "published: GPT-2.7B, 256K tokens, 4 A100"
            rows.append(Row(label, PUBLISHED.get(chunks), share, "measured", "activations / those of the whole", note))
            # Steps of the configurations alternated. CPU time is preferred, because other programs do not affect it.
            speed = row.get("of_reference_by_cpu_time", row["of_reference"])
            rows.append(Row(label, None, speed, "measured", "speed / that of the whole"))
    return rows


def main() -> None:
    args = command(__file__, __doc__).parse_args()
    seq_length = int(os.environ.get("SEQ_LENGTH", 4096))
    args.out_dir.mkdir(parents=True, exist_ok=True)
    rows = rows_of(sweep(args.out_dir / "sweep", seq_length))
    write(args.out_dir, "figure_12_measured", f"FPDT, figure 12, small: {seq_length:,} tokens", rows, over="chunks")


if __name__ == "__main__":
    main()
