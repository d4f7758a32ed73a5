# SPDX-License-Identifier: Apache-2.0
"""To Hugging Face: the folder of a Llama from a checkpoint of ours, read and written a layer at a time."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.arguments.config import CheckpointConfig, ModelConfig
from megatron.training.checkpoint.hugging_face import files, llama, tensors
from megatron.training.checkpoint.hugging_face.files import Entry, Header
from megatron.training.checkpoint.hugging_face.folders import (
    EMBEDDING,
    HEADERS,
    IGNORED,
    LM_HEAD,
    OTHERS,
    Done,
    companions,
    copy_files,
    dtype_name,
    new_folder,
    one_process,
    some,
    write_json,
)
from megatron.training.checkpoint.hugging_face.tensors import Piece
from megatron.training.checkpoint.megatron_lm.args import model_of, namespace
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.places import TRACKER, is_hugging_face
from megatron.training.refusal import Refusal

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from megatron.training.checkpoint import checkpoint
    from megatron.training.checkpoint.checksums import check, list_files
    from megatron.training.checkpoint.converting import adapters
    from megatron.training.checkpoint.converting.lazy_save import sharded
    from megatron.training.checkpoint.reading import load_state, tensors_in

ROWS = "embedding.word_embeddings.weight"


def to_hugging_face(
    source: Path,
    target: Path,
    dtype: torch.dtype | None,
    bar: Callable[[int], Done],
    step: int | None = None,
    along: Path | None = None,
) -> list[str]:
    """Write a checkpoint of ours as a Hugging Face folder; returns the closing lines.

    Args:
        dtype: of the weights; default the checkpoint's.
        bar: starts a progress bar of so many tensors.
        step: iteration; default the latest.
        along: folder with config.json, tokenizer and the like; default ``source/hf``, and without it a new config.json.

    Raises:
        Refusal: as above.
    """
    latest = checkpoint.find(CheckpointConfig(load=str(source), ckpt_step=step))
    if latest is None:
        raise Refusal(f"--from {source}: no checkpoint there ({TRACKER} is missing)")
    notes: list[str] = []
    path = check(latest, notes)
    given, along = along, along or source / "hf"
    beside = check(along, notes) if is_hugging_face(along) else None
    original = llama.read_config(beside.file("config.json")) if beside else None
    with one_process(), new_folder(target) as folder:
        common, stored = path.common(), tensors_in(path)
        model = _model(path, common)
        stored = adapters.without(stored, model)
        vocab_size = _vocabulary(path, common.get("vocab_size"), original, stored)
        pieces = list(tensors.pieces(model, vocab_size))
        config = llama.config_json(model, vocab_size, torch.float32)  # refuses what is no Llama
        kept = _check_stored(path, stored, pieces, model)
        dtype = dtype or kept
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
        headers, then = _headers(beside, pieces, dtype, tied=not model.untie_embeddings_and_output_weights)
        if original is not None:
            if along != given:
                _check_links(source, along)
            copy_files(companions(along), folder)
            config = llama.updated_config(original, along / "config.json", then, config)
            notes += [
                f"note: {name} {original.get(name)} of the original config.json is now {config.get(name)}"
                for name in sorted({*original, *config})
                if original.get(name) != config.get(name)
            ]
        if config != original:
            write_json(folder / "config.json", config)
        if then != dtype:  # else these files and their index are the original's
            (folder / files.INDEX).unlink(missing_ok=True)
            if len(headers) > 1:
                write_json(folder / files.INDEX, files.index_json(headers))
        names = {name for header in headers.values() for name in header.entries}
        with files.writing(folder, headers) as put:
            for name, tensor in _weights(path, pieces, model, kept, bar(len(pieces))):
                put(name, tensor.to(dtype))
                if name == EMBEDDING and LM_HEAD in names and not model.untie_embeddings_and_output_weights:
                    put(LM_HEAD, tensor.to(dtype))
            if others := [name for name in names if name.endswith(IGNORED)]:
                with files.reading(beside, {OTHERS: files.read_header(beside.file(OTHERS))}) as read:
                    for name in others:
                        put(name, read(name))
        list_files(folder)
    size = sum(header.size for header in headers.values())
    summary = (
        f"{target}: {len(names)} tensors of {path}, {dtype_name(dtype)}, {size / 1e9:,.2f} GB, files: {len(headers)}"
    )
    if model.lora_rank:
        notes.append(f"its adapters of rank {model.lora_rank} are merged into the weights")
    return [summary, *notes]


def _check_links(source: Path, along: Path) -> None:
    """Refuse links out of a checkpoint: what they lead to would be copied, and given away with the model."""
    for path in companions(along):
        if not path.resolve().is_relative_to(source.resolve()):
            raise Refusal(f"{path} is a link that leads out of {source}: remove it, or give --hf-files DIR")


def _model(path: Checked, common: dict[str, Any]) -> ModelConfig:
    """The model of a checkpoint of ours or of Megatron-LM's."""
    if "model" in common.get("config", {}):
        return llama.saved_settings(common["config"]["model"])
    if "args" in common:
        return model_of(namespace(common["args"], path), path)
    raise Refusal(
        f"checkpoint {path} was not written by this program, nor by Megatron-LM: it holds no settings of its model"
    )


def _vocabulary(
    path: Checked, trained: int | None, original: dict[str, Any] | None, stored: dict[str, ShardedTensor]
) -> int:
    """The rows to write: the original's, where the tokenizer of the training had fewer ids; the rest is padding."""
    there = (original or {}).get("vocab_size")
    if trained is None and there is None:
        raise Refusal(f"{path} does not say how large its vocabulary is: give --hf-files, a folder with a config.json")
    rows = stored[ROWS].global_shape[0] if ROWS in stored else 0
    return there if trained is None or (there and trained < there <= rows) else trained


def _check_stored(
    path: Checked, stored: dict[str, ShardedTensor], pieces: list[Piece], model: ModelConfig
) -> torch.dtype:
    """The dtype of a checkpoint's weights, if all are there in the shapes of its settings."""
    wanted = {piece.key: sharded(piece, model.num_layers, torch.float32) for piece in pieces}
    there = {key for key in stored if key.startswith(("embedding.", "decoder.", "output_layer."))}
    if odd := sorted(there ^ wanted.keys()):
        raise Refusal(f"{path}: its tensors are not those of a Llama with its settings: {some(odd)}")
    for key, tensor in wanted.items():
        found, shape = stored[key].global_shape, tensor.global_shape
        padded = tensor.allow_shape_mismatch and found[0] >= shape[0] and found[1:] == shape[1:]
        if found != shape and not padded:
            raise Refusal(f"{path}: {key} is {list(found)}, and {list(shape)} by its settings")
    return stored[pieces[0].key].dtype


def _headers(
    along: Checked | None, pieces: list[Piece], dtype: torch.dtype, tied: bool
) -> tuple[dict[str, Header], torch.dtype | None]:
    """(headers of the files to write, dtype of the original's weights if the files are cut as the original's were)."""
    wanted = {name: shape for piece in pieces for name, shape in zip(piece.names, piece.shapes)}
    name_of = files.NAMES[dtype]
    if along is not None and HEADERS in along.files:
        texts = llama.read_config(along.file(HEADERS))
        if any(Path(name).name != name or not name.endswith(".safetensors") for name in texts):
            raise Refusal(f"{along.file(HEADERS)}: it names files outside of its folder")
        try:
            headers = {name: files.parse_header(text) for name, text in texts.items()}
        except ValueError as error:
            raise Refusal(f"{along.file(HEADERS)}: {error}") from None
        entries = {name: entry for header in headers.values() for name, entry in header.entries.items()}
        same = all(name in entries and entries[name].shape == shape for name, shape in wanted.items())
        dtypes = {entries[name].dtype for name in wanted} if same else set()
        same = len(dtypes) == 1 and dtypes <= files.TORCH_DTYPES.keys()
        twin = {LM_HEAD} if tied else set()
        more = entries.keys() - wanted.keys()
        if same and all(name in twin or _as_kept(along, name, entries[name]) for name in more):
            then = files.TORCH_DTYPES[entries[EMBEDDING].dtype]
            if then == dtype:
                return headers, then
            return {
                file: files.make_header(
                    {
                        name: (e.dtype if name.endswith(IGNORED) else name_of, e.shape)
                        for name, e in header.entries.items()
                    },
                    header.metadata,
                )
                for file, header in headers.items()
            }, then
    return files.plan_files((name, name_of, shape) for name, shape in wanted.items()), None


def _as_kept(along: Checked, name: str, entry: Entry) -> bool:
    """Whether a tensor that no model asks for lies beside the headers, as they say."""
    if not name.endswith(IGNORED) or OTHERS not in along.files:
        return False
    kept = files.read_header(along.file(OTHERS)).entries.get(name)
    return kept is not None and (kept.dtype, kept.shape) == (entry.dtype, entry.shape) and entry.dtype in files.BYTES


def _weights(
    path: Checked, pieces: list[Piece], model: ModelConfig, dtype: torch.dtype, done: Done
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face's name, tensor) of all weights of a checkpoint, read a layer at a time."""
    for _, group in itertools.groupby(pieces, key=lambda piece: piece.layer):
        layer = list(group)
        state = {str(number): sharded(piece, model.num_layers, dtype, "cpu") for number, piece in enumerate(layer)}
        loaded = load_state({"pieces": state}, path, whole_tensors_once=False)["pieces"]
        for number, piece in enumerate(layer):
            rows = adapters.merge(path, piece, loaded[str(number)].view(piece.shape), model)
            yield from zip(piece.names, tensors.split(piece, rows, model.num_query_groups))
            done()
