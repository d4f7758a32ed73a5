# SPDX-License-Identifier: Apache-2.0
"""``--load`` of a Hugging Face folder on any grid, without conversion.

    FOLDER/config.json
    FOLDER/model.safetensors, or model.safetensors.index.json and the files that it names

Like a checkpoint named ``release`` in Megatron-LM, it has only weights, and a run starts from it at iteration 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.training.checkpoint.hugging_face import architectures, llama_settings, llama_weights, safetensors_folder
from megatron.training.checkpoint.hugging_face.llama_weights import Piece
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.load_torch_dist import ForeignCheckpoint
from megatron.training.checkpoint.megatron_lm.stored_tensors import WholeTensors
from megatron.training.refusal import Refusal

PADDING = 1024  # in Qwen and BLOOM, the embedding may have this many rows more than the tokenizer has ids


def open_folder(path: Checked) -> ForeignCheckpoint:
    """The weights of a Hugging Face folder.

    Raises:
        Refusal: the model is not supported, incomplete, or in another format than safetensors.
    """
    where = path.file("config.json")
    model = architectures.described(llama_settings.read_config(where), where)
    if model.settings.num_experts or model.settings.multi_latent_attention:
        raise Refusal(
            f"{path.path}: {model.family.title} cannot be loaded without conversion: convert it with "
            "tools/convert_hf.py --from-hf DIR --to DIR, and load that"
        )
    headers = safetensors_folder.read_folder(path)
    places = {name: file for file, header in headers.items() for name in header.entries}
    pieces = architectures.pieces(model, places)
    architectures.check_source(path.path, headers, pieces, model)
    parts: dict[str, list[Piece]] = {}
    for piece in pieces:
        key = piece.key.replace("layers.", "layers." if piece.layer is None else f"layers.{piece.layer}.")
        parts.setdefault(key, []).append(piece)
    make: dict[str, Callable[[], Tensor]] = {
        key: partial(_whole, path, rows, places, model.settings.num_query_groups) for key, rows in parts.items()
    }
    args: dict[str, Any] = asdict(model.settings) | {
        "padded_vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": PADDING,
        "attention": model.attention,
    }
    return ForeignCheckpoint(path.path, {}, args, WholeTensors(path.path, make), weights_alone=True)


def _whole(path: Checked, pieces: list[Piece], places: dict[str, str], groups: int) -> Tensor:
    """One of our weights, complete: its pieces are concatenated by rows."""
    return torch.cat(
        [
            llama_weights.fuse(piece, [_read(path, places[name], name) for name in piece.names], groups)
            for piece in pieces
        ]
    )


def _read(path: Checked, file: str, name: str) -> Tensor:
    with safetensors_folder.reading(path, {file: safetensors_folder.read_header(path.file(file))}) as read:
        return read(name)
