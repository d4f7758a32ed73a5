# SPDX-License-Identifier: Apache-2.0
"""The first step of a new process: with empty and with filled caches on disk, and with kernels that need no plan.

torch.compile and Triton keep compiled kernels on disk. cuDNN makes its plans in every process, which FlashAttention-2
("flash") does not need. The first step minus a later one is what a run pays once.
"""

from __future__ import annotations

import os
import time
import uuid
from functools import partial
from unittest import mock

import torch

from benchmarks.gpu.program import START, Plan, Program, flags
from benchmarks.gpu.stage import Case, Figures, Sizes, Stage
from benchmarks.gpu.step import expected, log_of

LAYERS = 2  # all layers have the same kernels


def run(stage: Stage, sizes: Sizes, device: torch.device) -> None:
    """The cases share their caches: "new kernels" are those that no case before it has compiled."""
    plan = Plan(LAYERS, sizes.steps[0][0], "none")
    cases = [("auto", "empty caches"), ("auto", "filled caches")]
    if device.type == "cuda":
        cases += [("flash", "filled caches"), ("triton", "new kernels"), ("triton", "filled caches")]
    work = partial(measured, stage, sizes, device.type, plan)
    stage.run([Case(f"{k}, {caches}", partial(work, k, caches), expected(plan, sizes, 4)) for k, caches in cases])


def measured(stage: Stage, sizes: Sizes, device: str, plan: Plan, kernel: str, caches: str) -> Figures:
    folder = (stage.folder / "caches").resolve()
    if caches.startswith("empty") and folder.exists():
        folder.rename(f"{folder}.{uuid.uuid4().hex}")
    places = {name: str(folder / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    words, limit, begin = [*flags(plan, sizes, device), "--attention-kernel", kernel], START + stage.left(), time.time()
    with mock.patch.dict(os.environ, places), Program(words, log_of(stage)) as program:
        first = program.ask("step", limit)["seconds"]
        before = time.time() - begin - first
        later = min(program.ask("step", limit)["seconds"] for _ in range(2))
    return {"start_seconds": before, "first_seconds": first, "later_seconds": later}
