# SPDX-License-Identifier: Apache-2.0
"""A part of a tensor of ours from a checkpoint of Megatron-LM, whatever the form it lies there in.

Weights: all layers of a kind as one tensor [layers, ...], or a tensor a layer. Norms have Transformer Engine's names in
either kind of layer, as core maps them; older names are tried too. Optimizer states:

- as the weights (``fully_reshardable``, and optimizers that are not distributed);
- ``fully_sharded_model_space`` (core before 0.15): [X, Y] in local parts [x, y] lies there as [X/x, Y/y, x*y];
- ``dp_reshardable`` (core 0.15 and later): see buckets.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megatron.training.checkpoint.megatron_lm.buckets import Buckets
from megatron.training.checkpoint.megatron_lm.stored import Shape, StoredTensors, copy_overlap
from megatron.training.checkpoint.megatron_lm.whole import WholeTensors
from megatron.training.refusal import Refusal

STATE = "optimizer.state."
MAIN = ("param", "fp32_param")  # names of an optimizer's own copy of the weights
PREFIXES = ("", "model.", "module.")
OLDER = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@dataclass
class Source:
    """Where parts come from; ``asked`` collects the names of weights that were asked for, or whose states were."""

    stored: StoredTensors | WholeTensors
    buckets: Buckets | None = None
    asked: set[str] = field(default_factory=set)

    def read(self, wanted: ShardedTensor) -> Tensor:
        """The data of ``wanted``, in its local shape.

        Raises:
            Refusal: it is not there, or has another shape.
        """
        offset = tuple(wanted.global_offset)
        shape = (1,) * wanted.prepend_axis_num + tuple(wanted.local_shape)
        state, key = self._split(wanted.key)
        self.asked.update(self._stacked(key))
        part = self._state(state, key, offset, shape) if state else self._weight(wanted, key, offset, shape)
        return part.reshape(wanted.local_shape)

    @staticmethod
    def _split(key: str) -> tuple[str | None, str]:
        if not key.startswith(STATE):
            return None, key
        state, _, rest = key.removeprefix(STATE).partition(".")
        return state, rest

    def _weight(self, wanted: ShardedTensor, key: str, offset: Shape, shape: Shape) -> Tensor:
        found = self._find(key, offset)
        if found is None:
            raise Refusal(f"checkpoint {self.stored.folder} has no {key}: it is of another model")
        name, single = found
        there, here = self.stored.shape(name), tuple(wanted.global_shape)[single:]
        alike = there[1:] == here[1:] if wanted.allow_shape_mismatch else there == here
        if not alike:
            raise Refusal(
                f"checkpoint {self.stored.folder} is of another model: {name} is {list(there)} there, {list(here)} here"
            )
        return self.stored.read(name, offset[single:], shape[single:])

    def _state(self, state: str, key: str, offset: Shape, shape: Shape) -> Tensor:
        if self.buckets is not None:
            return self.buckets.read(state, key, offset, shape)
        for name in MAIN if state in MAIN else (state,):
            found = self._find(f"{STATE}{name}.{key}", offset)
            if found is not None:
                return self._unflattened(*found, key, offset, shape)
        found = self._find(key, offset) if state in MAIN else None  # fp32: the weights themselves
        if found is None:
            raise Refusal(
                f"checkpoint {self.stored.folder} has no {state} of {key} in its optimizer: pass --no-load-optim"
            )
        return self.stored.read(found[0], offset[found[1] :], shape[found[1] :])

    def _unflattened(self, name: str, single: int, key: str, offset: Shape, shape: Shape) -> Tensor:
        """A block of a state, which may lie there in flat parts."""
        offset, shape = offset[single:], shape[single:]
        there = self.stored.shape(name)
        if len(there) == len(offset):
            return self.stored.read(name, offset, shape)
        weight = self._find(key, (0,) if single else offset)
        whole = self.stored.shape(weight[0])
        parts, size = there[:-1], tuple(length // parts for length, parts in zip(whole, there[:-1]))
        if len(parts) != len(whole) or prod(size) != there[-1]:
            raise Refusal(f"checkpoint {self.stored.folder}: {name} is {list(there)}, its weight {list(whole)}")
        out = torch.zeros(shape, dtype=self.stored.dtype(name))
        touched = (
            range(first // step, min(-(-(first + length) // step), count))
            for first, length, step, count in zip(offset, shape, size, parts)
        )
        for index in product(*touched):
            flat = self.stored.read(name, (*index, 0), (1,) * len(index) + there[-1:])
            copy_overlap(out, offset, flat.reshape(size), [at * step for at, step in zip(index, size)])
        return out

    def _find(self, key: str, offset: Sequence[int]) -> tuple[str, int] | None:
        """(name in the checkpoint, 1 if it is of a single layer, else 0)."""
        return next(
            ((name, int(name not in self._stacked(key))) for name in self._names(key, offset) if name in self.stored),
            None,
        )

    @staticmethod
    def _stacked(key: str) -> list[str]:
        prefix, rest = ("", key)
        if key.startswith(STATE):
            head, _, rest = key.removeprefix(STATE).partition(".")
            prefix = f"{STATE}{head}."
        keys = [rest] + [rest.replace(new, old) for new, old in OLDER.items() if new in rest]
        return [f"{prefix}{before}{one}" for before in PREFIXES for one in keys]

    def _names(self, key: str, offset: Sequence[int]) -> list[str]:
        stacked = self._stacked(key)
        if "decoder.layers." not in key:
            return stacked
        return stacked + [one.replace("decoder.layers.", f"decoder.layers.{offset[0]}.") for one in stacked]


def weights_in(stored: StoredTensors | WholeTensors) -> Iterator[str]:
    """The names of all weights that are there."""
    return (key for key in stored if not key.startswith("optimizer."))


def without_layer(name: str) -> str:
    """A weight's name without a layer's number."""
    return re.sub(r"decoder\.layers\.\d+\.", "decoder.layers.", name)
