# SPDX-License-Identifier: Apache-2.0
"""Llamas with one more idea each: SmolLM3, ERNIE 4.5, Granite, EXAONE 4.

Sources in transformers: models/smollm3, ernie4_5, granite and exaone4, configuration_*.py and modeling_*.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.training.families.llama import llama_settings
from megatron.training.families.llama.llama_like import LlamaLike
from megatron.training.families.llama.windows import LAYER_TYPES, LOCAL, WHOLE, read_windows, written_windows
from megatron.training.families.olmo import Olmo
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.models import rope_layers

ROTATED, EVERY = "no_rope_layers", "no_rope_layer_interval"


def without_rope(rotated: list[int]) -> dict[str, Any]:
    """The setting for layers of which those with a 1 have RoPE."""
    return {} if all(rotated) else {"no_rope_freq": [1 - one for one in rotated]}


class SmolLm3(LlamaLike):
    """Some layers have no RoPE: by default every fourth. Those may have the window."""

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        return model.no_rope_freq is not None

    def own(self, config: dict[str, Any], model: ModelConfig, where: object) -> dict[str, Any]:
        return without_rope(self._rotated(config, where))

    def _rotated(self, config: dict[str, Any], where: object) -> list[int]:
        layers, given = config["num_hidden_layers"], config.get(ROTATED)
        if given is None:
            every = llama_settings.whole(config.get(EVERY, 4), EVERY, where)
            given = [int((layer + 1) % every != 0) for layer in range(layers)]
        if not isinstance(given, list) or len(given) < layers or any(one not in (0, 1) for one in given):
            raise Refusal(f"{where}: {ROTATED} must have a 0 or a 1 for each of {layers} layers")
        if not any(given[:layers]):
            raise Refusal(f"{where}: {ROTATED} leaves no layer with RoPE, which is not supported")
        return [int(one) for one in given[:layers]]

    def attention(self, config: dict[str, Any], where: object) -> dict[str, Any]:
        kinds = [WHOLE if rotated else LOCAL for rotated in self._rotated(config, where)]
        on = config.get("use_sliding_window") and config.get("sliding_window") is not None
        given = config.get(LAYER_TYPES) or (kinds if on else None)
        return super().attention({**config, LAYER_TYPES: given}, where)

    def _windows(self, model: ModelConfig, attention: dict[str, Any] | None) -> dict[str, Any]:
        return {key: one for key, one in super()._windows(model, attention).items() if key != "max_window_layers"}

    def own_json(self, model: ModelConfig) -> dict[str, Any]:
        return {ROTATED: rope_layers(model), "pad_token_id": None}  # transformers' default may be outside of the rows


@dataclass(frozen=True)
class Granite(LlamaLike):
    """Embeddings, attention scores, what a layer adds, and logits have factors, which config.json gives."""

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        return any(getattr(model, name) for name in self.free)

    def own(self, config: dict[str, Any], model: ModelConfig, where: object) -> dict[str, Any]:

        def factor(name: str, usual: float) -> float | None:
            value = llama_settings.positive(config.get(name, 1.0), name, where)
            return None if value == usual else value

        return {
            "embedding_multiplier": factor("embedding_multiplier", 1.0),
            "residual_multiplier": factor("residual_multiplier", 1.0),
            "logits_scaling": factor("logits_scaling", 1.0),
            "softmax_scale": factor("attention_multiplier", model.kv_channels**-0.5),
        }

    def own_json(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "embedding_multiplier": model.embedding_multiplier or 1.0,
            "residual_multiplier": model.residual_multiplier or 1.0,
            "logits_scaling": model.logits_scaling or 1.0,
            "attention_multiplier": model.softmax_scale or model.kv_channels**-0.5,
        }


class Exaone4(Olmo):
    """Norms after attention and MLP as in OLMo 2, and of each query and key. With windows, the others have no RoPE."""

    def __init__(self) -> None:
        self.kind, self.title, self.architecture, self.third = "exaone4", "EXAONE 4", "Exaone4ForCausalLM", False
        self.differs = {"reordered_norm": True, "qk_layernorm": True}

    def settings(self, config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
        model, vocab_size = super().settings(config, where)
        if not (windows := self.attention(config, where)):
            if config.get("sliding_window") is not None:
                raise Refusal(f"{where}: sliding_window of {self.kind} without a layer that has it: no layer has RoPE")
            return model, vocab_size
        rotated = windows.get("window_attn_skip_freq", [1] * model.num_layers)
        return replace(model, **without_rope(rotated)), vocab_size

    def attention(self, config: dict[str, Any], where: object) -> dict[str, Any]:
        """As `Olmo.attention`; without layer_types the pattern says which layers have a window."""
        if config.get("sliding_window") is None:
            return {}
        pattern = config.get("sliding_window_pattern", 4)
        if config.get(LAYER_TYPES) is None:
            every = llama_settings.whole(pattern, "sliding_window_pattern", where)
            layers = range(1, config["num_hidden_layers"] + 1)
            config = {**config, LAYER_TYPES: [LOCAL if layer % every else WHOLE for layer in layers]}
        return read_windows(config, where)

    def config_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        written = super().config_json(replace(model, no_rope_freq=None), vocab_size, dtype)
        windows = written_windows(model, attention)
        own = windows["sliding_window"] if LOCAL in windows[LAYER_TYPES] else None
        return written | windows | {"sliding_window": own, "sliding_window_pattern": None}


SMOLLM3 = SmolLm3(
    "smollm3",
    "SmolLM3",
    "SmolLM3ForCausalLM",
    window="layers",
    switched=True,
    usual={"tie_word_embeddings": True, "rope_theta": 2000000.0},
    biases=("attention_bias", "mlp_bias"),
    free=("no_rope_freq",),
)
ERNIE = LlamaLike(
    "ernie4_5",
    "ERNIE 4.5",
    "Ernie4_5ForCausalLM",
    {"rotary_interleaved": True},
    usual={"tie_word_embeddings": True, "rope_theta": 500000.0, "head_dim": 128},
    biases=("use_bias", "use_bias"),
    stem="",
)
GRANITE = Granite(
    "granite",
    "Granite",
    "GraniteForCausalLM",
    biases=("attention_bias", "mlp_bias"),
    free=("embedding_multiplier", "residual_multiplier", "logits_scaling", "softmax_scale"),
    stem="",
)
