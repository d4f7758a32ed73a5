# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint is of the model that a run has: the shapes of its weights, and what it computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.training.arguments.config import Config, ModelConfig
from megatron.training.arguments.models import activation
from megatron.training.refusal import Refusal

# Settings that give the weights their shapes: they must agree between a checkpoint and the run that loads it.
SHAPES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "softmax_type",
    "embed_layernorm",
    "untie_embeddings_and_output_weights",
)
# Settings that change the network but no shape: weights may be taken over on purpose, a run may not go on.
FORMULAS = (
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int",
    "norm_epsilon",
    "apply_layernorm_1p",
)


def check_model(saved: dict[str, Any], config: Config, path: Path, weights_only: bool) -> None:
    """Refuse weights of other shapes, and a run that would go on as another network; new ones may start from them."""

    def differing(names: Sequence[str]) -> list[str]:
        return [
            f"--{name.replace('_', '-')} {saved[name]} there, {getattr(config.model, name)} here"
            for name in names
            if name in saved and saved[name] != getattr(config.model, name)
        ]

    positions = "position_embedding_type"
    learned = "learned_absolute" in (saved.get(positions), getattr(config.model, positions))  # the kind with weights
    shapes, formulas = (SHAPES, (positions, *FORMULAS))
    if learned:
        shapes, formulas = (*SHAPES, positions, "max_position_embeddings"), FORMULAS
    wrong = differing(shapes if weights_only else (*shapes, *formulas))
    changed = differing(formulas)
    there, here = _activation_of(saved), activation(config.model)
    if there not in (None, here):
        changed.append(f"the activation {there} there, {here} here")
        if not weights_only:
            wrong.append(changed[-1])
    if wrong:
        raise Refusal(f"checkpoint {path} is of another model: {'; '.join(wrong)}")
    config.notes += [f"weights of another network: {change}" for change in changed]


def _activation_of(saved: dict[str, Any]) -> str | None:
    """Of the model that a checkpoint describes; GELU was always by tanh before there was a flag for it."""
    if not saved:
        return None
    known = {field.name for field in fields(ModelConfig)}
    model = ModelConfig(**{name: value for name, value in saved.items() if name in known})
    if "bias_gelu_fusion" not in saved:
        model.openai_gelu = True
    return activation(model)
