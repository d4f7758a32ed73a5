# SPDX-License-Identifier: Apache-2.0
"""Models with LayerNorm and biases: BLOOM, GPT-2 and GPT-NeoX (Pythia).

Sources in transformers: models/bloom, gpt2 and gpt_neox, configuration_*.py and modeling_*.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.training.families.llama import llama_settings
from megatron.training.families.llama.family import Family
from megatron.training.families.llama.llama_weights import Piece
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.models import activation, derive_shape

EPSILON = 1e-5
LAYER_NORM = ("input_layernorm", "post_attention_layernorm")
GPT_SIZES = {"num_layers": ("n_layer", "num_hidden_layers"), "num_attention_heads": ("n_head", "num_attention_heads")}


@dataclass(frozen=True)
class GptLike(Family):
    """A kind of GPT.

    Attributes:
        kind, title, architecture, differs, ignored, stem: as in `Family`.
        sizes: for some of our settings the names in config.json; the first is written.
        epsilon: name of the epsilon of norms.
        only: keys of config.json of which only this value is supported, also if they are missing.
        prefix, words, layers, norms, linears, final: names of weights, in the order in which they are used.
        free: settings, in addition to sizes, in which they may differ.
        optional: names of weights that only some kinds have, by our names.
        transposed: matrices are [in, out], and have the rows of all queries first, then of all keys, of all values.
    """

    kind: str
    title: str
    architecture: str
    sizes: dict[str, tuple[str, ...]]
    epsilon: str
    only: dict[str, Any]
    prefix: str
    words: str
    layers: str
    norms: tuple[str, str]
    linears: tuple[str, str, str, str]
    final: str
    differs: dict[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()
    optional: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    transposed: bool = False
    stem: str | None = None

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        positions = self.differs.get("position_embedding_type")
        return model.normalization == "LayerNorm" and model.position_embedding_type == positions

    def settings(self, config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:

        def size(*names: str) -> int:
            value = next((config[name] for name in names if config.get(name) is not None), None)
            return llama_settings.whole(value, names[0], where)

        for name, value in self.only.items():
            if config.get(name, value) != value:
                raise Refusal(f"{where}: {name} {config[name]} is not supported for {self.kind}: only {value}")
        if "auto_map" in config or config.get("quantization_config"):
            raise Refusal(f"{where}: auto_map and quantization_config are not supported for {self.kind}")
        sizes = {ours: size(*names) for ours, names in self.sizes.items()}
        epsilon = llama_settings.positive(config.get(self.epsilon, EPSILON), self.epsilon, where)
        own = {"norm_epsilon": epsilon} | self.differs | self._own(config, where)
        return self._model(sizes, own), size("vocab_size")

    def _own(self, config: dict[str, Any], where: object) -> dict[str, Any]:
        """Settings that only this kind has."""
        width = config.get("n_inner") if "ffn_hidden_size" in self.free else None
        return {"ffn_hidden_size": llama_settings.whole(width, "n_inner", where)} if width is not None else {}

    def _model(self, sizes: dict[str, int], own: dict[str, Any]) -> ModelConfig:
        return derive_shape(ModelConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0, **own))

    def config_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        own = {name: getattr(model, name) for name in self.free}
        if "bias_gelu_fusion" in own:
            own["bias_gelu_fusion"] = activation(model) == "tanh_gelu"
        usual = self._model({ours: getattr(model, ours) for ours in self.sizes}, self.differs | own)
        names = {*llama_settings.FIXED, *self.differs, "norm_epsilon", "ffn_hidden_size", "kv_channels",
                 "num_query_groups", "add_bias_linear", "untie_embeddings_and_output_weights",
                 "position_embedding_type"}  # fmt: skip
        wrong = [name for name in sorted(names) if getattr(model, name) != getattr(usual, name)]
        self.refuse(model, wrong)
        if activation(model) != activation(usual):
            mine, theirs = activation(model), activation(usual)
            raise Refusal(f"the model is not a {self.title}: its MLP computes {mine}, not {theirs}")
        return {
            "architectures": [self.architecture],
            "model_type": self.kind,
            "vocab_size": vocab_size,
            **{names[0]: getattr(model, ours) for ours, names in self.sizes.items()},
            self.epsilon: model.norm_epsilon,
            **self.only,
            **self._own_json(model),
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }

    def _own_json(self, model: ModelConfig) -> dict[str, Any]:
        return {"n_inner": model.ffn_hidden_size} if model.ffn_hidden_size != 4 * model.hidden_size else {}

    def pieces(self, model: ModelConfig, vocab_size: int, names: Collection[str]) -> Iterator[Piece]:
        """All weights; ``names``: the tensors in the files, whose names have no prefix in some older files."""
        prefix = "" if f"{self.words}.weight" in names else self.prefix
        hidden, ffn, order = model.hidden_size, model.ffn_hidden_size, self.transposed

        def piece(ours: str, theirs: str, *shape: int, layer: int | None = None, **order: Any) -> Piece:
            return Piece(ours, (prefix + theirs,), (shape,), layer, **order)

        yield piece("embedding.word_embeddings.weight", f"{self.words}.weight", vocab_size, hidden)
        shapes = {"embedding.position_embeddings.weight": (model.max_position_embeddings, hidden)}
        for ours, theirs in self.optional.items():
            yield piece(ours, theirs, *shapes.get(ours, (hidden,)))
        for kind in ("weight", "bias"):
            yield piece(f"decoder.final_layernorm.{kind}", f"{self.final}.{kind}", hidden)
        inside = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
        sizes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, ffn), (ffn, hidden))
        for layer in range(model.num_layers):
            for ours, theirs in zip(inside[::2], self.norms):
                for kind in ("weight", "bias"):
                    name = f"decoder.layers.{ours}.layer_norm_{kind}"
                    yield piece(name, f"{self.layers}.{layer}.{theirs}.{kind}", hidden, layer=layer)
            for ours, theirs, (into, out) in zip(inside, self.linears, sizes):
                rows = (hidden,) * 3 if order and ours.endswith("qkv") else ()
                name, theirs = f"decoder.layers.{ours}", f"{self.layers}.{layer}.{theirs}"
                shape = (into, out) if order else (out, into)
                yield piece(f"{name}.weight", f"{theirs}.weight", *shape, layer=layer, transposed=order, joined=rows)
                yield piece(f"{name}.bias", f"{theirs}.bias", out, layer=layer, joined=rows)
        if model.untie_embeddings_and_output_weights:
            yield Piece("output_layer.weight", ("embed_out.weight",), ((vocab_size, hidden),))


class GptNeoX(GptLike):
    """GPT-NeoX: attention and MLP read the same input, and RoPE rotates a part of each head."""

    def _own(self, config: dict[str, Any], where: object) -> dict[str, Any]:
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise Refusal(f"{where}: rope_parameters of {self.kind} is not an object")
        if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
            raise Refusal(f"{where}: rope_scaling of type {kind} of {self.kind} is not supported: only default")
        base = rope.get("rope_theta", config.get("rotary_emb_base", 10000.0))
        share = rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
        if (act := str(config.get("hidden_act", "gelu"))) not in ACTIVATIONS:
            raise Refusal(f"{where}: hidden_act {act} of {self.kind} is not supported: only {', '.join(ACTIVATIONS)}")
        base = llama_settings.positive(base, "rotary_emb_base", where)
        share = llama_settings.positive(share, "rotary_pct", where)
        if base != int(base) or share > 1:
            raise Refusal(f"{where}: rotary_emb_base {base} must be an integer, and rotary_pct {share} at most 1")
        return {
            "rotary_base": int(base),
            "rotary_percent": share,
            "bias_gelu_fusion": ACTIVATIONS[act],
            "parallel_residual": bool(config.get("use_parallel_residual", True)),
            "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        }

    def _own_json(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "hidden_act": "gelu_new" if activation(model) == "tanh_gelu" else "gelu",
            "rotary_emb_base": float(model.rotary_base),
            "rotary_pct": model.rotary_percent,
            "use_parallel_residual": model.parallel_residual,
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        }


ACTIVATIONS = {"gelu": False, "gelu_new": True, "gelu_fast": True, "gelu_pytorch_tanh": True}  # whether by tanh
BLOOM = GptLike(
    "bloom",
    "BLOOM",
    "BloomForCausalLM",
    GPT_SIZES | {"hidden_size": ("hidden_size", "n_embed")},
    "layer_norm_epsilon",
    {
        "layer_norm_epsilon": EPSILON,  # as in the norm of the embedding
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
    },
    "transformer.",
    "word_embeddings",
    "h",
    LAYER_NORM,
    ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    "ln_f",
    differs={"normalization": "LayerNorm", "position_embedding_type": "alibi", "embed_layernorm": True},
    optional={
        f"embedding.word_embeddings.norm.{kind}": f"word_embeddings_layernorm.{kind}" for kind in ("weight", "bias")
    },
)
GPT2 = GptLike(
    "gpt2",
    "GPT-2",
    "GPT2LMHeadModel",
    GPT_SIZES | {"hidden_size": ("n_embd", "hidden_size"), "max_position_embeddings": ("n_positions", "n_ctx")},
    "layer_norm_epsilon",
    {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    "transformer.",
    "wte",
    "h",
    ("ln_1", "ln_2"),
    ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "ln_f",
    optional={"embedding.position_embeddings.weight": "wpe.weight"},
    differs={"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"},
    free=("norm_epsilon", "ffn_hidden_size"),
    ignored=(".attn.bias", ".attn.masked_bias"),
    transposed=True,
    stem="GPT2",
)
GPT_NEOX = GptNeoX(
    "gpt_neox",
    "GPT-NeoX",
    "GPTNeoXForCausalLM",
    {
        "num_layers": ("num_hidden_layers",),
        "num_attention_heads": ("num_attention_heads",),
        "hidden_size": ("hidden_size",),
        "ffn_hidden_size": ("intermediate_size",),
        "max_position_embeddings": ("max_position_embeddings",),
    },
    "layer_norm_eps",
    {"attention_bias": True},
    "gpt_neox.",
    "embed_in",
    "layers",
    LAYER_NORM,
    ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    "final_layer_norm",
    differs={"normalization": "LayerNorm", "position_embedding_type": "rope"},
    free=(
        "norm_epsilon",
        "rotary_base",
        "rotary_percent",
        "parallel_residual",
        "bias_gelu_fusion",
        "untie_embeddings_and_output_weights",
    ),
    ignored=(".attention.bias", ".attention.masked_bias"),
)
