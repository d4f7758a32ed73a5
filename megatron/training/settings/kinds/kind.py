# SPDX-License-Identifier: Apache-2.0
"""What a kind of layers is: everything about it is found from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from megatron.training.settings.read_with import Condition


class Model(Protocol):
    """A :class:`ModelConfig`: it consists of the settings of kinds, so they cannot import it."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int

    def __getattr__(self, setting: str) -> Any: ...


class Run(Protocol):
    """A :class:`Config`: its sections by name."""

    model: Model
    notes: list[str]

    def __getattr__(self, section: str) -> Any: ...


class Kind(NamedTuple):
    """A kind of layers that not every model has.

    Attributes:
        condition: which models have such layers; its settings name it.
        shape: of a model, the fields of :class:`Shape` with the sizes and closed forms of such layers.
        prepare: complete what the model's shape depends on; refuse what contradicts it.
        complete: the same, when the shape is known.
        check: the same, when the grid is known: of a configuration and the number of processes.
        core: what megatron-core gets of a configuration besides the settings with ``core``.
        mixer: "module:function" in context_parallel/core/mixers/, for what stands in place of attention.
        layers: of a model, 1 for each layer with this mixer, 0 for the others.
        options: arguments of the mixer, of a configuration.
        built: "module:function" there, called with each part of the model when its weights have initial values; None:
            there is nothing to do.
        loss: name in the log of a loss of these layers, which modules sum up in ``layer_loss``; None: they have none.
        starts: for each layer, whether it needs nothing that the layer before it hands on, so that a pipeline stage may
            begin with it.
        note: what to say about the mixer on this grid, where a layer has it; None: nothing.
        trains: of the settings of a model, also of a checkpoint's, what alone is trained; None: all weights.
        differs: whether layers have different weights, so that each has its own names in checkpoints.
    """

    condition: Condition
    shape: Callable[[Model], dict[str, Any]] = lambda model: {}
    prepare: Callable[[Run], None] = lambda config: None
    complete: Callable[[Run], None] = lambda config: None
    check: Callable[[Run, int], None] = lambda config, world_size: None
    core: Callable[[Run], dict[str, Any]] = lambda config: {}
    mixer: str | None = None
    layers: Callable[[Model], list[int]] = lambda model: [0] * model.num_layers
    options: Callable[[Run], dict[str, Any]] = lambda config: {}
    built: Callable[[Model], str | None] = lambda model: None
    loss: Callable[[Model], str | None] = lambda model: None
    starts: Callable[[Model], list[bool]] = lambda model: [True] * model.num_layers
    note: Callable[[Run], str | None] = lambda config: None
    trains: Callable[[Mapping[str, Any]], str | None] = lambda settings: None
    differs: Callable[[Model], bool] = lambda model: False


def settings_of(condition: Condition) -> Callable[[type], type]:
    """A class of the settings of a kind: without its layers, nothing reads them but the switch."""

    def define(section: type) -> type:
        for setting in fields(dataclass(section)):
            if setting.name != condition.switch:
                setting.metadata = MappingProxyType({**setting.metadata, "read_with": condition})
        return section

    return define
