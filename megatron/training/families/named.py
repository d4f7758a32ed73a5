# SPDX-License-Identifier: Apache-2.0
"""What ``--model`` names: a shape of the table ``MODELS``, or ``hf:DIR``, the model of DIR/config.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron.training.refusal import Fix, Refusal, nearest
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.models import LLAMA, MODELS

PREFIX = "hf:"
TUNED = re.compile(r"-(instruct|chat|base|hf|it|pt|deduped|8k)(?=-|$)")
DATED = re.compile(r"(?<=olmo-[23])-(1124|0325|0425|1025|1125)-")
SAME_SHAPE = {"llama3.370b": "llama3.1-70b", "mistral7bv0.3": "mistral-7b", "mixtral8x7bv0.1": "mixtral-8x7b",
              "mixtral8x22bv0.1": "mixtral-8x22b"}  # fmt: skip


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
    settings = MODELS[known(name)][1]
    return {field if "." in field else f"model.{field}": value for field, value in settings.items()}


def known(name: str) -> str:
    """The name in ``MODELS`` of a model that is named there, or by its id on the Hugging Face Hub.

    Raises:
        Refusal: no such model; it names the nearest one.
    """
    if name in MODELS:
        return name
    if (Path(name) / "config.json").is_file():
        raise Refusal(f"--model {name}", f": a folder is given as {PREFIX}{name}", Fix(f"--model {PREFIX}{name}"))
    owner, _, last = name.rpartition("/")
    plain, ours = _plain(last), {_plain(known): known for known in MODELS} | SAME_SHAPE
    if plain in ours and re.fullmatch(r"[\w.-]*", owner):
        return ours[plain]
    raise Refusal(
        f"--model {name}",
        f": not a known shape; did you mean {ours[nearest(plain, ours)]}? hf:DIR reads the config.json of any Hugging "
        "Face model's folder, and flags give sizes",
    )


def _plain(name: str) -> str:
    """A model's name without notation, dates, and words for fine-tuning, which keeps the shape."""
    name = DATED.sub("-", name.lower().removeprefix("meta-"))
    return re.sub("[-_]", "", TUNED.sub("", name))


def vocabulary(name: str) -> int:
    """Size of the vocabulary that a named model was published with. Raises Refusal as :func:`shape`."""
    return _described(name).vocab_size if name.startswith(PREFIX) else MODELS[known(name)][0]


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
