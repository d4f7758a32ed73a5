# SPDX-License-Identifier: Apache-2.0
"""Adapters (--lora-rank) between a checkpoint and a run: both have them, or they begin anew beside loaded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.context_parallel.core.lora import is_adapter
from megatron.training.arguments.config import ModelConfig
from megatron.training.refusal import Refusal

SETTINGS = ("lora_rank", "lora_alpha", "lora_targets")


def begin_anew(saved: dict[str, Any], model: ModelConfig, path: Path, weights_only: bool) -> bool:
    """Whether this run's adapters are not in the checkpoint.

    Args:
        saved: the checkpoint's settings of its model.

    Raises:
        Refusal: the run would go on as another one, or leave the checkpoint's adapters out.
    """
    there, here = saved.get("lora_rank"), model.lora_rank
    if there is None and here is not None and not weights_only:
        raise Refusal(
            f"checkpoint {path} has no adapters: to begin --lora-rank {here} from its weights, pass --finetune"
        )
    if there is not None and here is None:
        raise Refusal(
            f"checkpoint {path} has adapters: give --lora-rank {there}, or merge them into the weights with "
            "tools/convert_hf.py --from DIR --to-hf DIR, and load that"
        )
    if there is not None:
        wrong = [
            f"--{name.replace('_', '-')} {_words(saved[name])} there, {_words(getattr(model, name))} here"
            for name in SETTINGS
            if name in saved and saved[name] != getattr(model, name)
        ]
        if wrong:
            raise Refusal(f"checkpoint {path} has other adapters: {'; '.join(wrong)}")
    return there is None and here is not None


def _words(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else f"{value:g}"


def without_adapters(state: dict[str, Any]) -> dict[str, Any]:
    """A model's sharded state by parameters' names, without those of adapters."""
    return {name: part for name, part in state.items() if not is_adapter(name)}
