# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 and 3: norms after attention and MLP, norms of queries and keys over all heads; OLMo 3 has windows.

Sources in transformers: models/olmo2 and olmo3, configuration_*.py and modular_*.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron.training.families.gemma import layer_piece
from megatron.training.families.llama import llama_settings
from megatron.training.families.llama.family import WithLlamaNames
from megatron.training.families.llama.llama_weights import Piece
from megatron.training.families.llama.windows import (
    LAYER_TYPES,
    LOCAL,
    WHOLE,
    read_ropes,
    read_windows,
    written_windows,
)
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig


class Olmo(WithLlamaNames):
    """One of the two. In OLMo 3, RoPE is scaled only in layers without a window."""

    def __init__(self, version: int) -> None:
        self.kind, self.title, self.architecture = f"olmo{version}", f"OLMo {version}", f"Olmo{version}ForCausalLM"
        self.third = version == 3
        self.differs: dict[str, Any] = {"reordered_norm": True, "qk_layernorm_all_heads": True}

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        """As `Family.fits`; only OLMo 3 has windows."""
        return super().fits(model, attention) and (not self.third or bool(attention.get("window_size")))

    def settings(self, config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
        self.check_keys(config, where, *(("sliding_window", LAYER_TYPES) if self.third else ()))
        for name in ("attention_bias", "clip_qkv"):
            if config.get(name):
                raise Refusal(f"{where}: {name} {config[name]!r} of {self.kind} is not supported")
        whole, local = {}, None
        if self.third:
            config = {"rope_theta": 500000.0, **config}
            whole, local = read_ropes(config, where, config["rope_theta"])
        plain = {**config, "model_type": "llama", "architectures": None, "attention_bias": False, **whole}
        model, vocab_size = llama_settings.settings(plain, where)
        windows = self.attention(config, where)
        scaled = bool(llama_settings.scaling_json(model)) or local != model.rotary_base
        local = local if scaled and "window_attn_skip_freq" in windows else None
        return replace(model, rotary_base_local=local, **self.differs), vocab_size

    def attention(self, config: dict[str, Any], where: object) -> dict[str, Any]:
        return read_windows(config, where) if self.third else {}

    def config_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        fixed = {**llama_settings.FIXED, "add_bias_linear": False, **self.differs}
        if self.third:
            del fixed["rotary_base_local"]
        config = self.llama_json(model, vocab_size, dtype, fixed)
        if not self.third:
            return config
        local = {"rope_type": "default", "rope_theta": float(model.rotary_base_local or model.rotary_base)}
        whole = {"rope_type": "default"} | (config["rope_scaling"] or {}) | {"rope_theta": config["rope_theta"]}
        return config | written_windows(model, attention) | {"rope_parameters": {LOCAL: local, WHOLE: whole}}

    def layer_pieces(self, model: ModelConfig) -> Iterator[Piece]:
        hidden, ffn, size = model.hidden_size, model.ffn_hidden_size, model.kv_channels
        heads, groups = model.num_attention_heads * size, model.num_query_groups * size
        for layer in range(model.num_layers):
            qkv = [f"self_attn.{name}_proj" for name in "qkv"]
            shapes = (heads, hidden), (groups, hidden), (groups, hidden)
            yield layer_piece(layer, "self_attention.linear_qkv.weight", qkv, *shapes)
            for name, width in (("q", heads), ("k", groups)):
                width = width if model.qk_layernorm_all_heads else size
                yield layer_piece(
                    layer, f"self_attention.{name}_layernorm.weight", [f"self_attn.{name}_norm"], (width,)
                )
            yield layer_piece(layer, "self_attention.linear_proj.weight", ["self_attn.o_proj"], (hidden, heads))
            yield layer_piece(layer, "post_self_attn_layernorm.weight", ["post_attention_layernorm"], (hidden,))
            for part, name in enumerate(("gate_proj", "up_proj")):
                yield layer_piece(layer, "mlp.linear_fc1.weight", [f"mlp.{name}"], (ffn, hidden), part=(part, 2))
            yield layer_piece(layer, "mlp.linear_fc2.weight", ["mlp.down_proj"], (hidden, ffn))
            yield layer_piece(layer, "post_mlp_layernorm.weight", ["post_feedforward_layernorm"], (hidden,))
