# SPDX-License-Identifier: Apache-2.0
"""Layers of transformers whose queries choose their keys, over ranks: DeepSeek V3.2 and GLM-5.

transformers makes the keys and values of every head and a mask with s x s entries. Here the up-projection goes to the
queries and to the result instead: all heads share the latents as keys, and only latents and the indexer's keys are
gathered over the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class ByChoice(Protocol):
    """What a model passes to its attention as ``attention_mask``, for these layers."""

    def choose(self, q: Tensor, k: Tensor, weights: Tensor, top_k: int) -> Tensor:
        """q [b, s, heads, d], k [b, s, d], weights [b, s, heads] -> the chosen keys [b, s, n]."""
        ...

    def attend_chosen(self, q: Tensor, kv: Tensor, chosen: Tensor, value_size: int, scale: float) -> Tensor:
        """q [b, s, heads, d], kv [b, s, d], whose last entries are the value -> [b, s, heads, value_size]."""
        ...


class Form(NamedTuple):
    """What differs between modules.

    Attributes:
        rotate: the function of the module's file that rotates the indexer's queries and keys.
        hands_on: the module returns its choice, which later layers may use.
    """

    rotate: str
    hands_on: bool


FORMS = {
    "DeepseekV32Attention": Form("apply_rotary_pos_emb", False),
    "GlmMoeDsaAttention": Form("apply_rotary_pos_emb_interleave", True),
}


def chooses_keys(module: nn.Module) -> bool:
    """Whether a module is latent attention whose queries choose their keys, in a form that is known here."""
    return type(module).__name__ in FORMS


def forward_by_choice(
    module: nn.Module,
    usual: Callable[..., Any],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: ByChoice,
    prev_topk_indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """The forward of a module with :func:`chooses_keys`, [b, s_local, h] -> the same shape."""
    who = type(module).__name__
    if not hasattr(attention_mask, "attend_chosen"):
        raise ValueError(f"{who} has no causal mask made by transformers: not supported over ranks")
    if module.training and module.attention_dropout:
        raise ValueError(f"{who} has dropout of attention, which is not supported over ranks: set attention_dropout=0")
    form, functions = FORMS[who], sys.modules[type(module).__module__]
    rotate = functions.apply_rotary_pos_emb_interleave
    plain, rotated, value = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    compressed_q = module.q_a_layernorm(module.q_a_proj(hidden_states))
    q = module.q_b_proj(compressed_q).unflatten(-1, (-1, plain + rotated))
    q_plain, q_rotated = q.split([plain, rotated], dim=-1)
    both = module.kv_a_proj_with_mqa(hidden_states)
    latent, k_rotated = both.split([module.kv_lora_rank, rotated], dim=-1)
    latent = module.kv_a_layernorm(latent)
    q_rotated, k_rotated = rotate(q_rotated, k_rotated.unsqueeze(2), *position_embeddings, unsqueeze_dim=2)
    # The layer is called, not its weight read, so that adapters and hooks work.
    up = module.kv_b_proj(torch.eye(module.kv_lora_rank, dtype=latent.dtype, device=latent.device))
    up_key, up_value = up.unflatten(1, (-1, plain + value)).split([plain, value], dim=-1)
    absorbed = torch.cat((q_rotated, torch.einsum("bshn,chn->bshc", q_plain, up_key)), dim=-1)
    kv = torch.cat((k_rotated.squeeze(2), latent), dim=-1)
    chosen = prev_topk_indices
    if module.indexer is not None:
        turned = partial(getattr(functions, form.rotate), cos=position_embeddings[0], sin=position_embeddings[1])
        chosen = _choose(module.indexer, hidden_states, compressed_q, turned, attention_mask)
    out = attention_mask.attend_chosen(absorbed, kv, chosen, module.kv_lora_rank, module.scaling)
    result = module.o_proj(torch.einsum("bshc,chv->bshv", out, up_value).flatten(2))
    return (result, None, chosen) if form.hands_on else (result, None)


@torch.no_grad()
def _choose(
    indexer: nn.Module,
    hidden: Tensor,
    compressed_q: Tensor,
    rotate: Callable[..., tuple[Tensor, Tensor]],
    by: ByChoice,
) -> Tensor:
    """The keys that an indexer of transformers chooses; it is not trained there."""
    sizes = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    q = indexer.wq_b(compressed_q).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    (q_rotated, q_plain), (k_rotated, k_plain) = q.split(sizes, dim=-1), k.split(sizes, dim=-1)
    q_rotated, k_rotated = rotate(q_rotated, k_rotated, unsqueeze_dim=2)
    q, k = torch.cat((q_rotated, q_plain), dim=-1), torch.cat((k_rotated, k_plain), dim=-1).squeeze(2)
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
    return by.choose(q, k, weights * (indexer.n_heads**-0.5 * indexer.softmax_scale), indexer.index_topk)
