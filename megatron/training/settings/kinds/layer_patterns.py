# SPDX-License-Identifier: Apache-2.0
"""Which of a model's layers are of which kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron.training.settings.kinds.kind import Model


def expert_layers(model: Model) -> list[int]:
    """1 for each layer whose FFN is a mixture of experts, 0 for the others."""
    if not model.num_experts:
        return [0] * model.num_layers
    if model.is_hybrid_model:
        return [int(kind == "E") for kind in hybrid_pattern(model)]
    frequency = model.moe_layer_freq
    if isinstance(frequency, list):
        return frequency
    return [int(layer % frequency == 0) for layer in range(model.num_layers)]


def linear_layers(model: Model) -> list[int]:
    """1 for each linear-attention or SSM layer in place of keys and values, 0 for the others."""
    frequency = model.linear_attention_freq
    if model.is_hybrid_model:
        return [int(kind == "M") for kind in hybrid_pattern(model)]
    if model.experimental_attention_variant != "gated_delta_net":
        return [0] * model.num_layers
    if isinstance(frequency, list):
        return frequency
    return [int(number % frequency != 0) for number in range(1, model.num_layers + 1)]


def hybrid_pattern(model: Model) -> str:
    """What each layer of a hybrid model is: M (Mamba2), * (attention), - (MLP) or E (experts); empty for others.

    As in core, attention is spread evenly over all layers, and MLPs over the others, nearer to the end.
    """
    if not model.is_hybrid_model:
        return ""
    if model.hybrid_override_pattern:
        return model.hybrid_override_pattern
    kinds = ["M"] * model.num_layers
    attention, mlps = (round(model.num_layers * one) for one in (model.hybrid_attention_ratio, model.hybrid_mlp_ratio))
    mamba = model.num_layers - attention
    for index in _spread(range(model.num_layers), mamba / (attention + 1)):
        kinds[index] = "*"
    if mlps:
        for index in _spread([i for i, kind in enumerate(kinds) if kind == "M"], (mamba - mlps) / mlps):
            kinds[index] = "-"
    return "".join(kinds)


def _spread(places: Iterable[int], run: float) -> Iterator[int]:
    """The places that follow runs of ``run`` places on average."""
    left = run
    for place in places:
        chosen = left < 0.5
        if chosen:
            yield place
        left += run if chosen else -1
