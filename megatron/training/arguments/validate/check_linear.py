# SPDX-License-Identifier: Apache-2.0
"""Checks of layers with a state (Gated DeltaNet, Mamba2): which layers, their sizes, what they do not work with."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

from megatron.training.arguments.validate.check_model import check_pattern, sees_ahead
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal, refuse_combinations
from megatron.training.settings.config import Config
from megatron.training.settings.models import hybrid_pattern, linear_layers

FLAG, HYBRID = "--experimental-attention-variant", "--is-hybrid-model"
KINDS = "M*-E"


def check_linear(config: Config) -> None:
    """Refuse layers with a state that the model, the grid or other settings do not allow."""
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    if model.is_hybrid_model or model.hybrid_override_pattern or model.hybrid_attention_ratio or model.hybrid_mlp_ratio:
        _check_hybrid(config)
    if model.experimental_attention_variant is None:
        return
    if model.linear_attention_freq is None:
        raise Refusal(
            f"{FLAG} {model.experimental_attention_variant}",
            "needs --linear-attention-freq, which layers have a state: add --linear-attention-freq 4, as in Qwen3-Next",
            Fix("--linear-attention-freq 4"),
        )
    check_pattern("--linear-attention-freq", model.linear_attention_freq, model.num_layers)
    if not any(linear_layers(model)):
        raise Refusal(
            "--linear-attention-freq", f"leaves no layer with a state: leave it out, and {FLAG} too", LEAVE_OUT
        )
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if values % keys:
        raise Refusal(
            f"--linear-num-value-heads {values}", f"is not a multiple of --linear-num-key-heads {keys}: use one"
        )
    if keys % tensor:
        raise Refusal(
            f"--linear-num-key-heads {keys}", f"is not a multiple of --tensor-model-parallel-size {tensor}: use one"
        )
    refused = _combinations(config) | {
        "--normalization LayerNorm": (
            model.normalization == "LayerNorm",
            "the output of a state is normalized without a mean: use --normalization RMSNorm",
        ),
    }
    fixes = {"--normalization": "--normalization RMSNorm"}
    refuse_combinations(f"{FLAG} {model.experimental_attention_variant}", refused, fixes)


def _combinations(config: Config) -> dict[str, tuple[Any, str]]:
    """What layers with a state do not work with: by flag, whether it is given, and why."""
    model, parallel, chunks = config.model, config.parallel, config.chunks
    return {
        "--sequence-parallel --fpdt": (chunks.fpdt and parallel.sequence_parallel, "chunks are not split over TP"),
        "--multi-latent-attention": (model.multi_latent_attention, "the two are not built together"),
        "--mtp-num-layers": (model.mtp_num_layers, "which layer would predict ahead is not defined"),
        "--fp8-format": (model.fp8_format, "it needs Transformer Engine's layers"),
        "--attention-mask": (sees_ahead(config.attention), "a state holds earlier tokens alone: use a causal mask"),
    }


def _check_hybrid(config: Config) -> None:
    """Refuse patterns and sizes of hybrid models that contradict each other, or do not fit the grid."""
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    pattern, ratios = model.hybrid_override_pattern, (model.hybrid_attention_ratio, model.hybrid_mlp_ratio)
    if not model.is_hybrid_model:
        flag = "--hybrid-override-pattern" if pattern else "--hybrid-attention-ratio and --hybrid-mlp-ratio"
        raise Refusal(flag, f"needs {HYBRID}: add it, or leave it out", Fix(HYBRID), LEAVE_OUT)
    if pattern and len(pattern) != model.num_layers:
        raise Refusal(
            f"--hybrid-override-pattern with {len(pattern)} layers",
            f"does not fit --num-layers {model.num_layers}: give one letter for each layer",
        )
    if unknown := set(pattern or "") - set(KINDS):
        raise Refusal(f"--hybrid-override-pattern {pattern}", f"has {min(unknown)!r}: a layer is one of {KINDS}")
    if min(ratios) < 0 or sum(ratios) > 1:
        raise Refusal(
            f"--hybrid-attention-ratio {ratios[0]:g} and --hybrid-mlp-ratio {ratios[1]:g}",
            "are shares of all layers: use numbers from 0 to 1 with a sum of at most 1",
        )
    spread = hybrid_pattern(replace(model, hybrid_override_pattern=None))
    if pattern and any(ratios) and any(pattern.count(kind) != spread.count(kind) for kind in KINDS):
        raise Refusal(
            f"--hybrid-override-pattern {pattern}",
            "does not have the numbers of layers that the ratios give: leave --hybrid-attention-ratio and "
            "--hybrid-mlp-ratio out",
        )
    if ("E" in hybrid_pattern(model)) != bool(model.num_experts):
        missing = "E for layers with experts" if model.num_experts else "--num-experts"
        raise Refusal(f"{HYBRID} with {'--num-experts' if model.num_experts else 'E'}", f"needs {missing}: add it")
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
    refuse_combinations(HYBRID, _combinations(config) | {
        FLAG: (model.experimental_attention_variant, "its layers are chosen by --linear-attention-freq"),
        "--sandwich-norm": (model.sandwich_norm, halves),
        "--reordered-norm": (model.reordered_norm, halves),
        "--parallel-residual": (model.parallel_residual, halves),
        "--moe-layer-freq": (model.moe_layer_freq != 1, "the pattern says which layers have experts"),
    })  # fmt: skip
