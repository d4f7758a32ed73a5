# SPDX-License-Identifier: Apache-2.0
"""Kinds of layers that not every model has.

Each is a file here: settings, checks, what megatron-core gets, which closed forms it has (formulas/) and which mixer
(context_parallel/core/mixers/). Attention and MLP are what other layers have: model_settings.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.settings.kinds import (
    dsa_kind,
    expert_kind,
    gated_delta_kind,
    hybrid_kind,
    latent_kind,
    later_tokens_kind,
)
from megatron.training.settings.kinds.kind import Kind, Model

# Of two kinds with a mixer for the same layer, the later one's is used.
KINDS = (
    expert_kind.KIND,
    latent_kind.KIND,
    dsa_kind.KIND,
    gated_delta_kind.KIND,
    hybrid_kind.KIND,
    later_tokens_kind.KIND,
)


def kinds_in(model: Model) -> list[Kind]:
    """The kinds of layers that a model has."""
    return [kind for kind in KINDS if kind.condition.chosen(vars(model))]


def mixers_of(model: Model) -> dict[int, Kind]:
    """For layers, from 0, that mix tokens otherwise than by attention of keys and values: the kind with their mixer."""
    return {layer: kind for kind in kinds_in(model) for layer, has in enumerate(kind.layers(model)) if has}


@dataclass
class KindSettings(
    expert_kind.ExpertSettings,
    later_tokens_kind.LaterTokenSettings,
    hybrid_kind.HybridSettings,
    gated_delta_kind.LinearSettings,
    dsa_kind.DsaSettings,
    latent_kind.LatentSettings,
):
    """The settings of all kinds."""
