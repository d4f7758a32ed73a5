# SPDX-License-Identifier: Apache-2.0
"""The process of a stage. It is a module of its own, because a spawned process does not find functions of __main__."""

from __future__ import annotations

import importlib
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.stage import GPU, TINY, Stage, reason

# By name: module, contents, and the share of the time that a run is given, over those of the stages that follow.
STAGES = {
    "tests": ("run_tests", "tests/gpu, by pytest or without it", 2),
    "rates": ("rates", "products, copies, the shortest kernel; machine.json for the simulator", 1),
    "attention": ("attention", "all usable kernels from 8K to 512K against the GEMM rate; masks against causal", 2),
    "kernels": ("kernels", "variants of our attention kernels: block sizes, one pass or two, short ranges", 2),
    "linear": ("linear", "linear-attention and SSM layers: fla-core's kernels and this program's, 8K to 128K", 1),
    "step": ("step", "a training step of Llama-3-8B's shape: MFU, time by kind of kernel", 2),
    "first": ("first", "the first step of a process with empty and filled caches; cuDNN's plans", 1),
    "fpdt": ("fpdt", "FPDT against full recompute by chunk, overlap of copies", 2),
    "longest": ("longest", "the longest context on this GPU within its host memory", 1),
    "simulator": ("predict", "the simulator's predictions for all of these", 0.5),
}


def inside(name: str, folder: Path, device: str, tiny: bool, minutes: float, keep_failed: bool) -> None:
    """Main function of a stage's process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if name == "kernels" and device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    stage = Stage(name, folder, about(where, tiny), minutes, keep_failed)
    stage.write()
    sizes = TINY if tiny else GPU
    try:
        stage.predict = importlib.import_module("benchmarks.gpu.predict").predictor(stage, sizes)
        importlib.import_module(f"benchmarks.gpu.{STAGES[name][0]}").run(stage, sizes, where)
    except Exception as error:
        stage.report["failed"] = reason(error)
        stage.write()
        raise
    stage.finish()


def about(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Device and software that the figures depend on."""
    from megatron.platform.cpu import processor_name

    cuda = device.type == "cuda"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if cuda else processor_name(),
        "tiny": tiny,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "host_memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if cuda:
        result |= {
            "capability": list(torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return result
