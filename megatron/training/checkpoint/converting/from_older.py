# SPDX-License-Identifier: Apache-2.0
"""Convert older formats to ``torch_dist``, which this program and Megatron-LM load with ``--load DIR --finetune``::

FOLDER/release/                            the weights, and the args that came with them
FOLDER/latest_checkpointed_iteration.txt   contains "release"
"""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.checkpoint.hugging_face.safetensors_folder import Done, cast, dtype_name, new_folder, one_process
from megatron.training.checkpoint.megatron_lm.megatron_args import attention_of, model_of, vocabulary_block
from megatron.training.checkpoint.megatron_lm.places import TRACKER
from megatron.training.checkpoint.older_formats import LAYERS, Name, Weights, open_source, source_path
from megatron.training.families.llama.llama_settings import command_line, program, window_flags
from megatron.training.model.weights import VOCABULARY
from megatron.training.refusal import Refusal, some
from megatron.training.settings.config import ModelConfig

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from megatron.training.checkpoint.checksums import check, list_files
    from megatron.training.checkpoint.converting.lazy_save import empty_extra_states, save_lazily

PLAIN = (bool, int, float, str, type(None), torch.dtype)  # types of args that are copied


def convert(
    source: Path, target: Path, dtype: torch.dtype | None, bar: Callable[[int], Done], step: int | None = None
) -> list[str]:
    """Write the weights of ``source`` to ``target``; returns lines to print at the end.

    Args:
        dtype: of the weights; default: the source's.
        bar: starts a progress bar for this number of tensors.
        step: iteration; default: the latest.

    Raises:
        Refusal: something is missing, damaged or not supported; nothing is left in ``target``.
    """
    notes: list[str] = []
    weights = open_source(check(source_path(source, step), notes))
    model = model_of(weights.args, weights.path)
    wanted = shapes(model, weights)
    _check_names(weights, wanted)
    first = weights.tensors[Name(VOCABULARY[0])]()
    dtype = dtype or first.dtype
    attention = attention_of(weights.args, weights.path)
    with new_folder(target) as folder:
        _save(folder / "release", weights, wanted, model, dtype, bar(len(wanted)))
        (folder / TRACKER).write_text("release")
    numbers = sum(shape.numel() for shape in wanted.values())
    return [
        f"{target}: {numbers:,} parameters of {weights.path}, {dtype_name(dtype)}, "
        f"{numbers * dtype.itemsize / 1e9:,.2f} GB",
        "train it with this command, and flags for data, tokenizer, batch and schedule:",
        " ".join([program(model), *command_line(model, dtype), *window_flags(attention), "--load", str(target)])
        + " --finetune",
        *notes,
    ]


def shapes(model: ModelConfig, weights: Weights) -> dict[Name, torch.Size]:
    """Every weight of the model with its shape, layer by layer; the vocabulary has as many rows as in ``weights``."""
    if (embedding := weights.tensors.get(Name(VOCABULARY[0]))) is None:
        raise Refusal(f"{weights.path}: there is no {VOCABULARY[0]}")
    rows = embedding().shape[0]
    hidden, ffn, size = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    queries = model.num_attention_heads * size
    qkv = queries + 2 * model.num_query_groups * size
    wide = 2 * ffn if model.swiglu else ffn
    norms = ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)
    result: dict[Name, tuple[int, ...]] = {Name(VOCABULARY[0]): (rows, hidden)}
    if model.embed_layernorm:
        result |= {Name(f"embedding.word_embeddings.norm.{part}"): (hidden,) for part in ("weight", "bias")}
    if model.position_embedding_type == "learned_absolute":
        result[Name("embedding.position_embeddings.weight")] = (model.max_position_embeddings, hidden)
    for layer in range(model.num_layers):

        def put(key: str, *shape: int, layer: int = layer) -> None:
            result[Name(LAYERS + key, layer)] = shape

        for norm in norms:
            put(f"self_attention.linear_qkv.layer_norm_{norm}", hidden)
            put(f"mlp.linear_fc1.layer_norm_{norm}", hidden)
            if model.qk_layernorm:
                put(f"self_attention.q_layernorm.{norm}", size)
                put(f"self_attention.k_layernorm.{norm}", size)
        if model.softmax_type == "learnable":
            put("self_attention.core_attention.softmax_offset", model.num_attention_heads)
        for key, into, out in (
            ("self_attention.linear_qkv", hidden, qkv),
            ("self_attention.linear_proj", queries, hidden),
            ("mlp.linear_fc1", hidden, wide),
            ("mlp.linear_fc2", ffn, hidden),
        ):
            put(f"{key}.weight", out, into)
            if model.add_bias_linear or (model.add_qkv_bias and "qkv" in key):
                put(f"{key}.bias", out)
    for norm in norms:
        result[Name(f"decoder.final_layernorm.{norm}")] = (hidden,)
    if model.untie_embeddings_and_output_weights:
        result[Name(VOCABULARY[1])] = (rows, hidden)
    return {name: torch.Size(shape) for name, shape in result.items()}


def _check_names(weights: Weights, wanted: dict[Name, torch.Size]) -> None:
    def first(names: set[Name]) -> str:
        return some(sorted(name.with_layer for name in names))

    if missing := wanted.keys() - weights.tensors.keys():
        raise Refusal(f"{weights.path}: {len(missing)} weights that its args require are missing: {first(missing)}")
    if extra := weights.tensors.keys() - wanted.keys():
        raise Refusal(f"{weights.path}: {len(extra)} weights do not belong to the model in its args: {first(extra)}")


def _save(
    folder: Path, weights: Weights, wanted: dict[Name, torch.Size], model: ModelConfig, dtype: torch.dtype, done: Done
) -> None:
    parts, names = [], {}
    for name, shape in wanted.items():
        stacked = name.layer is not None
        data = torch.empty((1,) * stacked + tuple(shape), dtype=dtype, device="meta")
        offsets = [(0, name.layer, model.num_layers)] if stacked else []
        part = ShardedTensor.from_rank_offsets(name.key, data, *offsets)
        parts.append(part)
        names[part.key, part.global_offset] = name

    def compute(part: ShardedTensor) -> Tensor:
        name = names[part.key, part.global_offset]
        tensor = weights.tensors[name]()
        if tensor.shape != wanted[name]:
            raise Refusal(f"{weights.path}: {name.key} is {list(tensor.shape)}, its args require {list(wanted[name])}")
        return cast(tensor, dtype, name.key).contiguous()

    plain = {name: value for name, value in weights.args.items() if isinstance(value, PLAIN)}
    plain |= attention_of(weights.args, weights.path) | {"no_rope_freq": model.no_rope_freq}
    grid = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    grid["virtual_pipeline_model_parallel_size"] = None
    rows = wanted[Name(VOCABULARY[0])][0]
    args = plain | model_args(model) | grid
    args |= {"padded_vocab_size": rows, "make_vocab_size_divisible_by": vocabulary_block(plain)}
    args |= {"no_save_optim": True, "no_save_rng": True, "ckpt_format": "torch_dist"}
    state = {
        "args": Namespace(**args),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0.0,
        "model": {str(number): part for number, part in enumerate([*parts, *empty_extra_states(parts)])},
    }
    folder.mkdir()
    with one_process():
        save_lazily(state, folder, compute, done)
    list_files(folder)


def model_args(model: ModelConfig) -> dict[str, Any]:
    """The model as args with the names of current Megatron-LM."""
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention")
    names += ("num_query_groups", "kv_channels", "max_position_embeddings", "position_embedding_type", "rotary_base")
    names += ("rotary_percent", "normalization", "norm_epsilon", "swiglu", "add_bias_linear", "add_qkv_bias")
    names += ("untie_embeddings_and_output_weights",)
    return {name: getattr(model, name) for name in names} | {"num_experts": None}
