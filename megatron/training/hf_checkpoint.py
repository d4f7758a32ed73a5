# SPDX-License-Identifier: Apache-2.0
"""Whole checkpoints between Hugging Face's form and ours, a layer at a time: memory holds a layer, not the model.

Ours is a folder that ``--load FOLDER --finetune`` takes::

    FOLDER/release/                            the weights, as megatron-core's dist_checkpointing writes them
    FOLDER/hf/                                 what came along and the way back needs: config.json, tokenizer, ...
    FOLDER/latest_checkpointed_iteration.txt   says "release"
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.training import hugging_face, safetensors_files
from megatron.training.config import CheckpointConfig, Config, ModelConfig
from megatron.training.hugging_face import Piece
from megatron.training.refusal import Refusal
from megatron.training.safetensors_files import Header

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.training import checkpoint
    from megatron.training.lazy_save import LazySave

HEADERS = "safetensors_headers.json"  # in FOLDER/hf: the headers of the original's files
OTHERS = "other_tensors.safetensors"  # and tensors that transformers ignores
IGNORED = ".rotary_emb.inv_freq"  # old checkpoints hold RoPE's frequencies, which follow from config.json
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx", ".partial")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
STATELESS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")

Track = Callable[[list[Any], str], Any]  # wraps a list of things to do in a progress bar


def from_hugging_face(source: Path, target: Path, dtype: torch.dtype | None, track: Track) -> list[str]:
    """Write our checkpoint of a Llama's folder; returns the closing lines.

    Args:
        dtype: of the weights; default the source's.

    Raises:
        Refusal: one line on what is missing, damaged or not supported; then nothing is left behind.
    """
    config = hugging_face.read_config(source / "config.json")
    model, vocab_size = hugging_face.settings(config, source / "config.json")
    headers = safetensors_files.read_folder(source)
    pieces = list(hugging_face.pieces(model, vocab_size))
    others, stored = _check_tensors(source, headers, pieces, tied=not model.untie_embeddings_and_output_weights)
    dtype = dtype or stored
    with _new_folder(target) as folder, safetensors_files.reading(source, headers) as read, _one_process():
        if LM_HEAD in others:
            others.remove(LM_HEAD)  # tied: the embedding's twin
            if not torch.equal(read(LM_HEAD).view(torch.uint8), read(EMBEDDING).view(torch.uint8)):
                raise Refusal(f"{source}: tie_word_embeddings is true, but {LM_HEAD} differs from {EMBEDDING}")
        files = _keep_files(source, folder / "hf", headers)
        if others:
            _write_safetensors(folder / "hf", {OTHERS: _header_of({name: read(name) for name in others})}, read)
        _save(folder / "release", model, vocab_size, dtype, pieces, read, track)
        (folder / checkpoint.TRACKER).write_text("release")
    numbers = sum(torch.Size(piece.shape).numel() for piece in pieces)
    return [
        f"{target}: {numbers:,} parameters in {len(pieces)} tensors, {_name(dtype)}, "
        f"{numbers * dtype.itemsize / 1e9:,.2f} GB; with it in {target / 'hf'}: {', '.join(files)}",
        *([f"note: attention_dropout {p} of config.json is not used here"] if (p := config.get("attention_dropout")) else []),
    ]


def to_hugging_face(
    source: Path, target: Path, dtype: torch.dtype | None, track: Track, step: int | None = None, along: Path | None = None
) -> list[str]:
    """Write a checkpoint of ours as a Hugging Face folder; returns the closing lines.

    Args:
        dtype: of the weights; default the checkpoint's.
        step: iteration; default the latest.
        along: folder with config.json, tokenizer and the like; default ``source/hf``, and without it a new config.json.

    Raises:
        Refusal: as above.
    """
    path = checkpoint.find(CheckpointConfig(load=str(source), ckpt_step=step))
    if path is None:
        raise Refusal(f"--from {source} holds no checkpoint: {checkpoint.TRACKER} is missing")
    if along and not (along / "config.json").exists():
        raise Refusal(f"--hf-files {along} has no config.json")
    along = along or source / "hf"
    original = hugging_face.read_config(along / "config.json") if (along / "config.json").exists() else None
    with _one_process(), _new_folder(target) as folder:
        try:
            common = dist_checkpointing.load_common_state_dict(str(path))
            stored = dist_checkpointing.load_tensors_metadata(str(path))
        except Exception as error:  # whatever a damaged file makes torch raise
            raise Refusal(f"{path}: cannot be read: {_one_line(error)}") from error
        model = hugging_face.saved_settings(common.get("config", {}).get("model", {}))
        vocab_size = common.get("vocab_size") or (original or {}).get("vocab_size")
        if not vocab_size:
            raise Refusal(f"{path} does not say how large the vocabulary is: give --hf-files with a config.json")
        pieces = list(hugging_face.pieces(model, vocab_size))
        dtype = dtype or _check_stored(path, stored, pieces, model)
        config = hugging_face.config_json(model, vocab_size, dtype)
        headers, then = _headers(along, pieces, dtype)
        notes = []
        if original is not None:
            then = then or getattr(torch, str(original.get("dtype", original.get("torch_dtype"))), None) or dtype
            config = hugging_face.updated_config(original, along / "config.json", then, config)
            notes = [
                f"note: config.json: {name} {original.get(name)} is now {config.get(name)}"
                for name in sorted({*original, *config})
                if original.get(name) != config.get(name)
            ]
            _copy(_companions(along), folder)
        if config != original:
            _write_json(folder / "config.json", config)
        if len(headers) > 1 and not (folder / safetensors_files.INDEX).exists():
            _write_json(folder / safetensors_files.INDEX, safetensors_files.index_json(headers))
        with safetensors_files.writing(folder, headers) as put:
            _load(path, stored, model, pieces, dtype, {name for h in headers.values() for name in h.entries}, put, track)
            _put_others(along, headers, put)
    names = {name for header in headers.values() for name in header.entries}
    size = sum(header.size for header in headers.values())
    return [f"{target}: {len(names)} tensors of {path}, {_name(dtype)}, {size / 1e9:,.2f} GB in {len(headers)} files", *notes]


def training_flags(folder: Path) -> str:
    """The command that trains a converted checkpoint on, but for batch, sequence, schedule and data."""
    import shlex

    with _one_process():
        common = dist_checkpointing.load_common_state_dict(str(folder / "release"))
    model, optimizer = hugging_face.saved_settings(common["config"]["model"]), common["config"]["optimizer"]
    dtype = torch.bfloat16 if optimizer["bf16"] else torch.float16 if optimizer["fp16"] else torch.float32
    words = [hugging_face.program(model), *hugging_face.command_line(model, dtype)]
    if any((folder / "hf" / name).exists() for name in TOKENIZERS):
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "hf")]
    else:  # N ids and the end of document
        words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(common["vocab_size"] - 1)]
    return shlex.join([*words, "--load", str(folder), "--finetune"])


def _check_tensors(
    source: Path, headers: dict[str, Header], pieces: list[Piece], tied: bool
) -> tuple[set[str], torch.dtype]:
    """(names of tensors beyond the model's that may be there, dtype of the model's)."""
    there = {name: entry for header in headers.values() for name, entry in header.entries.items()}
    wanted = {name: shape for piece in pieces for name, shape in zip(piece.names, piece.shapes)}
    if missing := sorted(wanted.keys() - there.keys()):
        raise Refusal(f"{source}: {len(missing)} tensors of config.json's model are missing: {_some(missing)}")
    others = there.keys() - wanted.keys()
    odd = sorted(name for name in others if not (name.endswith(IGNORED) or (tied and name == LM_HEAD)))
    if odd:
        raise Refusal(f"{source}: {len(odd)} tensors are not of a Llama as config.json describes it: {_some(odd)}")
    for name, shape in wanted.items():
        if there[name].shape != shape:
            raise Refusal(f"{source}: {name} is {list(there[name].shape)}, but {list(shape)} by config.json")
    dtypes = sorted({there[name].dtype for name in wanted})
    if len(dtypes) > 1 or dtypes[0] not in safetensors_files.TORCH_DTYPES:
        raise Refusal(f"{source}: weights in {', '.join(dtypes)} are not supported: save them in one of BF16, F16, F32")
    return set(others), safetensors_files.TORCH_DTYPES[dtypes[0]]


def _save(
    folder: Path,
    model: ModelConfig,
    vocab_size: int,
    dtype: torch.dtype,
    pieces: list[Piece],
    read: Callable[[str], Tensor],
    track: Track,
) -> None:
    """Write the weights and the settings, as a training run that saves would."""
    config = Config(model=model)
    config.optimizer.bf16, config.optimizer.fp16 = dtype == torch.bfloat16, dtype == torch.float16
    sharded = {f"{piece.key}/{piece.layer}/{piece.part}": _sharded(piece, model.num_layers, dtype) for piece in pieces}
    makes = {id(sharded[key]): piece for key, piece in zip(sharded, pieces)}
    objects = {  # megatron-core's linear layers keep an empty extra state
        f"{name}/{layer}": ShardedObject(f"decoder.layers.{name}._extra_state", None, (model.num_layers,), (layer,))
        for name in STATELESS
        for layer in range(model.num_layers)
    }

    def compute(tensor: ShardedTensor) -> Tensor:
        names = makes[id(tensor)].names
        return hugging_face.fuse([read(name).to(dtype) for name in names], model.num_query_groups)

    state = {
        "config": asdict(config),
        "progress": asdict(checkpoint.Progress()),
        "vocab_size": vocab_size,
        "model": {**sharded, **objects},
    }
    folder.mkdir()
    dist_checkpointing.save(state, str(folder), LazySave(compute, track), content_metadata=dict(checkpoint.METADATA))


def _sharded(piece: Piece, layers: int, dtype: torch.dtype, data: Tensor | None = None) -> ShardedTensor:
    """A piece as megatron-core's part of a tensor; without ``data`` it takes no memory."""
    data = torch.empty(piece.shape, dtype=dtype, device="meta") if data is None else data
    rows = 0 if piece.layer is None else 1
    offsets = [(0, piece.layer, layers)] if rows else []
    offsets += [(rows, piece.part, piece.parts)] if piece.parts > 1 else []
    return ShardedTensor.from_rank_offsets(piece.key, data, *offsets, prepend_axis_num=rows)
