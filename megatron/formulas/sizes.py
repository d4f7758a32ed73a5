# SPDX-License-Identifier: Apache-2.0
"""Sizes that all formulas use: how a rank's work is cut into chunks, and bytes of the tensors inside a layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from megatron.decisions.division import head_plan
from megatron.formulas.strategy import Shape, Strategy, Workload

DIVISIBLE_BY = 128  # Megatron's --make-vocab-size-divisible-by
FPDT_LOSS_ROWS = 256  # least tokens in a chunk of FPDT's loss, unless the paper's rule gives fewer

Tensor = tuple[int, int]
"""Rows and columns of a parameter; a vector has one column."""


@dataclass(frozen=True)
class Chunks:
    """How many chunks the work of a rank is cut into. The program uses the same numbers (validate/check_memory.py)."""

    all_rows: int  # tokens of a rank, between the layers
    attention: int  # FPDT's chunks; 1 without FPDT
    rows: int  # tokens of the longest attention chunk
    ffn: int  # chunks of the FFN, called runs; 0: the FFN is not cut
    ffn_rows: int  # tokens of the longest run
    loss: int  # chunks of the loss; 0: the loss is not cut
    loss_rows: int


@lru_cache(maxsize=8192)
def chunks_of(workload: Workload, strategy: Strategy) -> Chunks:
    """The strategy's numbers, or those that FPDT derives where the strategy gives none."""
    shape, unit = workload.shape, chunk_unit(strategy.ulysses, strategy.tensor, strategy.sequence_parallel)
    rows = workload.seq_length // strategy.ring // unit
    attention, longest, ffn, loss = 1, rows, strategy.ffn_chunks, strategy.loss_chunks
    if strategy.fpdt_chunk:
        attention = attention_chunks(rows, max(chunk_rows(strategy.fpdt_chunk, strategy.ring, unit), 1))
        longest = ceil(rows / attention)
        ffn = ffn or ffn_chunks(attention)
        loss = loss or loss_chunks(rows, ffn, hidden=shape.hidden, ffn_hidden=shape.ffn, vocab=shape.vocab)
    ffn_rows = ceil(longest / ceil(ffn / attention)) if ffn else rows
    return Chunks(rows, attention, longest, ffn, ffn_rows, loss, ceil(rows / loss) if loss else rows)


def chunk_unit(ulysses: int, tensor: int, sequence_parallel: bool) -> int:
    """The number of tokens in a ring rank's chunk is a multiple of this."""
    return ulysses * (tensor if sequence_parallel else 1)


def chunk_rows(chunk: int, ring: int, unit: int) -> int:
    """Largest number of a rank's tokens in a chunk of ``chunk`` global tokens; 0: too short a chunk for the grid."""
    return chunk // ring // unit


def attention_chunks(rows: int, longest: int) -> int:
    """Number of FPDT's chunks of a rank's ``rows`` tokens, with at most ``longest`` tokens in each."""
    return ceil(rows / longest)


def ffn_chunks(attention: int) -> int:
    """FPDT's runs of the FFN: two per attention chunk, as in the paper."""
    return 2 * attention


def loss_chunks(rows: int, ffn_chunks: int, *, hidden: int, ffn_hidden: int, vocab: int) -> int:
    """FPDT's chunks of the loss: at least the paper's 2 x vocabulary / hidden size.

    There are more for long sequences, so that a chunk's logits are no larger than the inside of an FFN run. But chunks
    get no shorter than ``FPDT_LOSS_ROWS``: short ones would spend their time on adding to the weight's gradient.
    """
    return max(2 * ceil(vocab / hidden), min(ffn_chunks * ceil(vocab / ffn_hidden), ceil(rows / FPDT_LOSS_ROWS)))


WIDE = 4  # bytes of an fp32 number


@dataclass(frozen=True)
class Heads:
    """Heads of a rank before and after the all-to-all of Ulysses."""

    q: int
    kv: int
    local_q: int
    local_kv: int  # that attention computes with
    sent_kv: int  # that the rank receives: fewer, where it repeats a key/value head for its query heads


@lru_cache(maxsize=4096)
def heads_of(heads: int, kv_heads: int, tensor: int, ulysses: int) -> Heads:
    """The heads of a rank of a model. Raises ValueError if Ulysses does not divide a TP rank's heads."""
    q, kv = heads // tensor, max(kv_heads // tensor, 1)
    plan = head_plan(q, kv, ulysses)
    return Heads(q, kv, plan.q_heads, max(map(len, plan.kv_index)), max(map(len, plan.kv_heads)))


@dataclass(frozen=True)
class Sizes:
    """Bytes of tensors of one rank, for one micro-batch."""

    hidden: int  # hidden states between layers
    whole: int  # the same, gathered over TP
    q: int
    kv: int  # keys and values together
    k: int
    out: int  # output of attention
    qkv: int  # output of the projection, one tensor; with latents only that of keys and values
    local_q: int  # after the all-to-all: all tokens of the ring rank, some heads
    local_kv: int
    local_out: int
    lse: int
    ffn: int  # the activation that enters the second matrix of the MLP
    statistics: int  # one fp32 number per token between the layers
    angles: int  # of RoPE
    logits: int  # in the compute dtype


@lru_cache(maxsize=8192)
def sizes_of(workload: Workload, strategy: Strategy, itemsize: int) -> Sizes:
    """Bytes of a rank's tensors; ``itemsize``: bytes of a number in the compute dtype."""
    shape, tensor, batch = workload.shape, strategy.tensor, strategy.micro_batch
    heads = heads_of(shape.heads, shape.kv_heads, tensor, strategy.ulysses)
    whole = workload.seq_length // strategy.context * batch
    tokens = whole // tensor if strategy.sequence_parallel else whole
    ring_tokens = whole * strategy.ulysses
    d, value = shape.head_dim, shape.value_dim
    groups = shape.kv_heads if shape.kv_heads < tensor else heads.kv  # with fewer heads than TP, core keeps all of qkv
    in_qkv = ((1 + shape.output_gate) * (shape.heads if shape.kv_heads < tensor else heads.q) + 2 * groups) * d
    if shape.latent:
        in_qkv = heads.q * (d - shape.latent.rotated + value)
    return Sizes(
        hidden=tokens * shape.hidden * itemsize,
        whole=whole * shape.hidden * itemsize,
        q=whole * heads.q * d * itemsize,
        kv=whole * heads.kv * (d + value) * itemsize,
        k=whole * heads.kv * d * itemsize,
        out=whole * heads.q * value * itemsize,
        qkv=whole * in_qkv * itemsize,
        local_q=ring_tokens * heads.local_q * d * itemsize,
        local_kv=ring_tokens * heads.local_kv * (d + value) * itemsize,
        local_out=ring_tokens * heads.local_q * value * itemsize,
        lse=ring_tokens * heads.local_q * WIDE,
        ffn=whole * shape.ffn // tensor * itemsize,
        statistics=tokens * WIDE,
        angles=0 if shape.positions else whole // batch * (shape.latent.rotated if shape.latent else d) // 2 * WIDE,
        logits=whole * padded_vocab(shape.vocab, tensor) // tensor * itemsize,
    )


def padded_vocab(vocab: int, tensor: int) -> int:
    """Rows of the padded word embedding, all TP ranks together."""
    multiple = DIVISIBLE_BY * tensor
    return ceil(vocab / multiple) * multiple


def norm_kept(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
    """Bytes that a norm keeps in addition to its input: output and statistics.

    Without a fused kernel RMSNorm is several operations: in fp32 they keep one intermediate tensor; in bf16 they
    keep two fp32 tensors, but not the input.
    """
    sizes = sizes_of(workload, strategy, itemsize)
    if workload.shape.layer_norm:
        return sizes.hidden + 2 * sizes.statistics
    copies = 1 if fused else 2 if itemsize == WIDE else 4
    return copies * sizes.hidden + sizes.statistics


def norm_of(shape: Shape) -> tuple[Tensor, ...]:
    """The parameters of a norm."""
    return ((shape.hidden, 1),) * (2 if shape.layer_norm else 1)
