#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels of a training command before it starts, without a GPU.

    python tools/compile_kernels.py --gpus 8 -- --model llama3-8b --seq-length 131072 --ring-parallel-size 8 --bf16 \\
        --attention-kernel triton --gpu H100-80G

The flags are those of pretrain_llama.py. One step with one layer of each kind runs with fake tensors, as in a dry run;
the kernels that it would launch are compiled in parallel into Triton's cache (TRITON_CACHE_DIR, else ~/.triton/cache).
Triton finds them there if its version, the GPU's kind, and the arguments that it compiles for are the same. Packed
documents have ranges of other lengths, and may need other kernels. cuDNN's plans are made on the GPU.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from megatron.system.processes import cores, end_with_parent
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from tools.option_parser import OptionParser, in_one_line

if TYPE_CHECKING:  # it imports torch, for which --help does not wait
    from megatron.simulator.dry_run.recording.triton_launches import Wanted


@in_one_line(Refusal)
def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(__doc__)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs of the run (default 1)")
    parser.add_argument("--processes", type=int, default=cores(), metavar="N", help="default: one a core")
    parser.add_argument(
        "flags", nargs="+", metavar="-- FLAG", help="flags of pretrain_llama.py; --gpu is H100-80G by default"
    )
    options = parser.parse_args(argv)
    os.environ.pop("TRITON_INTERPRET", None)
    begin = time.monotonic()
    kernels, capability = wanted(options.flags, options.gpus)
    failed = 0
    if kernels:
        with ProcessPoolExecutor(min(options.processes, len(kernels)), get_context("spawn"), end_with_parent) as pool:
            for one, result in zip(kernels, pool.map(partial(compile_one, capability), kernels)):
                failed += result is not None
                print(f"{one.name}: {result or 'compiled'}")
    took = time.monotonic() - begin
    print(f"{len(kernels) - failed} of {len(kernels)} kernels for compute capability {capability / 10} in {took:.0f} s")
    return int(failed > 0)


def compile_one(capability: int, one: Wanted) -> str | None:
    """None, or why it could not be compiled."""
    from megatron.context_parallel.attention.kernels.triton_kernels.triton_ahead import compiled

    try:
        compiled(getattr(import_module(one.module), one.name), one.grid, one.given, one.named, capability)
    except Exception as error:  # of the compiler: of many kinds
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def wanted(flags: Sequence[str], gpus: int) -> tuple[list[Wanted], int]:
    """The kernels of a step on the first and the last rank, each once, and the compute capability. Raises Refusal."""
    from megatron.simulator.dry_run.dry_run import layer_counts, with_layers
    from megatron.simulator.dry_run.one_rank import run_rank, vocabulary_of
    from megatron.simulator.dry_run.recording.triton_launches import recorded
    from megatron.simulator.machines.machine_file import load
    from megatron.training.settings.models import LLAMA_DEFAULTS

    config = parse([*flags, "--dry-run", "--world-size", str(gpus)], LLAMA_DEFAULTS, gpus)
    machine = load(config.simulation.gpu or "H100-80G")
    if not machine.is_gpu:
        raise Refusal(f"--gpu {config.simulation.gpu} is no GPU")
    few = min((count for count in layer_counts(config) if count), default=None)
    config = config if few is None else with_layers(config, few)
    found: dict[Any, Wanted] = {}
    for rank in sorted({0, gpus - 1}):
        hooks = recorded(found, machine.capability)
        run_rank(config, gpus, rank, vocabulary_of(config)[0], machine=machine, also=hooks)
    return list(found.values()), 10 * machine.capability[0] + machine.capability[1]


if __name__ == "__main__":
    sys.exit(main())
