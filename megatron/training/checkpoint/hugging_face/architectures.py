# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face models that --load reads directly: Llama, models that differ from it by a flag (Qwen), and BLOOM.

Sources in transformers: models/llama, qwen2, qwen3 and bloom, configuration_*.py and modeling_*.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.training.arguments.config import ModelConfig
from megatron.training.arguments.models import derive_shape
from megatron.training.checkpoint.hugging_face import llama_settings, llama_weights, safetensors_folder
from megatron.training.checkpoint.hugging_face.llama_weights import Piece
from megatron.training.checkpoint.hugging_face.safetensors_folder import IGNORED, LM_HEAD, Entry, Header
from megatron.training.refusal import Refusal, some

EPSILON = 1e-5
LLAMAS = {
    "llama": {},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
}
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "bloom": "BloomForCausalLM"}
# Keys that a config.json of Qwen must have, because the defaults differ between these models.
REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "rms_norm_eps", "vocab_size", "max_position_embeddings")  # fmt: skip


class Described(NamedTuple):
    """A model as its config.json describes it."""

    settings: ModelConfig
    vocab_size: int
    kind: str


def described(config: dict[str, Any], where: object) -> Described:
    """Our settings for a config.json. Raises Refusal if the model is not supported."""
    kind = config.get("model_type")
    if kind not in (*LLAMAS, "bloom"):
        raise Refusal(f"{where}: model_type {kind!r} is not supported: only {', '.join(LLAMAS)} and bloom")
    if kind != "llama" and config.get("architectures") not in (None, [ARCHITECTURES[kind]]):
        raise Refusal(f"{where}: architectures {config['architectures']} is not supported: only {ARCHITECTURES[kind]}")
    if kind == "bloom":
        return Described(*_bloom(config, where), kind)
    if kind != "llama":
        config = _as_llama(config, where)
    settings, vocab_size = llama_settings.settings(config, where)
    return Described(replace(settings, **LLAMAS[kind]), vocab_size, kind)


def pieces(model: Described, names: Collection[str]) -> list[Piece]:
    """All weights of the model.

    Args:
        names: the tensors in the files; BLOOM's may have a prefix.
    """
    if model.kind == "bloom":
        prefix = "transformer." if "transformer.word_embeddings.weight" in names else ""
        return list(_bloom_pieces(model.settings, model.vocab_size, prefix))
    return list(llama_weights.pieces(model.settings, model.vocab_size))


def check_source(
    source: Path, headers: dict[str, Header], pieces: list[Piece], tied: bool
) -> tuple[dict[str, Entry], torch.dtype]:
    """Check names, shapes and dtypes of the tensors in a folder.

    Returns:
        (tensors that the model does not need but that may be present, dtype of the model's weights).

    Raises:
        Refusal: tensors are missing, unexpected or of another shape, or have several or unsupported dtypes.
    """
    there = {name: entry for header in headers.values() for name, entry in header.entries.items()}
    wanted = {name: shape for piece in pieces for name, shape in zip(piece.names, piece.shapes)}
    if missing := sorted(wanted.keys() - there.keys()):
        raise Refusal(f"{source}: {len(missing)} tensors that config.json requires are missing: {some(missing)}")
    others = {name: entry for name, entry in there.items() if name not in wanted}
    if extra := sorted(name for name in others if not (name.endswith(IGNORED) or (tied and name == LM_HEAD))):
        raise Refusal(f"{source}: {len(extra)} tensors do not belong to the model in config.json: {some(extra)}")
    for name, shape in wanted.items():
        if there[name].shape != shape:
            raise Refusal(f"{source}: {name} has shape {list(there[name].shape)}, not {list(shape)} as in config.json")
    dtypes = sorted({there[name].dtype for name in wanted})
    if len(dtypes) > 1 or dtypes[0] not in safetensors_folder.TORCH_DTYPES:
        raise Refusal(
            f"{source}: weights in {', '.join(dtypes)} are not supported: all in BF16, all in F16 or all in F32"
        )
    return others, safetensors_folder.TORCH_DTYPES[dtypes[0]]


def _as_llama(config: dict[str, Any], where: object) -> dict[str, Any]:
    """Qwen 2 is a Llama with biases for queries, keys and values; Qwen 3 is one with norms of queries and keys."""
    kind = config["model_type"]
    if missing := [name for name in (*REQUIRED, *(["head_dim"] * (kind == "qwen3"))) if config.get(name) is None]:
        raise Refusal(f"{where}: {', '.join(missing)} of {kind} is missing")
    layers = config.get("layer_types") or []
    if config.get("use_sliding_window") or any(layer != "full_attention" for layer in layers):
        raise Refusal(f"{where}: use_sliding_window is not supported: all layers have the mask given by flags")
    if kind == "qwen3" and config.get("attention_bias"):
        raise Refusal(f"{where}: attention_bias of qwen3 is not supported")
    return {**config, "model_type": "llama", "architectures": None, "attention_bias": False}


def _bloom(config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
    def first(*names: str) -> int:
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if not isinstance(value, int) or value < 1:
            raise Refusal(f"{where}: {names[0]} {value!r} is not a positive integer")
        return value

    if config.get("apply_residual_connection_post_layernorm"):
        raise Refusal(f"{where}: apply_residual_connection_post_layernorm is not supported")
    if config.get("layer_norm_epsilon", EPSILON) != EPSILON:
        raise Refusal(f"{where}: layer_norm_epsilon {config['layer_norm_epsilon']} is not supported: only {EPSILON:g}")
    if config.get("tie_word_embeddings") is False:
        raise Refusal(f"{where}: tie_word_embeddings false is not supported for bloom")
    model = ModelConfig(
        num_layers=first("n_layer", "num_hidden_layers"),
        hidden_size=first("hidden_size", "n_embed"),
        num_attention_heads=first("n_head", "num_attention_heads"),
        position_embedding_type="alibi",
        embed_layernorm=True,
        norm_epsilon=EPSILON,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return derive_shape(model), first("vocab_size")


def _bloom_pieces(model: ModelConfig, vocab_size: int, prefix: str) -> Iterator[Piece]:
    """BLOOM has the names of Megatron-LM before core; its queries, keys and values are ordered by head, as ours."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size

    def piece(ours: str, theirs: str, *shape: int, layer: int | None = None) -> Piece:
        return Piece(ours, (prefix + theirs,), (shape,), layer)

    yield piece("embedding.word_embeddings.weight", "word_embeddings.weight", vocab_size, hidden)
    for kind in ("weight", "bias"):
        yield piece(f"embedding.word_embeddings.norm.{kind}", f"word_embeddings_layernorm.{kind}", hidden)
        yield piece(f"decoder.final_layernorm.{kind}", f"ln_f.{kind}", hidden)
    linear = (
        ("self_attention.linear_qkv", "self_attention.query_key_value", hidden, 3 * hidden),
        ("self_attention.linear_proj", "self_attention.dense", hidden, hidden),
        ("mlp.linear_fc1", "mlp.dense_h_to_4h", hidden, ffn),
        ("mlp.linear_fc2", "mlp.dense_4h_to_h", ffn, hidden),
    )
    norms = (("self_attention.linear_qkv", "input_layernorm"), ("mlp.linear_fc1", "post_attention_layernorm"))
    for layer in range(model.num_layers):
        for ours, theirs in norms:
            for kind in ("weight", "bias"):
                name = f"decoder.layers.{ours}.layer_norm_{kind}"
                yield piece(name, f"h.{layer}.{theirs}.{kind}", hidden, layer=layer)
        for ours, theirs, into, out in linear:
            name = f"decoder.layers.{ours}"
            yield piece(f"{name}.weight", f"h.{layer}.{theirs}.weight", out, into, layer=layer)
            yield piece(f"{name}.bias", f"h.{layer}.{theirs}.bias", out, layer=layer)
