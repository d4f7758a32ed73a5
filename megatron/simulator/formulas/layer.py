# SPDX-License-Identifier: Apache-2.0
"""What a transformer layer keeps for its backward pass, and the most it holds while it runs.

Read off the program with a counter of storages (``--profile-memory``), operation by operation. The moments that can be
the fullest of a layer are few: the backward pass of the activation function, the second matrix' gradient, and attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron.simulator.formulas.parameters import stage_parameters
from megatron.simulator.formulas.sizes import WIDE, chunks_of, heads_of, sizes_of
from megatron.simulator.strategy import Strategy, Workload


@dataclass(frozen=True)
class Layer:
    """Bytes of one layer, over what was there before it, its input among it.

    Attributes:
        kept: after its forward pass, output included.
        forward: at most, in a forward pass that keeps nothing.
        backward: at most, from the gradient of its output to that of its input.
    """

    kept: int
    forward: int
    backward: int


@lru_cache(maxsize=8192)
def whole_layer(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> Layer:
    """A layer of megatron-core, with our attention; its FFN whole or in runs (--ffn-chunks)."""
    shape, sizes = workload.shape, sizes_of(workload, strategy, itemsize)
    layer = stage_parameters(shape, strategy.tensor, 1, 0).layer
    second, first = layer[-1 - int(shape.bias)], layer[-2 - 2 * int(shape.bias)]
    norm = norm_kept(workload, strategy, itemsize, fused)
    selective = strategy.recompute == "selective"
    copied = shape.heads > shape.kv_heads  # queries of a group lie between keys: core copies them out
    rotates = not shape.positions
    spread = strategy.ulysses > 1

    # Keys, values and queries as the projection gave them; rotated; or after the all-to-all.
    attention = norm
    if selective:
        attention += sizes.qkv + (sizes.q if copied else 0) + sizes.q
    else:
        if spread:
            attention += sizes.local_q + sizes.local_kv + sizes.q
        elif rotates:
            attention += sizes.qkv + sizes.q + sizes.kv // 2
        else:
            attention += sizes.qkv + (sizes.q if copied else 0)
        attention += sizes.local_q + sizes.lse
        if strategy.micro_batch > 1 and not spread:
            attention += sizes.q  # [b, s, ..] memory becomes [s, b, ..]
    middle = sizes.hidden
    working = attention_working(workload, strategy, itemsize)
    if selective:  # runs again
        working += 2 * sizes.q + sizes.kv // 2 + sizes.lse + (sizes.local_q + sizes.local_kv if spread else 0)

    chunks = chunks_of(workload, strategy)
    share = 1.0
    if chunks.ffn and not strategy.fpdt_chunk:
        share = chunks.ffn_rows / (sizes.hidden / (shape.hidden * itemsize) / strategy.micro_batch)
    inside, peak, gathered = mlp_bytes(workload, strategy, itemsize, fused)
    ffn = norm + inside
    second_grad, first_grad = (rows * columns * itemsize for rows, columns in (second, first))
    before = attention + middle
    if share == 1.0:
        kept = before + ffn + sizes.hidden
        backward = kept + max(peak, sizes.ffn + gathered + second_grad)
    else:
        kept = before + sizes.hidden
        sums = WIDE * (second[0] * second[1] + first[0] * first[1])
        run = int(share * (ffn + 2 * sizes.hidden + max(peak, sizes.ffn + gathered)))
        backward = kept + sizes.hidden + run + sums + second_grad
    # Attention comes last: dout and the gradient of the residual, beside all that attention keeps.
    backward = max(backward, attention + sizes.hidden + working)
    forward = max(
        middle + int(share * (ffn + sizes.hidden)) + sizes.hidden,
        norm + sizes.qkv + 2 * sizes.q + sizes.kv // 2 + sizes.q + 2 * (sizes.local_q + sizes.local_kv) * spread,
    )
    return Layer(kept, forward, backward)


def norm_kept(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
    """What a norm adds to its input: its output, and statistics.

    RMSNorm on a CPU is made of single operations, which keep an intermediate, in bf16 three in fp32.
    """
    sizes = sizes_of(workload, strategy, itemsize)
    if workload.shape.layer_norm:
        return sizes.hidden + 2 * sizes.statistics
    copies = 1 if fused else 2 if itemsize == WIDE else 5
    return copies * sizes.hidden + sizes.statistics


def mlp_bytes(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> tuple[int, int, int]:
    """(kept inside the MLP, most above that in backward, gradient gathered over TP)."""
    sizes, shape = sizes_of(workload, strategy, itemsize), workload.shape
    gathered = sizes.whole if strategy.tensor > 1 and strategy.sequence_parallel else 0
    if shape.gated:
        return (3 if fused else 5) * sizes.ffn, 2 * sizes.ffn, gathered
    return 2 * sizes.ffn, sizes.ffn, gathered


def attention_working(workload: Workload, strategy: Strategy, itemsize: int) -> int:
    """Bytes of attention's backward pass beside what attention keeps: dout, dq, dk, dv; on a ring, blocks under way."""
    sizes, ring = sizes_of(workload, strategy, itemsize), strategy.ring
    if ring == 1:
        working = sizes.local_q + sizes.local_q + sizes.local_kv + sizes.lse
    else:
        wide = WIDE // itemsize
        blocks = 3 if ring > 2 else 2  # held, arriving, and a copy of our own
        grads = 4 if ring > 2 else 3  # ours, this block's, arriving, leaving
        tile = sizes.local_q // 2 + sizes.local_kv  # dq, dk, dv of a tile
        working = sizes.local_q * (1 + wide) + blocks * sizes.local_kv + grads * wide * sizes.local_kv + tile
    heads = heads_of(workload.shape.heads, workload.shape.kv_heads, strategy.tensor, strategy.ulysses)
    if strategy.ulysses > 1:
        sent = sizes.local_q + sizes.local_kv * heads.sent_kv // heads.local_kv
        working = max(working, 2 * sent + sizes.q + sizes.kv)
    return working
