# SPDX-License-Identifier: Apache-2.0
"""The clock of ``--measure``: runs the training of a row on the GPUs of this machine.

Each row starts the training program for a few steps on random tokens, with the flags that the planner would print for
its strategy. A row whose attention is not causal in its paper runs with ``--attention-mask full``.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from examples.reproduce.simulate import shape_of
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.planner.plan_report import environment, launcher, training_flags
from megatron.training.refusal import Refusal

ROOT = Path(__file__).resolve().parents[2]
STEPS, NOT_COUNTED = 4, 2  # kernels are chosen and memory is reserved in the first ones
LIMIT = 3600.0  # seconds, time limit of a row
SIZES = {"layers": "num_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
PEAK = """
import torch
from megatron.training.settings.config import Config
from megatron.training.report.mfu import peak_flops
print(peak_flops(Config(), torch.device("cuda", 0)))
"""


class Unmeasured(Exception):
    """A run gave no time; the message is the reason, in few words."""


@dataclass(frozen=True)
class Measured:
    """Step times of runs on ``gpus`` GPUs of this machine; rows that need more are not run.

    Attributes:
        missing: a requirement of the rows that is not available; then no row is run.
    """

    gpus: int
    missing: str = ""
    mark: Literal["measured"] = "measured"

    @cached_property
    def peak(self) -> float:
        """FLOP/s of the data sheet, or else the measured GEMM rate; a separate process finds it, because this one must
        not use GPU memory."""
        done = subprocess.run(
            [sys.executable, "-c", PEAK], env=_environment(), stdout=subprocess.PIPE, text=True, check=True
        )
        return float(done.stdout)

    def seconds(
        self, model: str, workload: Workload, strategy: Strategy, *, inputs_in_host: bool = False
    ) -> float | str:
        if self.missing:
            return f"{self.missing} is not available"
        if strategy.ranks > self.gpus:
            return f"needs {strategy.ranks} GPUs"
        strategy = replace(strategy, offload_checkpoints=strategy.offload_checkpoints or inputs_in_host)
        try:
            return step_seconds(model, workload, strategy)
        except Unmeasured as reason:
            return str(reason)

    def slowed(self, what: str, **shares: float) -> Measured:
        return replace(self, missing=what)


def gpus_here() -> Measured:
    """The clock for all GPUs of this machine; raises :class:`Refusal` if there are none."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        raise Refusal("--measure needs GPUs, but there are none: leave it out to simulate, or use a machine with GPUs")
    return Measured(gpus)


def step_seconds(
    model: str, workload: Workload, strategy: Strategy, *, device: str = "cuda", limit: float = LIMIT
) -> float:
    """Seconds of a step of the training program, on as many processes as the strategy has ranks: the median of the
    steps after the first two.

    Raises:
        Unmeasured: out of memory, refused, failed, or not done within ``limit`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "steps.jsonl")
        flags = [*run_flags(model, workload, strategy), "--device", device, "--log-jsonl", str(log)]
        words = launcher(strategy.ranks, strategy.ranks)[1:]
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
        code, output = launch([*start, *flags], _environment() | dict(_pairs(strategy)), limit)
        lines = log.read_text().splitlines() if log.exists() else []
    if code or len(lines) < STEPS:
        raise Unmeasured(reason(code, output))
    return statistics.median(json.loads(line)["iteration_ms"] for line in lines[NOT_COUNTED:]) / 1e3


def run_flags(model: str, workload: Workload, strategy: Strategy) -> list[str]:
    """The program and its flags, without device and log.

    Raises:
        ValueError: the workload's shape differs from the named model's in more than layers, width and heads.
    """
    named, shape = shape_of(model), workload.shape
    other = {flag: getattr(shape, name) for name, flag in SIZES.items() if getattr(shape, name) != getattr(named, name)}
    if _sizes(shape_of(model, **other)) != _sizes(shape):
        raise ValueError(f"{model} with {other} is not the shape that the row is about: {shape}")
    entry = "pretrain_llama.py" if model.startswith("llama") else "pretrain_gpt.py"
    flags = [str(ROOT / entry), "--model", model]
    for flag, size in other.items():
        flags += ["--" + flag.replace("_", "-"), str(size)]
    # One token more than --vocab-size: a run without a tokenizer adds the end of a document.
    flags += ["--vocab-size", str(shape.vocab - 1), *training_flags(workload, strategy)]
    flags += [] if workload.causal else ["--attention-mask", "full"]
    return [*flags, *f"--train-iters {STEPS} --eval-iters 0 --lr 1e-4 --mock-data".split()]


def launch(command: list[str], environment: dict[str, str], limit: float) -> tuple[int, str]:
    """Exit code and output.

    Raises:
        Unmeasured: it took longer than ``limit`` seconds.
    """
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise Unmeasured(f"not done in {limit:.0f} s") from None
    finally:
        if process.poll() is None:
            process.terminate()  # the launcher ends its processes, within half a minute
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return process.returncode, output


def reason(code: int, output: str) -> str:
    """Why a run gave no time, from what it printed: out of memory, the program's own line, or its last exception."""
    if re.search(r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory", output):
        return "OOM"
    if "SIGKILL" in output:
        return "killed, as if host memory had run out"
    message = re.search(r"^error(?: on rank \d+)?: (.*)$", output, re.MULTILINE)
    if message:
        return message[1]
    raised = re.findall(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b: .*)$", output, re.MULTILINE)
    return raised[0] if raised else f"failed with code {code}"


def _sizes(shape: Shape) -> Shape:
    return replace(shape, positions=0)  # a run has one position per token


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return kept | {"PYTHONPATH": path}


def _pairs(strategy: Strategy) -> list[list[str]]:
    return [pair.split("=", 1) for pair in environment(strategy)]
