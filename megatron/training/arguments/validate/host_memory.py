# SPDX-License-Identifier: Apache-2.0
"""Checks before the first step that the tensors which a run offloads fit in host memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megatron.formulas.host_bytes import HostBytes, host_memory
from megatron.training.arguments.stages import strategy_of, workload_of
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config

CGROUP = Path("/sys/fs/cgroup")


def host_bytes(config: Config) -> HostBytes:
    """Bytes that the first pipeline stage offloads, by the simulator's formula. ``config`` must be complete.

    The number of data-parallel ranks is not used, so all micro-batches of a step are counted for one rank.
    """
    workload = workload_of(config, vocab_size=1)  # the vocabulary is never offloaded
    return host_memory(workload, strategy_of(config), 2 if config.optimizer.bf16 or config.optimizer.fp16 else 4)


def check_host_memory(config: Config, available: Callable[[], int] | None = None) -> None:
    """Compare the host memory that the ranks of this machine need with its free memory.

    Raises:
        Refusal: this machine has too little memory; the message has the numbers and flags that need less.
    """
    ranks, free = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), (available or available_bytes)()
    need = host_bytes(config)
    if need.total * ranks <= free:
        return
    flags = []
    if need.chunks > need.hidden and config.attention.recompute_granularity != "full":
        flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif need.chunks > need.hidden:
        flags.append("--no-fpdt-offload" if not config.chunks.fpdt_stream_hidden else "a lower --recompute-num-layers")
    else:
        flags.append("a higher --recompute-num-layers (with --recompute-granularity full --recompute-method uniform)")
    flags += ["a shorter --seq-length", "or more ranks per sequence"]
    flag = "--fpdt-stream-hidden" if config.chunks.fpdt_stream_hidden else "--offload-checkpoints"
    flag = flag if need.hidden else "--fpdt-offload"
    raise Refusal(
        f"{flag} needs {_gib(need.total)} of host memory per rank ({_gib(need.chunks + need.sums)} for chunks, "
        f"{_gib(need.hidden)} for hidden states), {_gib(need.total * ranks)} for the {ranks} ranks of this machine, "
        f"but {_gib(free)} are free: use {', '.join(flags)}"
    )


def available_bytes() -> int:
    """Bytes that processes of this machine, or of this container, may still allocate."""
    import psutil

    free = psutil.virtual_memory().available
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat.get("inactive_file", 0)))  # file caches can be freed
    except (OSError, ValueError):  # not in a container, or without a limit ("max")
        pass
    return free


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
