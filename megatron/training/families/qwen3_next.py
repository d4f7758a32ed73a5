# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: linear-attention layers and layers with gated attention, and experts with one that all tokens go to.

Source in transformers: models/qwen3_next. Its files order the rows of a state's projections by key head; ours, as
Megatron-LM's, have all queries, then all keys, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron.training.families.llama import llama_settings
from megatron.training.families.llama.family import WithLlamaNames
from megatron.training.families.llama.llama_weights import EXPERTS, Piece
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.kinds.layer_patterns import linear_layers
from megatron.training.settings.models import derive_shape

STATE, WHOLE = "linear_attention", "full_attention"
SIZES = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
         "linear_num_value_heads")  # fmt: skip
# Keys of config.json that may only have these values; the first is written.
PLAIN: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}
SHARE = 0.25  # of a head that RoPE rotates, if config.json does not say
WITH_EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}


class Qwen3Next(WithLlamaNames):
    """The family; without experts its MLPs are like a Llama's."""

    kind, title, architecture = "qwen3_next", "Qwen3-Next", "Qwen3NextForCausalLM"
    differs: dict[str, Any] = {
        "experimental_attention_variant": "gated_delta_net", "attention_output_gate": True, "qk_layernorm": True,
        "apply_layernorm_1p": True,
    }  # fmt: skip

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        return model.experimental_attention_variant == "gated_delta_net"

    def settings(self, config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
        self.check_keys(config, where, "head_dim", "num_experts", *SIZES)
        self.check_values(config, where, PLAIN)
        integer = self.integers(config, where)
        plain = {**config, "model_type": "llama", "architectures": None}
        share = plain.pop("partial_rotary_factor", None)
        rope = plain.get("rope_scaling") or plain.get("rope_parameters")
        if isinstance(rope, dict):
            share = rope.get("partial_rotary_factor", share)
            name = "rope_scaling" if plain.get("rope_scaling") else "rope_parameters"
            plain[name] = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
        model, vocab_size = llama_settings.settings(plain, where)
        own: dict[str, Any] = self.differs | {name: integer(name) for name in SIZES}
        own["rotary_percent"] = llama_settings.positive(
            SHARE if share is None else share, "partial_rotary_factor", where
        )
        own["linear_attention_freq"] = self._pattern(config, where)
        if config["num_experts"] != 0:
            own |= {ours: integer(theirs) for theirs, ours in WITH_EXPERTS.items()} | {"moe_shared_expert_gate": True}
            if not 1 < own["moe_router_topk"] <= own["num_experts"]:
                topk, experts = own["moe_router_topk"], own["num_experts"]
                raise Refusal(f"{where}: num_experts_per_tok {topk} is not from 2 to num_experts {experts}")
        if own["linear_num_value_heads"] % own["linear_num_key_heads"]:
            raise Refusal(f"{where}: linear_num_value_heads is not a multiple of linear_num_key_heads")
        return derive_shape(replace(model, **own)), vocab_size

    def _pattern(self, config: dict[str, Any], where: object) -> int | list[int]:
        layers, kinds, every = (
            config["num_hidden_layers"],
            config.get("layer_types"),
            config.get("full_attention_interval"),
        )
        if kinds is None:
            every = 4 if every is None else every
            if not isinstance(every, int) or isinstance(every, bool) or every < 1:
                raise Refusal(f"{where}: full_attention_interval {every!r} is not a positive integer")
            return every
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (STATE, WHOLE) for kind in kinds):
            raise Refusal(f"{where}: layer_types must name {STATE} or {WHOLE} for each of {layers} layers")
        pattern = [int(kind == STATE) for kind in kinds]
        if not any(pattern):
            raise Refusal(f"{where}: layer_types has no layer of the kind {STATE}: not supported for {self.kind}")
        regular = 4  # Qwen3-Next's, written as a number
        return regular if pattern == [int(bool(number % regular)) for number in range(1, layers + 1)] else pattern

    def config_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        fixed = {**llama_settings.FIXED, "add_bias_linear": False, **self.differs}
        del fixed["rotary_percent"]
        usual, free = ModelConfig(), ("moe_shared_expert_intermediate_size", "moe_shared_expert_gate")
        wrong = [n for n in llama_settings.ROUTER if n not in free and getattr(model, n) != getattr(usual, n)]
        if model.num_experts and not model.moe_shared_expert_gate:
            wrong.append("moe_shared_expert_gate")
        self.refuse(model, wrong)
        config = self.llama_json(model, vocab_size, dtype, fixed)
        config |= {name: values[0] for name, values in PLAIN.items()}
        config |= {
            "partial_rotary_factor": model.rotary_percent,
            "layer_types": [STATE if own else WHOLE for own in linear_layers(model)],
            "num_experts": 0,
        }
        config |= {name: getattr(model, name) for name in SIZES}
        if model.num_experts:
            config |= {theirs: getattr(model, ours) for theirs, ours in WITH_EXPERTS.items()}
        return config

    def layer_pieces(self, model: ModelConfig) -> Iterator[Piece]:
        """Each layer's weights have their own name."""
        for layer, with_state in enumerate(linear_layers(model)):
            for piece in _layer(model, bool(with_state)):
                yield replace(
                    piece,
                    key=f"decoder.layers.{layer}.{piece.key}",
                    names=tuple(f"model.layers.{layer}.{name}" for name in piece.names),
                    layer=layer,
                    stacked=False,
                )


def _layer(model: ModelConfig, with_state: bool) -> Iterator[Piece]:
    """The weights of a layer, without its number."""
    hidden = model.hidden_size
    yield from _state(model) if with_state else _attention(model)
    norm = "post_attention_layernorm.weight"
    if not model.num_experts:
        yield Piece("mlp.linear_fc1.layer_norm_weight", (norm,), ((hidden,),))
        yield from _mlp("mlp", "mlp", model.ffn_hidden_size, hidden)
        return
    yield Piece("pre_mlp_layernorm.weight", (norm,), ((hidden,),))
    yield Piece("mlp.router.weight", ("mlp.gate.weight",), ((model.num_experts, hidden),))
    shared = model.moe_shared_expert_intermediate_size
    yield from _mlp("mlp.shared_experts", "mlp.shared_expert", shared, hidden)
    yield Piece("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",), ((1, hidden),))
    for number in range(model.num_experts):
        for piece in _mlp(EXPERTS, f"mlp.experts.{number}", model.moe_ffn_hidden_size, hidden):
            yield replace(piece, expert=number, experts=model.num_experts)


def _mlp(ours: str, theirs: str, width: int, hidden: int) -> Iterator[Piece]:
    for part, name in enumerate(("gate_proj", "up_proj")):
        yield Piece(
            f"{ours}.linear_fc1.weight", (f"{theirs}.{name}.weight",), ((width, hidden),), part=part, parts=2
        )  # fmt: skip
    yield Piece(f"{ours}.linear_fc2.weight", (f"{theirs}.down_proj.weight",), ((hidden, width),))


def _attention(model: ModelConfig) -> Iterator[Piece]:
    hidden, size, heads = model.hidden_size, model.kv_channels, model.num_attention_heads
    groups = model.num_query_groups * size
    ours, theirs = "self_attention", "self_attn"
    yield Piece(f"{ours}.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), ((hidden,),))
    qkv = tuple(f"{theirs}.{name}_proj.weight" for name in "qkv")
    shapes = (2 * heads * size, hidden), (groups, hidden), (groups, hidden)
    yield Piece(f"{ours}.linear_qkv.weight", qkv, shapes, gate_heads=heads)
    for name in "qk":
        yield Piece(f"{ours}.{name}_layernorm.weight", (f"{theirs}.{name}_norm.weight",), ((size,),))
    yield Piece(f"{ours}.linear_proj.weight", (f"{theirs}.o_proj.weight",), ((hidden, heads * size),))


def _state(model: ModelConfig) -> Iterator[Piece]:
    hidden, groups, heads = model.hidden_size, model.linear_num_key_heads, model.linear_num_value_heads
    keys, values = groups * model.linear_key_head_dim, heads * model.linear_value_head_dim
    ours, theirs = "self_attention", "linear_attn"
    yield Piece(f"{ours}.in_proj.layer_norm_weight", ("input_layernorm.weight",), ((hidden,),))
    rows = (("query", keys), ("key", keys), ("value", values), ("z", values))
    for name, kinds in (("in_proj_qkvz", rows), ("in_proj_ba", (("beta", heads), ("alpha", heads)))):
        shape = sum(count for _, count in kinds), hidden
        yield Piece(f"{ours}.in_proj.weight", (f"{theirs}.{name}.weight",), (shape,), named=kinds, groups=groups)
    shape = 2 * keys + values, 1, model.linear_conv_kernel_dim
    yield Piece(f"{ours}.conv1d.weight", (f"{theirs}.conv1d.weight",), (shape,), named=rows[:3])
    for name in ("dt_bias", "A_log"):
        yield Piece(f"{ours}.{name}", (f"{theirs}.{name}",), ((heads,),))
    # Of all norms, only this one is not stored minus 1 in their files.
    norm = f"{theirs}.norm.weight"
    yield Piece(f"{ours}.out_norm.weight", (norm,), ((model.linear_value_head_dim,),), minus_one=True)
    yield Piece(f"{ours}.out_proj.weight", (f"{theirs}.out_proj.weight",), ((hidden, values),))
