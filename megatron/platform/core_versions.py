# SPDX-License-Identifier: Apache-2.0
"""What differs between megatron-core 0.16 and 0.19 for this program. It looks for features, never at the version.

``tests/unit/test_core_interface.py`` compares what this program uses of the installed version with 0.16.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# The values that tell an optimizer's groups of parameters apart. core 0.19 counts those of the schedule too, which our
# checkpoints and those of earlier versions do not have for a group.
GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")

# Messages of core 0.19 at warning level. Both describe what this program does on purpose: it builds a GPTModel and lets
# DDP compute the layout of its buffers. GPTModel's successor HybridModel has attention, FFN and experts as separate
# layers, so numbers of layers, names in checkpoints, pipeline layouts and the planner's shapes would change. 4 layers
# of core 0.19.2 on a CPU have the same loss and take as long in both (149 to 176 ms a step), but HybridModel has 108
# modules instead of 68, and full recompute keeps two inputs a layer. Its final norm needs Transformer Engine
# (hybrid_block.py:215), which no CPU has, and 0.16 and 0.17 lack it, so both classes would be needed: 46 of our files
# name GPTModel or its layers.
NOTICES = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
}


def silence_notices() -> None:
    """Drop :data:`NOTICES` from core's log."""
    for name, text in NOTICES.items():
        logging.getLogger(name).addFilter(lambda record, text=text: text not in str(record.msg))


def submodules_of(part: Any) -> Any:
    """The submodules of a part of a layer, which is a ModuleSpec; since 0.18 some parts are a ``partial``."""
    return part.keywords["submodules"] if isinstance(part, partial) else part.submodules


def inner_layer_name(names: Any) -> str:
    """The name of the transformer layer inside a layer of multi-token prediction, which 0.17 changed.

    Args:
        names: what contains one of both names.
    """
    return "mtp_model_layer" if "mtp_model_layer" in names else "transformer_layer"


def inner_layer(later_token_layer: nn.Module) -> nn.Module:
    """The transformer layer inside a layer of multi-token prediction."""
    return getattr(later_token_layer, inner_layer_name(later_token_layer._modules))


def numbered_after_model(arguments: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Keyword arguments of a transformer layer, which for multi-token prediction is numbered after the model's layers.

    core did so before 0.17. Since then it counts these layers from 1, so that they would have the dropout and the rules
    of the model's first layers.
    """
    if not arguments.get("is_mtp_layer"):
        return dict(arguments)
    number = arguments["layer_number"] + layers
    return {**arguments, "layer_number": number, "is_mtp_layer": False, "add_layer_offset": False}


def sample_parts(ids: Any, documents: Any, config: Any) -> tuple[Any, ...]:
    """What core's GPTDataset with this ``config`` expects of a sample: its ids, and their documents.

    Since 0.19 it expects the lengths of documents too, which only its ``inter_document_masking`` reads.
    """
    return (ids, documents, []) if hasattr(config, "inter_document_masking") else (ids, documents)
