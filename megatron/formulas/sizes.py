# SPDX-License-Identifier: Apache-2.0
"""Bytes of the tensors inside a layer, on one rank, for one micro-batch: what all formulas are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron.decisions.heads import head_plan
from megatron.formulas.parameters import padded_vocab
from megatron.formulas.strategy import Strategy, Workload

WIDE = 4  # bytes of an fp32 number


@dataclass(frozen=True)
class Heads:
    """Heads of a rank before and after the all-to-all of Ulysses."""

    q: int
    kv: int
    local_q: int
    local_kv: int  # that it computes with
    sent_kv: int  # that it is sent: fewer, where several of its query heads share one unevenly


@lru_cache(maxsize=4096)
def heads_of(heads: int, kv_heads: int, tensor: int, ulysses: int) -> Heads:
    q, kv = heads // tensor, max(kv_heads // tensor, 1)
    plan = head_plan(q, kv, ulysses)
    return Heads(q, kv, plan.q_heads, max(map(len, plan.kv_index)), max(map(len, plan.kv_heads)))


@dataclass(frozen=True)
class Sizes:
    """Bytes of tensors of one rank; ``hidden`` is what passes between layers, ``whole`` the same gathered over TP."""

    hidden: int
    whole: int
    q: int
    kv: int  # keys and values together
    qkv: int  # as the projection gives them, in one tensor
    local_q: int  # after the all-to-all: all tokens of the ring rank, some heads
    local_kv: int
    lse: int
    ffn: int  # the activation that enters the second matrix of the MLP
    statistics: int  # one fp32 number a token between the layers
    angles: int  # of RoPE
    logits: int  # in the compute dtype


@lru_cache(maxsize=8192)
def sizes_of(workload: Workload, strategy: Strategy, itemsize: int) -> Sizes:
    shape, tensor, batch = workload.shape, strategy.tensor, strategy.micro_batch
    heads = heads_of(shape.heads, shape.kv_heads, tensor, strategy.ulysses)
    whole = workload.seq_length // strategy.context * batch
    tokens = whole // tensor if strategy.sequence_parallel else whole
    ring_tokens = whole * strategy.ulysses
    d = shape.head_dim
    groups = shape.kv_heads if shape.kv_heads < tensor else heads.kv  # core gathers all of qkv then, and keeps it
    in_qkv = (shape.heads if shape.kv_heads < tensor else heads.q) + 2 * groups
    return Sizes(
        hidden=tokens * shape.hidden * itemsize,
        whole=whole * shape.hidden * itemsize,
        q=whole * heads.q * d * itemsize,
        kv=2 * whole * heads.kv * d * itemsize,
        qkv=whole * in_qkv * d * itemsize,
        local_q=ring_tokens * heads.local_q * d * itemsize,
        local_kv=2 * ring_tokens * heads.local_kv * d * itemsize,
        lse=ring_tokens * heads.local_q * WIDE,
        ffn=whole * shape.ffn // tensor * itemsize,
        statistics=tokens * WIDE,
        angles=0 if shape.positions else whole // batch * d // 2 * WIDE,
        logits=whole * padded_vocab(shape.vocab, tensor) // tensor * itemsize,
    )
