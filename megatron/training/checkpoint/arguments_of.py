# SPDX-License-Identifier: Apache-2.0
"""The model that a checkpoint is of, its length and its data: without process groups, before anything else.

For ``--use-checkpoint-args``, and for tools that read a checkpoint.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatron.training.arguments.config import ModelConfig
from megatron.training.checkpoint.checkpoint_folder import checkpoints_before
from megatron.training.checkpoint.hugging_face import architectures, llama_settings
from megatron.training.checkpoint.megatron_lm.checked import COMMON, Checked, glance
from megatron.training.checkpoint.megatron_lm.megatron_args import namespace, settings_of
from megatron.training.checkpoint.megatron_lm.places import checkpoint_path, is_hugging_face
from megatron.training.refusal import Refusal

OWN = ("model", "transformer_impl", "vocab_size", "init_method_std", "init_method_xavier_uniform", "fp8_format")


def shape_of(folder: str | Path, step: int | None = None, skip: bool = False) -> dict[str, Any] | None:
    """Settings of :class:`ModelConfig`, and ``seq_length``, of the checkpoint that ``--load folder`` would load.

    None where ``folder`` has no checkpoint, as in Megatron-LM, which then goes on with the flags.

    Args:
        step: ``--ckpt-step``.
        skip: ``--skip-damaged-checkpoints``.

    Raises:
        Refusal: it cannot be read, says nothing of its model, or is of one that is not built here.
    """
    path = checkpoint_path(Path(folder), step, whole=not skip)
    if path is None:
        return None
    known = {field.name for field in fields(ModelConfig)} - set(OWN)
    if is_hugging_face(path):
        where = glance(path, "config.json").file("config.json")
        model = architectures.described(llama_settings.read_config(where), where).settings
        return {name: value for name, value in asdict(model).items() if name in known}
    checked = _first_whole(path, skip)
    path, common = checked.path, checked.common()
    if "config" not in common:
        args = namespace(common.get("args"), path)
        length = {"seq_length": args["seq_length"]} if isinstance(args.get("seq_length"), int) else {}
        return settings_of(args, path) | length
    saved = common["config"]
    model = {name: value for name, value in saved.get("model", {}).items() if name in known}
    if not model:
        raise Refusal(f"checkpoint {path} holds no settings of its model")
    if "bias_gelu_fusion" not in model:  # before there was that flag, GELU was always by tanh
        model["openai_gelu"] = True
    length = saved.get("data", {}).get("seq_length")
    if length is not None and type(length) is not int:
        raise Refusal(f"checkpoint {path} does not say its --seq-length")
    return model if length is None else model | {"seq_length": length}


def length_of(folder: str | Path, step: int | None = None) -> int | None:
    """The length a checkpoint was trained at; of a Hugging Face folder, the longest that it is made for.

    Raises:
        Refusal: as `shape_of`.
    """
    shape = shape_of(folder, step) or {}
    return shape.get("seq_length") or shape.get("max_position_embeddings")


def held_out_data(path: Path) -> dict[str, Any]:
    """Where the data of a run of ours were, as {"data.field": value}; nothing where the checkpoint is of another form.

    Args:
        path: of the checkpoint itself.

    Raises:
        Refusal: it cannot be read.
    """
    if is_hugging_face(path):
        return {}
    data = (glance(path, COMMON).common().get("config") or {}).get("data") or {}
    plain = {"split": str, "mock_data": bool, "sft": bool}
    found = {name: value for name, kind in plain.items() if isinstance(value := data.get(name), kind) and value}
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        if isinstance(value := data.get(name), list) and all(isinstance(word, str) for word in value):
            found[name] = value
    return {f"data.{name}": value for name, value in found.items()}


def _first_whole(path: Path, skip: bool) -> Checked:
    """The settings in ``path``, or in the next older checkpoint where they are damaged and that may be skipped."""
    try:
        return glance(path, COMMON)
    except Refusal:
        number = path.name.removeprefix("iter_")
        if skip and number.isdigit():
            for _, older in checkpoints_before(path.parent, int(number)):
                with suppress(Refusal):
                    return glance(older, COMMON)
        raise
