# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 and Gemma 3 (text): norms after attention and MLP too, GELU, scaled embeddings, layers with a window.

Sources in transformers: models/gemma2 and gemma3, configuration_*.py and modeling_*.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.training.families.llama import llama_settings
from megatron.training.families.llama.family import WithLlamaNames
from megatron.training.families.llama.llama_weights import Piece
from megatron.training.families.llama.windows import LAYER_TYPES, read_ropes, read_windows, written_windows
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.models import derive_shape

ONLY = {
    "attention_bias": (False, None),
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "use_bidirectional_attention": (False, None),
    "tie_word_embeddings": (True, None),
}


class Gemma(WithLlamaNames):
    """A Gemma.

    Args:
        kind: model_type in config.json: gemma2 or gemma3_text.
        title: the name in messages.
        architecture: the class in transformers.
        third: Gemma 3: norms of queries and keys instead of soft-caps, and another RoPE in layers with a window.
    """

    def __init__(self, kind: str, title: str, architecture: str, *, third: bool) -> None:
        self.kind, self.title, self.architecture, self.third = kind, title, architecture, third
        self.stem = "Gemma3Text" if third else None
        self.differs: dict[str, Any] = {
            "normalization": "RMSNorm", "geglu": True, "sandwich_norm": True, "scale_embeddings": True,
            "apply_layernorm_1p": True, "add_bias_linear": False, "position_embedding_type": "rope",
            "untie_embeddings_and_output_weights": False, "qk_layernorm": third,
        }  # fmt: skip

    def settings(self, config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
        self.check_keys(config, where, "head_dim", "query_pre_attn_scalar", "sliding_window", LAYER_TYPES)
        self.check_values(config, where, ONLY)
        whole, local = read_ropes(config, where, 10000.0) if self.third else ({}, None)
        scale = llama_settings.positive(config["query_pre_attn_scalar"], "query_pre_attn_scalar", where)
        caps = {
            name: config.get(name) and llama_settings.positive(config[name], name, where)
            for name in ("attn_logit_softcapping", "final_logit_softcapping")
        }
        plain = {**config, "model_type": "llama", "architectures": None}
        plain |= {"hidden_act": "silu", "tie_word_embeddings": True, **whole}
        model, vocab_size = llama_settings.settings(plain, where)
        for name, value in (self.differs | caps | {"softmax_scale": scale**-0.5, "swiglu": False}).items():
            setattr(model, name, value)
        model.rotary_base_local = local
        self.attention(config, where)
        return derive_shape(model), vocab_size

    def attention(self, config: dict[str, Any], where: object) -> dict[str, Any]:
        return read_windows(config, where)

    def config_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        fixed = {**llama_settings.FIXED, "swiglu": False, **self.differs}
        free = ("softmax_scale", "attn_logit_softcapping", "final_logit_softcapping", "rotary_base_local")
        fixed = {name: value for name, value in fixed.items() if name not in free}
        config = self.llama_json(model, vocab_size, dtype, fixed)
        del config["attention_bias"], config["hidden_act"]
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": _whole((model.softmax_scale or model.kv_channels**-0.5) ** -2),
            **written_windows(model, attention),
            "attn_logit_softcapping": model.attn_logit_softcapping,
            "final_logit_softcapping": model.final_logit_softcapping,
        }
        if self.third:
            config["rope_local_base_freq"] = float(model.rotary_base_local or model.rotary_base)
        return config

    def layer_pieces(self, model: ModelConfig) -> Iterator[Piece]:
        hidden, ffn, size = model.hidden_size, model.ffn_hidden_size, model.kv_channels
        heads, groups = model.num_attention_heads * size, model.num_query_groups * size
        norms = {
            "self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
            "post_self_attn_layernorm.weight": "post_attention_layernorm",
            "mlp.linear_fc1.layer_norm_weight": "pre_feedforward_layernorm",
            "post_mlp_layernorm.weight": "post_feedforward_layernorm",
        }
        for layer in range(model.num_layers):
            for ours, theirs in norms.items():
                yield layer_piece(layer, ours, [theirs], (hidden,))
            qkv = [f"self_attn.{name}_proj" for name in "qkv"]
            shapes = (heads, hidden), (groups, hidden), (groups, hidden)
            yield layer_piece(layer, "self_attention.linear_qkv.weight", qkv, *shapes)
            for name in "qk" if model.qk_layernorm else "":
                yield layer_piece(layer, f"self_attention.{name}_layernorm.weight", [f"self_attn.{name}_norm"], (size,))
            yield layer_piece(layer, "self_attention.linear_proj.weight", ["self_attn.o_proj"], (hidden, heads))
            for part, name in enumerate(("gate_proj", "up_proj")):
                yield layer_piece(layer, "mlp.linear_fc1.weight", [f"mlp.{name}"], (ffn, hidden), part=(part, 2))
            yield layer_piece(layer, "mlp.linear_fc2.weight", ["mlp.down_proj"], (hidden, ffn))


def layer_piece(
    layer: int, ours: str, theirs: list[str], *shapes: tuple[int, ...], part: tuple[int, int] = (0, 1)
) -> Piece:
    """A piece of a layer from tensors named ``theirs``, without their prefix and ``.weight``."""
    names = tuple(f"model.layers.{layer}.{name}.weight" for name in theirs)
    return Piece(f"decoder.layers.{ours}", names, shapes, layer, *part)


def _whole(value: float) -> float | int:
    """The integer that a scale was computed from, if it is one up to rounding."""
    return round(value) if abs(value - round(value)) < 1e-9 * value else value
