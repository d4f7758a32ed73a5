# SPDX-License-Identifier: Apache-2.0
"""Optimizer states in the form ``dp_reshardable``: the distributed optimizer's own buckets, each a flat tensor.

Megatron-LM's default since core 0.15, and readable there on the same TP x PP only. The file does not say which
parameter lies where, but that follows from how core fills its buckets (megatron/core/distributed/
param_and_grad_buffer.py): a model chunk's parameters in reverse order, each from a multiple of 64 numbers on, until the
bucket has the length that is stored. The order of a layer's parameters depends on who made it, core or Transformer
Engine; both are tried, and what is read as main weights must be the weights, so a wrong guess cannot pass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from megatron.training.checkpoint.megatron_lm.stored import Shape, StoredTensors, copy_overlap
from megatron.training.model.names import BY_COLUMNS, BY_ROWS, VOCABULARY
from megatron.training.refusal import Refusal

ALIGNED = 64
KEY = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.param$")
LAYER = "decoder.layers."
NORM_1 = ("self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.layer_norm_bias")
SINKS = ("self_attention.core_attention.softmax_offset",)
PROJ = ("self_attention.linear_proj.weight", "self_attention.linear_proj.bias")
REST = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.q_layernorm.bias",
    "self_attention.k_layernorm.weight",
    "self_attention.k_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.layer_norm_bias",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
)
# Which norms belong to a linear layer is the difference: of core's layers, or of Transformer Engine's.
ORDERS = ((*NORM_1, *SINKS, *PROJ, *REST), (*SINKS, *PROJ, *NORM_1, *REST))


@dataclass(frozen=True)
class Saved:
    """The grid that wrote a checkpoint, and what of its model matters here."""

    tensor: int
    pipeline: int
    chunks: int  # virtual stages a rank
    layers: int
    gated: bool
    tied: bool


@dataclass(frozen=True)
class _Place:
    bucket: str
    start: int
    shape: Shape


class Buckets:
    """The states of a checkpoint. Raises Refusal where their places cannot be told."""

    def __init__(self, stored: StoredTensors, saved: Saved) -> None:
        self.stored, self.saved = stored, saved
        self.stacked = f"{LAYER}{PROJ[0]}" in stored
        if saved.layers % (saved.pipeline * saved.chunks):
            raise self._unknown("its pipeline stages have different numbers of layers")
        self.buckets: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for name in stored:
            if found := KEY.match(name):
                rank, chunk, _, bucket = found.groups()
                listed = self.buckets.setdefault((int(rank), int(chunk)), [])
                listed.append((int(bucket), name.removesuffix(".param"), stored.shape(name)[0]))
        for key, listed in self.buckets.items():
            self.buckets[key] = [(name, length) for _, name, length in sorted(listed)]
        if len(self.buckets) != saved.tensor * saved.pipeline * saved.chunks:
            raise self._unknown("its buckets are not those of its TP x PP")
        self._last: tuple[tuple, Tensor] | None = None
        for order in ORDERS:
            self.places = self._lay_out(order)
            if self.places is not None and self._right(0):
                return
        raise self._unknown("the order of parameters in its buckets is not one known here")

    def read(self, state: str, key: str, offset: Shape, shape: Shape) -> Tensor:
        """A block of a state of the weight ``key``; with a leading dimension of layers where it has one."""
        out = torch.zeros(shape, dtype=torch.float32)
        if key.startswith(LAYER):
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
        parts = [
            self.stored.read(f"{place.bucket}.{state}", [place.start], [place.shape.numel()]).reshape(place.shape)
            for place in self._places_of(key, layer)
        ]
        dim = _cut(key)
        if dim is None or self.saved.tensor == 1:
            whole = parts[0]
        elif self.saved.gated and "linear_fc1" in key:
            whole = torch.cat([half for halves in zip(*(part.chunk(2) for part in parts)) for half in halves])
        else:
            whole = torch.cat(parts, dim)
        if state == "param" and not self._same(whole, key, layer):
            raise self._unknown(f"what would be the main weights of {key} are not its weights")
        self._last = ((state, key, layer), whole)
        return whole

    def _places_of(self, key: str, layer: int | None) -> list[_Place]:
        if (0, key, layer) not in self.places:
            raise self._unknown(f"there is no {key}")
        return [self.places[rank, key, layer] for rank in range(self.saved.tensor)]

    def _same(self, main: Tensor, key: str, layer: int | None) -> bool:
        name, offset = self._stored_as(key, layer)
        shape = self.stored.shape(name)
        block = (1, *shape[1:]) if offset else shape
        weight = self.stored.read(name, offset or (0,) * len(shape), block).reshape(main.shape)
        return torch.equal(main.to(weight.dtype), weight)

    def _right(self, layer: int) -> bool:
        try:
            for _, key, of in [place for place in self.places if place[0] == 0 and place[2] == layer]:
                self._whole("param", key, of)
        except Refusal:
            return False
        return True

    def _lay_out(self, order: tuple[str, ...]) -> dict[tuple[int, str, int | None], _Place] | None:
        """Where each part lies: {(TP rank, weight, layer): place}; None if the lengths of buckets say otherwise."""
        saved, places = self.saved, {}
        for rank, stage, chunk in product(range(saved.tensor), range(saved.pipeline), range(saved.chunks)):
            buckets = list(self.buckets.get((rank + saved.tensor * stage, chunk), ()))
            end = 0
            for key, layer in reversed(self._parameters(order, stage, chunk)):
                shape = self._local_shape(key, layer)
                start = -(-end // ALIGNED) * ALIGNED
                if buckets and start >= buckets[0][1]:  # full
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
        saved, found = self.saved, []
        first, last = stage == chunk == 0, (stage, chunk) == (saved.pipeline - 1, saved.chunks - 1)
        if first:
            found += [(f"embedding.{kind}_embeddings.weight", None) for kind in ("word", "position")]
        count = saved.layers // (saved.pipeline * saved.chunks)
        begin = (chunk * saved.pipeline + stage) * count
        found += [(f"{LAYER}{name}", layer) for layer in range(begin, begin + count) for name in order]
        if last:
            found += [(f"decoder.final_layernorm.{kind}", None) for kind in ("weight", "bias")]
            if not saved.tied or not first:
                found.append(("output_layer.weight", None))
        return [(key, layer) for key, layer in found if self._stored_as(key, layer)[0] in self.stored]

    def _stored_as(self, key: str, layer: int | None) -> tuple[str, Shape]:
        """(name of the weight, offset of its layer where all layers are one tensor)."""
        if key == "output_layer.weight" and self.saved.tied:
            return VOCABULARY[0], ()
        if layer is None:
            return key, ()
        if self.stacked:
            rest = len(self.stored.shape(key)) - 1 if key in self.stored else 0
            return key, (layer, *(0,) * rest)
        return key.replace(LAYER, f"{LAYER}{layer}."), ()

    def _local_shape(self, key: str, layer: int | None) -> torch.Size:
        name, offset = self._stored_as(key, layer)
        shape = list(self.stored.shape(name)[1 if offset else 0 :])
        if (dim := _cut(key)) is not None:
            shape[dim] //= self.saved.tensor
        return torch.Size(shape)

    def _unknown(self, why: str) -> Refusal:
        return Refusal(
            f"checkpoint {self.stored.folder}: its optimizer is in the form dp_reshardable, and {why}. Load it in "
            "Megatron-LM and save it with --dist-ckpt-optim-fully-reshardable, or pass --no-load-optim here"
        )


def _cut(key: str) -> int | None:
    """The dimension along which TP cuts a weight."""
    if key.endswith(BY_ROWS) or key in VOCABULARY:
        return 0
    return 1 if key.endswith(BY_COLUMNS) else None
