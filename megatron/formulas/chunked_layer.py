# SPDX-License-Identifier: Apache-2.0
"""A layer under FPDT: what it keeps, and the most it holds while its chunks go through."""

from __future__ import annotations

from functools import lru_cache

from megatron.decisions.chunks import IN_FLIGHT, goes_by_keys
from megatron.formulas.chunks import chunks_of
from megatron.formulas.layer import Layer, ffn_run, matrices, ring_blocks, sums_of_its_own
from megatron.formulas.parameters import stage_parameters
from megatron.formulas.sizes import WIDE, heads_of, sizes_of
from megatron.formulas.strategy import Strategy, Workload


@lru_cache(maxsize=8192)
def chunked_layer(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> Layer:
    """As :func:`~megatron.formulas.layer.whole_layer`, for ChunkedLayer."""
    shape, chunks = workload.shape, chunks_of(workload, strategy)
    sizes = sizes_of(workload, strategy, itemsize)
    heads = heads_of(shape.heads, shape.kv_heads, strategy.tensor, strategy.ulysses)
    offload, recompute, count = strategy.fpdt_offload, strategy.recompute == "full", chunks.attention
    part = chunks.rows / chunks.all_rows
    q, kv, lse = (int(part * size) for size in (sizes.local_q, sizes.local_kv, sizes.lse))
    hidden, outside = int(part * sizes.hidden), int(part * sizes.q)
    on_ring, wide = strategy.ring > 1, WIDE // itemsize
    by_keys = on_ring or (offload and goes_by_keys(heads.local_q, heads.local_kv, itemsize))
    coming = 2 if count > 1 else 1  # chunks on the device: the one in use, and the next
    load = 1 if offload else 0  # without a host they are where they are kept

    run = ffn_run(workload, strategy, itemsize, fused)
    first, second = matrices(workload, strategy, itemsize)
    summed = WIDE * sums_of_its_own(strategy)
    numel = stage_parameters(shape, strategy.tensor, 1, 0).layer_numel
    mlp, every = (first + second) // itemsize * summed, numel * summed

    # A GPU's copies take their time: what went to the host last is on the device still.
    leaving = IN_FLIGHT if fused and offload and count > 1 else 0
    # The FFN of a chunk: its input and its gradient beside one run.
    if by_keys:  # all chunks go through it first; dout and the residual of the chunk before are still there
        ffn = (load * coming + leaving) * outside + (outside + hidden if count > 1 else 0)
        weights = mlp + (every - mlp) // 2
        pair = load * coming * ((3 + wide) * q + lse) + (q + hidden)
        pair += load * coming * kv + 2 * wide * kv + q + kv
        pair += (ring_blocks(kv, strategy.ring, itemsize) if on_ring else 0) + leaving * wide * q
    else:
        ffn = load * (coming * (2 * q + lse) + (kv * (1 + wide) if count > 1 else 0))
        weights = every if count > 1 else mlp
        ffn += leaving * wide * kv
        pair = load * coming * (2 * q + lse + (1 + wide) * kv) + q + hidden + wide * q + q + 2 * wide * kv
    states = 2 * sizes.hidden  # the gradients of output and input; streamed, the chunks that come, and those that leave
    if strategy.stream_hidden:
        states = 2 * coming * hidden + leaving * hidden
    backward = states + max(ffn + 2 * hidden + run + weights, pair + every, numel * itemsize)
    saved = 2 * sizes.local_q + sizes.local_kv + sizes.lse
    if not offload:
        waiting = wide * sizes.local_kv * (count - 1) // count
        if by_keys:
            backward += saved + sizes.local_q * (1 + wide)
        else:
            backward += saved * max(count - 1, 1) // count + waiting
    kept = (0 if strategy.stream_hidden else sizes.hidden) + (0 if recompute or offload else saved)
    # A forward pass that saves nothing has the keys and values of all chunks here.
    keys = sizes.local_kv if (recompute or not offload) and not strategy.stream_hidden else coming * kv
    projected = int(part * (sizes.qkv + 3 * sizes.q + sizes.kv // 2)) + kv
    made = (coming + leaving) * hidden if strategy.stream_hidden else sizes.hidden
    forward = made + keys + 2 * hidden + max(run - first - second, projected, 4 * q * wide)
    return Layer(kept, forward, backward)
