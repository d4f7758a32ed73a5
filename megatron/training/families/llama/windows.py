# SPDX-License-Identifier: Apache-2.0
"""Windows of layers in a config.json, and the RoPE of layers with and without a window."""

from __future__ import annotations

from typing import Any

from megatron.training.families.llama import llama_settings
from megatron.training.refusal import Refusal
from megatron.training.settings.config import AttentionConfig, ModelConfig
from megatron.training.settings.models import window_layers

LOCAL, WHOLE = "sliding_attention", "full_attention"
LAYER_TYPES = "layer_types"


def read_ropes(config: dict[str, Any], where: object, default: float) -> tuple[dict[str, Any], int]:
    """(RoPE of the layers without a window, as a Llama's config.json has it; base of the others, which is not scaled).

    Args:
        default: that base in a config.json of transformers 4 that does not give it.
    """
    given = config.get("rope_parameters")
    if isinstance(given, dict) and LOCAL in given:
        local, whole = given[LOCAL], given.get(WHOLE)
        if not isinstance(local, dict) or not isinstance(whole, dict):
            raise Refusal(f"{where}: rope_parameters must have {LOCAL} and {WHOLE}")
        if local.get("rope_type", "default") != "default":
            raise Refusal(f"{where}: scaled RoPE in layers with a window is not supported")
        base, found = local.get("rope_theta"), {"rope_parameters": whole, "rope_scaling": None}
    else:  # as transformers 4 writes it
        base, found = config.get("rope_local_base_freq", default), {}
    base = llama_settings.positive(base, "rope_theta of layers with a window", where)
    if base != int(base):
        raise Refusal(f"{where}: rope_theta {base} of layers with a window is not an integer")
    return found, int(base)


def read_windows(config: dict[str, Any], where: object) -> dict[str, Any]:
    """The settings of :class:`AttentionConfig` of a config.json: the window, and which layers have it."""
    kinds, window, layers = config[LAYER_TYPES], config["sliding_window"], config["num_hidden_layers"]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (LOCAL, WHOLE) for kind in kinds):
        raise Refusal(f"{where}: layer_types must name {LOCAL} or {WHOLE} for each of {layers} layers")
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise Refusal(f"{where}: sliding_window {window!r} is not a positive integer")
    if LOCAL not in kinds:
        return {}
    own = [int(kind == LOCAL) for kind in kinds]
    pattern = {} if all(own) else {"window_attn_skip_freq": own}
    return {"attention_mask": "window", "window_size": (window - 1, 0), **pattern}


def written_windows(model: ModelConfig, attention: dict[str, Any] | None) -> dict[str, Any]:
    """The keys of config.json for the windows of ``attention``."""
    known = {name: (attention or {}).get(name) for name in ("window_size", "window_attn_skip_freq")}
    windows = [0] * model.num_layers
    if known["window_size"] is not None:
        windows = window_layers(AttentionConfig(**known), model.num_layers)
    left = known["window_size"][0] if known["window_size"] else model.max_position_embeddings
    return {"sliding_window": left + 1, LAYER_TYPES: [LOCAL if own else WHOLE for own in windows]}
