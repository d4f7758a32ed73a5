# SPDX-License-Identifier: Apache-2.0
"""The attention core of a model for generation: it caches keys and values (kv_cache.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron.context_parallel.core.mixers.latent_attention import LatentAttention
from megatron.context_parallel.core.mixers.sparse_attention import SparseLatentAttention
from megatron.context_parallel.core.mixers.state_mixer import StateMixer
from megatron.context_parallel.core.spec import ContextParallelAttention
from megatron.context_parallel.positions.rope import rotary_angles
from megatron.inference.cached_choice import CachedChoice
from megatron.inference.cached_state import CachedState
from megatron.inference.kv_cache import CachePlan, LatentCache, LayerCache, decode_attention, prefill_attention
from megatron.platform.collectives import gathered
from megatron.platform.streams import to_device


class Generation:
    """The state of generation for one batch of prompts, shared by all layers of a model.

    Args:
        plan: which rank keeps which keys and values.

    Attributes:
        step: number of the decoded token in the current forward pass; None: the prompts.
        positions: int64 [s, 1 or b], of this rank's tokens in that pass.
    """

    def __init__(self, plan: CachePlan) -> None:
        self.plan = plan
        self.step: int | None = None
        self.positions = plan.layout.positions[:, None]
        self._angles: tuple[Tensor, dict[int, Tensor]] | None = None

    def advance(self) -> None:
        """Go on to the next decoded token; the first call goes to the first token after the prompts."""
        self.step = 0 if self.step is None else self.step + 1
        self.positions = torch.tensor([[length + self.step for length in self.plan.lengths]])

    def angles(self, inv_freq: Tensor) -> Tensor:
        """RoPE's angles, fp32 [s, 1 or b, 1, dim / 2]; computed once in each pass for layers with the same RoPE."""
        if self._angles is None or self._angles[0] is not self.positions:
            self._angles = self.positions, {}
        known = self._angles[1]
        if id(inv_freq) not in known:  # no other tensor gets this id, because the layers keep inv_freq
            known[id(inv_freq)] = rotary_angles(to_device(self.positions, inv_freq.device), inv_freq)[:, :, None]
        return known[id(inv_freq)]


class CachedAttention(MegatronModule):
    """Replaces a layer's ``core_attention``, whose settings and sinks it uses.

    Attributes:
        generation: the state of the current batch.
        cache: this layer's keys and values of that batch.
    """

    def __init__(self, inner: ContextParallelAttention) -> None:
        super().__init__(config=inner.config)
        self.inner = inner
        self.generation: Generation | None = None
        self.cache: LayerCache | None = None

    def begin(self, generation: Generation) -> None:
        """Start a new batch; the keys and values of the previous one are dropped."""
        self.generation, self.cache = generation, LayerCache(generation.plan)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """q [s, b, heads, d], k and v [s, b, kv_heads, d] -> [s, b, heads * d]; s is s_local, or 1 in decoding."""
        settings, generation = self.inner.settings, self.generation
        if settings.rotary is not None:
            query, key = settings.rotary.rotate(query, key, generation.angles(settings.rotary.inv_freq))
        rule = replace(self.inner.rule, sinks=self.inner.sinks(query.device))
        if generation.step is None:
            out = prefill_attention(query, key, value, cache=self.cache, rule=rule)
        else:
            out = decode_attention(query, key, value, cache=self.cache, step=generation.step, rule=rule)
        return out.flatten(2)


class CachedLatents(CachedAttention):
    """The same for multi-latent attention: it caches latents.

    Prompts have attention with keys and values, as in training. For a decoded token the latent is the one key of all
    heads, and :meth:`LatentAttention.absorbed` transforms the queries accordingly.
    """

    def __init__(self, inner: ContextParallelAttention, attention: LatentAttention) -> None:
        super().__init__(inner)
        # Bound methods, so that the layer's parameters do not also become parameters of this module.
        self.compress, self.expand = attention.compressed, attention.expanded
        self.absorb, self.raise_ = attention.absorbed, attention.raised
        self.latents: Tensor | None = None
        attention.get_query_key_value_tensors = self.tensors

    def begin(self, generation: Generation) -> None:
        self.generation, self.cache = generation, LatentCache(generation.plan, self.config.qk_pos_emb_head_dim)

    def tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`LatentAttention.get_query_key_value_tensors`; in decoding, the key and value are the latent."""
        query, k_rotated, latent = self.compress(hidden_states)
        self.latents = torch.cat([k_rotated, latent], dim=-1)[:, :, None]
        if self.generation.step is None:
            return query, *self.expand(k_rotated, latent)
        return self.absorb(query), self.latents, latent[:, :, None]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """q, k, v of :meth:`tensors` -> [s, b, heads * size of a value head]; s is s_local, or 1 in decoding."""
        rotary, generation, axis = self.inner.settings.rotary, self.generation, self.cache.plan.layout.grid.ulysses
        angles = generation.angles(rotary.inv_freq)
        rule = replace(self.inner.rule, sinks=self.inner.sinks(query.device))
        query, key = rotary.rotate(query, key, angles)
        if generation.step is not None:
            rule = replace(rule, kernel="auto")  # that of the prompts may not take heads of this size
            out = decode_attention(query, key, value, cache=self.cache, step=generation.step, rule=rule)
            return self.raise_(out).flatten(2)
        latents = rotary.rope.rotate(self.latents, angles)
        self.cache.keep(latents if axis.size == 1 else gathered(latents, axis.group))
        return prefill_attention(query, key, value, cache=self.cache, rule=rule).flatten(2)


def keep_all(model: nn.Module) -> list[CachedAttention | CachedState | CachedChoice]:
    """Give each layer of a model that mixes tokens a cache; call it after loading the weights."""
    caches = []
    for module in [*model.modules()]:
        inner = getattr(module, "core_attention", None)
        if isinstance(module, StateMixer):
            caches.append(CachedState(module))
        elif isinstance(module, SparseLatentAttention):
            caches.append(CachedChoice(module))
        elif isinstance(inner, ContextParallelAttention):
            latent = isinstance(module, LatentAttention)
            module.core_attention = CachedLatents(inner, module) if latent else CachedAttention(inner)
            caches.append(module.core_attention)
    return caches
