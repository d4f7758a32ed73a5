# SPDX-License-Identifier: Apache-2.0
"""Checks of the shape of the model and its positions."""

from __future__ import annotations

from dataclasses import fields
from math import gcd

from megatron.training.arguments.config import Config, ModelConfig
from megatron.training.arguments.models import ROTARY, derive_shape
from megatron.training.refusal import Refusal, near


def check_required(config: Config) -> None:
    """Refuse a model without a shape; settle its longest sequence."""
    model, data = config.model, config.data
    relative = model.position_embedding_type != "learned_absolute"  # nothing is as long as that, and it says no more
    if (model.model or relative) and model.max_position_embeddings is None:
        model.max_position_embeddings = data.seq_length
    names = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    missing = [name for name in names if getattr(model, name) is None]
    missing += [name for name in ("seq_length", "micro_batch_size") if getattr(data, name) is None]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        shape = "" if model.model else "; --model names a whole shape, for example --model llama3-8b"
        raise Refusal(f"missing: {flags}{shape}")


def check_model(config: Config) -> None:
    """Derive the shape of the model, and refuse what is none."""
    model, heads = config.model, config.model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        raise Refusal(
            f"--hidden-size {model.hidden_size} is no multiple of --num-attention-heads {heads}: "
            f"use {near(model.hidden_size, heads)}, or give --kv-channels"
        )
    groups = model.num_query_groups
    if not model.group_query_attention and groups not in (1, heads):
        raise Refusal(f"--num-query-groups {groups} needs --group-query-attention: add it, or leave both out")
    if model.group_query_attention and heads % groups:
        raise Refusal(
            f"--num-attention-heads {heads} is no multiple of --num-query-groups {groups}: "
            f"use --num-query-groups {gcd(heads, groups)}"
        )
    chosen = {"--swiglu": model.swiglu, "--squared-relu": model.squared_relu, "--openai-gelu": model.openai_gelu}
    activations = [flag for flag, given in chosen.items() if given]
    if len(activations) > 1:
        raise Refusal(f"{' and '.join(activations)} are {len(activations)} activations: leave one in")
    model = derive_shape(model)
    if model.ffn_hidden_size < 1:
        raise Refusal(
            f"--swiglu with --hidden-size {model.hidden_size} gives an MLP of width 0: give --ffn-hidden-size"
        )
    _positions(model)
    config.model = model


def _positions(model: ModelConfig) -> None:
    rotated, kind = int(model.kv_channels * model.rotary_percent), model.position_embedding_type
    if kind in ROTARY and (rotated < 2 or rotated % 2):
        raise Refusal(
            f"RoPE rotates pairs, and --rotary-percent {model.rotary_percent:g} of heads of {model.kv_channels} is "
            f"{rotated}: use another --rotary-percent or --kv-channels"
        )
    if kind != "yarn":
        names = [field.name for field in fields(model) if field.name.startswith("yarn_")]
        given = [name for name in names if getattr(model, name) != getattr(ModelConfig, name)]
        if given:
            flags = ", ".join("--" + name.replace("_", "-").replace("yarn-corr", "no-yarn-corr") for name in given)
            raise Refusal(f"{flags} without --position-embedding-type yarn: add it, or leave out what is YaRN's")
        return
    for flag in ("rotary_seq_len_interpolation_factor", "use_rope_scaling"):
        if getattr(model, flag):
            raise Refusal(
                f"--{flag.replace('_', '-')} and --position-embedding-type yarn both lower frequencies: leave one out"
            )
    if model.yarn_rotary_scaling_factor <= 1:
        raise Refusal(
            f"--position-embedding-type yarn with --yarn-rotary-scaling-factor {model.yarn_rotary_scaling_factor:g} "
            "changes nothing: give a factor above 1, or use --position-embedding-type rope"
        )
    if model.yarn_beta_fast <= model.yarn_beta_slow:
        raise Refusal(
            f"--yarn-beta-fast {model.yarn_beta_fast:g} must be above --yarn-beta-slow {model.yarn_beta_slow:g}: "
            "the defaults are 32 and 1"
        )
    if model.rotary_base < 2:
        raise Refusal(f"--rotary-base {model.rotary_base} leaves YaRN no slow pairs: use 2 or more")
