# SPDX-License-Identifier: Apache-2.0
"""Memory of a transformer layer, of megatron-core or in FPDT's chunks: what it keeps for backward, and its peaks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron.decisions.division import IN_FLIGHT, goes_by_keys
from megatron.formulas.host_bytes import replaces_out
from megatron.formulas.kinds import mixer_of
from megatron.formulas.kinds.attention_figures import ring_blocks
from megatron.formulas.kinds.expert_figures import experts_kept, experts_peak, ffn_numel
from megatron.formulas.parameters import stage_parameters
from megatron.formulas.sizes import WIDE, chunks_of, heads_of, norm_kept, sizes_of
from megatron.formulas.strategy import Shape, Strategy, Workload

SMALL_INDEX = 2  # bytes of an expert's number


@dataclass(frozen=True)
class Layer:
    """Bytes that one layer adds to what was in use before it, such as its input.

    Attributes:
        kept: after its forward pass, output included.
        forward: peak of a forward pass that keeps nothing for backward.
        backward: peak of its backward pass.
    """

    kept: int
    forward: int
    backward: int


@lru_cache(maxsize=8192)
def whole_layer(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> Layer:
    """A layer of megatron-core with this program's attention; its FFN may run in chunks (--ffn-chunks)."""
    shape, hidden = workload.shape, sizes_of(workload, strategy, itemsize).hidden
    ffn = _ffn(workload, strategy, itemsize, fused) if shape.has_ffn else Layer(0, 0, 0)
    if not shape.mixes:
        return Layer(ffn.kept, hidden + ffn.forward, ffn.backward)
    mixer = _mixer(workload, strategy, itemsize, fused)
    backward = mixer.backward
    if strategy.zero > 1:  # FSDP keeps all gradients of a layer until its backward pass is over
        backward += _ffn_gradients(shape, strategy, itemsize) if shape.has_ffn else 0
    return Layer(
        mixer.kept + ffn.kept,
        max(2 * hidden + ffn.forward, mixer.forward),
        max(mixer.kept + ffn.backward, backward),
    )


def _mixer(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> Layer:
    """The part of a layer that mixes tokens, with its norm and its output."""
    mixer, how = mixer_of(workload.shape), (workload, strategy, itemsize, fused)
    norm, hidden = norm_kept(*how), sizes_of(workload, strategy, itemsize).hidden
    kept = norm + mixer.kept(*how) + hidden
    # Backward also has the residual's gradient.
    return Layer(kept, norm + mixer.forward(*how), kept + mixer.working(*how))


def attention_apart(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
    """Bytes of attention's output and lse that a recomputed layer keeps beside its input (--keep-attention)."""
    shape, sizes = workload.shape, sizes_of(workload, strategy, itemsize)
    if not strategy.keep_attention or shape.linear or not shape.mixes:
        return 0
    # A CPU's kernel computes with values as large as keys, and its output is a part of that.
    padded = not fused and strategy.ring == 1 and shape.value_dim < shape.head_dim
    return (sizes.local_q if padded else sizes.local_out) + sizes.lse


def choices_apart(workload: Workload, strategy: Strategy) -> int:
    """Bytes of the numbers of experts that a recomputed layer keeps beside its input (--moe-enable-routing-replay)."""
    mixture = workload.shape.mixture
    by_chunks = strategy.fpdt_chunk and (strategy.recompute_method == "block" or strategy.recompute_layers == 1)
    if mixture is None or not mixture.replay or strategy.recompute != "full" or by_chunks:
        return 0
    return SMALL_INDEX * mixture.topk * strategy.local_tokens(workload)


def _ffn(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> Layer:
    """The FFN of a layer, with its norm and its output."""
    shape, sizes, chunks = workload.shape, sizes_of(workload, strategy, itemsize), chunks_of(workload, strategy)
    first, second = matrices(workload, strategy, itemsize)
    if chunks.ffn:
        run = ffn_run(workload, strategy, itemsize, fused)
        sums = (first + second) * WIDE // itemsize * separate_gradient_sums(strategy)
        return Layer(sizes.hidden, run - first - second, 2 * sizes.hidden + run + sums)
    norm = norm_kept(workload, strategy, itemsize, fused)
    if shape.mixture:
        inside = experts_kept(workload, strategy, itemsize, fused)
        in_forward, in_backward = experts_peak(workload, strategy, itemsize)
        kept = norm + inside + sizes.hidden
        return Layer(kept, norm + inside + in_forward, kept + in_backward)
    inside, peak = mlp_kept(workload, strategy, fused, itemsize)
    kept, gradient = norm + inside + sizes.hidden, second if strategy.zero > 1 else 0
    backward = kept + max(peak + gradient, sizes.ffn + _gathered(workload, strategy, itemsize) + second)
    after = sizes.hidden + norm + sizes.ffn * (2 if shape.gated else 1) + sizes.whole
    return Layer(kept, kept, max(backward, after + first + gradient))


def _ffn_gradients(shape: Shape, strategy: Strategy, itemsize: int) -> int:
    """Bytes of the gradients of an FFN's matrices on a rank."""
    if shape.mixture:
        return ffn_numel(shape, strategy) * itemsize
    return (3 if shape.gated else 2) * (shape.ffn // strategy.tensor) * shape.hidden * itemsize


def mlp_kept(workload: Workload, strategy: Strategy, fused: bool, itemsize: int) -> tuple[int, int]:
    """(bytes kept inside the MLP, bytes in addition during the backward pass of the activation function)."""
    ffn = sizes_of(workload, strategy, itemsize).ffn
    if workload.shape.gated:  # both halves and their product; unfused also silu's output and a copy of the linear half
        return (3 if fused else 5) * ffn, 2 * ffn
    return 2 * ffn, ffn


def matrices(workload: Workload, strategy: Strategy, itemsize: int) -> tuple[int, int]:
    """Bytes of the MLP's first and second matrix in the compute dtype, which are also those of their gradients."""
    shape = workload.shape
    second = shape.ffn // strategy.tensor * shape.hidden * itemsize
    return (2 if shape.gated else 1) * second, second


def separate_gradient_sums(strategy: Strategy) -> bool:
    """Whether chunks need buffers to sum weights' gradients in: FSDP, unlike DDP, has none that they can add to."""
    return strategy.zero > 1


def ffn_run(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
    """Peak bytes of one chunk of the FFN in backward, where its forward pass is computed again.

    The gradients of the MLP's matrices are included.
    """
    sizes, chunks = sizes_of(workload, strategy, itemsize), chunks_of(workload, strategy)
    inside, peak = mlp_kept(workload, strategy, fused, itemsize)
    first, second = matrices(workload, strategy, itemsize)
    ends = norm_kept(workload, strategy, itemsize, fused) + 2 * sizes.hidden  # output, and the previous run's gradient
    gathered = _gathered(workload, strategy, itemsize)
    wide = 2 if workload.shape.gated else 1
    activation = ends + inside + max(peak, sizes.ffn + gathered)
    matrix = ends + wide * sizes.ffn + sizes.whole + gathered
    rows, run = chunks.all_rows, chunks.ffn_rows
    return max(activation * run // rows + second, matrix * run // rows + first + second)


def _gathered(workload: Workload, strategy: Strategy, itemsize: int) -> int:
    """Bytes of the gradient of the MLP's output, gathered over TP."""
    if strategy.tensor == 1 or not strategy.sequence_parallel:
        return 0
    return sizes_of(workload, strategy, itemsize).whole


@lru_cache(maxsize=8192)
def chunked_layer(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> Layer:
    """A layer under FPDT (``ChunkedLayer``), which runs in chunks."""
    shape, chunks = workload.shape, chunks_of(workload, strategy)
    sizes = sizes_of(workload, strategy, itemsize)
    heads = heads_of(shape.heads, shape.kv_heads, strategy.tensor, strategy.ulysses)
    offload, recompute, count = strategy.fpdt_offload, strategy.recompute == "full", chunks.attention
    part = chunks.rows / chunks.all_rows
    q, out, kv, lse = (int(part * size) for size in (sizes.local_q, sizes.local_out, sizes.local_kv, sizes.lse))
    hidden = int(part * sizes.hidden)
    on_ring, wide = strategy.ring > 1, WIDE // itemsize
    by_keys = on_ring or (offload and goes_by_keys(heads.local_q, heads.local_kv, itemsize))
    coming = 2 if count > 1 else 1  # chunks on the device: the one in use and the prefetched one
    load = 1 if offload else 0  # without offloading, kept chunks are used in place

    run = ffn_run(workload, strategy, itemsize, fused)
    first, second = matrices(workload, strategy, itemsize)
    summed = WIDE * separate_gradient_sums(strategy)
    numel = stage_parameters(shape, strategy.tensor, 1, 0).layer_numel
    mlp_sums, all_sums = (first + second) // itemsize * summed, numel * summed

    # Copies on a GPU are asynchronous: tensors on their way to the host still occupy the device.
    leaving = IN_FLIGHT if fused and offload and count > 1 else 0
    # The FFN of a chunk needs the chunk's input and gradient in addition to one run.
    if by_keys:  # the FFN of all chunks runs first; dout and the residual of the previous chunk still exist
        ffn = (load * coming + leaving) * out + (out + hidden if count > 1 else 0)
        weights = mlp_sums + (all_sums - mlp_sums) // 2
        read = out + (lse if replaces_out(shape, fused) else out)
        pair = load * coming * ((1 + wide) * q + read + lse) + (q + hidden)
        pair += load * coming * kv + 2 * wide * kv + q + kv
        pair += (ring_blocks(kv, strategy.ring, itemsize) if on_ring else 0) + leaving * wide * q
    else:
        ffn = load * (coming * (q + out + lse) + (kv * (1 + wide) if count > 1 else 0))
        weights = all_sums if count > 1 else mlp_sums
        ffn += leaving * wide * kv
        pair = load * coming * (q + out + lse + (1 + wide) * kv) + out + hidden + wide * q + q + 2 * wide * kv
    states = 2 * sizes.hidden  # gradients of output and input; streamed: only chunks that are loaded or stored
    if strategy.stream_hidden:
        states = 2 * coming * hidden + leaving * hidden
    if not fused and not on_ring and shape.value_dim < shape.head_dim:  # a CPU's kernel pads v, out and dout, and so dv
        keys = int(part * sizes.local_kv * shape.head_dim / (shape.head_dim + shape.value_dim))
        pair += 2 * q + 3 * keys - kv
    if shape.latent:  # the gradients of queries and keys go back through their parts and latents
        how = workload, strategy, itemsize, fused
        parts = norm_kept(*how) + shape.latent.before(*how)
        parts += 2 * (sizes.q + sizes.qkv) + sizes.k
        pair = max(pair, int(part * parts) + (1 + wide) * (q + kv) + 2 * hidden)
    backward = states + max(ffn + 2 * hidden + run + weights, pair + all_sums, numel * itemsize)
    saved = sizes.local_q + sizes.local_out + sizes.local_kv + sizes.lse
    if not offload:
        waiting = wide * sizes.local_kv * (count - 1) // count
        if by_keys:
            backward += saved + sizes.local_out + sizes.local_q * wide
        else:
            backward += saved * max(count - 1, 1) // count + waiting
    kept = (0 if strategy.stream_hidden else sizes.hidden) + (0 if recompute or offload else saved)
    # A forward pass that saves nothing for backward keeps the keys and values of all chunks on the device.
    keys = sizes.local_kv if (recompute or not offload) and not strategy.stream_hidden else coming * kv
    projected = int(part * (sizes.qkv + 3 * sizes.q + sizes.kv // 2)) + kv
    made = (coming + leaving) * hidden if strategy.stream_hidden else sizes.hidden
    forward = made + keys + 2 * hidden + max(run - first - second, projected, 4 * q * wide)
    return Layer(kept, forward, backward)
