# SPDX-License-Identifier: Apache-2.0
"""The training program in a separate process, which runs one step per request, each with a time limit."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from benchmarks import fpdt_worker
from benchmarks.gpu.stage import Figures, Sizes, reason
from megatron.formulas.strategy import Strategy

START = 150.0  # seconds allowed for imports, the model and start-up of the first step
MODES = {
    "none": [],
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split(),
    "fpdt": ["--fpdt"],
    "fpdt on the device": ["--fpdt", "--no-fpdt-offload"],
    "fpdt streamed": ["--fpdt", "--fpdt-stream-hidden"],
}
MODES["fpdt streamed, recompute"] = [*MODES["fpdt streamed"], *MODES["recompute"]]  # the least memory
LOSS_ROWS = 2048  # tokens in a chunk of the loss, so that all logits never exist at once


class Failed(RuntimeError):
    """The program ended or took too long."""


@dataclass(frozen=True)
class Plan:
    """What is trained on one device: number of layers, sequence length, a mode of ``MODES``, and FPDT's chunk."""

    layers: int
    length: int
    mode: str
    chunk: int = 0

    @property
    def streamed(self) -> bool:
        return self.mode.startswith("fpdt streamed")

    @property
    def loss_chunks(self) -> int:
        return max(1, self.length // LOSS_ROWS)

    def strategy(self) -> Strategy:
        """The strategy for formulas and the simulator."""
        return Strategy(
            recompute="full" if self.mode.endswith("recompute") else "none",
            fpdt_chunk=self.chunk,
            fpdt_offload=self.mode != "fpdt on the device",
            offload_checkpoints=self.streamed,
            loss_chunks=self.loss_chunks,
        )

    def figures(self) -> Figures:
        return {"layers": self.layers, "length": self.length, "mode": self.mode, "chunk": self.chunk}


def flags(plan: Plan, sizes: Sizes, device: str) -> list[str]:
    """Flags of the training program, whose vocabulary has one token more, for the end of a document."""
    model = sizes.model
    words = (
        f"--num-layers {plan.layers} --hidden-size {model.hidden} --ffn-hidden-size {model.ffn} "
        f"--num-attention-heads {model.heads} --group-query-attention --num-query-groups {model.kv_heads} "
        f"--kv-channels {model.head_dim} --vocab-size {model.vocab - 1} --make-vocab-size-divisible-by 1 "
        f"--rotary-base 500000 --seq-length {plan.length} --max-position-embeddings {plan.length} "
        "--micro-batch-size 1 --global-batch-size 1 --train-iters 1000 --lr 1e-4 --mock-data "
        f"--tokenizer-type NullTokenizer --num-workers 0 --eval-iters 0 --loss-chunks {plan.loss_chunks} "
        f"--device {device} --no-progress"
    ).split()
    words += ["--bf16"] * (device == "cuda")
    if plan.chunk:
        words += ["--fpdt-chunk-size", str(plan.chunk)]
    return words + MODES[plan.mode]


class Program:
    """The program in a new process, as a context manager; it is ready after its first answer.

    Args:
        start: how the process starts; CUDA needs ``spawn``.
    """

    def __init__(self, words: list[str], log: Path, start: str = "spawn") -> None:
        context = mp.get_context(start)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, words, str(log)), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, what: str, seconds: float) -> Figures:
        """The answer to ``step``, ``meter`` or ``profile``.

        Raises:
            Failed: the program has ended, or has not answered after ``seconds``.
        """
        try:
            self.pipe.send(what)
            if not self.pipe.poll(max(seconds, 0.0)):
                raise Failed(f"no answer to {what} after {seconds:.0f} s")
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(10)
            killed = " (killed: out of host memory?)" if self.process.exitcode == -9 else ""
            raise Failed(f"the program ended with code {self.process.exitcode}{killed}") from None
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            with suppress(OSError):  # it has ended
                self.pipe.send(None)
            self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def serve(pipe: Connection, words: list[str], log: str) -> None:
    """Main function of the process; its output goes to ``log``."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(target, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    print("flags:", *words)

    def requests() -> Iterator[str]:
        while (request := pipe.recv()) is not None:
            yield request

    try:
        fpdt_worker.serve(words, requests(), pipe.send)
    except BaseException as error:
        traceback.print_exc()
        pipe.send({"failed": reason(error)})
