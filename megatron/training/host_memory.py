# SPDX-License-Identifier: Apache-2.0
"""Host memory that a run will need for what it offloads, told before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megatron.formulas.host_bytes import HostBytes, host_memory
from megatron.training.arguments.config import Config
from megatron.training.arguments.stages import strategy_of, workload_of
from megatron.training.refusal import Refusal

CGROUP = Path("/sys/fs/cgroup")


def host_bytes(config: Config) -> HostBytes:
    """What the first pipeline stage offloads, by the simulator's formula; ``config`` is completed.

    Data parallelism is not known here: as if all micro-batches of a step were this rank's.
    """
    workload = workload_of(config, vocab_size=1)  # the vocabulary is never offloaded
    return host_memory(
        workload,
        strategy_of(config),
        2 if config.optimizer.bf16 or config.optimizer.fp16 else 4,
        streamed=config.chunks.fpdt_stream_hidden,
        block=config.attention.recompute_method == "block",
    )


def check_host_memory(config: Config, available: Callable[[], int] | None = None) -> None:
    """Refuse what this machine's memory cannot hold.

    Raises:
        Refusal: with the numbers, and the knobs to turn.
    """
    ranks, room = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), (available or available_bytes)()
    need = host_bytes(config)
    if need.total * ranks <= room:
        return
    knobs = []
    if need.chunks > need.hidden and config.attention.recompute_granularity != "full":
        knobs.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif need.chunks > need.hidden:
        knobs.append("--no-fpdt-offload" if not config.chunks.fpdt_stream_hidden else "a lower --recompute-num-layers")
    else:
        knobs.append("a higher --recompute-num-layers (with --recompute-granularity full --recompute-method uniform)")
    knobs += ["a shorter --seq-length", "or more ranks for a sequence"]
    flag = "--fpdt-stream-hidden" if config.chunks.fpdt_stream_hidden else "--offload-checkpoints"
    flag = flag if need.hidden else "--fpdt-offload"
    raise Refusal(
        f"{flag} needs {_gib(need.total)} of host memory a rank ({_gib(need.chunks + need.sums)} for chunks, "
        f"{_gib(need.hidden)} for hidden states), {_gib(need.total * ranks)} for the {ranks} of this machine, and "
        f"{_gib(room)} are free: use {', '.join(knobs)}"
    )


def available_bytes() -> int:
    """Memory that processes of this machine, or of this container, may still take."""
    import psutil

    free = psutil.virtual_memory().available
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat.get("inactive_file", 0)))  # file caches give way
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        pass
    return free


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
