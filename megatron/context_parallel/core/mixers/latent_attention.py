# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention (MLA) of DeepSeek V2, V3 and Kimi: keys and values are made from a short latent of each token.

The weights, their names and their formulas are those of core's ``MLASelfAttention``. Core's class is not used:
it needs Transformer Engine, its RoPE assumes core's own order of tokens, and without sequence parallelism it does not
sum the gradient of the keys' rotated part over TP.

Sizes: in each head, queries and keys have R rotated and N other entries, and values have V. The latent of keys and
values has C entries.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from megatron.context_parallel.core.core_attention import ContextParallelAttention
from megatron.context_parallel.core.lora import ColumnParallelLinearWithLora
from megatron.context_parallel.core.mixers.state_mixer import Linear, MixerSpec
from megatron.context_parallel.core.transformer_layer import AttentionSettings


class LatentAttention(Attention):
    """Makes queries, keys and values from latents; its ``core_attention`` is the same as in other layers.

    A head has its rotated entries first, where RoPE expects them: the product of a query and a key does not depend on
    the order of their entries, so the weights keep core's order (rotated entries last).

    Args:
        config: with the sizes; its ``kv_channels`` is the size of a value head, and its ``softmax_scale`` is set.
        epsilon: of the latents' norms; default: as of the layers' norms.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        epsilon: float | None = None,
        **_: object,  # since 0.18 core passes ``name`` and more
    ) -> None:
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, pg_collection)
        heads, hidden, queries = config.num_attention_heads, config.hidden_size, config.hidden_size
        self.sizes = [config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim]

        def linear(name: str, into: int, out: int) -> nn.Module:
            return build_module(
                getattr(submodules, name),
                into,
                out,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_group=self.pg_collection.tp,
            )

        def norm(name: str, size: int) -> nn.Module:
            kind = getattr(submodules, name)
            return build_module(kind, hidden_size=size, config=config, eps=epsilon or config.layernorm_epsilon)

        plain, rotated, value = self.sizes
        self.q_layernorm = self.k_layernorm = None  # core's forward would use them as norms of heads
        if config.q_lora_rank is None:
            self.linear_q_proj = linear("linear_q_proj", hidden, heads * (plain + rotated))
        else:
            queries = config.q_lora_rank
            self.linear_q_down_proj = linear("linear_q_down_proj", hidden, queries)
            self.linear_q_up_proj = linear("linear_q_up_proj", queries, heads * (plain + rotated))
            self.q_layernorm = norm("q_layernorm", queries)
        self.linear_kv_down_proj = linear("linear_kv_down_proj", hidden, config.kv_lora_rank + rotated)
        self.linear_kv_up_proj = linear("linear_kv_up_proj", config.kv_lora_rank, heads * (plain + value))
        self.kv_layernorm = norm("kv_layernorm", config.kv_lora_rank)
        self.sends_latents = self.core_attention.settings.latents
        if self.sends_latents:
            self.core_attention.up = self._up

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, h] -> q and k [s, b, heads, R + N], not yet rotated, v [s, b, heads, V]; heads of this TP rank.

        With sequence parallelism the input is [s / TP, b, h]; the results have all s tokens. If latents are sent, k is
        the part that all heads share [s, b, 1, R] and v the latent [s, b, 1, C]; ``core_attention`` knows the rest.
        """
        query, k_rotated, latent = self.compressed(hidden_states)
        if self.sends_latents:
            return query, k_rotated[:, :, None], self._all_tokens(latent)[:, :, None]
        return query, *self.expanded(k_rotated, latent)

    def compressed(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, h] -> q [s, b, heads, R + N], the rotated part of all heads' keys [s, b, R], the latent [s, b, C].

        Nothing is rotated yet. With sequence parallelism the latent is [s / TP, b, C].
        """
        return self.queries(self.latent_of_queries(hidden_states)), *self.latent_of_keys(hidden_states)

    def latent_of_queries(self, hidden_states: Tensor) -> Tensor:
        """The normed latent of queries [s, b, Q]; without one, the hidden states. Under sequence parallelism s / TP."""
        if self.config.q_lora_rank is None:
            return hidden_states
        latent_sbq, _ = self.linear_q_down_proj(hidden_states)
        return self.q_layernorm(self._own_tokens(self._whole(latent_sbq)))

    def queries(self, latent: Tensor) -> Tensor:
        """What :meth:`latent_of_queries` returns -> q [s, b, heads, R + N]."""
        up = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        query = up(latent)[0].unflatten(-1, (self.num_attention_heads_per_partition, -1))
        q_plain, q_rotated = query.split(self.sizes[:2], dim=-1)
        return torch.cat([q_rotated, q_plain], dim=-1)

    def latent_of_keys(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The last two results of :meth:`compressed`."""
        both, _ = self.linear_kv_down_proj(hidden_states)
        latent_sbC, k_rotated = self._whole(both).split([self.config.kv_lora_rank, self.sizes[1]], dim=-1)
        # All heads share this part of the key, so its gradient is the sum over the heads of all TP ranks.
        return _for_all_heads(k_rotated, group=self.pg_collection.tp), self.kv_layernorm(self._own_tokens(latent_sbC))

    def expanded(self, k_rotated: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [s, b, heads, R + N] and values [s, b, heads, V] of what :meth:`compressed` returns."""
        (plain, _, value), heads = self.sizes, self.num_attention_heads_per_partition
        keys_values, _ = self.linear_kv_up_proj(latent)
        k_plain, v = keys_values.unflatten(-1, (heads, -1)).split([plain, value], dim=-1)
        return torch.cat([k_rotated[:, :, None].expand(-1, -1, heads, -1), k_plain], dim=-1), v

    def absorbed(self, query: Tensor) -> Tensor:
        """Queries [s, b, heads, R + N] -> [s, b, heads, R + C], for keys (rotated part, latent) that all heads share.

        A score is q . (W c) for the up-projection W of keys, which equals (q W) . c. With latents as values, attention
        returns means of latents, from which :meth:`raised` makes the heads' outputs.
        """
        rotated, plain = query.split([self.sizes[1], self.sizes[0]], dim=-1)
        return torch.cat([rotated, torch.einsum("sbhn,hnc->sbhc", plain, self._up()[:, : self.sizes[0]])], dim=-1)

    def raised(self, out: Tensor) -> Tensor:
        """Means of latents [s, b, heads, C] -> means of values [s, b, heads, V]."""
        return torch.einsum("sbhc,hvc->sbhv", out, self._up()[:, self.sizes[0] :])

    def _up(self) -> Tensor:
        """The up-projection of keys and values, [heads, N + V, C]."""
        layer = self.linear_kv_up_proj
        weight = layer.with_adapter() if isinstance(layer, ColumnParallelLinearWithLora) else layer.weight
        return weight.unflatten(0, (self.num_attention_heads_per_partition, -1))

    def _whole(self, part: Tensor) -> Tensor:
        """The complete latents, from the part of their entries that this TP rank computed."""
        return gather_from_tensor_model_parallel_region(part, group=self.pg_collection.tp)

    def _own_tokens(self, latent: Tensor) -> Tensor:
        """The latent; with sequence parallelism only of this TP rank's tokens: the up-projection gathers them."""
        if not self.config.sequence_parallel:
            return latent
        return scatter_to_sequence_parallel_region(latent, group=self.pg_collection.tp)

    def _all_tokens(self, latent: Tensor) -> Tensor:
        """The latent of all tokens, whose gradient is the sum over the heads of all TP ranks."""
        tp = self.pg_collection.tp
        if not self.config.sequence_parallel:
            return _for_all_heads(latent, group=tp)
        return gather_from_sequence_parallel_region(latent, tensor_parallel_output_grad=True, group=tp)


def _for_all_heads(x: Tensor, group: Any) -> Tensor:
    """``x``, whose gradient is the sum over the heads of all TP ranks."""
    x = copy_to_tensor_model_parallel_region(x, group=group)
    if x.requires_grad:
        x.register_hook(Tensor.contiguous)  # of others, core sums a copy and drops it (mappings.py, _reduce)
    return x


def latent_attention(
    settings: AttentionSettings, linear: Linear, norm: type, *, normed: bool, epsilon: float | None = None
) -> MixerSpec:
    """Multi-latent attention; ``normed``: with norms of the latents, which may have their own ``epsilon``."""
    names = ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj")
    layers = {f"linear_{name}": linear(f"linear_{name}") for name in names}
    of_latents = norm if normed else IdentityOp
    parts = MLASelfAttentionSubmodules(
        **layers,
        q_layernorm=of_latents,
        kv_layernorm=of_latents,
        core_attention=partial(ContextParallelAttention, settings=settings),
    )
    up = {f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_" for x in ("q", "kv")}
    params = {"attn_mask_type": AttnMaskType.causal}  # core's layers for multi-token prediction look for it
    params |= {"epsilon": epsilon}
    return MixerSpec(ModuleSpec(LatentAttention, params, parts), up | {"input_layernorm.": "input_layernorm."})
