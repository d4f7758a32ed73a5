# SPDX-License-Identifier: Apache-2.0
"""Convert our checkpoint to a Hugging Face folder, one layer at a time, or its adapters to a PEFT folder."""

from __future__ import annotations

import itertools
import json
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.checkpoint.hugging_face import safetensors_folder
from megatron.training.checkpoint.hugging_face.safetensors_folder import (
    HEADERS,
    OTHERS,
    TOKENIZERS,
    Done,
    Entry,
    Header,
    cast,
    companions,
    copy_files,
    dtype_name,
    new_folder,
    one_process,
    write_json,
)
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.megatron_args import attention_of, model_of, namespace
from megatron.training.checkpoint.megatron_lm.places import TRACKER, is_hugging_face
from megatron.training.checkpoint.megatron_lm.stored_tensors import StoredTensors
from megatron.training.families import architectures
from megatron.training.families.architectures import Described
from megatron.training.families.llama import llama_settings, llama_weights
from megatron.training.families.llama.llama_weights import LM_HEAD, Piece
from megatron.training.json_file import json_object
from megatron.training.refusal import Refusal, short, some
from megatron.training.settings.config import CheckpointConfig, ModelConfig
from megatron.training.untrusted.links import file_in

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.context_parallel.core.lora import Lora, is_adapter, merged
    from megatron.training.checkpoint import checkpoint
    from megatron.training.checkpoint.checksums import check, list_files
    from megatron.training.checkpoint.converting.lazy_save import sharded
    from megatron.training.checkpoint.read_torch_dist import load_state

PEFT_PREFIX = "base_model.model."
TOKENIZER_FILES = (*TOKENIZERS, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
                   "chat_template.jinja", "chat_template.json", "generation_config.json")  # fmt: skip
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
GIVE = "give --hf-files DIR, a folder with config.json and the tokenizer's files"
WITHOUT_FILES = (None, "NullTokenizer", "ByteLevelTokenizer")


def adapter_pieces(piece: Piece, model: ModelConfig) -> tuple[Piece, Piece] | None:
    """The pieces (A, B) of the adapter that belongs to this piece of a weight; None if it has no adapter."""
    layer, _, kind = piece.key.rpartition(".")
    if model.lora_rank is None or kind != "weight" or layer.rpartition(".")[2] not in model.lora_targets:
        return None
    out, into = piece.shape
    a = Piece(f"{layer}.lora_a", ("",), ((model.lora_rank, into),), piece.layer, stacked=piece.stacked)
    b = replace(a, key=f"{layer}.lora_b", shapes=((out, model.lora_rank),), part=piece.part, parts=piece.parts)
    return a, replace(b, named=piece.named)


def load_adapter(path: Checked, piece: Piece, model: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """(A [rank, in], B [out, rank]) of the adapter for this piece of a weight; None if it has no adapter."""
    pieces = adapter_pieces(piece, model)
    if pieces is None:
        return None
    parts = {name: piece.stored() for name, piece in zip("ab", pieces)}
    state = {name: [sharded(part, model.num_layers, dtype, "cpu") for part in own] for name, own in parts.items()}
    loaded = load_state(state, path, whole_tensors_once=False)
    return tuple(torch.cat([x.view(part.shape) for x, part in zip(loaded[name], parts[name])]) for name in "ab")


def merge(path: Checked, piece: Piece, rows: Tensor, model: ModelConfig) -> Tensor:
    """The rows of a weight, with its adapter merged into them if it has one."""
    adapter = load_adapter(path, piece, model, rows.dtype)
    if adapter is None:
        return rows
    lora = Lora(model.lora_rank, model.lora_alpha, tuple(model.lora_targets))
    return merged(rows, *adapter, lora).to(rows.dtype)


def to_peft(source: Path, target: Path, bar: Callable[[int], Done], step: int | None, base: str) -> list[str]:
    """Write the adapters of a checkpoint as a folder that PEFT loads; returns lines to print at the end.

    Each of our layers corresponds to several of Hugging Face's (query, key and value; gate and up). They share A, so A
    is written several times.

    Args:
        base: the value of ``base_model_name_or_path``.

    Raises:
        Refusal: there is no checkpoint, or it has no adapters.
    """
    latest = checkpoint.find(CheckpointConfig(load=str(source), ckpt_step=step))
    if latest is None:
        raise Refusal(f"--from {source}: no checkpoint there")
    notes: list[str] = []
    path = check(latest, notes)
    common = path.common()
    saved = common.get("config", {}).get("model")
    model = llama_settings.saved_settings(saved) if saved else ModelConfig()
    if model.lora_rank is None:
        raise Refusal(f"--from {source}: {path} has no adapters: --to-hf writes its weights")
    with one_process(), new_folder(target) as folder:
        pieces = architectures.family_of(model).pieces(model, common["vocab_size"], ())
        wanted = [piece for piece in pieces if adapter_pieces(piece, model)]
        done, tensors, dtype = bar(len(wanted)), {}, StoredTensors(path).dtype(wanted[0].stored()[0].key)
        for piece in wanted:
            tensors.update(_for_peft(path, piece, model, dtype))
            done()
        header = safetensors_folder.make_header({name: ("F32", tuple(part.shape)) for name, part in tensors.items()})
        with safetensors_folder.writing(folder, {"adapter_model.safetensors": header}) as put:
            for name, part in tensors.items():
                put(name, part)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": model.lora_rank,
            "lora_alpha": model.lora_alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        }
        write_json(folder / "adapter_config.json", config)
    return [f"{target}: adapters of rank {model.lora_rank} for {len(tensors) // 2} layers of {path}", *notes]


def _for_peft(path: Checked, piece: Piece, model: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    a, b = (part.float() for part in load_adapter(path, piece, model, dtype))
    untransposed = replace(piece, transposed=False)  # PEFT has [rank, in] and [out, rank] for GPT-2's matrices too
    for name, rows in zip(piece.names, llama_weights.split(untransposed, b, model.num_query_groups)):
        stem = PEFT_PREFIX + name.removesuffix(".weight")
        yield f"{stem}.lora_A.weight", a
        yield f"{stem}.lora_B.weight", rows.contiguous()


def to_hugging_face(
    source: Path,
    target: Path,
    dtype: torch.dtype | None,
    bar: Callable[[int], Done],
    step: int | None = None,
    hf_files: Path | None = None,
) -> list[str]:
    """Write our checkpoint as a Hugging Face folder; returns lines to print at the end.

    Args:
        dtype: of the weights; default: the checkpoint's.
        bar: starts a progress bar for this number of tensors.
        step: iteration; default: the latest.
        hf_files: folder of the original model with config.json, tokenizer etc.; default: ``source/hf``. If it does not
            exist, a new config.json is written.

    Raises:
        Refusal: there is no checkpoint, it is damaged, or transformers does not have its model.
    """
    latest = checkpoint.find(CheckpointConfig(load=str(source), ckpt_step=step))
    if latest is None:
        raise Refusal(f"--from {source}: no checkpoint there ({TRACKER} is missing)")
    notes: list[str] = []
    path = check(latest, notes)
    folder_of_original = hf_files or source / "hf"
    original_files = check(folder_of_original, notes) if is_hugging_face(folder_of_original) else None
    original = llama_settings.read_config(original_files.file("config.json")) if original_files else None
    described = None
    if original is not None:
        described = architectures.described(original, folder_of_original / "config.json")
    files = companions(folder_of_original) if original is not None else []
    common = path.common()
    files += _tokenizer_files(common, {file.name for file in files}, notes)
    made = _made_files(common, files, notes) if original is None else {}
    with one_process(), new_folder(target, [*files, *map(Path, made)]) as folder:
        stored, (model, attention) = StoredTensors(path), _settings(path, common)
        vocab_size = _vocabulary(path, common.get("vocab_size"), original)
        family = described.family if described else architectures.family_of(model, attention)
        names = {name for header in _original_headers(original_files).values() for name in header.entries}
        if not family.predicts_ahead and model.mtp_num_layers:
            notes.append(
                f"note: its {model.mtp_num_layers} layers of multi-token prediction are left out: {family.title} has "
                "none"
            )
            model = replace(model, mtp_num_layers=None)
        ours = Described(model, vocab_size, family, attention)
        pieces = architectures.pieces(ours, names)
        config = architectures.config_json(ours, torch.float32)  # refuses models of another family
        stored_dtype = _check_stored(path, stored, pieces, model, family)
        dtype = dtype or stored_dtype
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
        ignored, copies = partial(architectures.is_ignored, ours), architectures.copies(ours, pieces)
        headers, original_dtype = _headers(original_files, pieces, dtype, copies, ignored)
        copy_files(files, folder)
        for name, content in made.items():
            (folder / name).write_text(content, encoding="utf-8")
        if original is not None:
            wide = original_dtype or torch.float32
            written = architectures.config_json(described, wide)
            config = llama_settings.updated_config(original, written, original_dtype, config)
            notes += [
                f"note: {name} {original.get(name)} of the original config.json is now {config.get(name)}"
                for name in sorted({*original, *config})
                if original.get(name) != config.get(name)
            ]
        if config != original:
            write_json(folder / "config.json", config)
        if original_dtype != dtype:  # otherwise the files and their index have the original's form
            (folder / safetensors_folder.INDEX).unlink(missing_ok=True)
            if len(headers) > 1:
                write_json(folder / safetensors_folder.INDEX, safetensors_folder.index_json(headers))
        names = {name for header in headers.values() for name in header.entries}
        with safetensors_folder.writing(folder, headers) as put:
            entries = {name: entry for header in headers.values() for name, entry in header.entries.items()}
            for name, tensor in _weights(path, pieces, model, stored_dtype, bar(len(pieces))):
                put(name, cast(tensor, safetensors_folder.TORCH_DTYPES[entries[name].dtype], name))
                for copy in (copy for copy, same in copies.items() if same == name and copy in names):
                    put(copy, tensor.to(dtype))
            if others := [name for name in names if ignored(name)]:
                header = safetensors_folder.read_header(original_files.file(OTHERS))
                with safetensors_folder.reading(original_files, {OTHERS: header}) as read:
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


def _tokenizer_files(common: dict[str, Any], present: set[str], notes: list[str]) -> list[Path]:
    """The files of the tokenizer that a checkpoint names, unless ``present`` files have one.

    Only files of known names are taken, because the checkpoint may be a stranger's and name any folder.

    Args:
        notes: receives a line about what is written, or why there is no tokenizer.
    """
    args = vars(common["args"]) if isinstance(common.get("args"), Namespace) else {}  # Megatron-LM's
    data = (common.get("config") or {}).get("data") or args
    kind, name = data.get("tokenizer_type"), data.get("tokenizer_model")
    if present & set(TOKENIZERS) or kind in WITHOUT_FILES:
        return []
    if kind != "HuggingFaceTokenizer" or not isinstance(name, str):
        notes.append(
            f"note: no tokenizer was written: the training's {short(kind)} is not in Hugging Face's form; {GIVE}"
        )
        return []
    folder = Path(name)
    files = [file_in(folder, one) for one in TOKENIZER_FILES if (folder / one).is_file() and one not in present]
    if not {file.name for file in files} & set(TOKENIZERS):
        notes.append(f"note: no tokenizer was written: {folder} of the training has none now; {GIVE}")
        return []
    notes.append(
        f"note: the tokenizer is that of the training, from {folder}: {', '.join(file.name for file in files)}"
    )
    return files


def _made_files(common: dict[str, Any], files: list[Path], notes: list[str]) -> dict[str, str]:
    """{name: content} of files that a tokenizer lacks and that follow from it and from the training.

    Args:
        notes: receives a line about each of them, and about what is missing.
    """
    by_name = {file.name: file for file in files}
    if not by_name.keys() & set(TOKENIZERS):
        return {}
    settings = json_object(by_name.get("tokenizer_config.json"))
    made, data = {}, (common.get("config") or {}).get("data") or {}
    template = data.get("sft_tokenizer_prompt_format")
    if data.get("sft") and isinstance(template, str) and template != "default":
        notes.append(f"note: give {template}, the training's chat template, as {TEMPLATE} in --hf-files DIR")
    elif not settings.get("chat_template") and not by_name.keys() & {TEMPLATE, "chat_template.json"}:
        notes.append(f"note: there is no chat template: put {TEMPLATE} next to the tokenizer, or into --hf-files DIR")
    if GENERATION in by_name:
        return made
    end, known = settings.get("eos_token"), json_object(by_name.get("tokenizer.json")).get("added_tokens")
    end = end.get("content") if isinstance(end, dict) else end
    ids = [one.get("id") for one in known or () if isinstance(one, dict) and end and one.get("content") == end]
    if ids and type(ids[0]) is int:
        made[GENERATION] = json.dumps({"eos_token_id": ids[0]}, indent=2) + "\n"
        notes.append(f"note: {GENERATION} is new: an answer ends at the tokenizer's {short(end)}, {ids[0]}")
    else:
        notes.append(f"note: there is no {GENERATION}: without it an answer has no end; put it into --hf-files DIR")
    return made


def _settings(path: Checked, common: dict[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """The settings of model and attention in our checkpoint, or in Megatron-LM's."""
    if "model" in common.get("config", {}):
        return llama_settings.saved_settings(common["config"]["model"]), common["config"].get("attention", {})
    if "args" in common:
        args = namespace(common["args"], path)
        return model_of(args, path), attention_of(args, path)
    raise Refusal(
        f"checkpoint {path} was written neither by this program nor by Megatron-LM: it holds no settings of its model"
    )


def _vocabulary(path: Checked, trained: int | None, original: dict[str, Any] | None) -> int:
    """The number of rows to write: those over which the loss was computed, without padding, or the original's."""
    original_size = (original or {}).get("vocab_size")
    if trained is None and original_size is None:
        raise Refusal(f"{path} does not say how large its vocabulary is: give --hf-files, a folder with a config.json")
    return original_size if trained is None else trained


def _check_stored(
    path: Checked,
    stored: StoredTensors,
    pieces: list[Piece],
    model: ModelConfig,
    family: architectures.Family,
) -> torch.dtype:
    """Check that all weights exist with the shapes that the settings require; returns their dtype."""
    parts = [part for piece in pieces for part in piece.stored()]
    wanted = {part.key: sharded(part, model.num_layers, torch.float32) for part in parts}
    of_model = ("embedding.", "decoder.", "output_layer.", "reward_head.", *("mtp.",) * family.predicts_ahead)
    present = {key for key in stored if key.startswith(of_model) and not (model.lora_rank and is_adapter(key))}
    if differing := sorted(present ^ wanted.keys()):
        raise Refusal(
            f"{path}: tensors are missing or unexpected for a {family.title} with its settings: {some(differing)}"
        )
    for key, tensor in wanted.items():
        actual, shape = stored.shape(key), tensor.global_shape
        padded = tensor.allow_shape_mismatch and actual[0] >= shape[0] and actual[1:] == shape[1:]
        if actual != shape and not padded:
            raise Refusal(f"{path}: {key} is {list(actual)}, but its settings require {list(shape)}")
    return stored.dtype(pieces[0].key)


def _original_headers(original_files: Checked | None) -> dict[str, Header]:
    """The headers of the original model's files, as stored in ``original_files``; empty if they are not stored."""
    if original_files is None or HEADERS not in original_files.files:
        return {}
    texts = llama_settings.read_config(original_files.file(HEADERS))
    if any(Path(name).name != name or not name.endswith(".safetensors") for name in texts):
        raise Refusal(f"{original_files.file(HEADERS)}: it names files outside of its folder")
    try:
        return {name: safetensors_folder.parse_header(text) for name, text in texts.items()}
    except ValueError as error:
        raise Refusal(f"{original_files.file(HEADERS)}: {error}") from None


def _headers(
    original_files: Checked | None,
    pieces: list[Piece],
    dtype: torch.dtype,
    copies: dict[str, str],
    ignored: Callable[[str], bool],
) -> tuple[dict[str, Header], torch.dtype | None]:
    """(headers of the files to write, dtype of the original's weights).

    The files hold the same tensors as the original's if ``original_files`` has the original's headers and they fit the
    model; otherwise new files are planned, and the dtype is None.
    """
    wanted = {name: shape for piece in pieces for name, shape in zip(piece.names, piece.shapes)}
    # A tied head is not written, but the layers of multi-token prediction have their copies in released files.
    wanted |= {name: wanted[same] for name, same in copies.items() if name != LM_HEAD}
    wide = {name for piece in pieces if piece.wide for name in piece.names}
    dtype_code = safetensors_folder.NAMES[dtype]
    if headers := _original_headers(original_files):
        entries = {name: entry for header in headers.values() for name, entry in header.entries.items()}
        same = all(name in entries and entries[name].shape == shape for name, shape in wanted.items())
        dtypes = {entries[name].dtype for name in wanted.keys() - wide} if same else set()
        same = len(dtypes) == 1 and dtypes <= safetensors_folder.TORCH_DTYPES.keys()
        extra = entries.keys() - wanted.keys()
        if same and all(
            name in copies or (ignored(name) and _is_kept(original_files, name, entries[name])) for name in extra
        ):
            original_dtype = safetensors_folder.TORCH_DTYPES[dtypes.pop()]
            if original_dtype == dtype:
                return headers, original_dtype
            return {
                file: safetensors_folder.make_header(
                    {
                        name: (e.dtype if name in wide or ignored(name) else dtype_code, e.shape)
                        for name, e in header.entries.items()
                    },
                    header.metadata,
                )
                for file, header in headers.items()
            }, original_dtype
    codes = {name: safetensors_folder.NAMES[torch.float32] for name in wide}
    return safetensors_folder.plan_files(
        (name, codes.get(name, dtype_code), shape) for name, shape in wanted.items()
    ), None


def _is_kept(original_files: Checked, name: str, entry: Entry) -> bool:
    """Whether ``original_files`` has kept this tensor, which transformers ignores, with the same dtype and shape."""
    if OTHERS not in original_files.files:
        return False
    kept = safetensors_folder.read_header(original_files.file(OTHERS)).entries.get(name)
    return (
        kept is not None
        and (kept.dtype, kept.shape) == (entry.dtype, entry.shape)
        and entry.dtype in safetensors_folder.BYTES
    )


def _weights(
    path: Checked, pieces: list[Piece], model: ModelConfig, dtype: torch.dtype, done: Done
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face's name, tensor) of all weights of a checkpoint, read one layer at a time."""
    for _, group in itertools.groupby(pieces, key=lambda piece: piece.layer):
        layer = list(group)
        state = {
            f"{number} {index}": sharded(part, model.num_layers, dtype, "cpu")
            for number, piece in enumerate(layer)
            for index, part in enumerate(piece.stored())
        }
        loaded = load_state({"pieces": state}, path, whole_tensors_once=False)["pieces"]
        for number, piece in enumerate(layer):
            found = [loaded[f"{number} {index}"].view(part.shape) for index, part in enumerate(piece.stored())]
            rows = merge(path, piece, torch.cat(found) if piece.named else found[0], model)
            yield from zip(piece.names, llama_weights.split(piece, rows, model.num_query_groups))
            done()
