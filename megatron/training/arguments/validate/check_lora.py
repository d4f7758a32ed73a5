# SPDX-License-Identifier: Apache-2.0
"""Checks of adapters (--lora-rank): which layers get them."""

from __future__ import annotations

from megatron.training.refusal import LEAVE_OUT, Fix, Refusal, nearest, refuse_combinations
from megatron.training.settings.config import Config, ModelConfig
from megatron.training.settings.kinds.layer_patterns import hybrid_pattern, linear_layers

OF_LATENTS = (
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
)
STATE, FFN = ("in_proj", "out_proj"), ("linear_fc1", "linear_fc2")
JOINED = {  # names of Hugging Face's layers that are one layer here
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj", "gate_up_proj"),
    "linear_fc2": ("down_proj",),
}
LORA_TARGETS = ("linear_qkv", *OF_LATENTS, "linear_proj", *STATE, *FFN)


def complete_lora(config: Config) -> None:
    """Complete which layers get adapters; refuse Transformer Engine's layers, whose inputs are not accessible.

    With latent attention, linear_qkv stands for all layers that make queries, keys and values.
    """
    model = config.model
    if model.lora_rank is None:
        return
    layers = _layers(model)
    own = [name for name in LORA_TARGETS if any(name in names for names in layers)]
    targets = model.lora_targets
    if targets is None:  # all layers but experts
        targets = [name for name in own if name not in FFN] or own if model.num_experts else own
        if model.num_experts:
            config.notes.append(f"--lora-rank: experts get no adapters, only {', '.join(targets)}")
    targets = _own_names(config, targets)
    if unknown := [name for name in targets if name not in LORA_TARGETS]:
        near = nearest(unknown[0], [*LORA_TARGETS, *(name for names in JOINED.values() for name in names)])
        raise Refusal(
            f"--lora-targets {unknown[0]}",
            f": not supported; did you mean {near}? Layers are {', '.join(LORA_TARGETS)}",
        )
    if model.multi_latent_attention and "linear_qkv" in targets:
        targets = [name for name in LORA_TARGETS[1:] if name in targets or name in {*OF_LATENTS} & {*own}]
    if model.num_experts:
        own, given = [name for name in own if name not in FFN], {*FFN} & {*targets}
        others = f"--lora-targets {' '.join(own)}"
        refused = {
            "--lora-targets linear_fc1": (given and own, f"experts have no adapters: use {others}"),
            "--lora-rank": (not own, "experts have no adapters, and no layer has attention or a state"),
        }
        refuse_combinations(f"--num-experts {model.num_experts}", refused, {"--lora-targets": others})
    if absent := [name for name in targets if name not in own]:
        if model.is_hybrid_model and absent[0] == "out_proj":
            reason = "is not supported for Mamba2, as in PEFT, because kernels read its weight without calling it"
        else:
            reason = "is no layer of this model"
        raise Refusal(f"--lora-targets {absent[0]}", f"{reason}: choose from {', '.join(own)}")
    model.lora_targets = [name for name in LORA_TARGETS if name in targets]
    if not targets:
        raise Refusal("--lora-targets", "names no layer: give one, or leave it out for the usual ones", LEAVE_OUT)
    if model.transformer_impl == "transformer_engine" or model.fp8_format:
        given = "--fp8-format" if model.fp8_format else "--transformer-impl transformer_engine"
        raise Refusal(
            f"--lora-rank with {given}",
            "is not supported, since the inputs of Transformer Engine's layers are not accessible: use "
            "--transformer-impl local, without FP8",
            Fix("--transformer-impl local"),
        )
    model.transformer_impl = "local"


def _own_names(config: Config, targets: list[str]) -> list[str]:
    """``targets`` with our names for Hugging Face's layers; a note says what else gets the joined layer's adapter."""
    ours = {theirs: name for name, names in JOINED.items() for theirs in names}
    result = list(dict.fromkeys(ours.get(name, name) for name in targets))
    for name in result:
        parts, given = JOINED.get(name, ())[:3], [target for target in targets if ours.get(target) == name]
        left = [part for part in parts if not part.startswith(("qkv", "gate_up")) and part not in given]
        if given and left and not {*given} & {"qkv_proj", "query_key_value", "gate_up_proj"}:
            config.notes.append(
                f"--lora-targets {' '.join(given)}: {name} is one layer here, so its adapter also changes "
                f"{' and '.join(left)}"
            )
    return result


def _layers(model: ModelConfig) -> list[tuple[str, ...]]:
    """For each layer, core's names of its linear layers that can have adapters; experts count as an MLP."""
    attention = ["linear_qkv", "linear_proj"]
    if model.multi_latent_attention:
        attention[:1] = OF_LATENTS[:1] + OF_LATENTS[3:] if model.q_lora_rank is None else OF_LATENTS[1:]
    if model.is_hybrid_model:
        kinds = {"M": STATE[:1], "*": attention, "-": FFN, "E": FFN}
        return [(*kinds[kind],) for kind in hybrid_pattern(model)]
    return [(*(STATE if state else attention), *FFN) for state in linear_layers(model)]
