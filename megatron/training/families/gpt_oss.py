# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: sinks, windows in some layers, YaRN, biases, experts whose files are transposed and alternate gate and up.

Sources in transformers: models/gpt_oss, configuration_gpt_oss.py and modeling_gpt_oss.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.training.families.llama import llama_settings
from megatron.training.families.llama.family import WithLlamaNames
from megatron.training.families.llama.llama_weights import EXPERTS, Piece
from megatron.training.families.llama.windows import LAYER_TYPES, read_windows, written_windows
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.models import derive_shape

FURTHER = ("head_dim", "sliding_window", LAYER_TYPES, "num_local_experts", "num_experts_per_tok", "swiglu_limit")


class GptOss(WithLlamaNames):
    """A gpt-oss in bf16, fp16 or fp32; conversion dequantizes the published MXFP4 weights first."""

    kind, title, architecture = "gpt_oss", "gpt-oss", "GptOssForCausalLM"
    differs: dict[str, Any] = {
        "normalization": "RMSNorm", "swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0,
        "add_bias_linear": True, "softmax_type": "learnable",
    }  # fmt: skip

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        return bool(model.num_experts) and model.softmax_type == "learnable"

    def settings(self, config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
        self.check_keys(config, where, *FURTHER)
        if not (config.get("rope_scaling") or config.get("rope_parameters")):
            raise Refusal(f"{where}: rope_scaling of {self.kind} is missing; without it, the default is yarn")
        self.check_values(config, where, {"attention_bias": (True,), "swiglu_alpha": (1.702,)})
        experts, topk = config["num_local_experts"], config["num_experts_per_tok"]
        if not (isinstance(topk, int) and isinstance(experts, int) and 1 < topk <= experts):
            raise Refusal(f"{where}: num_experts_per_tok {topk!r} is not from 2 to num_local_experts {experts!r}")
        plain = {"rope_theta": 150000.0, **config, "model_type": "llama", "architectures": None}
        model, vocab_size = llama_settings.settings(plain | {"attention_bias": False}, where)
        own = {
            "num_experts": experts,
            "moe_router_topk": topk,
            "moe_ffn_hidden_size": model.ffn_hidden_size,
            "activation_func_clamp_value": llama_settings.positive(config["swiglu_limit"], "swiglu_limit", where),
        }
        for name, value in (self.differs | own).items():
            setattr(model, name, value)
        self.attention(config, where)
        return derive_shape(model), vocab_size

    def attention(self, config: dict[str, Any], where: object) -> dict[str, Any]:
        """The settings of :class:`AttentionConfig` of a config.json: the window, and which layers have it."""
        return read_windows(config, where)

    def config_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        fixed = {**llama_settings.FIXED, **self.differs}
        fixed.pop("activation_func_clamp_value")
        usual = ModelConfig()
        wrong = [name for name in llama_settings.ROUTER if getattr(model, name) != getattr(usual, name)]
        wrong += [] if model.activation_func_clamp_value else ["activation_func_clamp_value"]
        self.refuse(model, wrong)
        config = self.llama_json(model, vocab_size, dtype, fixed)
        return config | {
            "rope_scaling": config["rope_scaling"] or {"rope_type": "default"},
            "attention_bias": True,
            "intermediate_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.moe_router_topk,
            "swiglu_limit": model.activation_func_clamp_value,
            **written_windows(model, attention),
        }

    def layer_pieces(self, model: ModelConfig) -> Iterator[Piece]:
        hidden, ffn, size = model.hidden_size, model.moe_ffn_hidden_size or model.ffn_hidden_size, model.kv_channels
        heads, groups, experts = model.num_attention_heads * size, model.num_query_groups * size, model.num_experts
        for layer in range(model.num_layers):

            def piece(
                ours: str, theirs: list[str], *shapes: tuple[int, ...], layer: int = layer, **order: bool
            ) -> Piece:
                names = tuple(f"model.layers.{layer}.{name}" for name in theirs)
                return Piece(f"decoder.layers.{ours}", names, shapes, layer, **order)

            yield piece("self_attention.linear_qkv.layer_norm_weight", ["input_layernorm.weight"], (hidden,))
            yield piece("pre_mlp_layernorm.weight", ["post_attention_layernorm.weight"], (hidden,))
            sinks = "self_attention.core_attention.softmax_offset"
            yield piece(sinks, ["self_attn.sinks"], (model.num_attention_heads,))
            for kind, into in (("weight", (hidden,)), ("bias", ())):
                qkv = [f"self_attn.{name}_proj.{kind}" for name in "qkv"]
                shapes = ((rows, *into) for rows in (heads, groups, groups))
                yield piece(f"self_attention.linear_qkv.{kind}", qkv, *shapes)
                proj = (hidden, heads) if into else (hidden,)
                yield piece(f"self_attention.linear_proj.{kind}", [f"self_attn.o_proj.{kind}"], proj)
                yield piece(f"mlp.router.{kind}", [f"mlp.router.{kind}"], (experts, *into))
            up, down = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
            fc1, fc2 = f"{EXPERTS}.linear_fc1", f"{EXPERTS}.linear_fc2"
            yield piece(f"{fc1}.weight", [up], (experts, hidden, 2 * ffn), transposed=True, alternating=True)
            yield piece(f"{fc1}.bias", [f"{up}_bias"], (experts, 2 * ffn), alternating=True)
            yield piece(f"{fc2}.weight", [down], (experts, ffn, hidden), transposed=True)
            yield piece(f"{fc2}.bias", [f"{down}_bias"], (experts, hidden))
