# SPDX-License-Identifier: Apache-2.0
"""Convert a model from Hugging Face's format to ours, one tensor at a time, so the model need not fit into memory.

The result is a folder for ``--load FOLDER --finetune``::

    FOLDER/release/                            the weights, as megatron-core's dist_checkpointing writes them
    FOLDER/hf/                                 for converting back: config.json, tokenizer, file headers
    FOLDER/latest_checkpointed_iteration.txt   contains "release"
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from megatron.training.checkpoint.hugging_face import load_folder, safetensors_folder
from megatron.training.checkpoint.hugging_face.safetensors_folder import (
    HEADERS,
    OTHERS,
    TOKENIZERS,
    Done,
    cast,
    companions,
    copy_files,
    dtype_name,
    new_folder,
    one_process,
    write_json,
)
from megatron.training.checkpoint.megatron_lm.places import TRACKER, is_hugging_face
from megatron.training.families import architectures
from megatron.training.families.architectures import Described
from megatron.training.families.llama import llama_settings, llama_weights
from megatron.training.families.llama.llama_weights import LM_HEAD, Piece
from megatron.training.refusal import Refusal
from megatron.training.settings.config import AttentionConfig, Config

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from megatron.training.checkpoint.checksums import check, list_files
    from megatron.training.checkpoint.converting.lazy_save import empty_extra_states, save_lazily, sharded
    from megatron.training.checkpoint.converting.quantized import CONFIG, quantization
    from megatron.training.checkpoint.rank_file import without_inner_sums
    from megatron.training.checkpoint.run_state import Progress


def from_hugging_face(
    source: Path, target: Path, dtype: torch.dtype | None, bar: Callable[[int], Done], ahead: int | None = None
) -> list[str]:
    """Convert the model in the folder ``source``; returns lines to print at the end.

    Args:
        dtype: of the weights; default: the source's.
        bar: starts a progress bar for this number of tensors.
        ahead: layers of multi-token prediction to convert.

    Raises:
        Refusal: something is missing, damaged or not supported; nothing is left in ``target``.
    """
    where = source / "config.json"
    if not is_hugging_face(source):
        raise Refusal(f"{where}: No such file")
    notes: list[str] = []
    checked = check(source, notes)
    config = llama_settings.read_config(checked.file(where.name))
    quantized = quantization(config, where)
    config = {name: value for name, value in config.items() if name != CONFIG}
    model, *_ = described = architectures.described(config, where)
    if ahead:
        present = config.get("num_nextn_predict_layers") or 0 if described.family.predicts_ahead else 0
        if ahead > present:
            raise Refusal(
                f"--mtp-num-layers {ahead}: {where} describes {present} such layers: give at most this number"
            )
        model.mtp_num_layers = ahead
    stored_headers = headers = safetensors_folder.read_folder(checked)
    if quantized is not None:
        headers = quantized.headers(stored_headers)
    pieces = architectures.pieces(described, {name for header in headers.values() for name in header.entries})
    others, stored = load_folder.check_source(source, headers, pieces, described)
    dtype = dtype or stored
    to_copy = companions(source)
    with new_folder(target, to_copy) as folder, safetensors_folder.reading(checked, stored_headers) as read:
        if quantized is not None:
            read = quantized.reader(read, stored_headers, dtype)
        for name, same in architectures.copies(described, pieces).items():
            if name not in others:
                continue
            if not torch.equal(read(name).view(torch.uint8), read(same).view(torch.uint8)):
                setting = "tie_word_embeddings is true" if name == LM_HEAD else "they are shared"
                raise Refusal(f"{where}: {setting}, but {name} differs from {same}")
            del others[name]
        hf = folder / "hf"
        hf.mkdir()
        copied = copy_files(to_copy, hf)
        if quantized is not None:
            write_json(hf / where.name, config)
            others = {}
        else:
            write_json(hf / HEADERS, {name: header.text for name, header in headers.items()})
        if others:
            extra = {OTHERS: safetensors_folder.make_header({name: (e.dtype, e.shape) for name, e in others.items()})}
            with safetensors_folder.writing(hf, extra) as put:
                for name in others:
                    put(name, read(name))
        list_files(hf)
        _save(folder / "release", described, dtype, pieces, read, bar(sum(len(piece.stored()) for piece in pieces)))
        (folder / TRACKER).write_text("release")
    numbers = sum(torch.Size(piece.shape).numel() for piece in pieces)
    lines = [
        f"{target}: {numbers:,} parameters, {dtype_name(dtype)}, {numbers * dtype.itemsize / 1e9:,.2f} GB; "
        f"in {target / 'hf'}, for converting back: {', '.join(copied)}"
    ]
    if dropout := config.get("attention_dropout"):
        lines.append(f"note: attention_dropout {dropout} of config.json is not used in training here")
    if quantized is not None:
        lines.append(
            f"note: weights in {quantized.method} were dequantized; converting back writes {dtype_name(dtype)}"
            + ("" if ahead else ", without layers for multi-token prediction")
        )
    kept = [name for name in others if name.startswith("model.layers.") and not name.endswith(architectures.IGNORED)]
    if kept:
        lines.append(
            f"note: {len(kept)} tensors of layers for multi-token prediction are kept for converting back; they are "
            "not trained, so after training they do not fit the model (--mtp-num-layers N converts N layers)"
        )
    return [
        *lines,
        *notes,
        "train it with this command, and flags for data, batch and schedule:",
        _command(described, dtype, target, copied),
    ]


def _save(
    folder: Path,
    described: Described,
    dtype: torch.dtype,
    pieces: list[Piece],
    read: Callable[[str], Tensor],
    done: Done,
) -> None:
    """Write weights and settings as a training run saves them."""
    model, vocab_size, _, attention = described
    config = Config(model=model, attention=AttentionConfig(**attention))
    config.optimizer.bf16, config.optimizer.fp16 = dtype == torch.bfloat16, dtype == torch.float16
    stored = [(piece, part) for piece in pieces for part in piece.stored()]
    parts = [sharded(part, model.num_layers, dtype) for _, part in stored]
    places = {(part.key, part.global_offset): piece for part, (piece, _) in zip(parts, stored)}

    def compute(part: ShardedTensor) -> Tensor:
        piece = places[part.key, part.global_offset]
        tensors = [cast(read(name), part.dtype, name) for name in piece.names]
        rows, own = llama_weights.fuse(piece, tensors, model.num_query_groups), part.key.rpartition(".")[2]
        names = [name for name, _ in piece.named]
        return rows.split([count for _, count in piece.named])[names.index(own)] if names else rows

    others = empty_extra_states(parts)
    state = {
        "config": asdict(config),
        "progress": asdict(Progress()),
        "vocab_size": vocab_size,
        "model": {str(number): part for number, part in enumerate([*parts, *others])},
    }
    folder.mkdir()
    with one_process(), without_inner_sums():
        save_lazily(state, folder, compute, done)
    list_files(folder)


def _command(described: Described, dtype: torch.dtype, folder: Path, copied: list[str]) -> str:
    """The command that continues training, without the flags for batch, sequence, schedule and data."""
    model, vocab_size, _, attention = described
    words = [llama_settings.program(model), *llama_settings.command_line(model, dtype)]
    words += llama_settings.window_flags(attention)
    if any(name in copied for name in TOKENIZERS):
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "hf")]
    else:  # NullTokenizer adds an end-of-document id to --vocab-size
        words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size - 1)]
    return shlex.join([*words, "--load", str(folder), "--finetune"])
