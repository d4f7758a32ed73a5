# SPDX-License-Identifier: Apache-2.0
"""Adapters of a checkpoint on their way to Hugging Face: merged into the weights, or as a folder for PEFT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.core.lora import Lora, is_adapter, merged
from megatron.training.arguments.config import CheckpointConfig, ModelConfig
from megatron.training.checkpoint import checkpoint
from megatron.training.checkpoint.checksums import check
from megatron.training.checkpoint.converting.lazy_save import sharded
from megatron.training.checkpoint.hugging_face import files, llama, tensors
from megatron.training.checkpoint.hugging_face.folders import Done, new_folder, one_process, write_json
from megatron.training.checkpoint.hugging_face.tensors import Piece
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.reading import load_state, tensors_in
from megatron.training.refusal import Refusal

PEFT_PREFIX = "base_model.model."


def pieces_of(piece: Piece, model: ModelConfig) -> tuple[Piece, Piece] | None:
    """A and B beside the rows of a weight; None where they have no adapter."""
    layer, _, kind = piece.key.rpartition(".")
    if model.lora_rank is None or kind != "weight" or layer.rpartition(".")[2] not in model.lora_targets:
        return None
    out, into = piece.shape
    a = Piece(f"{layer}.lora_a", ("",), ((model.lora_rank, into),), piece.layer)
    return a, Piece(f"{layer}.lora_b", ("",), ((out, model.lora_rank),), piece.layer, piece.part, piece.parts)


def of_checkpoint(path: Checked, piece: Piece, model: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """(A [rank, in], B [out, rank]) beside the rows of a weight."""
    found = pieces_of(piece, model)
    if found is None:
        return None
    state = {name: sharded(one, model.num_layers, dtype, "cpu") for name, one in zip("ab", found)}
    loaded = load_state({"adapter": state}, path, whole_tensors_once=False)["adapter"]
    return tuple(loaded[name].view(one.shape) for name, one in zip("ab", found))


def merge(path: Checked, piece: Piece, rows: Tensor, model: ModelConfig) -> Tensor:
    """The rows of a weight with its adapter in them, if it has one."""
    adapter = of_checkpoint(path, piece, model, rows.dtype)
    return rows if adapter is None else merged(rows, *adapter, lora_of(model)).to(rows.dtype)


def lora_of(model: ModelConfig) -> Lora:
    """Of a model that has adapters."""
    return Lora(model.lora_rank, model.lora_alpha, tuple(model.lora_targets))


def without(stored: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """What a checkpoint holds, less the adapters that its settings speak of."""
    return {key: value for key, value in stored.items() if not (model.lora_rank and is_adapter(key))}


def to_peft(source: Path, target: Path, bar: Callable[[int], Done], step: int | None, base: str) -> list[str]:
    """Write the adapters of a checkpoint as a folder that PEFT loads; returns the closing lines.

    Several layers of Hugging Face are one here (query, key and value; gate and up): they share A, and so their
    adapters hold it several times.

    Args:
        base: what ``base_model_name_or_path`` says.

    Raises:
        Refusal: there is no checkpoint, or none with adapters.
    """
    latest = checkpoint.find(CheckpointConfig(load=str(source), ckpt_step=step))
    if latest is None:
        raise Refusal(f"--from {source}: no checkpoint there")
    notes: list[str] = []
    path = check(latest, notes)
    common = path.common()
    saved = common.get("config", {}).get("model")
    model = llama.saved_settings(saved) if saved else ModelConfig()
    if model.lora_rank is None:
        raise Refusal(f"--from {source}: {path} has no adapters: --to-hf writes its weights")
    with one_process(), new_folder(target) as folder:
        wanted = [piece for piece in tensors.pieces(model, common["vocab_size"]) if pieces_of(piece, model)]
        done, found, dtype = bar(len(wanted)), {}, tensors_in(path)[wanted[0].key].dtype
        for piece in wanted:
            found.update(_for_peft(path, piece, model, dtype))
            done()
        header = files.make_header({name: ("F32", tuple(part.shape)) for name, part in found.items()})
        with files.writing(folder, {"adapter_model.safetensors": header}) as put:
            for name, part in found.items():
                put(name, part)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": model.lora_rank,
            "lora_alpha": model.lora_alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({name.split(".")[-3] for name in found}),
        }
        write_json(folder / "adapter_config.json", config)
    return [f"{target}: adapters of rank {model.lora_rank} for {len(found) // 2} layers of {path}", *notes]


def _for_peft(path: Checked, piece: Piece, model: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    a, b = (part.float() for part in of_checkpoint(path, piece, model, dtype))
    for name, rows in zip(piece.names, tensors.split(piece, b, model.num_query_groups)):
        stem = PEFT_PREFIX + name.removesuffix(".weight")
        yield f"{stem}.lora_A.weight", a
        yield f"{stem}.lora_B.weight", rows.contiguous()
