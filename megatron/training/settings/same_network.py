# SPDX-License-Identifier: Apache-2.0
"""Whether two networks are the same: which settings differ that determine the weights, or what is computed with them.

The field of a setting says its role (settings/flag.py). A setting that the network does not read is not compared, and
two ways to write the same network, such as a pattern of layers as a number or as a list, are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron.training.settings.attention_settings import MASKS
from megatron.training.settings.config import AttentionConfig, Config, ModelConfig
from megatron.training.settings.flag import ADAPTERS, FUNCTION, WEIGHTS, kinds_of
from megatron.training.settings.kinds import KINDS
from megatron.training.settings.kinds.layer_patterns import expert_layers, hybrid_pattern, linear_layers
from megatron.training.settings.models import (
    activation,
    derive_shape,
    rope_layers,
    window_layers,
)
from megatron.training.settings.read_with import ROTARY

SECTIONS = ("model", "attention", "data")
# Models of checkpoints that are older than these settings have none of these kinds.
OLDER = {kind.condition.switch: getattr(ModelConfig, kind.condition.switch) for kind in KINDS}
POSITIONS = ("position_embedding_type", "max_position_embeddings")  # determine weights if positions are learned
FILES = ("mask_function", "sparse_pattern")  # may name a file, which may have moved to another folder
CLOSE = 1e-9  # numbers that differ by less, relatively, are equal: a scale may have been written as its inverse square


class Differences(NamedTuple):
    """What differs between two networks, a text for each setting.

    Attributes:
        weights: settings that determine the shapes of weights.
        function: settings that change what is computed with them.
    """

    weights: list[str]
    function: list[str]


@cache
def roles() -> dict[str, tuple[str, str]]:
    """{name: (section, role)} of the settings that are part of the network."""
    config = Config()
    return {
        field.name: (section, field.metadata["network"])
        for section in SECTIONS
        for field in fields(getattr(config, section))
        if field.metadata.get("network", ADAPTERS) != ADAPTERS
    }


def attention_settings() -> list[str]:
    """Names of the settings of :class:`AttentionConfig` that are part of the network."""
    return [name for name, (section, _) in roles().items() if section == "attention"]


def flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """{name: value} of the sections of a configuration that hold settings of the network."""
    return {name: value for section in SECTIONS for name, value in (sections.get(section) or {}).items()}


def of_run(config: Config) -> dict[str, Any]:
    """The settings of a run, by name."""
    return flat({section: vars(getattr(config, section)) for section in SECTIONS})


def of_model(model: ModelConfig, attention: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings of a model and its attention, by name; missing ones of attention have their defaults."""
    given = {name: value for name, value in (attention or {}).items() if name in attention_settings()}
    return asdict(model) | asdict(AttentionConfig(attention_mask="causal")) | given


def differences(
    there: Mapping[str, Any], here: Mapping[str, Any], places: tuple[str, str] = ("in the checkpoint", "in this run")
) -> Differences:
    """How the network ``there`` differs from the network ``here``.

    Args:
        there: settings of a model; those that are missing are taken to be equal.
        here: settings of a complete model.
        places: where the two are, for the texts.
    """
    found = Differences([], [])
    if not there:
        return found
    older = {} if "bias_gelu_fusion" in there else {"openai_gelu": True}  # older runs always compute GELU by tanh
    there = {**here, **OLDER, **older, **there}
    theirs, own = _canonical(there), _canonical(here)
    unread, learned = _unread(here), "learned_absolute" in (there[POSITIONS[0]], here[POSITIONS[0]])
    if there[POSITIONS[0]] != "yarn":  # where the kinds of positions differ, that says it
        unread = (*unread, "yarn_")
    for name in own:
        if name.startswith(unread) or _equal(theirs[name], own[name]):
            continue
        if name == "activation":
            text = f"the activation {theirs[name]} {places[0]}, {own[name]} {places[1]}"
        else:
            text = f"--{name.replace('_', '-')} {shown(there[name])} {places[0]}, {shown(here[name])} {places[1]}"
        weights = learned if name in POSITIONS else roles().get(name, ("", FUNCTION))[1] == WEIGHTS
        (found.weights if weights else found.function).append(text)
    return found


def _unread(here: Mapping[str, Any]) -> tuple[str, ...]:
    """Beginnings of the names of settings that this network does not read."""
    kind, mask = here["position_embedding_type"], here.get("attention_mask")
    unread = [] if kind == "learned_absolute" else ["max_position_embeddings"]
    unread += [one.name for one in fields(ModelConfig) if any(not kind.chosen(here) for kind in kinds_of(one))]
    unread += [] if kind in ROTARY else ["rotary_", "no_rope_freq", "use_rope_scaling"]
    unread += [] if kind == "yarn" else ["yarn_"]
    unread += [] if here["use_rope_scaling"] else ["rope_scaling_factor"]
    return (*unread, *(name for other, kind in MASKS.items() if other not in (mask, "window") for name in kind.flags))


def _canonical(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are part of the network, in a form in which equal networks are equal."""
    model = derive_shape(ModelConfig(**{field.name: settings[field.name] for field in fields(ModelConfig)}))
    result = {name: settings[name] for name in roles() if name in settings} | {POSITIONS[1]: settings[POSITIONS[1]]}
    result |= {name: getattr(model, name) for name in ("kv_channels", "ffn_hidden_size", "num_query_groups")}
    result |= {
        "activation": activation(model),
        "softmax_scale": model.softmax_scale or model.kv_channels**-0.5,
        "rotary_base_local": model.rotary_base_local or model.rotary_base,
        "no_rope_freq": rope_layers(model),
        "hybrid_override_pattern": hybrid_pattern(model),
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
    }
    for part in ("swiglu", "geglu", "quick_geglu"):  # the activation, but gated MLPs have other weights
        result[part] = model.gated
    for part in ("hybrid_attention_ratio", "hybrid_mlp_ratio"):  # the pattern
        del result[part]
    if model.linear_attention_freq is not None:
        result["linear_attention_freq"] = linear_layers(model)
    if model.num_experts and model.moe_layer_freq:
        result["moe_layer_freq"] = expert_layers(model)
        if all(result["moe_layer_freq"]):  # no layer has an MLP of the other width
            result["ffn_hidden_size"] = result["moe_ffn_hidden_size"]
    if model.position_embedding_type == "yarn":
        from megatron.context_parallel.positions.rope import Yarn  # imports torch, which --help does not need

        factor, mscale, all_dim = model.yarn_rotary_scaling_factor, model.yarn_mscale, model.yarn_mscale_all_dim
        result["yarn_mscale"] = Yarn(factor, mscale=mscale, mscale_all_dim=all_dim).attention_factor
        result["yarn_mscale_all_dim"] = all_dim if model.multi_latent_attention else 0.0  # it scales their scores too
    if result.get("attention_mask") in ("window", "document", None):
        result["attention_mask"] = "causal"  # the window has its own setting, and documents too
    if settings.get("window_size") is not None:
        skip = AttentionConfig(window_attn_skip_freq=settings.get("window_attn_skip_freq"))
        result["window_attn_skip_freq"] = window_layers(skip, model.num_layers)
    for name in FILES:
        result[name] = Path(settings[name]).name if settings.get(name) else None
    return result


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=CLOSE)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return one == other


def shown(value: Any) -> str:
    """A setting's value as its flag takes it."""
    if isinstance(value, tuple) or (isinstance(value, list) and value and isinstance(value[0], str)):
        return ",".join(map(str, value))
    return str(value).replace(" ", "") if isinstance(value, list) else str(value)
