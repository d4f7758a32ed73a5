# SPDX-License-Identifier: Apache-2.0
"""Host memory that a run will need for what it offloads, told before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from megatron.context_parallel.fpdt import goes_by_keys
from megatron.context_parallel.ulysses import head_plan
from megatron.training.config import Config
from megatron.training.refusal import Refusal
from megatron.training.validate_chunks import attention_chunks

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostBytes:
    """Bytes of one rank at the peak of a step.

    Attributes:
        chunks: q, k, v, out and lse of FPDT's chunks, of all layers that keep them at once.
        sums: gradients of one layer on their way.
        hidden: layer inputs, streamed hidden states and their gradients.
    """

    chunks: int
    sums: int
    hidden: int

    @property
    def total(self) -> int:
        return self.chunks + self.sums + self.hidden


def host_bytes(config: Config) -> HostBytes:
    """What the first pipeline stage offloads (it has the most micro-batches in flight); ``config`` is completed."""
    model, parallel, chunks = config.model, config.parallel, config.chunks
    item = 2 if config.optimizer.bf16 or config.optimizer.fp16 else 4
    batch, tensor = config.data.micro_batch_size, parallel.tensor_model_parallel_size
    ring_tokens = config.data.seq_length // parallel.ring_parallel_size * batch
    tokens = ring_tokens // parallel.ulysses_parallel_size // (tensor if parallel.sequence_parallel else 1)
    keeping, saved, passing = _layers(config)
    flying = parallel.pipeline_model_parallel_size + (
        parallel.pipeline_model_parallel_size - 1 if parallel.num_virtual_stages_per_pipeline_rank else 0
    )
    flying = min(flying, max(1, config.data.global_batch_size // batch))

    chunk_bytes = sums = 0
    if chunks.fpdt and chunks.fpdt_offload:
        heads, kv_heads = _heads(config)
        query, key = ring_tokens * heads * model.kv_channels, 2 * ring_tokens * kv_heads * model.kv_channels
        one = (2 * query + key) * item + ring_tokens * heads * 4
        recomputed = config.attention.recompute_granularity == "full"
        chunk_bytes = one * keeping * (1 if recomputed else flying)
        if chunk_bytes and recomputed and config.attention.recompute_method == "block":
            chunk_bytes = one * ((keeping - 1) * flying + 1)
        on_ring = parallel.ring_parallel_size > 1
        if on_ring or goes_by_keys(heads, kv_heads, item):  # dout, dq, and dk and dv until a chunk's dq is done
            sums = query * (item + 4) + 4 * key // (1 if on_ring else attention_chunks(config))
        else:
            sums = 4 * key
    hidden = tokens * model.hidden_size * item
    states = 0
    if chunks.fpdt_stream_hidden:
        states = (saved + passing) * hidden
    elif chunks.offload_checkpoints:
        states = saved * hidden * flying
    return HostBytes(chunk_bytes, sums, states)


def _layers(config: Config) -> tuple[int, int, int]:
    """Layers that keep chunks at once; hidden states saved for backward; streamed ones that come and go besides."""
    attention = config.attention
    layers = config.model.num_layers // config.parallel.pipeline_model_parallel_size
    passing = 3  # gradients, and the next state
    if attention.recompute_granularity != "full":
        return layers, layers, passing
    unit = attention.recompute_num_layers
    if attention.recompute_method == "uniform":
        return unit, ceil(layers / unit), passing + (unit if unit > 1 else 0)
    return max(layers - unit, 1), layers, passing


def _heads(config: Config) -> tuple[int, int]:
    """Query and key heads of a rank after the all-to-all."""
    model, parallel = config.model, config.parallel
    tensor, ulysses = parallel.tensor_model_parallel_size, parallel.ulysses_parallel_size
    heads, kv_heads = model.num_attention_heads // tensor, max(model.num_query_groups // tensor, 1)
    plan = head_plan(heads, kv_heads, ulysses)
    return plan.q_heads, max(len(index) for index in plan.kv_index)


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
