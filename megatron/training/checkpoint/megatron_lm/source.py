# SPDX-License-Identifier: Apache-2.0
"""Read a part of one of our tensors from a checkpoint of Megatron-LM, in any of its forms.

Weights are stored with all layers in one tensor [layers, ...], or with one tensor per layer. Norms have Transformer
Engine's names, to which core maps those of its own layers; older names are tried too. Optimizer states are stored

- like the weights (``fully_reshardable``, and optimizers that are not distributed);
- as ``fully_sharded_model_space`` (core before 0.15): [X, Y] in local parts [x, y] is stored as [X/x, Y/y, x*y];
- as ``dp_reshardable`` (core 0.15 and later): see :class:`Buckets`.
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

from megatron.training.checkpoint.megatron_lm.stored_tensors import Shape, StoredTensors, WholeTensors, copy_overlap
from megatron.training.model.weights import BY_COLUMNS, BY_ROWS, VOCABULARY
from megatron.training.refusal import Refusal

ALIGNMENT = 64  # elements
KEY = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.param$")
LAYERS = "decoder.layers."
NORM_1 = ("self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.layer_norm_bias")
SINKS = ("self_attention.core_attention.softmax_offset",)
PROJ = ("self_attention.linear_proj.weight", "self_attention.linear_proj.bias")
OTHERS = [
    f"{module}{kind}"
    for module in (
        "self_attention.linear_qkv.", "self_attention.q_layernorm.", "self_attention.k_layernorm.",
        "mlp.linear_fc1.layer_norm_", "mlp.linear_fc1.", "mlp.linear_fc2.",
    )
    for kind in ("weight", "bias")
]  # fmt: skip
# The order of a layer's parameters in core's layers, and in Transformer Engine's, where norms belong to linear layers.
ORDERS = ((*NORM_1, *SINKS, *PROJ, *OTHERS), (*SINKS, *PROJ, *NORM_1, *OTHERS))


@dataclass(frozen=True)
class Saved:
    """The grid that wrote a checkpoint, and the properties of its model that determine the buckets."""

    tensor: int
    pipeline: int
    chunks: int  # virtual stages per rank
    layers: int
    gated: bool  # SwiGLU
    tied: bool  # the output layer shares the embedding's weights


@dataclass(frozen=True)
class _Place:
    bucket: str
    start: int
    shape: Shape


class Buckets:
    """Optimizer states in the form ``dp_reshardable``: the distributed optimizer's buckets, each a flat tensor.

    This is Megatron-LM's default since core 0.15, which reads it only on the same TP x PP. The file does not say where
    each parameter lies, but that follows from how core fills its buckets (megatron/core/distributed/
    param_and_grad_buffer.py): a model chunk's parameters in reverse order, each aligned to 64 elements, until the
    bucket has the stored length. The order of a layer's parameters differs between core's and Transformer Engine's
    layers; both are tried. The main weights that are read must equal the weights, so a wrong order is always noticed.

    Raises:
        Refusal: the places of the parameters cannot be determined.
    """

    def __init__(self, stored: StoredTensors, saved: Saved) -> None:
        self.stored, self.saved = stored, saved
        self.stacked = f"{LAYERS}{PROJ[0]}" in stored
        if saved.layers % (saved.pipeline * saved.chunks):
            raise self._unknown("its pipeline stages have different numbers of layers")
        self.buckets: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for name in stored:
            if match := KEY.match(name):
                rank, chunk, _, bucket = match.groups()
                listed = self.buckets.setdefault((int(rank), int(chunk)), [])
                listed.append((int(bucket), name.removesuffix(".param"), stored.shape(name)[0]))
        for key, listed in self.buckets.items():
            self.buckets[key] = [(name, length) for _, name, length in sorted(listed)]
        if len(self.buckets) != saved.tensor * saved.pipeline * saved.chunks:
            raise self._unknown("its buckets are not those of its TP x PP")
        self._last: tuple[tuple, Tensor] | None = None
        for order in ORDERS:
            self.places = self._lay_out(order)
            if self.places is not None and self._matches_weights(0):
                return
        raise self._unknown("the order of parameters in its buckets is unknown")

    def read(self, state: str, key: str, offset: Shape, shape: Shape) -> Tensor:
        """A block of one optimizer state of the weight ``key``; for weights of layers, dimension 0 is the layer."""
        out = torch.zeros(shape, dtype=torch.float32)
        if key.startswith(LAYERS):
            for layer in range(offset[0], offset[0] + shape[0]):
                whole = self._whole(state, key, layer)
                copy_overlap(out, offset, whole[None], (layer, *(0 for _ in whole.shape)))
        else:
            whole = self._whole(state, key, None)
            copy_overlap(out, offset, whole, (0,) * whole.dim())
        return out

    def _whole(self, state: str, key: str, layer: int | None) -> Tensor:
        if self._last is not None and self._last[0] == (state, key, layer):
            return self._last[1]
        if (0, key, layer) not in self.places:
            raise self._unknown(f"there is no {key}")
        places = [self.places[rank, key, layer] for rank in range(self.saved.tensor)]
        parts = [
            self.stored.read(f"{place.bucket}.{state}", [place.start], [place.shape.numel()]).reshape(place.shape)
            for place in places
        ]
        whole = join_parts(parts, key, self.saved.gated)
        if state == "param" and not self._equals_weight(whole, key, layer):
            raise self._unknown(f"the values at the place of the main weights of {key} differ from its weights")
        self._last = ((state, key, layer), whole)
        return whole

    def _equals_weight(self, main: Tensor, key: str, layer: int | None) -> bool:
        name, offset = self._stored_as(key, layer)
        shape = self.stored.shape(name)
        block = (1, *shape[1:]) if offset else shape
        weight = self.stored.read(name, offset or (0,) * len(shape), block).reshape(main.shape)
        return torch.equal(main.to(weight.dtype), weight)

    def _matches_weights(self, layer: int) -> bool:
        """Whether the main weights of this layer equal its weights."""
        try:
            for key in [key for rank, key, of in self.places if rank == 0 and of == layer]:
                self._whole("param", key, layer)
        except Refusal:
            return False
        return True

    def _lay_out(self, order: tuple[str, ...]) -> dict[tuple[int, str, int | None], _Place] | None:
        """Where each part lies: {(TP rank, weight, layer): place}; None if that contradicts the buckets' lengths."""
        saved, places = self.saved, {}
        for rank, stage, chunk in product(range(saved.tensor), range(saved.pipeline), range(saved.chunks)):
            buckets = list(self.buckets.get((rank + saved.tensor * stage, chunk), ()))
            end = 0
            for key, layer in reversed(self._parameters(order, stage, chunk)):
                shape = self._local_shape(key, layer)
                start = -(-end // ALIGNMENT) * ALIGNMENT
                if buckets and start >= buckets[0][1]:  # this bucket is full
                    buckets.pop(0)
                    start = 0
                if not buckets or start + shape.numel() > buckets[0][1]:
                    return None
                places.setdefault((rank, key, layer), _Place(buckets[0][0], start, shape))
                end = start + shape.numel()
            if len(buckets) != 1 or end != buckets[0][1]:
                return None
        return places

    def _parameters(self, order: tuple[str, ...], stage: int, chunk: int) -> list[tuple[str, int | None]]:
        """(weight, layer) of a model chunk, in the order of its modules."""
        saved, names = self.saved, []
        first, last = stage == chunk == 0, (stage, chunk) == (saved.pipeline - 1, saved.chunks - 1)
        if first:
            names += [(f"embedding.{kind}_embeddings.weight", None) for kind in ("word", "position")]
        count = saved.layers // (saved.pipeline * saved.chunks)
        begin = (chunk * saved.pipeline + stage) * count
        names += [(f"{LAYERS}{name}", layer) for layer in range(begin, begin + count) for name in order]
        if last:
            names += [(f"decoder.final_layernorm.{kind}", None) for kind in ("weight", "bias")]
            if not saved.tied or not first:
                names.append(("output_layer.weight", None))
        return [(key, layer) for key, layer in names if self._stored_as(key, layer)[0] in self.stored]

    def _stored_as(self, key: str, layer: int | None) -> tuple[str, Shape]:
        """(name of the stored weight, offset of the layer if all layers are one tensor, otherwise empty)."""
        if key == "output_layer.weight" and self.saved.tied:
            return VOCABULARY[0], ()
        if layer is None:
            return key, ()
        if self.stacked:
            dims = len(self.stored.shape(key)) - 1 if key in self.stored else 0
            return key, (layer, *(0,) * dims)
        return key.replace(LAYERS, f"{LAYERS}{layer}."), ()

    def _local_shape(self, key: str, layer: int | None) -> torch.Size:
        name, offset = self._stored_as(key, layer)
        shape = list(self.stored.shape(name)[1 if offset else 0 :])
        if (dim := split_dim(key)) is not None:
            shape[dim] //= self.saved.tensor
        return torch.Size(shape)

    def _unknown(self, why: str) -> Refusal:
        return Refusal(
            f"checkpoint {self.stored.folder}: its optimizer is in the form dp_reshardable, and {why}. Load it in "
            "Megatron-LM and save it with --dist-ckpt-optim-fully-reshardable, or pass --no-load-optim"
        )


def split_dim(key: str) -> int | None:
    """The dimension along which TP splits a weight; None if it does not."""
    if key.endswith(BY_ROWS) or key in VOCABULARY:
        return 0
    return 1 if key.endswith(BY_COLUMNS) else None


def join_parts(parts: Sequence[Tensor], key: str, gated: bool) -> Tensor:
    """A complete weight from its parts on the TP ranks; for a weight that TP does not split, the first rank's.

    Args:
        gated: with SwiGLU, each rank's part of the first MLP layer has rows of the gate, then of the up projection.
    """
    dim = split_dim(key)
    if dim is None or len(parts) == 1:
        return parts[0]
    if gated and "linear_fc1" in key:
        return torch.cat([half for halves in zip(*(part.chunk(2) for part in parts)) for half in halves])
    return torch.cat(list(parts), dim)


STATE = "optimizer.state."
MAIN = ("param", "fp32_param")  # names of an optimizer's fp32 copy of the weights
PREFIXES = ("", "model.", "module.")
OLDER_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@dataclass
class Source:
    """Reads parts of tensors; ``requested`` collects the names of weights that were read, or whose states were read."""

    stored: StoredTensors | WholeTensors
    buckets: Buckets | None = None
    requested: set[str] = field(default_factory=set)

    def read(self, wanted: ShardedTensor) -> Tensor:
        """The data of ``wanted``, in its local shape. Raises Refusal if it is missing, or has another shape."""
        offset = tuple(wanted.global_offset)
        shape = (1,) * wanted.prepend_axis_num + tuple(wanted.local_shape)
        state, key = self._split(wanted.key)
        self.requested.update(self._stacked(key))
        part = self._state(state, key, offset, shape) if state else self._weight(wanted, key, offset, shape)
        return part.reshape(wanted.local_shape)

    @staticmethod
    def _split(key: str) -> tuple[str | None, str]:
        if not key.startswith(STATE):
            return None, key
        state, _, weight = key.removeprefix(STATE).partition(".")
        return state, weight

    def _weight(self, wanted: ShardedTensor, key: str, offset: Shape, shape: Shape) -> Tensor:
        stored = self._find(key, offset)
        if stored is None:
            raise Refusal(f"checkpoint {self.stored.folder} has no {key}: it is of another model")
        name, single = stored
        saved_shape, own_shape = self.stored.shape(name), tuple(wanted.global_shape)[single:]
        same = saved_shape[1:] == own_shape[1:] if wanted.allow_shape_mismatch else saved_shape == own_shape
        if not same:
            raise Refusal(
                f"checkpoint {self.stored.folder} is of another model: {name} is {list(saved_shape)} in the "
                f"checkpoint, {list(own_shape)} in this run"
            )
        return self.stored.read(name, offset[single:], shape[single:])

    def _state(self, state: str, key: str, offset: Shape, shape: Shape) -> Tensor:
        if self.buckets is not None:
            return self.buckets.read(state, key, offset, shape)
        for name in MAIN if state in MAIN else (state,):
            stored = self._find(f"{STATE}{name}.{key}", offset)
            if stored is not None:
                return self._unflattened(*stored, key, offset, shape)
        stored = self._find(key, offset) if state in MAIN else None  # in fp32, the weights are the main weights
        if stored is None:
            raise Refusal(
                f"checkpoint {self.stored.folder} has no {state} of {key} in its optimizer: pass --no-load-optim"
            )
        name, single = stored
        return self.stored.read(name, offset[single:], shape[single:])

    def _unflattened(self, name: str, single: int, key: str, offset: Shape, shape: Shape) -> Tensor:
        """A block of a state, which may be stored in flat parts (``fully_sharded_model_space``)."""
        offset, shape = offset[single:], shape[single:]
        saved_shape = self.stored.shape(name)
        if len(saved_shape) == len(offset):
            return self.stored.read(name, offset, shape)
        weight = self._find(key, (0,) if single else offset)
        whole = self.stored.shape(weight[0])
        parts = saved_shape[:-1]
        size = tuple(length // count for length, count in zip(whole, parts))
        fits = len(parts) == len(whole) and not any(length % count for length, count in zip(whole, parts))
        if not fits or prod(size) != saved_shape[-1]:
            raise Refusal(f"checkpoint {self.stored.folder}: {name} is {list(saved_shape)}, its weight {list(whole)}")
        out = torch.zeros(shape, dtype=self.stored.dtype(name))
        touched = (
            range(first // step, min(-(-(first + length) // step), count))
            for first, length, step, count in zip(offset, shape, size, parts)
        )
        for index in product(*touched):
            flat = self.stored.read(name, (*index, 0), (1,) * len(index) + saved_shape[-1:])
            copy_overlap(out, offset, flat.reshape(size), [at * step for at, step in zip(index, size)])
        return out

    def _find(self, key: str, offset: Sequence[int]) -> tuple[str, int] | None:
        """(name in the checkpoint, 1 if it holds a single layer, else 0); None if it is missing."""
        return next(
            ((name, int(name not in self._stacked(key))) for name in self._names(key, offset) if name in self.stored),
            None,
        )

    @staticmethod
    def _stacked(key: str) -> list[str]:
        """Names under which a weight, or one of its states, may be stored with all layers in one tensor."""
        state, weight = Source._split(key)
        start = f"{STATE}{state}." if state else ""
        weights = [weight] + [weight.replace(new, old) for new, old in OLDER_NORMS.items() if new in weight]
        return [f"{start}{prefix}{name}" for prefix in PREFIXES for name in weights]

    def _names(self, key: str, offset: Sequence[int]) -> list[str]:
        stacked = self._stacked(key)
        if LAYERS not in key:
            return stacked
        return stacked + [name.replace(LAYERS, f"{LAYERS}{offset[0]}.") for name in stacked]


def weights_in(stored: StoredTensors | WholeTensors) -> Iterator[str]:
    """The names of all stored weights."""
    return (key for key in stored if not key.startswith("optimizer."))


def without_layer(name: str) -> str:
    """A weight's name without the layer's number."""
    return re.sub(r"decoder\.layers\.\d+\.", LAYERS, name)
