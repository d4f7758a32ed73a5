# SPDX-License-Identifier: Apache-2.0
"""The ``args`` of Megatron-LM's checkpoints: the model that they describe, as our settings.

Names, defaults and meanings as in Megatron-LM's megatron/training/arguments.py, core 0.12 to 0.16. A setting of ours
has the same name there, with the exceptions below.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from megatron.training.arguments.config import ModelConfig
from megatron.training.arguments.models import derive_shape
from megatron.training.checkpoint.megatron_lm.common_file import fitting
from megatron.training.refusal import Refusal

# Settings that are of the model and say nothing of its weights or formulas.
ELSEWHERE = ("model", "transformer_impl", "vocab_size", "init_method_std", "init_method_xavier_uniform")
# What other networks have: name of the argument, values without effect, and what it would be.
OTHERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_experts": ((None,), "experts"),
    "multi_latent_attention": ((None, False), "multi-latent attention"),
    "mtp_num_layers": ((None, 0), "multi-token prediction"),
    "is_hybrid_model": ((None, False), "Mamba layers"),
    "hybrid_override_pattern": ((None,), "Mamba layers"),
    "hybrid_layer_pattern": ((None,), "Mamba layers"),
    "heterogeneous_layers_config_path": ((None,), "layers that differ"),
    "heterogeneous_layers_config_encoded_json": ((None,), "layers that differ"),
    "linear_attention_freq": ((None,), "linear attention"),
    "experimental_attention_variant": ((None,), "another attention"),
    "attention_output_gate": ((None, False), "gated attention"),
    "no_rope_freq": ((None,), "layers without RoPE"),
    "window_attn_skip_freq": ((None,), "layers without a window"),
    "qk_l2_norm": ((None, False), "queries and keys of length 1"),
    "quick_geglu": ((None, False), "another activation"),
    "glu_linear_offset": ((None, 0, 0.0), "another activation"),
    "activation_func_clamp_value": ((None,), "another activation"),
    "apply_residual_connection_post_layernorm": ((None, False), "residuals after the norm"),
    "retro_add_retriever": ((None, False), "retrieval"),
    "use_retro": ((None, False), "retrieval"),
    "spec": ((None,), "layers from a file"),
    "use_mup": ((None, False), "another scaling"),
}
# Names of Megatron-DeepSpeed's, and of Megatron-LM before core.
OLDER = {
    "norm_epsilon": ("layernorm_epsilon",),
    "rotary_base": ("rope_theta", "rotary_position_embeddings_theta"),
}
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
POSITIONS = ("learned_absolute", "rope", "yarn", "none")


def namespace(args: Any, where: object) -> dict[str, Any]:
    """What a checkpoint's ``args`` hold, by name. Raises Refusal where they are nothing of the kind."""
    if not isinstance(args, (Namespace, SimpleNamespace)):
        raise Refusal(f"checkpoint {where} has no args that can be read: it does not say of which model it is")
    return vars(args)


def settings_of(args: dict[str, Any], where: object) -> dict[str, Any]:
    """The settings of :class:`ModelConfig` that ``args`` give; those they do not know are left out.

    Raises:
        Refusal: a model of another kind, named.
    """
    found = [
        f"--{name.replace('_', '-')} ({what})"
        for name, (neutral, what) in OTHERS.items()
        if name in args and not _is_one_of(args[name], neutral)
    ]
    if found:
        raise Refusal(f"checkpoint {where} is of a model that is not built here: {', '.join(found)}")
    for size in ("num_layers", "hidden_size", "num_attention_heads"):
        if args.get(size) is None:
            raise Refusal(f"checkpoint {where}: its args give no --{size.replace('_', '-')}")
    known = {
        field.name: args[field.name]
        for field in fields(ModelConfig)
        if field.name not in ELSEWHERE and args.get(field.name) is not None
    }
    for name, older in OLDER.items():
        if name not in known and (value := next((args[one] for one in older if args.get(one) is not None), None)):
            known[name] = value
    if "add_bias_linear" not in known and isinstance(args.get("disable_bias_linear"), bool):
        known["add_bias_linear"] = not args["disable_bias_linear"]
    known["normalization"] = NORMS.get(str(known.get("normalization", "LayerNorm")).lower(), known.get("normalization"))
    if args.get("use_rotary_position_embeddings") is True:  # the older spelling
        known["position_embedding_type"] = "rope"
    positions = known.get("position_embedding_type", "learned_absolute")
    if positions not in (*POSITIONS, "alibi"):
        raise Refusal(f"checkpoint {where}: --position-embedding-type {positions} is not built here")
    if (groups := args.get("num_key_value_heads")) is not None:
        known["num_query_groups"] = groups
        known["group_query_attention"] = groups != args.get("num_attention_heads")
    if known.get("normalization") not in (None, "LayerNorm", "RMSNorm"):
        raise Refusal(f"checkpoint {where}: --normalization {known['normalization']} is not built here")
    return dict(fitting(known, where))


def model_of(args: dict[str, Any], where: object) -> ModelConfig:
    """The whole model: where ``args`` say nothing, Megatron-LM's defaults, which are ours."""
    return derive_shape(ModelConfig(**settings_of(args, where)))


def model_described(args: dict[str, Any], where: object) -> dict[str, Any]:
    """What ``args`` say of the model, widths that follow from others filled in: to be compared with a run's."""
    said, model = settings_of(args, where), model_of(args, where)
    derived = ("kv_channels", "ffn_hidden_size", "num_query_groups")
    return said | {name: getattr(model, name) for name in derived}


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    name = getattr(value, "name", value)  # of an enum
    if isinstance(value, list):  # DeepSpeed's number of experts by layer: 1 is none
        return all(one in (1, *neutral) for one in value)
    return any(value is one or name == one for one in neutral)
