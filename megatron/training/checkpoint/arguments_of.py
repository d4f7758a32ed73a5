# SPDX-License-Identifier: Apache-2.0
"""The model that a checkpoint is of, for ``--use-checkpoint-args``: without process groups, before anything else."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.training.arguments.config import ModelConfig
from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.args import namespace, settings_of
from megatron.training.checkpoint.places import checkpoint_path
from megatron.training.refusal import Refusal

# Of these the checkpoint's count, whatever the flags say, as in Megatron-LM (load_args_from_checkpoint of
# megatron/training/checkpointing.py); of the others the flags count where given.
CHECKPOINT_WINS = frozenset(
    (
        "num_query_groups",
        "group_query_attention",
        "position_embedding_type",
        "rotary_base",
        "rotary_percent",
        "rotary_interleaved",
        "add_bias_linear",
        "add_qkv_bias",
        "squared_relu",
        "swiglu",
        "untie_embeddings_and_output_weights",
        "apply_layernorm_1p",
        "normalization",
        "attention_dropout",
        "hidden_dropout",
    )
)
OWN = ("model", "transformer_impl", "vocab_size", "init_method_std", "init_method_xavier_uniform", "fp8_format")


def shape_of(folder: str | Path, step: int | None = None) -> dict[str, Any] | None:
    """Settings of :class:`ModelConfig` by name, of the checkpoint that ``--load folder`` would load.

    None where ``folder`` has no checkpoint, as in Megatron-LM, which then goes on with the flags.

    Args:
        step: ``--ckpt-step``.

    Raises:
        Refusal: it cannot be read, says nothing of its model, or is of one that is not built here.
    """
    path = checkpoint_path(Path(folder), step)
    if path is None:
        return None
    common = unpickle.read(path / "common.pt")
    if not isinstance(common, dict):
        raise Refusal(f"checkpoint {path}: common.pt does not hold what a checkpoint does")
    if "config" not in common:
        return settings_of(namespace(common.get("args"), path), path)
    known = {field.name for field in fields(ModelConfig)} - set(OWN)
    model = {name: value for name, value in common["config"].get("model", {}).items() if name in known}
    if not model:
        raise Refusal(f"checkpoint {path} holds no settings of its model")
    return model
