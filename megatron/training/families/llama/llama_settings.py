# SPDX-License-Identifier: Apache-2.0
"""Convert a Llama's settings from config.json, to config.json, and to command-line flags."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from megatron.context_parallel.positions.rope import LLAMA3_HIGH, LLAMA3_LENGTH, LLAMA3_LOW, Yarn
from megatron.training.json_file import parse_json, read_bytes
from megatron.training.refusal import Refusal, reason
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.flag import FUNCTION, WEIGHTS, every
from megatron.training.settings.kinds import KINDS, kinds_in
from megatron.training.settings.models import LLAMA, derive_shape
from megatron.training.settings.read_with import ROTARY
from megatron.training.untrusted.largest_numbers import check_numbers

# Constants of Llama 3's RoPE scaling in Megatron; only the factor can be set.
LLAMA3 = {
    "low_freq_factor": LLAMA3_LOW,
    "high_freq_factor": LLAMA3_HIGH,
    "original_max_position_embeddings": LLAMA3_LENGTH,
}
YARN_LENGTH = "original_max_position_embeddings"


def rope_settings(config: dict[str, Any], where: object) -> dict[str, Any]:
    """RoPE settings from rope_theta and rope_scaling (transformers 4) or rope_parameters (transformers 5)."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise Refusal(f"{where}: rope_parameters by layer type are not supported")
    theta = positive(rope.get("rope_theta", config.get("rope_theta", 10000.0)), "rope_theta", where)
    if theta != int(theta):
        raise Refusal(f"{where}: rope_theta {theta} is not supported: --rotary-base must be an integer")
    if (share := rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1.0):
        raise Refusal(f"{where}: partial_rotary_factor {share} is not supported for llama")
    result: dict[str, Any] = {"rotary_base": int(theta)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "linear":
        result["rotary_seq_len_interpolation_factor"] = positive(rope.get("factor"), "factor of rope_scaling", where)
    elif kind == "llama3":
        for name, fixed in LLAMA3.items():
            if (value := rope.get(name, config.get(name))) != fixed:
                raise Refusal(f"{where}: rope_scaling llama3 with {name} {value} is not supported: only {fixed:g}")
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
    """YaRN settings. As in transformers, the original length may be outside rope_scaling; defaults are derived."""

    def number(name: str, default: float) -> float:
        return positive(default if rope.get(name) is None else rope[name], f"{name} of rope_scaling", where)

    longest, length = config.get("max_position_embeddings") or 2048, config.get(YARN_LENGTH)
    length = number(YARN_LENGTH, longest) if length is None else positive(length, YARN_LENGTH, where)
    if length != int(length):
        raise Refusal(f"{where}: {YARN_LENGTH} {length} is not an integer")
    factor = number("factor", longest / length)
    if factor <= 1:
        raise Refusal(f"{where}: rope_scaling yarn with factor {factor:g} has no effect: use type default")
    mscale, all_dim = 1.0, 0.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):  # transformers uses both or neither
        mscale, all_dim = number("mscale", 1.0), number("mscale_all_dim", 0.0)
    if rope.get("attention_factor") is not None:
        wanted = number("attention_factor", 1.0)
        if wanted < 1:
            raise Refusal(f"{where}: rope_scaling yarn: attention_factor {wanted:g} must be at least 1")
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
    """rope_scaling of a config.json; None without scaling.

    Raises:
        Refusal: two scalings at once.
    """
    linear = model.rotary_seq_len_interpolation_factor
    if linear and model.use_rope_scaling:
        raise Refusal(
            "--rotary-seq-len-interpolation-factor with --use-rope-scaling: config.json can name only one scaling"
        )
    if linear:
        return {"rope_type": "linear", "factor": linear}
    if model.use_rope_scaling:
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3}
    return _yarn_json(model) if model.position_embedding_type == "yarn" else None


def _yarn_json(model: ModelConfig) -> dict[str, Any]:
    """rope_scaling of YaRN, with an explicit attention_factor, because transformers interprets mscale differently."""
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
    """``value`` as a float. Raises Refusal if it is not a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise Refusal(f"{where}: {name} {value!r} is not a positive number")
    return float(value)


def whole(value: object, name: str, where: object, least: int = 1) -> int:
    """``value``, a whole number from ``least``. Raises Refusal if it is none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive whole number" if least == 1 else f"a whole number from {least}"
        raise Refusal(f"{where}: {name} {value!r} is not {kind}")
    return value


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALING = ("rope_theta", "rope_scaling", "rope_parameters")
YARN = [field.name for field in fields(ModelConfig) if field.name.startswith("yarn_")]
# Settings that are on by default, and the flags that switch them off.
OFF = {
    "add_bias_linear": "--disable-bias-linear",
    "yarn_correction_range_round_to_int": "--no-yarn-correction-range-round-to-int",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
}
# Settings that a Llama's config.json says. All Llama models share the others, most of which are features that are off.
SAID = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels position_embedding_type
    rotary_base rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor norm_epsilon add_bias_linear
    untie_embeddings_and_output_weights
""".split()
# Models with layers of these kinds are of other families.
OTHERS = [kind.condition.switch for kind in KINDS if not kind.condition.value]
FIXED = {"squared_relu": False} | {
    field.name: LLAMA.get(field.name, field.default)
    for field in fields(ModelConfig)
    if field.metadata.get("network") in (WEIGHTS, FUNCTION)
    and field.name not in (*SAID, *YARN)
    and field.name not in OTHERS
    and not any(condition.switch for condition in every(field, "read_with"))
}

PLACES = ("reordered_norm", "qk_layernorm_all_heads", "parallel_residual")
# Settings of experts that have our defaults in these models.
ROUTER = ("moe_layer_freq", "moe_shared_expert_intermediate_size", "moe_router_score_function",
          "moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor",
          "moe_router_enable_expert_bias", "moe_expert_capacity_factor", "moe_shared_expert_gate")  # fmt: skip


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json. Raises Refusal if it is missing, not a JSON object, or has a number that is too large."""
    try:
        config = parse_json(read_bytes(path))
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: {reason(error)}") from None
    if not isinstance(config, dict):
        raise Refusal(f"{path}: not a JSON object")
    check_numbers(config, path)
    return config


def settings(config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
    """(our settings, vocabulary size) of a Llama's config.json; ``where`` names it in messages.

    Raises:
        Refusal: it is not a plain Llama, or has a setting that is not supported.
    """
    _plain_llama(config, where)

    def integer(name: str, default: int) -> int:
        value = config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Refusal(f"{where}: {name} {value!r} is not a positive integer")
        return value

    heads, hidden = integer("num_attention_heads", 32), integer("hidden_size", 4096)
    groups = integer("num_key_value_heads", heads)
    if heads % groups:
        raise Refusal(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    if config.get("head_dim") is None and hidden % heads:
        raise Refusal(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}: head_dim is missing"
        )
    biases = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if biases[0] != biases[1]:
        raise Refusal(
            f"{where}: attention_bias {biases[0]} with mlp_bias {biases[1]} is not supported: "
            "megatron-core has biases in all of its linear layers or in none"
        )
    model = ModelConfig(
        num_layers=integer("num_hidden_layers", 32),
        hidden_size=hidden,
        ffn_hidden_size=integer("intermediate_size", 11008),
        num_attention_heads=heads,
        group_query_attention=groups != heads,
        num_query_groups=groups,
        kv_channels=integer("head_dim", hidden // heads),
        max_position_embeddings=integer("max_position_embeddings", 2048),
        norm_epsilon=positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
        add_bias_linear=biases[0],
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **{name: value for name, value in FIXED.items() if name in LLAMA},
        **({"position_embedding_type": "rope"} | rope_settings(config, where)),
    )
    if model.kv_channels % 2:
        raise Refusal(f"{where}: head_dim {model.kv_channels} is odd, but RoPE rotates pairs")
    return derive_shape(model), integer("vocab_size", 32000)


def updated_config(
    original: dict[str, Any], before: dict[str, Any], dtype: torch.dtype | None, new: dict[str, Any]
) -> dict[str, Any]:
    """``original`` with the settings that training changed.

    Args:
        before: the config.json that we would write for the original.
        dtype: of the original's weights; None if only its config.json gives it.
        new: the same as ``before``, for the trained model.
    """
    if dtype is None:
        before["torch_dtype"] = original.get("dtype", original.get("torch_dtype"))
    ignored = ("architectures", "bos_token_id", "eos_token_id")
    changed = {name: value for name, value in new.items() if before.get(name) != value and name not in ignored}
    if ("id2label" in before) != ("id2label" in new):
        changed["architectures"] = new["architectures"]
    result = dict(original)
    if any(name in SCALING for name in changed):
        result = {name: value for name, value in result.items() if name not in SCALING}
        changed |= {name: new[name] for name in SCALING if name in new}
    if "torch_dtype" in changed and "dtype" in original:
        changed["dtype"] = changed.pop("torch_dtype")
    return result | changed


def command_line(model: ModelConfig, dtype: torch.dtype) -> list[str]:
    """The flags that describe the model to the program that :func:`program` names."""
    names = ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"]
    names += ["group_query_attention", "num_query_groups"] if model.group_query_attention else []
    names += ["kv_channels"] + ["max_position_embeddings"] * (model.max_position_embeddings is not None)
    names += ["position_embedding_type"] + ["rotary_base"] * (model.position_embedding_type in ROTARY)
    names += ["rotary_percent"] if model.rotary_percent != 1 else []
    names += ["rotary_interleaved"] if model.rotary_interleaved else []
    names += ["rotary_seq_len_interpolation_factor"] if model.rotary_seq_len_interpolation_factor else []
    names += ["use_rope_scaling", "rope_scaling_factor"] if model.use_rope_scaling else []
    names += YARN if model.position_embedding_type == "yarn" else []
    names += [name for name, usual in FIXED.items() if usual is None and getattr(model, name) is not None]
    names += ["normalization", "norm_epsilon", "swiglu", "geglu", "apply_layernorm_1p", "sandwich_norm"]
    names += [name for name in ("quick_geglu", "glu_linear_offset") if getattr(model, name)]
    names += ["attention_output_gate"]
    if model.experimental_attention_variant:
        variant = next(kind.condition for kind in kinds_in(model) if kind.condition.value)
        own = (field for field in fields(ModelConfig) if field.metadata.get("read_with") is variant)
        names += [field.name for field in own if field.metadata.get("network")]
    if model.is_hybrid_model:
        names += ["is_hybrid_model", "hybrid_override_pattern", "squared_relu"]
        names += [field.name for field in fields(ModelConfig) if field.name.startswith("mamba_")]
    names += ["softmax_type"] if model.softmax_type != "vanilla" else []
    names += [] if model.gated else ["bias_gelu_fusion"]
    names += [name for name in PLACES if getattr(model, name)]
    names += ["scale_embeddings", "add_bias_linear", "untie_embeddings_and_output_weights"]
    names += ["add_qkv_bias", "qk_layernorm", "embed_layernorm", "hidden_dropout", "attention_dropout"]
    if model.multi_latent_attention:
        names += ["multi_latent_attention"] + ["q_lora_rank"] * (model.q_lora_rank is not None)
        names += ["kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"]
        names += ["latent_norm_epsilon"] if model.latent_norm_epsilon else []
    names += [name for name in ("mtp_num_layers", "reward_model") if getattr(model, name)]
    if model.num_experts:
        usual = ModelConfig(moe_router_topk=0)  # this one is always written
        moe = [field.name for field in fields(ModelConfig) if field.name.startswith("moe_")]
        names += ["num_experts"] + [name for name in moe if getattr(model, name) != getattr(usual, name)]
    words: list[str] = []
    for name in names:
        value = getattr(model, name)
        if name in OFF:
            words += [] if value else [OFF[name]]
        elif isinstance(value, bool):
            words += ["--" + name.replace("_", "-")] if value else []
        else:
            text = f"{value!r}" if isinstance(value, float) else str(value).replace(" ", "")
            words += ["--" + name.replace("_", "-"), text]
    return words + {torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"]}.get(dtype, [])


def window_flags(attention: dict[str, Any]) -> list[str]:
    """The flags of the settings that a family's ``attention`` gives."""
    if not attention:
        return []
    skip = attention.get("window_attn_skip_freq")
    pattern = [] if skip is None else ["--window-attn-skip-freq", str(skip).replace(" ", "")]
    return ["--window-size", "{},{}".format(*attention["window_size"]), *pattern]


def program(model: ModelConfig) -> str:
    """The script to train with. No flag of pretrain_llama.py enables tied embeddings, biases or MLPs without a gate."""
    tied = not model.untie_embeddings_and_output_weights
    return "pretrain_gpt.py" if tied or model.add_bias_linear or model.is_hybrid_model else "pretrain_llama.py"


def saved_settings(saved: dict[str, Any]) -> ModelConfig:
    """The model settings in a checkpoint; fields that ModelConfig does not have are ignored."""
    known = {field.name for field in fields(ModelConfig)}
    return derive_shape(ModelConfig(**{name: value for name, value in saved.items() if name in known}))


def _plain_llama(config: dict[str, Any], where: object) -> None:
    """Refuse a Llama with custom code, quantization or another activation."""
    if "auto_map" in config:
        raise Refusal(f"{where}: auto_map asks for code from the checkpoint, which is never run")
    if config.get("quantization_config"):
        raise Refusal(
            f"{where}: quantization_config is not supported: save the model in bf16, fp16 or fp32, or "
            "convert it with tools/convert_hf.py, which dequantizes MXFP4 and FP8"
        )
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise Refusal(f"{where}: hidden_act {act} is not supported: only silu")
