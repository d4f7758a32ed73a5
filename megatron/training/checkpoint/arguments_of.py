# SPDX-License-Identifier: Apache-2.0
"""Read the model's settings, sequence length and data paths from a checkpoint, without process groups.

Used by ``--use-checkpoint-args`` and by tools that read a checkpoint.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from megatron.training.checkpoint.checkpoint_folder import checkpoints_before
from megatron.training.checkpoint.megatron_lm.checked import COMMON, Checked, open_unchecked
from megatron.training.checkpoint.megatron_lm.megatron_args import attention_of, namespace, settings_of
from megatron.training.checkpoint.megatron_lm.places import checkpoint_path, is_hugging_face
from megatron.training.data.tokenizer import Tokenizer, check_vocab
from megatron.training.families import architectures
from megatron.training.families.llama import llama_settings
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config, ModelConfig
from megatron.training.settings.flag import NEVER, names_with
from megatron.training.settings.same_network import attention_settings


def shape_of(folder: str | Path, step: int | None = None, skip: bool = False) -> dict[str, Any] | None:
    """The settings of model and mask, and ``seq_length``, of the checkpoint that ``--load folder`` would load.

    They are fields of :class:`ModelConfig` and those of :class:`AttentionConfig` that are part of the network.
    Returns None if ``folder`` has no checkpoint; the run then uses its flags, as in Megatron-LM.

    Args:
        step: ``--ckpt-step``.
        skip: ``--skip-damaged-checkpoints``.

    Raises:
        Refusal: the checkpoint cannot be read, has no model settings, or holds a model that is not supported.
    """
    path = checkpoint_path(Path(folder), step, whole=not skip)
    if path is None:
        return None
    known = {field.name for field in fields(ModelConfig)} - set(names_with(ModelConfig, "loaded", NEVER))
    if is_hugging_face(path):
        file = open_unchecked(path, "config.json").file("config.json")
        model = architectures.described(llama_settings.read_config(file), file)
        return {name: value for name, value in asdict(model.settings).items() if name in known} | model.attention
    checked = _first_readable(path, skip)
    path, common = checked.path, checked.common()
    if "config" not in common:
        args = namespace(common.get("args"), path)
        length = {"seq_length": args["seq_length"]} if isinstance(args.get("seq_length"), int) else {}
        return settings_of(args, path) | attention_of(args, path) | length
    saved = common["config"]
    model = {name: value for name, value in saved.get("model", {}).items() if name in known}
    if not model:
        raise Refusal(f"checkpoint {path} holds no settings of its model")
    if "bias_gelu_fusion" not in model:  # checkpoints older than this flag always use GELU's tanh approximation
        model["openai_gelu"] = True
    mask = {name: value for name, value in saved.get("attention", {}).items() if name in attention_settings()}
    length = saved.get("data", {}).get("seq_length")
    if length is not None and type(length) is not int:
        raise Refusal(f"checkpoint {path} does not say its --seq-length")
    return model | mask | ({} if length is None else {"seq_length": length})


def length_of(folder: str | Path, step: int | None = None) -> int | None:
    """The sequence length of the run that wrote the checkpoint; for a Hugging Face folder, ``max_position_embeddings``.

    Raises:
        Refusal: as `shape_of`.
    """
    shape = shape_of(folder, step) or {}
    return shape.get("seq_length") or shape.get("max_position_embeddings")


def held_out_data(path: Path) -> dict[str, Any]:
    """The data settings of the run that wrote the checkpoint ``path``, as {"data.field": value}.

    Empty for checkpoints that this program did not write. Raises Refusal if the checkpoint cannot be read.
    """
    if is_hugging_face(path):
        return {}
    data = (open_unchecked(path, COMMON).common().get("config") or {}).get("data") or {}
    plain = {"split": str, "mock_data": bool, "sft": bool}
    settings = {name: value for name, kind in plain.items() if isinstance(value := data.get(name), kind) and value}
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        if isinstance(value := data.get(name), list) and all(isinstance(word, str) for word in value):
            settings[name] = value
    return {f"data.{name}": value for name, value in settings.items()}


UNUSED = 1024  # in Qwen, BLOOM and others, the model may have this many rows more than the tokenizer has ids


def vocabulary(path: Checked | None, tokenizer: Tokenizer, config: Config) -> tuple[Tokenizer, int]:
    """(``tokenizer``, limited to the ids that the model knows; rows of the vocabulary over which the loss is computed).

    The rows are the checkpoint's, because they are part of its network: those of a Hugging Face model may be more or
    fewer than its tokenizer's ids. Without a checkpoint, or with one of Megatron-LM, they are the tokenizer's ids.

    Args:
        path: the checkpoint that is loaded.

    Raises:
        Refusal: the tokenizer is not the checkpoint's, or --vocab-size is not the tokenizer's.
    """
    size = check_vocab(config.model.vocab_size, tokenizer)
    if tokenizer.kind != "NullTokenizer":
        config.model.vocab_size = size  # for the checkpoints of this run
    universal = config.checkpoint.universal_checkpoint  # DeepSpeed's, which does not say it
    rows, ids = (None, None) if path is None or universal else _vocabulary_in(path)
    if rows is None:
        return tokenizer, size
    if ids is None:
        most = rows if tokenizer.kind == "NullTokenizer" else rows + UNUSED  # the data may not use the others
        ids = size if rows - UNUSED < size <= most else rows
    if size != ids:
        raise Refusal(
            f"checkpoint {path} has a vocabulary of {ids} tokens, this run's tokenizer has {size}: use the "
            "checkpoint's tokenizer"
        )
    if size > rows:
        config.notes.append(f"{tokenizer.source} has {size} ids, the model {rows}: data with larger ids are refused")
    elif size < rows:
        config.notes.append(
            f"the loss is over all {rows} rows of the model's vocabulary; {tokenizer.source} has {size}"
        )
    return replace(tokenizer, vocab_size=min(size, rows)), rows


def _vocabulary_in(path: Checked) -> tuple[int | None, int | None]:
    """(rows, ids of the tokenizer) of the model in a checkpoint; None if it does not say."""
    if is_hugging_face(path.path):
        file = path.file("config.json")
        return architectures.described(llama_settings.read_config(file), file).vocab_size, None
    common = path.common()
    rows = common.get("vocab_size")
    if "config" not in common or rows is None:
        return None, None
    kind = (common["config"].get("data") or {}).get("tokenizer_type")
    if kind is None:  # a converted model: any tokenizer's
        return rows, None
    ids = (common["config"].get("model") or {}).get("vocab_size")
    return rows, rows if ids is None else ids + (kind == "NullTokenizer")  # it adds an id to --vocab-size


def unchecked(path: Path) -> Checked:
    """A checkpoint of which only the settings were checked. Raises Refusal if they cannot be read."""
    return open_unchecked(path, "config.json" if is_hugging_face(path) else COMMON)


def _first_readable(path: Path, skip: bool) -> Checked:
    """``path``; if its settings are damaged and ``skip`` is set, the next older checkpoint with undamaged settings."""
    try:
        return open_unchecked(path, COMMON)
    except Refusal:
        number = path.name.removeprefix("iter_")
        if skip and number.isdigit():
            for _, older in checkpoints_before(path.parent, int(number)):
                with suppress(Refusal):
                    return open_unchecked(older, COMMON)
        raise
