# SPDX-License-Identifier: Apache-2.0
"""What ``--model`` names: a shape of the table ``MODELS``, or ``hf:DIR``, the model of DIR/config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.models import LLAMA, MODELS

PREFIX = "hf:"


def shape(name: str) -> dict[str, Any]:
    """The settings of :class:`ModelConfig` that a named model sets.

    Raises:
        Refusal: no such model.
    """
    return {field.removeprefix("model."): value for field, value in preset(name).items() if field.startswith("model.")}


def preset(name: str) -> dict[str, Any]:
    """{"section.field": value} of all settings that a named model sets. Raises Refusal as :func:`shape`."""
    if name.startswith(PREFIX):
        model = _described(name)
        values, usual = vars(model.settings), vars(ModelConfig())
        given = {name: value for name, value in values.items() if name in LLAMA or value != usual[name]}
        return {f"model.{name}": value for name, value in given.items()} | {
            f"attention.{name}": value for name, value in model.attention.items()
        }
    if name not in MODELS:
        raise Refusal(
            f"--model {name}",
            f": not a known shape; choose from {', '.join(MODELS)}, or give hf:DIR, a folder with the config.json of a "
            "Hugging Face model, or the sizes by flags",
        )
    return {field if "." in field else f"model.{field}": value for field, value in MODELS[name][1].items()}


def vocabulary(name: str) -> int:
    """Size of the vocabulary that a named model was published with. Raises Refusal as :func:`shape`."""
    return _described(name).vocab_size if name.startswith(PREFIX) else MODELS[name][0]


def _described(name: str) -> Any:
    """The model of DIR/config.json; only this file is read, and no code from the folder is run."""
    from megatron.training.families import architectures  # it imports torch
    from megatron.training.families.llama import llama_settings

    file = Path(name.removeprefix(PREFIX)) / "config.json"
    try:
        config = llama_settings.read_config(file)
        config.pop("quantization_config", None)  # of the weights, which are not read
        return architectures.described(config, file)
    except Refusal as refusal:
        raise Refusal(f"--model {name}", f": {refusal}") from None
