# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a step: those that the model needs, and those executed with recompute."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from megatron.formulas.kinds import attention_of
from megatron.formulas.sizes import chunks_of, padded_vocab
from megatron.formulas.strategy import Shape, Strategy, Workload, refuse_unknown


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of a forward pass over one sequence, all layers together: matrix products, and attention without a mask.

    ``choice``: scores that only choose keys, without a mask; they have no backward pass.
    """

    qkv: float
    out: float
    mlp: float
    logits: float
    attention: float
    choice: float = 0.0

    @property
    def gemm(self) -> float:
        return self.qkv + self.out + self.mlp + self.logits


@lru_cache(maxsize=4096)
def forward_flops(shape: Shape, seq_length: int) -> ForwardFlops:
    """FLOPs of one sequence: matrix products only, 2 for each multiply-add."""
    token, with_state = 2 * seq_length, sum(shape.linear.layers) if shape.linear else 0
    with_keys = shape.layers_with("*") if shape.pattern else shape.layers - with_state
    mixers = [(attention_of(shape), with_keys)] + ([(shape.linear, with_state)] if with_state else [])
    if shape.latent and shape.latent.differs:
        mixers = [(shape.latent.of_layer(layer), 1) for layer in range(shape.layers)]
    return ForwardFlops(
        qkv=token * sum(layers * mixer.products(shape) for mixer, layers in mixers),
        out=token * shape.hidden * sum(layers * mixer.out_width(shape) for mixer, layers in mixers),
        mlp=token * shape.hidden * _mlp_width(shape),
        logits=token * shape.hidden * shape.vocab,
        attention=token * sum(layers * mixer.pairs(shape, seq_length) for mixer, layers in mixers),
        choice=token * sum(layers * mixer.choice(shape, seq_length) for mixer, layers in mixers),
    )


def _mlp_width(shape: Shape) -> float:
    """Multiplications for a token in the MLPs of all layers, divided by the hidden size."""
    matrices, mixture = 3 if shape.gated else 2, shape.mixture
    dense = shape.layers_with("-") if shape.pattern else shape.layers - (sum(mixture.layers) if mixture else 0)
    return dense * matrices * shape.ffn + (sum(mixture.layers) * mixture.width(matrices) if mixture else 0)


@dataclass(frozen=True)
class Flops:
    """FLOPs of a step, all ranks together: matrix products, and attention over the pairs that the mask allows.

    Attributes:
        model_gemm, model_attention: forward and backward, without recompute, as in MFU.
        gemm, attention: executed, with recompute and the scores that attention's backward pass computes again.
    """

    model_gemm: float
    model_attention: float
    gemm: float
    attention: float

    @property
    def model(self) -> float:
        return self.model_gemm + self.model_attention


@dataclass(frozen=True)
class Passes:
    """How often the forward pass of each part of a layer runs per micro-batch."""

    qkv: int
    attention: int
    out: int  # output projection
    ffn: int


def passes_of(workload: Workload, strategy: Strategy) -> Passes:
    """Forward passes with recompute.

    FPDT's backward pass computes projections and the FFN again chunk by chunk. Full recompute adds one forward pass of
    the QKV projection and attention (unless that is kept), and in units of several layers also one of the output
    projection and the FFN.
    """
    refuse_unknown(workload.shape, strategy)
    if strategy.recompute == "full" and strategy.recompute_method == "block":
        layers = strategy.most_layers(workload.shape.layers)
        kinds = [(passes_of(workload, kind), count / layers) for kind, count in strategy.layer_kinds(layers)]
        return Passes(*(sum(share * getattr(one, f.name) for one, share in kinds) for f in fields(Passes)))
    full = strategy.recompute == "full"
    if strategy.fpdt_chunk:
        unit = full and strategy.recompute_layers > 1
        return Passes(qkv=2 + full, attention=1 + full, out=2 + unit, ffn=2 + unit)
    ffn_again = bool(chunks_of(workload, strategy).ffn)  # backward computes each piece of the FFN again
    attention = 1 + (strategy.recompute != "none" and not strategy.keep_attention)
    return Passes(qkv=1 + full, attention=attention, out=1 + full, ffn=1 + full + ffn_again)


@lru_cache(maxsize=65536)
def step_flops(workload: Workload, strategy: Strategy) -> Flops:
    """FLOPs of a step of ``global_batch`` sequences.

    A backward pass costs twice a forward pass, attention's about 2.5 times, because flash kernels compute scores again.
    Executed logits are those of the padded vocabulary.
    """
    one = forward_flops(workload.shape, workload.seq_length)
    batch, run = workload.global_batch, passes_of(workload, strategy)
    pairs, choice = one.attention * workload.attended, one.choice * workload.attended
    scores = attention_of(workload.shape).score_share(workload.shape)
    logits = one.logits / workload.shape.vocab * padded_vocab(workload.shape.vocab, strategy.tensor)
    gemm = (run.qkv + 2) * one.qkv + (run.out + 2) * one.out + (run.ffn + 2) * one.mlp + 3 * logits
    return Flops(
        model_gemm=3 * batch * one.gemm,
        model_attention=batch * (3 * pairs + choice),
        gemm=batch * gemm,
        attention=batch * (pairs * (run.attention + 2 + scores) + choice * run.attention),
    )
