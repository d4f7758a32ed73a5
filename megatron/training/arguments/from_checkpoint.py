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
# Of a longer context than the checkpoint's, these flags count with --finetune: that is how it is stretched.
POSITIONS = ("position_embedding_type", "rotary_base", "rotary_percent")
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
    over, stretched = [], _longer_than(saved, config, given)
    for name, value in saved.items():
        part = config.data if name == "seq_length" else config.model
        section = "data" if name == "seq_length" else "model"
        if not hasattr(part, name):
            continue
        is_given = f"{section}.{name}" in given
        if is_given and (name not in CHECKPOINT_WINS or (stretched and name in POSITIONS)):
            continue
        if is_given and getattr(part, name) != value:
            over.append(f"{name.replace('_', '-')} {getattr(part, name)} -> {value}")
        setattr(part, name, value)
    config.notes.append(f"--use-checkpoint-args: the model as in {folder}")
    if stretched:
        _stretch(config, given, saved, stretched)
    if over:
        config.notes.append(f"--use-checkpoint-args: the checkpoint's count, not the flags': {', '.join(over)}")


def _longer_than(saved: dict[str, Any], config: Config, given: Collection[str]) -> int:
    """The length that a checkpoint was trained at, where flags stretch its rotary positions beyond it; else 0."""
    trained, length = saved.get("seq_length") or saved.get("max_position_embeddings") or 0, config.data.seq_length
    if not config.checkpoint.finetune or "data.seq_length" not in given or length <= trained:
        return 0
    kinds = {saved.get("position_embedding_type")}
    if "model.position_embedding_type" in given:
        kinds.add(config.model.position_embedding_type)
    return trained if kinds <= {"rope", "yarn"} and any(f"model.{name}" in given for name in POSITIONS) else 0


def _stretch(config: Config, given: Collection[str], saved: dict[str, Any], trained: int) -> None:
    """Settle what comes with a longer context where no flag says it: the table, and what YaRN counts from."""
    model = config.model
    changed = [name for name in POSITIONS if f"model.{name}" in given and saved.get(name) != getattr(model, name)]
    what = ", ".join(f"{name.replace('_', '-')} {saved.get(name)} -> {getattr(model, name)}" for name in changed)
    if "model.max_position_embeddings" not in given:
        model.max_position_embeddings = config.data.seq_length
    yarn = "model.yarn_original_max_position_embeddings"
    if model.position_embedding_type == "yarn" != saved["position_embedding_type"] and yarn not in given:
        model.yarn_original_max_position_embeddings = trained
        what += f", yarn-original-max-position-embeddings {trained}"
    config.notes.append(f"--use-checkpoint-args: {trained} to {config.data.seq_length} tokens, by the flags: {what}")
