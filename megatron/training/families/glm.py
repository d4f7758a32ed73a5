# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 and GLM-4.5-Air: the experts of DeepSeek V3 with ordinary attention (transformers' glm4_moe)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron.training.families.deepseek import DeepSeek, ahead_pieces
from megatron.training.families.llama import llama_settings
from megatron.training.families.llama.llama_weights import Piece, layers
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.kinds.layer_patterns import expert_layers

SHARE = "partial_rotary_factor"
FREE = ("add_qkv_bias", "qk_layernorm", "rotary_percent")


class Glm(DeepSeek):
    """A GLM-4.5."""

    def __init__(self) -> None:
        super().__init__(3)
        self.kind, self.title, self.architecture = "glm4_moe", "GLM-4.5", "Glm4MoeForCausalLM"
        self.differs, self.stem = {}, ""

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        return bool(model.num_experts) and model.moe_router_score_function == "sigmoid"

    def settings(self, config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
        """Our settings and the vocabulary size of a config.json. Raises Refusal if it is not supported."""
        self.check_keys(config, where, "first_k_dense_replace")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise Refusal(f"{where}: rope_parameters of {self.kind} is not an object")
        share = llama_settings.positive(rope.get(SHARE, config.get(SHARE, 0.5)), SHARE, where)
        if share > 1:
            raise Refusal(f"{where}: {SHARE} {share} is above 1")
        whole = {name: value for name, value in rope.items() if name != SHARE} or None
        plain = {**config, "model_type": "llama", "architectures": None, "attention_bias": False, SHARE: None}
        model, vocab_size = llama_settings.settings(plain | {"rope_parameters": whole, "rope_scaling": None}, where)
        integer = self.integers(config, where)
        dense = integer("first_k_dense_replace", 0)
        own = {} if dense >= model.num_layers else self.experts(config, where, dense, integer)
        own |= {"add_qkv_bias": bool(config.get("attention_bias")), "qk_layernorm": bool(config.get("use_qk_norm"))}
        return replace(model, rotary_percent=share, **own), vocab_size

    def config_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The config.json of a model with our settings. Raises Refusal if the model is of another family."""
        dense = expert_layers(model).index(1) if model.num_experts else model.num_layers
        fixed = llama_settings.FIXED | {"add_bias_linear": False} | (self.router if model.num_experts else {})
        fixed = {name: value for name, value in fixed.items() if name not in FREE}
        if model.num_experts:
            wrong = self._wrong_router(model, dense)
            self.refuse(model, wrong)
        return self.llama_json(model, vocab_size, dtype, fixed) | {
            "attention_bias": model.add_qkv_bias,
            "use_qk_norm": model.qk_layernorm,
            SHARE: model.rotary_percent,
            "first_k_dense_replace": dense,
            "num_nextn_predict_layers": model.mtp_num_layers or 0,
            **self.router_json(model),
        }

    def layer_pieces(self, model: ModelConfig) -> Iterator[Piece]:
        """All weights, layer by layer; if some layers have experts and others not, each layer's have their own name."""
        hidden, size = model.hidden_size, model.kv_channels
        heads, groups = model.num_attention_heads * size, model.num_query_groups * size
        for layer, place, stacked, experts in layers(model):

            def piece(ours: str, theirs: str, *shape: int, layer: int = layer, place: str = place,
                      stacked: bool = stacked, part: tuple[int, int] = (0, 1),
                      expert: tuple[int | None, int] = (None, 1), wide: bool = False) -> Piece:  # fmt: skip
                name = f"model.layers.{layer}.{theirs}"
                return Piece(place + ours, (name,), (shape,), layer, *part, *expert, stacked=stacked, wide=wide)

            yield piece("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", hidden)
            for kind in ("weight", "bias") if model.add_qkv_bias else ("weight",):
                theirs = tuple(f"model.layers.{layer}.self_attn.{name}_proj.{kind}" for name in "qkv")
                shapes = tuple((rows, hidden) if kind == "weight" else (rows,) for rows in (heads, groups, groups))
                ours = f"{place}self_attention.linear_qkv.{kind}"
                yield Piece(ours, theirs, shapes, layer, stacked=stacked)
            for name in "qk" if model.qk_layernorm else "":
                yield piece(f"self_attention.{name}_layernorm.weight", f"self_attn.{name}_norm.weight", size)
            yield piece("self_attention.linear_proj.weight", "self_attn.o_proj.weight", hidden, heads)
            yield from self.ffn_pieces(model, piece, experts)
            yield from ahead_pieces(model, layer)
