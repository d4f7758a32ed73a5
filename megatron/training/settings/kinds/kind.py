# SPDX-License-Identifier: Apache-2.0
"""What a kind of layers is: everything about it is found from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.training.settings.read_with import Condition

Settings = Any
"""A :class:`Config`, or its model: it consists of the settings of kinds, so they cannot import it."""


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
    """

    condition: Condition
    shape: Callable[[Settings], dict[str, Any]] = lambda model: {}
    prepare: Callable[[Settings], None] = lambda config: None
    complete: Callable[[Settings], None] = lambda config: None
    check: Callable[[Settings, int], None] = lambda config, world_size: None
    core: Callable[[Settings], dict[str, Any]] = lambda config: {}
    mixer: str | None = None
    layers: Callable[[Settings], list[int]] = lambda model: [0] * model.num_layers
    options: Callable[[Settings], dict[str, Any]] = lambda config: {}


def settings_of(condition: Condition) -> Callable[[type], type]:
    """A class of the settings of a kind: without its layers, nothing reads them but the switch."""

    def define(section: type) -> type:
        for setting in fields(dataclass(section)):
            if setting.name != condition.switch:
                setting.metadata = MappingProxyType({**setting.metadata, "read_with": condition})
        return section

    return define
