#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bytes that a training step needs on device and host in addition to the model's states, by mode and sequence length.

    python benchmarks/memory.py --seq-lengths 4096 8192 --modes plain recompute fpdt stream

Each case is one forward and backward pass of the real program in a separate process that counts all tensors. Device
bytes are the peak minus what was allocated before (parameters, gradients and optimizer states). The chunk is the same
for all lengths; its default is an eighth of the first length.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CHUNKS = "--fpdt --fpdt-chunk-size {chunk}"
MODES = {
    "plain": "",
    "recompute": RECOMPUTE,
    "fpdt-device": f"{CHUNKS} --no-fpdt-offload",
    "fpdt": CHUNKS,
    "fpdt-inputs": f"{CHUNKS} --offload-checkpoints",
    "fpdt-recompute": f"{CHUNKS} {RECOMPUTE} --offload-checkpoints",
    "stream": f"{CHUNKS} --fpdt-stream-hidden",
    "stream-recompute": f"{CHUNKS} --fpdt-stream-hidden {RECOMPUTE}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-attention-heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--chunk", type=int, help="tokens of a chunk; default: an eighth of the first length")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one.split())))
        return
    chunk, rows = options.chunk or options.seq_lengths[0] // 8, []
    for length in options.seq_lengths:
        for mode in options.modes:
            rows.append({"mode": mode, "tokens": length, "chunk": chunk, **run(options, MODES[mode], length, chunk)})
            print(json.dumps(rows[-1]), flush=True)
    show(rows)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


def run(options: argparse.Namespace, flags: str, length: int, chunk: int) -> dict[str, float]:
    """One case, in a separate process."""
    words = (
        f"--num-layers {options.num_layers} --hidden-size {options.hidden_size} --vocab-size {options.vocab_size - 1} "
        f"--num-attention-heads {options.num_attention_heads} --seq-length {length} --max-position-embeddings {length} "
        f"--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --eval-iters 0 "
        f"--num-workers 0 --device cpu --hidden-dropout 0 --attention-dropout 0 --position-embedding-type rope "
        f"--normalization RMSNorm --untie-embeddings-and-output-weights {flags.format(chunk=chunk)}"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--one", words], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1]) | {"seconds": round(time.perf_counter() - begin, 1)}


def measure(argv: list[str]) -> dict[str, int]:
    """Bytes of one forward and backward pass of this process."""
    from megatron.training.arguments.parser import parse
    from megatron.training.job import batches_for, prepare
    from megatron.training.report.tensor_memory import TensorMeter
    from megatron.training.setup import start
    from megatron.training.step import train_step

    config = parse(argv, None, 1)
    job = prepare(config, start(config))
    batches = batches_for(job, job.datasets[0], 0, 0)
    with TensorMeter("cpu") as meter:
        states = meter.now
        figures: dict[str, int] = {}

        def instead_of_an_update() -> bool:  # the optimizer's temporary buffers do not count
            figures.update(device=meter.peak - states, host=meter.host_peak, states=states)
            return True  # skip it

        job.optimizer.prepare_grads = instead_of_an_update
        train_step(job.runtime, job.model_chunks, job.optimizer, job.schedule, batches, config, 1)
    return figures


def show(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("mode", "tokens", "chunk", "device MiB", "vs recompute", "vs plain", "host MiB")
    known = {(row["mode"], row["tokens"]): row["device"] for row in rows}
    for row in rows:
        others = (known.get((mode, row["tokens"])) for mode in ("recompute", "plain"))
        shares = [f"1/{other / row['device']:.1f}" if other else "" for other in others]
        sizes = [f"{row[place] / 2**20:,.1f}" for place in ("device", "host")]
        table.add_row(row["mode"], f"{row['tokens']:,}", f"{row['chunk']:,}", sizes[0], *shares, sizes[1])
    Console().print(table)


if __name__ == "__main__":
    main()
