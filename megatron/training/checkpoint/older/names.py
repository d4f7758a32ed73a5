# SPDX-License-Identifier: Apache-2.0
"""Names of weights, from four programs to core's: Megatron-LM of today and before core, DeepSpeed's with and without
its pipeline.

Facts from megatron/legacy/model of NVIDIA/Megatron-LM (core 0.9 to 0.12) and megatron/model of
microsoft/Megatron-DeepSpeed: language_model.py, gpt_model.py, transformer.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.training.model.names import BY_COLUMNS, BY_ROWS, VOCABULARY

LAYERS = "decoder.layers."
OF_A_LAYER = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "input_norm.": "self_attention.linear_qkv.layer_norm_",
    "self_attention.query_key_value.": "self_attention.linear_qkv.",
    "self_attention.dense.": "self_attention.linear_proj.",
    "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_",
    "post_attention_norm.": "mlp.linear_fc1.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "mlp.dense_h_to_4h.": "mlp.linear_fc1.",
    "mlp.dense_4h_to_h.": "mlp.linear_fc2.",
}
OF_ALL = {
    "encoder.final_layernorm.": "decoder.final_layernorm.",
    "encoder.final_norm.": "decoder.final_layernorm.",
    "tied_modules.embed.": "embedding.",
}
# Copies of a tied embedding, frequencies that follow from settings, states of FP8.
LEFT_OUT = re.compile(r"^word_embeddings_for_head\.|\.?inv_freq$|_extra_state$")


@dataclass(frozen=True)
class Name:
    """Core's name of a weight; ``layer`` counts from where the file's names do."""

    key: str
    layer: int | None = None


def core_name(name: str) -> Name | None:
    """The weight that ``name`` means, None for what is left out. Unknown ones keep their name."""
    name = re.sub(r"^(module\.)*(model\.)?(language_model\.)?", "", name)
    if LEFT_OUT.search(name):
        return None
    name = re.sub(r"^transformer\.", "encoder.", name).replace(".attention.", ".self_attention.")
    if found := re.match(r"(?:encoder|decoder)\.layers\.(\d+)\.(.*)", name):
        return Name(LAYERS + _replaced(found[2], OF_A_LAYER), int(found[1]))
    return Name(_replaced(name, OF_ALL))


def pipe_names(names: Iterable[str]) -> dict[str, Name] | None:
    """The weights of DeepSpeed's pipeline module, whose names begin with a module's number; None if they do not.

    Modules in order: embedding, layers, final norm, output layer; the first and last are ``tied_modules.embed`` where
    they share their weights. In between are functions, which have numbers too but no weights.
    """
    numbered: dict[int, list[tuple[str, str]]] = {}
    found: dict[str, Name] = {}
    for name in names:
        if matched := re.match(r"(\d+)\.(.*)", name):
            numbered.setdefault(int(matched[1]), []).append((name, matched[2]))
        elif name.startswith("tied_modules.embed."):
            found[name] = core_name(name)
    layers = sorted(number for number, inner in numbered.items() if any("attention." in rest for _, rest in inner))
    if not layers:
        return None
    for number, inner in numbered.items():
        for name, rest in inner:
            if number in layers:
                found[name] = core_name(f"encoder.layers.{layers.index(number)}.{rest}")
            elif rest.startswith("lm_head."):
                found[name] = Name(rest.replace("lm_head.", "output_layer."))
            elif "embeddings." in rest:
                found[name] = Name(f"embedding.{rest}")
            elif number > layers[-1]:
                found[name] = Name(f"decoder.final_layernorm.{rest}")
            else:
                found[name] = Name(name)
    return found


def _replaced(name: str, table: dict[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in table.items() if name.startswith(old)), name)


def joined(parts: list[Tensor], key: str, gated: bool) -> Tensor:
    """A weight from its parts on the TP ranks; SwiGLU's first layer has half of the gate and half of the rest on each.

    Raises:
        ValueError: what all ranks should have alike differs between them.
    """
    if len(parts) == 1:
        return parts[0]
    if gated and "linear_fc1." in key and not key.endswith(("layer_norm_weight", "layer_norm_bias")):
        return torch.cat([half for halves in zip(*(part.chunk(2) for part in parts)) for half in halves])
    if key.endswith(BY_ROWS) or key in VOCABULARY:
        return torch.cat(parts)
    if key.endswith(BY_COLUMNS):
        return torch.cat(parts, 1)
    if any(not part.equal(parts[0]) for part in parts[1:]):
        raise ValueError(f"{key} differs between TP ranks")
    return parts[0]


def reordered(qkv: Tensor, version: float, heads: int) -> Tensor:
    """Rows of queries, keys and values as they are since checkpoint version 2: [heads, 3, size of a head, ...].

    Before: [3, heads, size] (version 0), [heads, size, 3] (version 1). There were no query groups then.
    """
    rest = qkv.shape[1:]
    if version >= 2:
        return qkv
    if version == 0:
        return qkv.reshape(3, heads, -1, *rest).transpose(0, 1).reshape(qkv.shape)
    return qkv.reshape(heads, -1, 3, *rest).transpose(1, 2).reshape(qkv.shape)
