# SPDX-License-Identifier: Apache-2.0
"""RoPE and its scalings, linear, Llama 3's and YaRN: from config.json, and to config.json."""

from __future__ import annotations

import math
from typing import Any

from megatron.context_parallel.positions.rope import LLAMA3_HIGH, LLAMA3_LENGTH, LLAMA3_LOW, Yarn
from megatron.training.arguments.config import ModelConfig
from megatron.training.refusal import Refusal

# What Megatron's RoPE scaling of Llama 3 fixes; its factor is free.
LLAMA3 = {
    "low_freq_factor": LLAMA3_LOW,
    "high_freq_factor": LLAMA3_HIGH,
    "original_max_position_embeddings": LLAMA3_LENGTH,
}
YARN_LENGTH = "original_max_position_embeddings"


def rope_settings(config: dict[str, Any], where: object) -> dict[str, Any]:
    """Settings of RoPE, from rope_theta and rope_scaling (transformers 4) or rope_parameters (5)."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise Refusal(f"{where}: rope_parameters by layer type are not supported")
    theta = positive(rope.get("rope_theta", config.get("rope_theta", 10000.0)), "rope_theta", where)
    if theta != int(theta):
        raise Refusal(f"{where}: rope_theta {theta} is not supported: --rotary-base is a whole number")
    if (share := rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1.0):
        raise Refusal(f"{where}: partial_rotary_factor {share} is not supported for llama")
    result: dict[str, Any] = {"rotary_base": int(theta)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "linear":
        result["rotary_seq_len_interpolation_factor"] = positive(rope.get("factor"), "factor of rope_scaling", where)
    elif kind == "llama3":
        for name, fixed in LLAMA3.items():
            if (value := rope.get(name, config.get(name))) != fixed:
                raise Refusal(f"{where}: rope_scaling llama3 with {name} {value}: Megatron's is fixed at {fixed:g}")
        result |= {
            "use_rope_scaling": True,
            "rope_scaling_factor": positive(rope.get("factor"), "factor of rope_scaling", where),
        }
    elif kind == "yarn":
        result |= _yarn(rope, config, where)
    elif kind != "default":
        raise Refusal(f"{where}: rope_scaling of type {kind} is not supported: only default, linear, llama3 and yarn")
    return result


def _yarn(rope: dict[str, Any], config: dict[str, Any], where: object) -> dict[str, Any]:
    """Settings of YaRN. transformers reads some of them from beside rope_scaling too, and derives those left out."""

    def number(name: str, default: float) -> float:
        return positive(default if rope.get(name) is None else rope[name], f"{name} of rope_scaling", where)

    longest, length = config.get("max_position_embeddings") or 2048, config.get(YARN_LENGTH)
    length = number(YARN_LENGTH, longest) if length is None else positive(length, YARN_LENGTH, where)
    if length != int(length):
        raise Refusal(f"{where}: {YARN_LENGTH} {length} is no whole number")
    factor = number("factor", longest / length)
    if factor <= 1:
        raise Refusal(f"{where}: rope_scaling yarn with factor {factor:g} changes nothing: use type default")
    mscale, all_dim = 1.0, 0.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):  # transformers takes both or neither
        mscale, all_dim = number("mscale", 1.0), number("mscale_all_dim", 0.0)
    if rope.get("attention_factor") is not None:
        wanted = number("attention_factor", 1.0)
        if wanted < 1:
            raise Refusal(f"{where}: rope_scaling yarn with attention_factor {wanted:g} is not supported: at least 1")
        if abs(Yarn(factor, mscale=mscale, mscale_all_dim=all_dim).attention_factor - wanted) > 1e-12:
            mscale, all_dim = (wanted - 1) / (0.1 * math.log(factor)), 0.0
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": int(length),
        "yarn_beta_fast": number("beta_fast", 32.0),
        "yarn_beta_slow": number("beta_slow", 1.0),
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": all_dim,
        "yarn_correction_range_round_to_int": bool(rope.get("truncate", True)),
    }


def scaling_json(model: ModelConfig) -> dict[str, Any] | None:
    """rope_scaling of a config.json; None where RoPE is as it was published.

    Raises:
        Refusal: two scalings at once.
    """
    linear = model.rotary_seq_len_interpolation_factor
    if linear and model.use_rope_scaling:
        raise Refusal("--rotary-seq-len-interpolation-factor with --use-rope-scaling: config.json can name only one")
    if linear:
        return {"rope_type": "linear", "factor": linear}
    if model.use_rope_scaling:
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3}
    return _yarn_json(model) if model.position_embedding_type == "yarn" else None


def _yarn_json(model: ModelConfig) -> dict[str, Any]:
    """rope_scaling of YaRN; attention_factor is spelled out, since transformers reads mscale in a way of its own."""
    factor, mscale, all_dim = model.yarn_rotary_scaling_factor, model.yarn_mscale, model.yarn_mscale_all_dim
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        YARN_LENGTH: model.yarn_original_max_position_embeddings,
        "beta_fast": model.yarn_beta_fast,
        "beta_slow": model.yarn_beta_slow,
        "attention_factor": Yarn(factor, mscale=mscale, mscale_all_dim=all_dim).attention_factor,
    }
    if mscale and all_dim:
        scaling |= {"mscale": mscale, "mscale_all_dim": all_dim}
    return scaling | ({} if model.yarn_correction_range_round_to_int else {"truncate": False})


def positive(value: object, name: str, where: object) -> float:
    """A number above 0. Raises Refusal where a file says something else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise Refusal(f"{where}: {name} {value!r} is no positive number")
    return float(value)
