#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 13 of the FPDT paper with a small model: memory in the backward pass of a Transformer block, by chunks.

    python examples/reproduce/fpdt/figure_13.py [OUT_DIR]

The block is like Llama-3-8B's, but of width 128, on 16,384 tokens (SEQ_LENGTH) and one process. The FFN has
twice as many chunks as attention, as in the paper, and in one run four times as many. Every tensor that is made or
freed is counted, but not weights, gradients and optimizer states, which exist before the step.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import Row, command, write  # noqa: E402

CHUNKS = ((2, 4), (4, 8), (8, 16), (4, 16))  # of attention, of the FFN; the first three are the paper's
MIB = 2**20
NOTE = "on a CPU SwiGLU is not fused, so its parts are separate tensors"
FFN, ATTENTION, HOST = "#e69f00", "#0072b2", "#8a8a8a"


@dataclass(frozen=True)
class Backward:
    """A block's backward pass: bytes after each event, and whether the event was in the FFN."""

    device: list[int]
    host: list[int]
    in_ffn: list[bool]

    def peak(self, ffn: bool) -> int:
        return max(size for size, inside in zip(self.device, self.in_ffn) if inside == ffn)


def record(seq_length: int, chunks: int, ffn_chunks: int) -> Backward:
    """Train a model of one block for a step, and record its backward pass."""
    from megatron.context_parallel.fpdt import chunk_work
    from megatron.training.arguments.parser import parse
    from megatron.training.job import batches_for, prepare
    from megatron.training.report.tensor_memory import TensorMeter
    from megatron.training.settings.models import LLAMA_DEFAULTS
    from megatron.training.setup import start, stop
    from megatron.training.step import train_step

    words = (
        f"--num-layers 1 --hidden-size 128 --ffn-hidden-size 448 --num-attention-heads 8 --group-query-attention "
        f"--num-query-groups 2 --seq-length {seq_length} --max-position-embeddings {seq_length} --micro-batch-size 1 "
        f"--train-iters 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 999 --eval-iters 0 "
        f"--num-workers 0 --fpdt --fpdt-chunk-size {seq_length // chunks} --ffn-chunks {ffn_chunks}"
    )
    config = parse(words.split(), LLAMA_DEFAULTS, 1)
    spans: dict[str, list[tuple[float, float]]] = {"block": [], "ffn": []}

    def timed(name: str, function: Callable) -> Callable:
        def run(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                spans[name].append((begin, time.perf_counter()))

        return run

    runtime = start(config)
    try:
        job = prepare(config, runtime)
        batches = batches_for(job, job.datasets[0], 0, 0)
        backward = staticmethod(timed("block", chunk_work._Chunked.backward))
        ffn_grad = timed("ffn", chunk_work.ChunkWork.ffn_grad)
        with (
            TensorMeter(runtime.device.type, record=True) as meter,
            patch.object(chunk_work._Chunked, "backward", backward),
            patch.object(chunk_work.ChunkWork, "ffn_grad", ffn_grad),
        ):
            before, before_host = meter.now, meter.host_now
            train_step(runtime, job.model_chunks, job.optimizer, job.schedule, batches, config, 1)
        return _within(meter.history, spans, before, before_host)
    finally:
        stop()


def _within(history: Any, spans: dict[str, list[tuple[float, float]]], before: int, before_host: int) -> Backward:
    """The part of a history within the block's backward pass; bytes relative to those before the step."""
    ((begin, end),) = spans["block"]
    levels = {"device": -before, "host": -before_host}
    result = Backward([], [], [])
    for when, number, change in history.events:
        place = history.blocks[number].place
        if place in levels:
            levels[place] += change
        if begin <= when <= end:
            result.device.append(levels["device"])
            result.host.append(levels["host"])
            result.in_ffn.append(any(low <= when <= high for low, high in spans["ffn"]))
    return result


def draw(figure: Any, recorded: dict[tuple[int, int], Backward]) -> None:
    panels = figure.subplots(1, len(recorded), sharey=True, squeeze=False)[0]
    for axes, ((chunks, ffn_chunks), result) in zip(panels, recorded.items()):
        places = range(len(result.device))
        sizes = [size / MIB for size in result.device]
        for inside, colour, name in ((False, ATTENTION, "attention and projections"), (True, FFN, "FFN")):
            where = [flag == inside for flag in result.in_ffn]
            style = {"color": colour, "linewidth": 0, "label": f"{name} (measured)"}
            axes.fill_between(places, sizes, where=where, step="post", **style)
        host = [size / MIB for size in result.host]
        axes.plot(places, host, color=HOST, linewidth=1.2, label="host memory (measured)")
        most = f"at most {max(sizes):.0f} MiB"
        axes.set_title(f"{chunks} chunks, FFN in {ffn_chunks}:\n{most}", fontsize=11)
        axes.set(xlabel="allocations and frees", xlim=(0, len(places)), ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("MiB without weights, gradients, states")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, fontsize=9, loc="outside lower center", ncols=3)


def rows_of(recorded: dict[tuple[int, int], Backward]) -> list[Row]:
    rows = []
    for (chunks, ffn_chunks), result in recorded.items():
        label = {"chunks": chunks, "ffn_chunks": ffn_chunks}
        sizes = {"FFN": result.peak(True), "attention": result.peak(False)}
        rows += [Row({**label, "in": name}, None, size / MIB, "measured", "MiB") for name, size in sizes.items()]
        rows.append(Row({**label, "in": "host memory"}, None, max(result.host) / MIB, "measured", "MiB"))
        printed, fullest = "attention" if ffn_chunks == 2 * chunks else None, max(sizes, key=sizes.get)
        rows.append(Row({**label, "in": "the block"}, printed, fullest, "measured", "fullest in", NOTE))
    return rows


def main() -> None:
    args = command(__file__, __doc__).parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"  # megatron-core warns about libraries that only GPUs need
    seq_length = int(os.environ.get("SEQ_LENGTH", 16384))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # a process trains once
        recorded = {chunks: pool.apply(record, (seq_length, *chunks)) for chunks in CHUNKS}
    title = f"FPDT, figure 13, small: backward of a block, {seq_length:,} tokens"
    write(args.out_dir, "figure_13", title, rows_of(recorded), draw=lambda figure: draw(figure, recorded))


if __name__ == "__main__":
    main()
