# SPDX-License-Identifier: Apache-2.0
"""The largest numbers that settings may have, wherever they come from: flags, a config.json or a checkpoint.

Readers check them before anything is computed or allocated from them, so that a small file cannot fill the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.training.refusal import Refusal, short

LARGEST = 1 << 40  # of any number: far above any width, vocabulary or base of RoPE
MOST_RANKS = 1 << 20  # of a simulated cluster
MOST_LAYERS, MOST_EXPERTS, MOST_HEADS = 10_000, 10_000, 100_000
MOST_PIECES = 500_000  # weights of a model, as they are named in files; each expert has its own
LAYERS = """
    num_layers mtp_num_layers recompute_num_layers num_hidden_layers n_layer n_layers num_nextn_predict_layers
    first_k_dense_replace max_window_layers
""".split()
HEADS = """
    num_attention_heads num_key_value_heads num_query_groups n_head num_heads mamba_num_heads linear_num_key_heads
    linear_num_value_heads
""".split()
EXPERTS = "num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok moe_router_topk".split()
# By the names of settings, here and in config.json: those that code loops over, or that are sizes of a block.
MOST = dict.fromkeys(LAYERS, MOST_LAYERS) | dict.fromkeys(EXPERTS, MOST_EXPERTS) | dict.fromkeys(HEADS, MOST_HEADS)
MOST |= {"weight_block_size": 1 << 20, "global_batch_size": 1 << 22, "world_size": MOST_RANKS}
MAY_BE_INFINITE = ("time_step_limit", "model_max_length")  # transformers writes infinity there


def most(name: str) -> int:
    """The largest absolute value of the setting ``name``."""
    return MOST.get(name, LARGEST)


def check_numbers(settings: Mapping[str, Any], where: object) -> None:
    """Refuse a number in ``settings``, at any depth, that is not finite or too large for its key.

    Args:
        where: the file, for the message.
    """
    todo: list[tuple[str, Any]] = list(settings.items())
    while todo:
        name, value = todo.pop()
        if isinstance(value, dict):
            todo += value.items()
        elif isinstance(value, list):
            todo += [(name, one) for one in value]
        elif isinstance(value, int | float) and name not in MAY_BE_INFINITE:
            if not abs(value) <= (limit := most(name)):  # NaN as well
                raise Refusal(f"{where}: {short(name)} {short(value)} is not a number from {-limit:,} to {limit:,}")
