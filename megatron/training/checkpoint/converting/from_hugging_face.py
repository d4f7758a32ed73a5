# SPDX-License-Identifier: Apache-2.0
"""From Hugging Face: our checkpoint of a Llama's folder, a tensor at a time, so that memory holds no model.

Ours is a folder that ``--load FOLDER --finetune`` takes::

    FOLDER/release/                            the weights, as megatron-core's dist_checkpointing writes them
    FOLDER/hf/                                 what the way back needs besides: config.json, tokenizer, file headers
    FOLDER/latest_checkpointed_iteration.txt   says "release"
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from megatron.training.arguments.config import Config, ModelConfig
from megatron.training.checkpoint.hugging_face import architectures, llama_settings, llama_weights, safetensors_folder
from megatron.training.checkpoint.hugging_face.llama_weights import Piece
from megatron.training.checkpoint.hugging_face.safetensors_folder import (
    EMBEDDING,
    HEADERS,
    LM_HEAD,
    OTHERS,
    Done,
    companions,
    copy_files,
    dtype_name,
    new_folder,
    one_process,
    write_json,
)
from megatron.training.checkpoint.megatron_lm.places import TRACKER, is_hugging_face
from megatron.training.refusal import Refusal

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    from megatron.training.checkpoint import checkpoint
    from megatron.training.checkpoint.checksums import check, list_files
    from megatron.training.checkpoint.converting.lazy_save import LazySave, sharded
    from megatron.training.checkpoint.rank_file import without_inner_sums
    from megatron.training.checkpoint.run_state import Progress

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
STATELESS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def from_hugging_face(source: Path, target: Path, dtype: torch.dtype | None, bar: Callable[[int], Done]) -> list[str]:
    """Write our checkpoint of a Llama's folder; returns the closing lines.

    Args:
        dtype: of the weights; default the source's.
        bar: starts a progress bar of so many tensors.

    Raises:
        Refusal: one line on what is missing, damaged or not supported; then nothing is left behind.
    """
    where = source / "config.json"
    if not is_hugging_face(source):
        raise Refusal(f"{where}: No such file")
    notes: list[str] = []
    checked = check(source, notes)
    config = llama_settings.read_config(checked.file(where.name))
    model, vocab_size = llama_settings.settings(config, where)
    headers = safetensors_folder.read_folder(checked)
    pieces = list(llama_weights.pieces(model, vocab_size))
    others, stored = architectures.check_source(
        source, headers, pieces, tied=not model.untie_embeddings_and_output_weights
    )
    dtype = dtype or stored
    with new_folder(target) as folder, safetensors_folder.reading(checked, headers) as read:
        if LM_HEAD in others:
            if not torch.equal(read(LM_HEAD).view(torch.uint8), read(EMBEDDING).view(torch.uint8)):
                raise Refusal(f"{where}: tie_word_embeddings is true, but {LM_HEAD} differs from {EMBEDDING}")
            del others[LM_HEAD]
        hf = folder / "hf"
        hf.mkdir()
        along = copy_files(companions(source), hf)
        write_json(hf / HEADERS, {name: header.text for name, header in headers.items()})
        if others:
            extra = {OTHERS: safetensors_folder.make_header({name: (e.dtype, e.shape) for name, e in others.items()})}
            with safetensors_folder.writing(hf, extra) as put:
                for name in others:
                    put(name, read(name))
        list_files(hf)
        _save(folder / "release", model, vocab_size, dtype, pieces, read, bar(len(pieces)))
        (folder / TRACKER).write_text("release")
    numbers = sum(torch.Size(piece.shape).numel() for piece in pieces)
    lines = [
        f"{target}: {numbers:,} parameters, {dtype_name(dtype)}, {numbers * dtype.itemsize / 1e9:,.2f} GB; "
        f"in {target / 'hf'}, for the way back: {', '.join(along)}"
    ]
    if dropout := config.get("attention_dropout"):
        lines.append(f"note: attention_dropout {dropout} of config.json is not used in training here")
    return [
        *lines,
        *notes,
        "train it with, beside data, batch and schedule:",
        _command(model, vocab_size, dtype, target, along),
    ]


def _save(
    folder: Path,
    model: ModelConfig,
    vocab_size: int,
    dtype: torch.dtype,
    pieces: list[Piece],
    read: Callable[[str], Tensor],
    done: Done,
) -> None:
    """Write weights and settings, as a training run would save them."""
    config = Config(model=model)
    config.optimizer.bf16, config.optimizer.fp16 = dtype == torch.bfloat16, dtype == torch.float16
    parts = [sharded(piece, model.num_layers, dtype) for piece in pieces]
    names = {(part.key, part.global_offset): piece.names for part, piece in zip(parts, pieces)}
    objects = [  # the extra state of megatron-core's linear layers, empty without FP8
        ShardedObject(f"decoder.layers.{name}._extra_state", None, (model.num_layers,), (layer,))
        for name in STATELESS
        for layer in range(model.num_layers)
    ]

    def compute(part: ShardedTensor) -> Tensor:
        theirs = [read(name).to(dtype) for name in names[part.key, part.global_offset]]
        return llama_weights.fuse(theirs, model.num_query_groups)

    state = {
        "config": asdict(config),
        "progress": asdict(Progress()),
        "vocab_size": vocab_size,
        "model": {str(number): part for number, part in enumerate([*parts, *objects])},
    }
    folder.mkdir()
    with one_process(), without_inner_sums():
        dist_checkpointing.save(state, str(folder), LazySave(compute, done), content_metadata=dict(checkpoint.METADATA))
    list_files(folder)


def _command(model: ModelConfig, vocab_size: int, dtype: torch.dtype, folder: Path, along: list[str]) -> str:
    """The command that trains a converted checkpoint on, but for batch, sequence, schedule and data."""
    words = [llama_settings.program(model), *llama_settings.command_line(model, dtype)]
    if any(name in along for name in TOKENIZERS):
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "hf")]
    else:  # which has N ids and the end of document
        words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size - 1)]
    return shlex.join([*words, "--load", str(folder), "--finetune"])
