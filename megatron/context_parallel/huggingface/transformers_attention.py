# SPDX-License-Identifier: Apache-2.0
"""Our attention and masks, registered in transformers (AttentionInterface, AttentionMaskInterface).

In place of a mask with s x s entries a model gets a small object with a method ``attend``. The model passes it to each
attention as ``attention_mask``, and a recomputed layer gets the same object, which holds all state that it needs.
:func:`masks_by` chooses this object for the models that are called within a context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.context_parallel.attention.rule import AttentionRule
from megatron.context_parallel.attention.usp import attention_by_rule
from megatron.context_parallel.huggingface.indexed_layers import Question
from megatron.context_parallel.huggingface.rank_batch import Part
from megatron.context_parallel.positions.position_dropout import Dropout
from megatron.context_parallel.sparse_attention.blocks import block_attention, choose_blocks
from megatron.context_parallel.sparse_attention.choice import choose_keys
from megatron.context_parallel.sparse_attention.chosen_attention import Indexer, sparse_attention

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function
except ImportError as error:
    raise ImportError("models over ranks need AttentionMaskInterface: install a newer transformers") from error

NAME = "megatron_context_parallel"
# Arguments that models and their callers pass to attention and that do not change its result.
HARMLESS = {
    "position_ids", "position_embeddings", "cache_position", "use_cache", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "layer_idx", "labels", "context_mixer",
    "deterministic",
}  # fmt: skip
# Arguments about the entries of a mask, which is never made.
OF_ENTRIES = {
    "batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "attention_mask", "allow_is_bidirectional_skip",
    "dtype", "device", "config",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """The options of a layer's call of attention.

    Attributes:
        window: see :class:`Shared`.
        layer: its number in the model.
        scale, softcap, sinks: see :class:`~megatron.context_parallel.attention.rule.AttentionRule`.
        dropout: current probability.
    """

    window: int | None
    layer: int
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float


class InPlaceOfMask(Protocol):
    """The object that a model passes to its attention as ``attention_mask``."""

    window: int | None
    ahead: bool

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """[b, heads, s, d] -> [b, s, heads, d of v]."""
        ...


Make = Callable[[int | None, bool], InPlaceOfMask]
_masks_by: ContextVar[Make | None] = ContextVar("masks_by", default=None)


@contextmanager
def masks_by(make: Make) -> Iterator[None]:
    """A context in which models get ``make(window, ahead)`` in place of their masks; see :class:`Shared`."""
    token = _masks_by.set(make)
    try:
        yield
    finally:
        _masks_by.reset(token)


@dataclass(frozen=True)
class Shared:
    """Attention over all ranks of the grid.

    Attributes:
        part: properties of the batch.
        kernel: name of the kernel.
        window: keys that a query sees, itself included; None: all before it.
        ahead: it sees later keys too; the window is then the largest distance to either side.
        seed: of dropout.
        lessons: takes the losses [b, s_local] of indexers, for each query; None: they are not wanted.
    """

    part: Part
    kernel: str
    window: int | None
    ahead: bool
    seed: int
    lessons: list[Tensor] | None = None

    def rule(self, call: Call, samples: int) -> AttentionRule:
        """The attention rule of a call, without its mask."""
        dropout, data = None, self.part.layout.grid.data.rank
        if call.dropout:
            numbers = tuple(range(data * samples, (data + 1) * samples))
            dropout = Dropout(call.dropout, self.seed + (self.part.number << 32), call.layer, numbers)
        return AttentionRule(
            kernel=self.kernel, scale=call.scale, softcap=call.softcap, sinks=call.sinks, dropout=dropout
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        rule = self.rule(call, q.size(0))
        q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
        masks = self.part.masks(call.window, self.ahead)
        out = attention_by_rule(q, k, v, layout=self.part.layout, rule=rule, masks=masks)
        return out.transpose(0, 1).contiguous()  # some models call view() on it

    def choose(self, q: Tensor, k: Tensor, weights: Tensor, top_k: int) -> Tensor:
        q, k, weights = (x.transpose(0, 1) for x in (q, k, weights))
        masks, layout = self.part.masks(self.window), self.part.layout
        return choose_keys(q, k, weights, layout=layout, top_k=top_k, mask=masks).transpose(0, 1)

    def attend_chosen(
        self, q: Tensor, kv: Tensor, chosen: Tensor, value_size: int, scale: float, indexer: Indexer | None
    ) -> Tensor:
        q, kv, chosen = (x.transpose(0, 1) for x in (q, kv.unsqueeze(2), chosen))
        indexer = None if indexer is None else Indexer(*(x.transpose(0, 1) for x in indexer))
        sizes = {"layout": self.part.layout, "value_size": value_size, "scale": scale}
        out, loss = sparse_attention(q, kv, chosen, indexer=indexer, **sizes)
        if loss is not None:
            self.lessons.append(loss.transpose(0, 1))
        return out.transpose(0, 1)

    def attend_blocks(self, q: Tensor, k: Tensor, v: Tensor, call: Call, asked: Question) -> Tensor:
        if call.dropout or call.softcap or call.sinks is not None:
            raise ValueError("chosen blocks with dropout of attention, a soft-cap or sinks: not supported over ranks")
        where = {"layout": self.part.layout, "block": asked.block, "mask": self.part.masks(self.window)}
        index = (x.transpose(0, 1) for x in (asked.q, asked.k))
        chosen = choose_blocks(*index, top=asked.top, local=asked.local, **where)
        q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
        out = block_attention(q, k, v, chosen, kernel=self.kernel, scale=call.scale, **where)
        return out.transpose(0, 1).contiguous()


@dataclass(frozen=True)
class NotCausal:
    """A mask that is refused only when attention uses it: some decoders make masks that they never use."""

    why: str


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: InPlaceOfMask | NotCausal | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    block_indices: Question | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of :data:`NAME`: [b, heads, s_local, d] -> [b, s_local, heads, d].

    Raises:
        ValueError: an option is not supported.
    """
    who = type(module).__name__
    if isinstance(attention_mask, NotCausal):
        raise ValueError(f"{attention_mask.why}: not supported over ranks")
    if not hasattr(attention_mask, "attend"):
        raise ValueError(
            f"{who} has no mask made by transformers: attention over another sequence, over images, or with a "
            "mask given by the caller is not supported over ranks"
        )
    if is_causal is False and not attention_mask.ahead:
        raise ValueError(f"{who} asks for attention that is not causal: not supported over ranks")
    for name, asked in others.items():
        if name not in HARMLESS and asked is not None:
            raise ValueError(f"{who} passes {name} to its attention, which is not supported over ranks")
    window = attention_mask.window
    if sliding_window not in (None, window) and not attention_mask.ahead:  # the mask counts to either side
        raise ValueError(f"{who} has a window of {sliding_window} tokens, but its mask one of {window}: not supported")
    call = Call(window, getattr(module, "layer_idx", None) or 0, scaling, softcap, s_aux, dropout)
    if block_indices is not None:
        return attention_mask.attend_blocks(query, key, value, call, block_indices), None
    return attention_mask.attend(query, key, value, call), None


def mask(
    *,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **others: Any,
) -> InPlaceOfMask | NotCausal:
    """The mask function of :data:`NAME`.

    Raises:
        ValueError: an argument is not supported, or :func:`masks_by` is not active.
    """
    for name, asked in others.items():
        if name not in OF_ENTRIES and asked is not None:
            raise ValueError(f"the model passes {name} to its masks, which is not supported over ranks")
    make = _masks_by.get()
    if make is None:
        raise ValueError(
            "this model is distributed over ranks: call it as model(**context.shard(batch)), or restore it by "
            "context.remove() first"
        )
    ahead = _looks_ahead(mask_function, local_size)
    if use_vmap or not (allow_is_causal_skip or ahead or mask_function is causal_mask_function):
        return NotCausal("the model adds to its causal mask (for example full attention within images)")
    if ahead is None:
        return NotCausal("the model's mask is neither causal nor full, nor a sliding window of these")
    return make(local_size, ahead)


def _looks_ahead(function: Callable[..., Any], window: int | None) -> bool | None:
    """Whether a mask function is full, and not causal, within ``window``, tested for pairs at the edges; None: neither.

    A full window reaches to either side.
    """
    if function is causal_mask_function and window is None:
        return False
    left = window or 1000
    q = torch.tensor([0, 1, left - 1, left, left + 1, 2 * left, 5 * left])[:, None]
    k = torch.cat([q + step for step in (-left - 1, -left, 1 - left, -1, 0, 1, left, left + 1)], dim=1).clamp(min=0)
    q, none = q.expand_as(k), torch.zeros_like(k)
    seen = torch.as_tensor(function(none, none, q, k)).expand_as(k)
    if bool(seen.eq((k <= q) & ((k > q - left) if window else True)).all()):
        return False
    return True if bool(seen.eq(((k - q).abs() <= left) if window else torch.ones_like(seen)).all()) else None


def register() -> None:
    """Register :data:`NAME` in transformers."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
