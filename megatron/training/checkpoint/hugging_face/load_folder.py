# SPDX-License-Identifier: Apache-2.0
"""``--load`` of a Hugging Face folder on any grid, without conversion.

    FOLDER/config.json
    FOLDER/model.safetensors, or model.safetensors.index.json and the files that it names

Like a checkpoint named ``release`` in Megatron-LM, it has only weights, and a run starts from it at iteration 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.checkpoint.hugging_face import safetensors_folder
from megatron.training.checkpoint.hugging_face.safetensors_folder import Entry, Header
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.load_torch_dist import ForeignCheckpoint
from megatron.training.checkpoint.megatron_lm.stored_tensors import WholeTensors
from megatron.training.families import architectures
from megatron.training.families.llama import llama_settings, llama_weights
from megatron.training.families.llama.llama_weights import Piece
from megatron.training.refusal import Refusal, some
from megatron.training.settings.kinds import kinds_in
from megatron.training.settings.same_network import of_model

PADDING = 1024  # in Qwen and BLOOM, the embedding may have this many rows more than the tokenizer has ids


def open_folder(path: Checked) -> ForeignCheckpoint:
    """The weights of a Hugging Face folder.

    Raises:
        Refusal: the model is not supported, incomplete, or in another format than safetensors.
    """
    where = path.file("config.json")
    model = architectures.described(llama_settings.read_config(where), where)
    if kinds_in(model.settings):
        raise Refusal(
            f"{path.path}: {model.family.title} cannot be loaded without conversion: convert it with "
            "tools/convert_hf.py --from-hf DIR --to DIR, and load that"
        )
    headers = safetensors_folder.read_folder(path)
    places = {name: file for file, header in headers.items() for name in header.entries}
    pieces = architectures.pieces(model, places)
    check_source(path.path, headers, pieces, model)
    parts: dict[str, list[Piece]] = {}
    for piece in pieces:
        key = piece.key.replace("layers.", "layers." if piece.layer is None else f"layers.{piece.layer}.")
        parts.setdefault(key, []).append(piece)
    make: dict[str, Callable[[], Tensor]] = {
        key: partial(_whole, path, rows, places, model.settings.num_query_groups) for key, rows in parts.items()
    }
    args: dict[str, Any] = of_model(model.settings, model.attention) | {
        "padded_vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": PADDING,
    }
    return ForeignCheckpoint(path.path, {}, args, WholeTensors(path.path, make), weights_alone=True)


def check_source(
    source: Path, headers: dict[str, Header], pieces: list[Piece], model: architectures.Described
) -> tuple[dict[str, Entry], torch.dtype]:
    """Check names, shapes and dtypes of the tensors in a folder against ``model`` and its ``pieces``.

    Returns:
        (tensors that the model does not need but that may be present, dtype of the model's weights).

    Raises:
        Refusal: tensors are missing, unexpected or of another shape, or have several or unsupported dtypes.
    """
    present = {name: entry for header in headers.values() for name, entry in header.entries.items()}
    wanted = {name: shape for piece in pieces for name, shape in zip(piece.names, piece.shapes)}
    if missing := sorted(wanted.keys() - present.keys()):
        raise Refusal(f"{source}: {len(missing)} tensors that config.json requires are missing: {some(missing)}")
    others = {name: entry for name, entry in present.items() if name not in wanted}
    copies = architectures.copies(model, pieces)
    if extra := sorted(name for name in others if name not in copies and not architectures.is_ignored(model, name)):
        raise Refusal(f"{source}: {len(extra)} tensors do not belong to the model in config.json: {some(extra)}")
    for name, shape in wanted.items():
        if present[name].shape != shape:
            raise Refusal(f"{source}: {name} is {list(present[name].shape)}, but config.json requires {list(shape)}")
    wide = {name for piece in pieces if piece.wide for name in piece.names}
    dtypes = sorted({present[name].dtype for name in wanted.keys() - wide})
    if len(dtypes) > 1 or dtypes[0] not in safetensors_folder.TORCH_DTYPES:
        raise Refusal(
            f"{source}: weights in {', '.join(dtypes)} are not supported: all must be BF16, all F16 or all F32"
        )
    return others, safetensors_folder.TORCH_DTYPES[dtypes[0]]


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
