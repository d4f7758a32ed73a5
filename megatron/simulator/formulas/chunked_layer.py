# SPDX-License-Identifier: Apache-2.0
"""A layer under FPDT: what it keeps, and the most it holds while its chunks go through."""

from __future__ import annotations

from functools import lru_cache

from megatron.context_parallel.chunk_pass import goes_by_keys
from megatron.simulator.formulas.layer import Layer, mlp_bytes, norm_kept
from megatron.simulator.formulas.parameters import stage_parameters
from megatron.simulator.formulas.sizes import WIDE, chunks_of, heads_of, sizes_of
from megatron.simulator.strategy import Strategy, Workload


@lru_cache(maxsize=8192)
def chunked_layer(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> Layer:
    """As :func:`~megatron.simulator.formulas.layer.whole_layer`, for ChunkedLayer."""
    shape, chunks = workload.shape, chunks_of(workload, strategy)
    sizes = sizes_of(workload, strategy, itemsize)
    heads = heads_of(shape.heads, shape.kv_heads, strategy.tensor, strategy.ulysses)
    offload, recompute = strategy.fpdt_offload, strategy.recompute == "full"
    rows = sizes.hidden // (shape.hidden * itemsize) // strategy.micro_batch
    part = chunks.rows / rows
    piece = chunks.ffn_rows / rows
    q, kv, lse, hidden = (int(part * size) for size in (sizes.local_q, sizes.local_kv, sizes.lse, sizes.hidden))
    on_ring = strategy.ring > 1
    by_keys = on_ring or (offload and goes_by_keys(heads.local_q, heads.local_kv, itemsize))
    wide = WIDE // itemsize

    inside, peak, gathered = mlp_bytes(workload, strategy, itemsize, fused)
    norm = norm_kept(workload, strategy, itemsize, fused)
    run = int(piece * (norm + inside + sizes.hidden + max(peak, sizes.ffn + gathered) + sizes.hidden))
    layer = stage_parameters(shape, strategy.tensor, 1, 0).layer
    sums = WIDE * sum(a * b for a, b in layer)
    second = layer[-1 - int(shape.bias)]
    second_grad = second[0] * second[1] * itemsize

    saved = 0 if offload else sizes.local_q * 2 + sizes.local_kv + sizes.lse
    kept = sizes.hidden + (0 if recompute else saved)
    # Backward: the layer's gradient, saved chunks coming through a double buffer, one run of the FFN.
    coming = 0 if not offload else 2 * (q if by_keys else 2 * q + lse)
    ffn = coming + 2 * hidden + run + sums + second_grad
    pair = q * (1 + 1 + 1 + 2 * wide) + lse + kv * (1 + 2 * wide + 1)
    if by_keys:
        pair += q * (3 + wide) + lse
        blocks = (2 if strategy.ring == 2 else 3) + (2 if strategy.ring == 2 else 4) * wide if on_ring else 0
        pair += blocks * kv
    else:
        pair += kv * (1 + wide)
    backward = 2 * sizes.hidden + max(ffn, pair + sums)
    if not offload:
        backward += saved + wide * sizes.local_kv + (sizes.local_q * (1 + wide) if by_keys else 0)
    # Forward: without saving, keys and values of all chunks stay here.
    keys = sizes.local_kv if recompute or not offload else 2 * kv
    projected = int(part * (sizes.qkv + sizes.q + sizes.kv // 2 + sizes.q)) + kv
    forward = sizes.hidden + keys + max(run, projected, 4 * q * wide) + 2 * hidden
    return Layer(kept, forward, backward)
