# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels in parallel before they are timed: Triton itself compiles one after another in a process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from benchmarks.gpu.stage import Figures, Stage, reason
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Launch
from megatron.system.processes import end_with_parent

SECONDS = 8.0  # about what one core takes for a job; the processes start in the same time

Job = Callable[[int], list[Launch]]
"""Makes launches of tensors without memory for a GPU of a capability (80, 90, ..); it is sent to another process."""


def compile_ahead(stage: Stage, jobs: Sequence[Job], device: torch.device) -> None:
    """Compile all launches into Triton's cache on disk, from which this stage's process then loads them."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    cores = os.cpu_count() or 1
    stage.say(f"compiles kernels for about {SECONDS * (1 + -(-len(jobs) // cores)):.0f} s")
    stage.report["compiled"] = compiled(jobs, 10 * major + minor, cores)


def compiled(jobs: Sequence[Job], capability: int, processes: int) -> Figures:
    """Compile in so many processes; what was done, and why some jobs failed."""
    begin = time.monotonic()
    with ProcessPoolExecutor(processes, get_context("spawn"), end_with_parent) as pool:
        found = list(pool.map(partial(_compile, capability), jobs))
    numbers = [each for each in found if isinstance(each, int)]
    wrong = [each for each in found if isinstance(each, str)]
    took = time.monotonic() - begin
    return {"kernels": sum(numbers), "cores": processes, "seconds": took, "not_compiled": wrong}


def _compile(capability: int, job: Job) -> int | str:
    """The number of kernels, or why one could not be compiled."""
    from benchmarks.triton_compile import compile_launch

    try:
        return len([compile_launch(launch, capability) for launch in job(capability)])
    except Exception as error:  # the stage finds the same error in the case that needs the kernel
        return reason(error)
