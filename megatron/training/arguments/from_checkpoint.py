# SPDX-License-Identifier: Apache-2.0
"""``--use-checkpoint-args``: the model's settings from a checkpoint, as Megatron-LM takes them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from megatron.training.arguments.config import Config
from megatron.training.refusal import Refusal

# Of these the checkpoint's count, whatever the flags say, as in Megatron-LM (load_args_from_checkpoint of its
# megatron/training/checkpointing.py); of the others the flags count where given.
CHECKPOINT_WINS = (
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
ShapeOf = Callable[[str, int | None, bool], dict[str, Any] | None]


def take_checkpoint_args(config: Config, given: Collection[str], shape_of: ShapeOf) -> None:
    """Put the settings of the checkpoint in ``--load``, or else in ``--pretrained-checkpoint``, into ``config``.

    What that changes is noted. Where there is no checkpoint yet, the flags count, as in Megatron-LM.

    Args:
        given: settings that flags gave, as "section.field".
        shape_of: see :func:`megatron.training.checkpoint.arguments_of.shape_of`.

    Raises:
        Refusal: no folder to look in, or a checkpoint that does not say its model.
    """
    settings = config.checkpoint
    if settings.load is None and settings.pretrained_checkpoint is None:
        raise Refusal("--use-checkpoint-args: from which checkpoint? Give --load or --pretrained-checkpoint")
    saved = None
    if settings.load:
        saved = shape_of(settings.load, settings.ckpt_step, settings.skip_damaged_checkpoints)
    folder = settings.load
    if saved is None and settings.pretrained_checkpoint:
        folder, saved = settings.pretrained_checkpoint, shape_of(settings.pretrained_checkpoint, None, False)
    if saved is None:
        config.notes.append(f"--use-checkpoint-args: {folder} has no checkpoint yet, so the flags count")
        return
    over = []
    for name, value in saved.items():
        part = config.data if name == "seq_length" else config.model
        section = "data" if name == "seq_length" else "model"
        if not hasattr(part, name):
            continue
        is_given = f"{section}.{name}" in given
        if is_given and name not in CHECKPOINT_WINS:
            continue
        if is_given and getattr(part, name) != value:
            over.append(f"{name.replace('_', '-')} {getattr(part, name)} -> {value}")
        setattr(part, name, value)
    config.notes.append(f"--use-checkpoint-args: the model as in {folder}")
    if over:
        config.notes.append(f"--use-checkpoint-args: the checkpoint's count, not the flags': {', '.join(over)}")
