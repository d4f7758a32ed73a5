# SPDX-License-Identifier: Apache-2.0
"""Layers of transformers whose queries choose their keys, over ranks: DeepSeek V3.2, GLM-5, A.X K2, dots3, MiniMax-M3.

transformers makes the keys and values of every head and a mask with s x s entries. Here the up-projection goes to the
queries and to the result instead: all heads share the latents as keys, and only latents and the indexer's keys are
gathered over the ranks.

transformers does not train the indexer. With the argument ``indexer_loss`` of ``parallelize`` it learns from attention.

MiniMax-M3 chooses blocks of keys. Its indexer only asks here; the attention function, which knows the mask, chooses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron.context_parallel.sparse_attention.chosen_attention import Indexer


class ByChoice(Protocol):
    """What a model passes to its attention as ``attention_mask``, for these layers.

    Attributes:
        lessons: takes the losses [b, s] of the layers' indexers; None: they are not trained.
    """

    lessons: list[Tensor] | None

    def choose(self, q: Tensor, k: Tensor, weights: Tensor, top_k: int) -> Tensor:
        """q [b, s, heads, d], k [b, s, d], weights [b, s, heads] -> the chosen keys [b, s, n]."""
        ...

    def attend_chosen(
        self, q: Tensor, kv: Tensor, chosen: Tensor, value_size: int, scale: float, indexer: Indexer | None
    ) -> Tensor:
        """q [b, s, heads, d], kv [b, s, d], whose last entries are the value -> [b, s, heads, value_size]."""
        ...


class Queries(NamedTuple):
    """Queries [b, s, heads, d], the indexer's input, and a factor [b, s, heads, 1 or v] of attention's result."""

    q: Tensor
    compressed: Tensor
    gate: Tensor | None = None


def _queries(module: nn.Module, hidden: Tensor) -> Queries:
    compressed = module.q_a_layernorm(module.q_a_proj(hidden))
    return Queries(_by_head(module, module.q_b_proj(compressed)), compressed)


def _queries_of_axk2(module: nn.Module, hidden: Tensor) -> Queries:
    first = module.q_a_proj(hidden)
    compressed = module.q_a_layernorm(first)
    both = _by_head(module, module.q_gate_proj(torch.cat((compressed, first), dim=-1)))
    q, gate = both.split([module.qk_head_dim, module.v_head_dim], dim=-1)
    return Queries(q, compressed, gate.float().sigmoid())


def _queries_of_dots3(module: nn.Module, hidden: Tensor) -> Queries:
    compressed = module.q_a_layernorm(module.q_a_proj(hidden)) * module.q_lora_scale
    gate = module.g_proj(hidden).unsqueeze(-1).sigmoid()
    return Queries(_by_head(module, module.q_b_proj(compressed)), compressed, gate)


def _by_head(module: nn.Module, x: Tensor) -> Tensor:
    return x.unflatten(-1, (module.num_heads, -1))


class Form(NamedTuple):
    """What differs between modules.

    Attributes:
        rotate: the function of the module's file that rotates the indexer's queries and keys.
        hands_on: the module returns its choice, which later layers may use.
        queries: of a module's input.
    """

    rotate: str
    hands_on: bool = False
    queries: Callable[[nn.Module, Tensor], Queries] = _queries


HALVES, PAIRS = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"
FORMS = {
    "DeepseekV32Attention": Form(HALVES),
    "GlmMoeDsaAttention": Form(PAIRS, hands_on=True),
    "AXK2Attention": Form(HALVES, queries=_queries_of_axk2),
    "Dots3NoteTextAttention": Form(PAIRS, queries=_queries_of_dots3),
}


def chooses_keys(module: nn.Module) -> bool:
    """Whether a module is latent attention whose queries choose their keys, in a form that is known here."""
    return type(module).__name__ in FORMS and (module.indexer is not None or FORMS[type(module).__name__].hands_on)


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
    form = FORMS[who]
    learns = attention_mask.lessons is not None and module.indexer is not None
    learns = learns and any(x.requires_grad for x in module.indexer.parameters())
    q, kv, indexer, gate = project_by_choice(module, hidden_states, position_embeddings, learns=learns)
    chosen = prev_topk_indices
    if indexer is not None:
        chosen = attention_mask.choose(*indexer, module.indexer.index_topk)
    teaches = indexer if learns else None
    out = attention_mask.attend_chosen(q, kv, chosen, module.kv_lora_rank, module.scaling, teaches)
    result = result_by_choice(module, out, gate)
    return (result, None, chosen) if form.hands_on else (result, None)


class Projected(NamedTuple):
    """Queries [b, s, heads, d], keys [b, s, D] with the value at the end, the indexer's; see :class:`Queries`."""

    q: Tensor
    kv: Tensor
    indexer: Indexer | None
    gate: Tensor | None


def project_by_choice(
    module: nn.Module, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *, learns: bool = False
) -> Projected:
    """What attention to chosen latents needs of a module's input [b, s, h]; ``learns``: the indexer gets gradients."""
    form, functions = FORMS[type(module).__name__], sys.modules[type(module).__module__]
    rotate, rotated = getattr(functions, PAIRS), module.qk_rope_head_dim
    q, compressed, gate = form.queries(module, hidden_states)
    q_plain, q_rotated = q.split([module.qk_nope_head_dim, rotated], dim=-1)
    both = module.kv_a_proj_with_mqa(hidden_states)
    latent, k_rotated = both.split([module.kv_lora_rank, rotated], dim=-1)
    latent = module.kv_a_layernorm(latent) * getattr(module, "kv_lora_scale", 1)
    k_rotated = getattr(module, "k_rope_only_layernorm", nn.Identity())(k_rotated)
    q_rotated, k_rotated = rotate(q_rotated, k_rotated.unsqueeze(2), *position_embeddings, unsqueeze_dim=2)
    up_key, _ = _up_projections(module, latent)
    absorbed = torch.cat((q_rotated, torch.einsum("bshn,chn->bshc", q_plain, up_key)), dim=-1).to(latent.dtype)
    kv = torch.cat((k_rotated.squeeze(2).to(latent.dtype), latent), dim=-1)
    if module.indexer is None:
        return Projected(absorbed, kv, None, gate)
    turned = partial(getattr(functions, form.rotate), cos=position_embeddings[0], sin=position_embeddings[1])
    with nullcontext() if learns else torch.no_grad():
        indexer = _index(module.indexer, hidden_states.detach(), compressed.detach(), turned)
    return Projected(absorbed, kv, indexer, gate)


def gate_by_choice(module: nn.Module, hidden_states: Tensor) -> Tensor | None:
    """The factor of attention's result, if a module has one."""
    form = FORMS[type(module).__name__]
    return None if form.queries is _queries else form.queries(module, hidden_states).gate


def result_by_choice(module: nn.Module, out: Tensor, gate: Tensor | None) -> Tensor:
    """A module's result [b, s, h] from means of latents [b, s, heads, C]."""
    _, up_value = _up_projections(module, out)
    out = torch.einsum("bshc,chv->bshv", out, up_value)
    out = out if gate is None else (out * gate).to(out.dtype)
    return module.o_proj(out.flatten(2))


def _up_projections(module: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """The up-projections to keys and values [C, heads, ..]."""
    # The layer is called, not its weight read, so that adapters and hooks work.
    up = module.kv_b_proj(torch.eye(module.kv_lora_rank, dtype=like.dtype, device=like.device))
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    return up.unflatten(1, (-1, sum(sizes))).split(sizes, dim=-1)


def hands_on_choice(module: nn.Module) -> bool:
    """Whether a module with :func:`chooses_keys` may use another one's choice, or others its own."""
    return FORMS[type(module).__name__].hands_on


def _index(
    indexer: nn.Module, hidden: Tensor, compressed_q: Tensor, rotate: Callable[..., tuple[Tensor, Tensor]]
) -> Indexer:
    """The queries [b, s, heads, d], keys [b, s, d] and weights [b, s, heads] of an indexer of transformers."""
    sizes = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    q = indexer.wq_b(compressed_q).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    (q_rotated, q_plain), (k_rotated, k_plain) = q.split(sizes, dim=-1), k.split(sizes, dim=-1)
    q_rotated, k_rotated = rotate(q_rotated, k_rotated, unsqueeze_dim=2)
    q, k = torch.cat((q_rotated, q_plain), dim=-1), torch.cat((k_rotated, k_plain), dim=-1).squeeze(2)
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    return Indexer(q, k, weights * (indexer.n_heads**-0.5 * indexer.softmax_scale))


class Question(NamedTuple):
    """What chooses blocks of keys: queries [b, s, groups, d], keys [b, s, d], and sizes as for ``cp.choose_blocks``."""

    q: Tensor
    k: Tensor
    block: int
    top: int
    local: int


def asks_for_blocks(module: nn.Module) -> bool:
    """Whether a module is an indexer for blocks of keys, in a form that is known here."""
    return type(module).__name__ == "MiniMaxM3VLIndexer"


@torch.no_grad()
def forward_with_question(
    indexer: nn.Module,
    usual: Callable[..., Any],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
) -> Question:
    """The forward of a module with :func:`asks_for_blocks`; its result becomes ``block_indices`` of attention."""
    q = indexer.q_norm(indexer.q_proj(hidden_states).unflatten(-1, (-1, indexer.head_dim)))
    k = indexer.k_norm(indexer.k_proj(hidden_states).unflatten(-1, (1, -1)))
    cos, sin = (x[..., : indexer.head_dim] for x in position_embeddings)
    q, k = sys.modules[type(indexer).__module__].apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    return Question(q, k.squeeze(2), indexer.block_size, indexer.topk_blocks, indexer.local_blocks)
