# SPDX-License-Identifier: Apache-2.0
"""Hybrid models (Nemotron H): a layer is a Mamba2 layer, attention, an MLP or experts."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

from megatron.formulas.kinds.state_figures import LinearAttention
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal, refuse_combinations
from megatron.training.settings.flag import function, size, weights
from megatron.training.settings.kinds.gated_delta_kind import LINEAR, without_states
from megatron.training.settings.kinds.kind import Kind, Model, Run, settings_of
from megatron.training.settings.kinds.layer_patterns import hybrid_pattern, linear_layers
from megatron.training.settings.read_with import Condition, of_kind

FLAG, VARIANT = "--is-hybrid-model", "--experimental-attention-variant"
LETTERS = "M*-E"
MAMBA_WIDTH = 4  # tokens that the convolution of Mamba2 sees, in core
HYBRID = of_kind("is_hybrid_model")
STATES = Condition(
    "read only with --experimental-attention-variant or --is-hybrid-model", lambda c: LINEAR.holds(c) or HYBRID.holds(c)
)


@settings_of(HYBRID)
class HybridSettings:
    """Settings of hybrid models and of Mamba2."""

    is_hybrid_model: bool = weights(
        False, "a layer is a Mamba2 layer, attention or an MLP: see --hybrid-override-pattern", core=True
    )
    hybrid_override_pattern: str | None = weights(
        None,
        "hybrid model: for each layer M (Mamba2), * (attention), - (MLP) or E (experts), as in M-M*-; default all M, "
        "or by the two ratios",
    )
    hybrid_attention_ratio: float = weights(0.0, "hybrid model: share of attention layers, which are spread evenly")
    hybrid_mlp_ratio: float = weights(0.0, "hybrid model: share of MLP layers, which are spread evenly")
    mamba_state_dim: int = size(128, "hybrid model: state of Mamba2 for each number of a head")
    mamba_head_dim: int = size(64, "hybrid model: size of a head of Mamba2")
    mamba_num_groups: int = size(8, "hybrid model: groups of heads that share B and C, and a norm")
    mamba_num_heads: int | None = size(
        None, "hybrid model: number of heads of Mamba2; default 2 x --hidden-size / --mamba-head-dim"
    )
    mamba_dt_min: float = function(0.0, "hybrid model: smallest time step; 0.001 in transformers' Nemotron H")


def _check(config: Run, _: int) -> None:
    """Refuse patterns and sizes of hybrid models that contradict each other, or do not fit the grid."""
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    pattern, ratios = model.hybrid_override_pattern, (model.hybrid_attention_ratio, model.hybrid_mlp_ratio)
    if not model.is_hybrid_model:
        if not (pattern or any(ratios)):
            return
        flag = "--hybrid-override-pattern" if pattern else "--hybrid-attention-ratio and --hybrid-mlp-ratio"
        raise Refusal(flag, f"needs {FLAG}: add it, or leave it out", Fix(FLAG), LEAVE_OUT)
    if pattern and len(pattern) != model.num_layers:
        raise Refusal(
            f"--hybrid-override-pattern with {len(pattern)} layers",
            f"does not fit --num-layers {model.num_layers}: give one letter for each layer",
        )
    if unknown := set(pattern or "") - set(LETTERS):
        raise Refusal(f"--hybrid-override-pattern {pattern}", f"has {min(unknown)!r}: a layer is one of {LETTERS}")
    if min(ratios) < 0 or sum(ratios) > 1:
        raise Refusal(
            f"--hybrid-attention-ratio {ratios[0]:g} and --hybrid-mlp-ratio {ratios[1]:g}",
            "are shares of all layers: use numbers from 0 to 1 with a sum of at most 1",
        )
    spread = hybrid_pattern(replace(model, hybrid_override_pattern=None))
    if pattern and any(ratios) and any(pattern.count(kind) != spread.count(kind) for kind in LETTERS):
        raise Refusal(
            f"--hybrid-override-pattern {pattern}",
            "does not have the numbers of layers that the ratios give: leave --hybrid-attention-ratio and "
            "--hybrid-mlp-ratio out",
        )
    if ("E" in hybrid_pattern(model)) != bool(model.num_experts):
        missing = "E for layers with experts" if model.num_experts else "--num-experts"
        raise Refusal(f"{FLAG} with {'--num-experts' if model.num_experts else 'E'}", f"needs {missing}: add it")
    heads, size, groups = model.mamba_num_heads, model.mamba_head_dim, model.mamba_num_groups
    if 2 * model.hidden_size % size and heads == 2 * model.hidden_size // size:
        raise Refusal(f"--mamba-head-dim {size}", "does not divide 2 x --hidden-size: give --mamba-num-heads")
    if heads % groups:
        raise Refusal(
            f"--mamba-num-heads {heads}",
            f"is not a multiple of --mamba-num-groups {groups}: use --mamba-num-groups {gcd(heads, groups)}",
            Fix(f"--mamba-num-groups {gcd(heads, groups)}"),
        )
    if groups % tensor:
        raise Refusal(
            f"--mamba-num-groups {groups}", f"is not a multiple of --tensor-model-parallel-size {tensor}: use one"
        )
    halves = "a layer is a mixer or an MLP, with one norm and one residual"
    refuse_combinations(FLAG, without_states(config) | {
        VARIANT: (model.experimental_attention_variant, "its layers are chosen by --linear-attention-freq"),
        "--sandwich-norm": (model.sandwich_norm, halves),
        "--reordered-norm": (model.reordered_norm, halves),
        "--parallel-residual": (model.parallel_residual, halves),
        "--moe-layer-freq": (model.moe_layer_freq != 1, "the pattern says which layers have experts"),
    })  # fmt: skip


def _shape(model: Model) -> dict[str, Any]:
    pattern, states = hybrid_pattern(model), tuple(linear_layers(model))
    if not any(states):
        return {"pattern": pattern}
    heads = model.mamba_num_groups, model.mamba_num_heads
    sizes = model.mamba_state_dim, model.mamba_head_dim, MAMBA_WIDTH
    return {"pattern": pattern, "linear": LinearAttention(states, *heads, *sizes, "mamba2", delta=False)}


def _options(config: Run) -> dict[str, Any]:
    return {"exchange": config.parallel.linear_attention_exchange, "dt_min": config.model.mamba_dt_min}


KIND = Kind(
    HYBRID,
    _shape,
    check=_check,
    mixer="mamba2:mamba2",
    layers=linear_layers,
    options=_options,
    differs=lambda model: True,
)
