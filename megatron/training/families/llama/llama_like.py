# SPDX-License-Identifier: Apache-2.0
"""Models that differ from a Llama in some settings: Qwen 2 and 3, Mistral, Phi-3, and with experts Mixtral, Qwen 3.

Sources in transformers: models/llama, qwen2, qwen3, qwen3_moe, mistral, mixtral and phi3, configuration_*.py and
modeling_*.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron.training.families.llama import llama_settings, llama_weights
from megatron.training.families.llama.family import Family, WithLlamaNames
from megatron.training.families.llama.llama_weights import ExpertNames, Piece
from megatron.training.families.llama.windows import LAYER_TYPES, LOCAL, WHOLE, read_windows, written_windows
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.kinds.layer_patterns import expert_layers

BIASES = ("attention_bias", "mlp_bias")  # a Llama's keys


@dataclass(frozen=True)
class LlamaLike(WithLlamaNames):
    """A kind of model that differs from a Llama only in some of our settings.

    Attributes:
        kind, title, architecture, stem: as in `Family`.
        differs: those settings, with their values.
        only: keys of config.json of which only this value is supported.
        joined: the files have q, k and v in one tensor, and gate and up projection in one.
        window: which layers may have one: "" none, "all" (of all together), or "layers" (of each by itself).
        switched: config.json has the switch use_sliding_window.
        usual: keys of config.json whose default in transformers is not a Llama's, with that default.
        biases: keys of config.json for the biases of attention and of the MLP; empty: there are none.
        free: settings in which such models differ from each other, and Llamas do not.
    """

    kind: str
    title: str
    architecture: str
    differs: dict[str, Any] = field(default_factory=dict)
    only: dict[str, Any] = field(default_factory=dict)
    joined: bool = False
    window: str = ""
    switched: bool = False
    usual: dict[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    stem: str | None = None

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        """As `Family.fits`; of models with a Llama's settings, a Mistral is one with a window."""
        windows = attention.get("window_size") is not None
        apart = self.kind == "llama" or windows or bool(self.differs)
        return super().fits(model, attention) and not self.joined and apart and (not windows or bool(self.window))

    def settings(self, config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
        config = self.usual | {
            name: value for name, value in config.items() if value is not None or name not in self.usual
        }
        plain = self._as_llama(config, where) if self.kind != "llama" else config
        model, vocab_size = llama_settings.settings(plain, where)
        return replace(model, **self.differs, **self.own(config, model, where)), vocab_size

    def own(self, config: dict[str, Any], model: ModelConfig, where: object) -> dict[str, Any]:
        """The settings of ``free`` in a config.json; ``model``: what a Llama's config.json has too."""
        return {}

    def own_json(self, model: ModelConfig) -> dict[str, Any]:
        """The keys of config.json for :meth:`own`."""
        return {}

    def attention(self, config: dict[str, Any], where: object) -> dict[str, Any]:
        kinds = config.get(LAYER_TYPES) if self.window == "layers" else None
        on = self.window and config.get("sliding_window") is not None
        if not on or (self.switched and not config.get("use_sliding_window")):
            if any(kind != WHOLE for kind in config.get(LAYER_TYPES) or []):
                raise Refusal(f"{where}: layer_types names other layers than {WHOLE}, but they have no window")
            return {}
        first = config.get("max_window_layers", 28) if self.window == "layers" else 0  # the default of transformers
        if kinds is None:
            kinds = [LOCAL if layer >= first else WHOLE for layer in range(config["num_hidden_layers"])]
        return read_windows({**config, LAYER_TYPES: kinds}, where)

    def layer_pieces(self, model: ModelConfig) -> Iterator[Piece]:
        return llama_weights.layer_pieces(model, joined=self.joined)

    def config_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        fixed = llama_settings.FIXED | ({} if self.biases else {"add_bias_linear": False}) | self.differs
        fixed = {name: value for name, value in fixed.items() if name not in self.free}
        config = self.llama_json(model, vocab_size, dtype, fixed)
        del config["attention_bias"]
        config |= dict.fromkeys(self.biases, model.add_bias_linear)
        if self.joined and config["rope_scaling"]:
            kind = config["rope_scaling"]["rope_type"]
            raise Refusal(f"RoPE scaling {kind} is not known to Hugging Face's {self.architecture}: train without it")
        return config | self.only | self._windows(model, attention) | self.own_json(model)

    def _windows(self, model: ModelConfig, attention: dict[str, Any] | None) -> dict[str, Any]:
        """The keys of config.json for the windows of ``attention``."""
        if not self.window:
            return {}
        written = written_windows(model, attention)
        own = LOCAL in written[LAYER_TYPES]
        keys: dict[str, Any] = {"sliding_window": written["sliding_window"] if own else None}
        if self.switched:
            keys["use_sliding_window"] = own
        if self.window == "layers":
            first = written[LAYER_TYPES].index(LOCAL) if own else model.num_layers
            keys |= {"max_window_layers": first, LAYER_TYPES: written[LAYER_TYPES]}
        return keys

    def _as_llama(self, config: dict[str, Any], where: object) -> dict[str, Any]:
        self.check_keys(config, where, *(["head_dim"] if self.kind.startswith("qwen3") else []))
        if self.kind.startswith("qwen3") and config.get("attention_bias"):
            raise Refusal(f"{where}: attention_bias of {self.kind} is not supported")
        if self.kind == "mistral" and "sliding_window" not in config:
            raise Refusal(f"{where}: sliding_window of mistral is missing; write null if there is none")
        for name, value in self.only.items():
            if (config.get(name) or None) != (value or None):
                given = config.get(name)
                raise Refusal(f"{where}: {name} {given!r} of {self.kind} is not supported: only {value!r}")
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if self.joined and (kind := scaling.get("rope_type", scaling.get("type", "default"))) != "default":
            raise Refusal(f"{where}: rope_scaling of type {kind} of {self.kind} is not supported: only default")
        biases = {ours: config.get(theirs, False) for ours, theirs in zip(BIASES, self.biases)}
        return {**config, "model_type": "llama", "architectures": None, "attention_bias": False} | biases


@dataclass(frozen=True)
class WithExperts(LlamaLike):
    """A model like a Llama whose MLPs, all or some, are mixtures of experts, chosen by a softmax.

    Attributes:
        number, width: keys of config.json: number of experts, and width of an expert.
        names: of the weights in the files.
        mixed: config.json says whether the chosen experts' weights are divided by their sum, and which layers have an
            MLP instead.
    """

    number: str = "num_local_experts"
    width: str = "intermediate_size"
    names: ExpertNames = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
    mixed: bool = False

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        return bool(model.num_experts) and Family.fits(self, model, attention)

    def settings(self, config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
        if config.get(self.number) is None and "num_local_experts" in config:  # transformers 5 writes it so
            config = {**config, self.number: config["num_local_experts"]}
        names = (self.number, "num_experts_per_tok", self.width)
        for name in names:
            if not isinstance(config.get(name), int) or isinstance(config[name], bool) or config[name] < 1:
                raise Refusal(f"{where}: {name} {config.get(name)!r} of {self.kind} is not a positive integer")
        model, vocab_size = super().settings(config, where)
        experts, topk, width = (config[name] for name in names)
        if not 1 < topk <= experts:
            raise Refusal(f"{where}: num_experts_per_tok {topk} is not from 2 to {self.number} {experts}")
        model = replace(model, num_experts=experts, moe_router_topk=topk, moe_ffn_hidden_size=width)
        return replace(model, **self._mixed(config, model.num_layers, where)), vocab_size

    def _mixed(self, config: dict[str, Any], layers: int, where: object) -> dict[str, Any]:
        """Our settings for the keys that only kinds with ``mixed`` have."""
        if not self.mixed:
            return {}
        every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        llama_settings.whole(every, "decoder_sparse_step", where)
        if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
            raise Refusal(f"{where}: mlp_only_layers {dense!r} is not a list of layers")
        pattern = [int((layer + 1) % every == 0 and layer not in dense) for layer in range(layers)]
        if not any(pattern):
            raise Refusal(f"{where}: decoder_sparse_step and mlp_only_layers leave no layer with experts")
        # A softmax over all experts, of which the largest are taken as they are.
        usual = {} if config.get("norm_topk_prob", False) else {"moe_router_pre_softmax": True}
        return usual | ({} if all(pattern) else {"moe_layer_freq": pattern})

    def _mixed_json(self, model: ModelConfig) -> dict[str, Any]:
        if not self.mixed:
            return {}
        dense = [layer for layer, experts in enumerate(expert_layers(model)) if not experts]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense, "norm_topk_prob": not model.moe_router_pre_softmax}

    def config_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        usual = ModelConfig()
        free = ("moe_layer_freq", "moe_router_pre_softmax") if self.mixed else ()
        wrong = [name for name in llama_settings.ROUTER if getattr(model, name) != getattr(usual, name)]
        wrong = [name for name in wrong if name not in free]
        self.refuse(model, wrong)
        return (
            super().config_json(model, vocab_size, dtype, attention)
            | self._mixed_json(model)
            | {
                self.number: model.num_experts,
                "num_experts_per_tok": model.moe_router_topk,
                self.width: model.moe_ffn_hidden_size or model.ffn_hidden_size,
            }
        )

    def layer_pieces(self, model: ModelConfig) -> Iterator[Piece]:
        return llama_weights.layer_pieces(model, self.names)
