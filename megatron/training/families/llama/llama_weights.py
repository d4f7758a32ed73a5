# SPDX-License-Identifier: Apache-2.0
"""Weights of Llama, Qwen, Mixtral and Phi-3: which Hugging Face tensors make up each of our tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.kinds import kinds_in
from megatron.training.settings.kinds.layer_patterns import expert_layers

EXPERTS = "mlp.experts.experts"  # in checkpoints


EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Piece:
    """Rows of one of our tensors, and the Hugging Face tensors that they are made of.

    Our checkpoints hold each weight of all layers in one tensor [layers, ...], or with experts [layers, experts, ...];
    ``linear_fc1`` has the gate's rows first, then those of the up projection.
    """

    key: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the Hugging Face tensors
    layer: int | None = None
    part: int = 0  # index of these rows among ``parts`` equal parts of the tensor's rows
    parts: int = 1
    expert: int | None = None  # index of the expert among ``experts``
    experts: int = 1
    stacked: bool = True  # False: the layer is part of the key, because the layers differ
    wide: bool = False  # fp32, whatever the dtype of the others
    joined: tuple[int, ...] = ()  # numbers of rows of q, k and v, if one Hugging Face tensor has them one after another
    transposed: bool = False  # [in, out], or of all experts [experts, in, out]
    alternating: bool = False  # of all experts: rows of the gate and of the up projection take turns
    gate_heads: int = 0  # of the first of q, k and v: each of these heads has the rows of its query, then of its gate
    named: tuple[tuple[str, int], ...] = ()  # our checkpoints have these rows in several tensors: name, rows
    groups: int = 0  # of the one Hugging Face tensor: each group has its share of every one of ``named``
    minus_one: bool = False  # ours is the Hugging Face tensor minus 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of these rows, or of those of all experts."""
        if self.transposed:
            *experts, into, out = self.shapes[0]
            return (*experts, out, into)
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])

    def stored(self) -> list[Piece]:
        """The tensors of our checkpoints that hold these rows."""
        tail = self.shapes[0][1:]
        parts = [
            replace(self, key=f"{self.key}.{name}", names=(), shapes=((rows, *tail),), named=(), groups=0)
            for name, rows in self.named
        ]
        return parts or [self]


class ExpertNames(NamedTuple):
    """Hugging Face's names of a mixture in a layer, and of the three matrices of an expert."""

    mixture: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def layers(model: ModelConfig) -> Iterator[tuple[int, str, bool, bool]]:
    """(number, beginning of our names, whether our tensors hold all layers, whether it has experts) of each layer.

    Those after the last layer of the model are of multi-token prediction.
    """
    pattern = expert_layers(model) if model.num_experts else [0] * model.num_layers
    mixed = len(set(pattern)) > 1 or any(kind.differs(model) for kind in kinds_in(model))
    for layer, experts in enumerate(pattern):
        yield layer, f"decoder.layers.{layer}." if mixed else "decoder.layers.", not mixed, bool(experts)
    for ahead in range(model.mtp_num_layers or 0):
        yield model.num_layers + ahead, f"mtp.layers.{ahead}.transformer_layer.", False, bool(pattern[-1])


def layer_pieces(model: ModelConfig, own: ExpertNames = ExpertNames(), joined: bool = False) -> Iterator[Piece]:
    """The weights of all layers of a model like a Llama.

    Args:
        joined: the files have q, k and v in one tensor, and gate and up projection in one, as Phi-3's do.
    """
    hidden, ffn, size = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    heads, groups = model.num_attention_heads * size, model.num_query_groups * size
    for layer, place, stacked, has_experts in layers(replace(model, mtp_num_layers=None)):

        def piece(
            core_name: str,
            hf_names: Sequence[str],
            *shapes: tuple[int, ...],
            layer: int = layer,
            place: str = place,
            stacked: bool = stacked,
            part: tuple[int, int] = (0, 1),
            expert: tuple[int | None, int] = (None, 1),
            rows: tuple[int, ...] = (),
        ) -> Piece:
            names = tuple(f"model.layers.{layer}.{name}" for name in hf_names)
            return Piece(place + core_name, names, shapes, layer, *part, *expert, stacked=stacked, joined=rows)

        kinds = ["weight", "bias"] if model.add_bias_linear else ["weight"]
        yield piece("self_attention.linear_qkv.layer_norm_weight", ["input_layernorm.weight"], (hidden,))
        for kind in ["weight", "bias"] if model.add_bias_linear or model.add_qkv_bias else ["weight"]:
            tail = (hidden,) if kind == "weight" else ()
            name, rows = f"self_attention.linear_qkv.{kind}", (heads, groups, groups)
            if joined:
                yield piece(name, [f"self_attn.qkv_proj.{kind}"], (sum(rows), *tail), rows=rows)
                continue
            qkv = [f"self_attn.{name}_proj.{kind}" for name in "qkv"]
            yield piece(name, qkv, *((number, *tail) for number in rows))
        for name in "qk" if model.qk_layernorm else "":
            yield piece(f"self_attention.{name}_layernorm.weight", [f"self_attn.{name}_norm.weight"], (size,))
        for kind in kinds:
            tail = (heads,) if kind == "weight" else ()
            yield piece(f"self_attention.linear_proj.{kind}", [f"self_attn.o_proj.{kind}"], (hidden, *tail))
        if has_experts:
            width = model.moe_ffn_hidden_size
            norm, mixture, experts = "post_attention_layernorm.weight", own.mixture, model.num_experts
            yield piece("pre_mlp_layernorm.weight", [norm], (hidden,))
            yield piece("mlp.router.weight", [f"{mixture}.gate.weight"], (experts, hidden))
            for number in range(experts):
                for part, name in enumerate((own.gate, own.up)):
                    hf_names = [f"{mixture}.experts.{number}.{name}.weight"]
                    yield piece(
                        f"{EXPERTS}.linear_fc1.weight",
                        hf_names,
                        (width, hidden),
                        part=(part, 2),
                        expert=(number, experts),
                    )
                hf_names = [f"{mixture}.experts.{number}.{own.down}.weight"]
                yield piece(f"{EXPERTS}.linear_fc2.weight", hf_names, (hidden, width), expert=(number, experts))
            continue
        yield piece("mlp.linear_fc1.layer_norm_weight", ["post_attention_layernorm.weight"], (hidden,))
        for kind in kinds:
            tail = (hidden,) if kind == "weight" else ()
            if joined:
                yield piece(f"mlp.linear_fc1.{kind}", [f"mlp.gate_up_proj.{kind}"], (2 * ffn, *tail))
            for part, name in enumerate(() if joined else ("gate_proj", "up_proj")):
                yield piece(f"mlp.linear_fc1.{kind}", [f"mlp.{name}.{kind}"], (ffn, *tail), part=(part, 2))
            tail = (ffn,) if kind == "weight" else ()
            yield piece(f"mlp.linear_fc2.{kind}", [f"mlp.down_proj.{kind}"], (hidden, *tail))


def fuse(piece: Piece, tensors: Sequence[Tensor], groups: int) -> Tensor:
    """Our rows from a piece's Hugging Face tensors; q, k and v are ordered by query group: [queries, key, value]."""
    if piece.transposed:
        tensors = [tensor.transpose(-2, -1) for tensor in tensors]
    parts = tensors[0].split(piece.joined) if piece.joined else tensors
    if piece.alternating:
        parts = [torch.cat([parts[0][:, ::2], parts[0][:, 1::2]], dim=1)]
    if piece.minus_one:
        if not torch.equal((parts[0] - 1) + 1, parts[0]):
            raise Refusal(
                f"{piece.names[0]}: minus 1, as this program stores it, it cannot be represented exactly in "
                f"{str(parts[0].dtype).removeprefix('torch.')}: add --dtype fp32"
            )
        return parts[0] - 1
    if piece.groups:
        by_group = parts[0].unflatten(0, (piece.groups, -1))
        return torch.cat([part.flatten(0, 1) for part in by_group.split(_shares(piece), dim=1)])
    if piece.gate_heads:
        queries, gates = parts[0].unflatten(0, (piece.gate_heads, 2, -1)).unbind(1)
        parts = [queries.flatten(0, 1), gates.flatten(0, 1), *parts[1:]]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([x.unflatten(0, (groups, -1)) for x in parts], dim=1).flatten(0, 1)


def split(piece: Piece, rows: Tensor, groups: int) -> list[Tensor]:
    """A piece's Hugging Face tensors from our rows; the inverse of :func:`fuse`."""
    if piece.alternating:
        rows = torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)
    if piece.minus_one:
        return [rows + 1]
    if piece.groups:
        parts = rows.split([count for _, count in piece.named])
        return [torch.cat([part.unflatten(0, (piece.groups, -1)) for part in parts], dim=1).flatten(0, 1)]
    sizes, parts = piece.joined or [shape[0] for shape in piece.shapes], [rows]
    if piece.gate_heads:
        sizes = [sizes[0] // 2, sizes[0] // 2, *sizes[1:]]
    if len(sizes) > 1:
        cut = rows.unflatten(0, (groups, -1)).split([size // groups for size in sizes], dim=1)
        parts = [part.flatten(0, 1) for part in cut]
    if piece.gate_heads:
        heads = [part.unflatten(0, (piece.gate_heads, 1, -1)) for part in parts[:2]]
        parts = [torch.cat(heads, dim=1).flatten(0, 2), *parts[2:]]
    if piece.joined:
        parts = [torch.cat(parts)]
    return [part.transpose(-2, -1).contiguous() for part in parts] if piece.transposed else parts


def _shares(piece: Piece) -> list[int]:
    """How many rows of each of ``piece.named`` a group has."""
    return [rows // piece.groups for _, rows in piece.named]
