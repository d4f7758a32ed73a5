# SPDX-License-Identifier: Apache-2.0
"""Pairs and ring traffic of each layer, for models whose layers have different masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.certifying.comparing import listed
from megatron.context_parallel.attention.ring import key_source
from megatron.context_parallel.attention.ring_plan import attention_plan
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.formulas.sizes import heads_of
from megatron.training.model.attention_rule import layer_masks
from megatron.training.model.core_config import compute_dtype
from megatron.training.settings.config import Config


@dataclass(frozen=True)
class LayerTraffic:
    """Layers with the same mask.

    Attributes:
        layers: their numbers in the complete model, from 1.
        pairs: (query, key) pairs of the busiest ring rank, in one head and sample.
        sent: bytes of keys and values that a ring rank sends at most in a layer's forward pass of a micro-batch.
    """

    mask: Mask
    layers: tuple[int, ...]
    pairs: int
    sent: int


def layer_traffic(config: Config) -> list[LayerTraffic]:
    """One entry for each mask, without packed documents and chunks; empty if all layers have the same mask."""
    model, parallel, masks = config.model, config.parallel, layer_masks(config)
    if len(set(masks)) == 1:
        return []
    tensor, ulysses, ring = (getattr(parallel, f"{axis}_parallel_size") for axis in ("tensor_model", "ulysses", "ring"))
    balance = "contiguous" if parallel.context_parallel_balance == "contiguous" else "zigzag"
    layout = SequenceLayout(config.data.seq_length, abstract_grid(ulysses=ulysses, ring=ring), balance)
    heads = heads_of(model.num_attention_heads, model.num_query_groups, tensor, ulysses)
    key_and_value = model.kv_channels + (model.v_head_dim if model.multi_latent_attention else model.kv_channels)
    numbers = heads.local_kv * key_and_value
    if model.multi_latent_attention and parallel.latent_exchange == "latents":
        numbers = model.kv_lora_rank + model.qk_pos_emb_head_dim
    row = numbers * compute_dtype(config).itemsize * config.data.micro_batch_size
    groups = []
    for mask in dict.fromkeys(masks):
        plan, axis = attention_plan(layout, mask), layout.grid.ring
        sources = [key_source(parallel.key_exchange, plan, axis, rank) for rank in range(ring)]
        pairs = max(sum(tile.pairs for hop in source.hops for tile in hop.tiles) for source in sources)
        those = tuple(number for number, other in enumerate(masks, 1) if other == mask)
        groups.append(LayerTraffic(mask, those, pairs, row * max(source.sent for source in sources)))
    return groups


def describe_layers(config: Config) -> Iterator[str]:
    """One line for each mask, for the console; none if all layers have the same mask."""
    for group in layer_traffic(config):
        sends = f" and sends {group.sent / 2**20:,.1f} MiB of keys and values"
        yield (
            f"layers {listed(group.layers)}: {group.mask}; in a forward pass a rank attends to at most "
            f"{group.pairs:,} pairs of tokens{sends if config.parallel.ring_parallel_size > 1 else ''}"
        )
