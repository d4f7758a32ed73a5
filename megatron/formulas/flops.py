# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a step: what the model needs, and what is executed with recompute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron.formulas.chunks import chunks_of
from megatron.formulas.strategy import Strategy, Workload


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of a forward pass over one sequence, all layers together: matrix products, and attention's full square."""

    qkv: float
    out: float
    mlp: float
    logits: float
    attention: float

    @property
    def gemm(self) -> float:
        return self.qkv + self.out + self.mlp + self.logits


def forward_flops(
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    gated: bool,
    seq_length: int,
) -> ForwardFlops:
    """2 a multiply-add; only matrix products count."""
    token = 2 * seq_length
    return ForwardFlops(
        qkv=token * layers * hidden * (heads + 2 * kv_heads) * head_dim,
        out=token * layers * heads * head_dim * hidden,
        mlp=token * layers * (3 if gated else 2) * hidden * ffn,
        logits=token * hidden * vocab,
        attention=layers * 2 * token * seq_length * heads * head_dim,
    )


@dataclass(frozen=True)
class Flops:
    """FLOPs of a whole step, all ranks together: matrix products, and attention, of allowed pairs alone.

    Attributes:
        model_gemm, model_attention: forward and backward, once: what MFU is measured with.
        gemm, attention: executed, recompute included, and the scores that attention's backward pass computes again.
    """

    model_gemm: float
    model_attention: float
    gemm: float
    attention: float

    @property
    def model(self) -> float:
        return self.model_gemm + self.model_attention

    @property
    def executed(self) -> float:
        return self.gemm + self.attention


@lru_cache(maxsize=4096)
def forward(workload: Workload) -> ForwardFlops:
    """Of one sequence, by the program's own count (``megatron.training.report.flops``)."""
    shape = workload.shape
    return forward_flops(
        layers=shape.layers,
        hidden=shape.hidden,
        ffn=shape.ffn,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=shape.vocab,
        gated=shape.gated,
        seq_length=workload.seq_length,
    )


@lru_cache(maxsize=65536)
def step_flops(workload: Workload, strategy: Strategy) -> Flops:
    """FLOPs of a step of ``global_batch`` sequences.

    A backward pass is twice a forward one; attention's is 2.5 times it, as flash kernels compute scores once more.
    Recompute repeats forward passes: under FPDT backward computes projections and the FFN again piece by piece, and
    with full recompute attention as well.
    """
    one, batch = forward(workload), workload.global_batch
    pairs = one.attention * (0.5 if workload.causal else 1.0)
    full = strategy.recompute == "full"
    qkv = out = ffn = 1 + full
    attention = 1 + (strategy.recompute != "none")
    if strategy.fpdt_chunk:
        unit = full and strategy.recompute_layers > 1
        qkv, out, ffn, attention = 2 + full, 2 + unit, 2 + unit, 1 + full
    elif chunks_of(workload, strategy).ffn:
        ffn += 1
    gemm = (qkv + 2) * one.qkv + (out + 2) * one.out + (ffn + 2) * one.mlp + 3 * one.logits
    return Flops(
        model_gemm=3 * batch * one.gemm,
        model_attention=3 * batch * pairs,
        gemm=batch * gemm,
        attention=batch * pairs * (attention + 2.5),
    )
