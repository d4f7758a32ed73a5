# SPDX-License-Identifier: Apache-2.0
"""USP: Ulysses around Ring (USP paper, algorithm 1). Ulysses alone, Ring alone and one process are special cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron.context_parallel.attention.attend import Kept, tiled_attention
from megatron.context_parallel.attention.ring import key_source
from megatron.context_parallel.attention.ring_plan import AttentionPlan, attention_plan
from megatron.context_parallel.attention.rule import AttentionRule, one_dtype
from megatron.context_parallel.attention.ulysses import ulysses_attention
from megatron.context_parallel.layout.masks import Causal, Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.positions.position_dropout import Dropout
from megatron.decisions.key_exchange import PASSED_ON
from megatron.platform.autograd import refuse_transforms


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: SequenceLayout,
    mask: Mask | Sequence[Mask] = Causal(),
    key_layout: SequenceLayout | None = None,
    kernel: str = "auto",
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    mask_cpu_threshold: int = 16384,
    dropout: Dropout | None = None,
    gather_keys: bool = False,
    exchange: str = PASSED_ON,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Exact attention over the complete sequence; each rank passes the tokens that it holds.

    Args:
        q: [s_local, b, heads, d]; k: [s_local, b, kv_heads, d]; v: like k, but its head size may differ; kv_heads
            divides heads (GQA, MQA). Tokens are those of ``layout.positions``.
        layout: which rank holds which tokens.
        mask: which keys a query attends to; one mask, or a sequence with one for each sample of the batch.
        key_layout: layout of the keys if they come from another sequence (cross-attention); default ``layout``.
        kernel, scale, alibi_slopes, mask_cpu_threshold, dropout, gather_keys, exchange, softcap, sinks: see
            :class:`~megatron.context_parallel.attention.rule.AttentionRule`.

    Returns:
        [s_local, b, heads, head size of v], in the dtype of q; 0 for a query that attends to nothing. Under autocast
        q, k and v are cast first, as ``scaled_dot_product_attention`` does.

    Raises:
        ValueError: the Ulysses degree does not divide the heads, the number of tokens is not the layout's, or q, k and
            v have different dtypes.
        KernelUnavailable: the kernel cannot run on this machine.
    """
    rule = AttentionRule(
        kernel=kernel,
        scale=scale,
        alibi_slopes=alibi_slopes,
        mask_cpu_threshold=mask_cpu_threshold,
        dropout=dropout,
        gather_keys=gather_keys,
        exchange=exchange,
        softcap=softcap,
        sinks=sinks,
    )
    masks = mask if isinstance(mask, Sequence) else [mask]
    return attention_by_rule(q, k, v, layout=layout, rule=rule, masks=masks, key_layout=key_layout)


def attention_by_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: SequenceLayout,
    rule: AttentionRule,
    masks: Sequence[Mask],
    key_layout: SequenceLayout | None = None,
    kept: Kept | None = None,
    plans: Mapping[Mask, AttentionPlan] | None = None,
) -> Tensor:
    """:func:`attention` with its options given as a rule.

    Args:
        masks: one for all samples of the batch, or one for each; they replace the rule's mask.
        kept: see :func:`~megatron.context_parallel.attention.attend.tiled_attention`.
        plans: by mask, where they are already made.
    """
    refuse_transforms("attention")
    q, k, v = one_dtype(q, k, v)
    for part, x, name in ((layout, q, "q"), (key_layout or layout, k, "k")):
        if part.chunks > 1:
            raise ValueError(
                f"the layout has {part.chunks} chunks, which only ChunkedLayer can use: make the layout with chunks=1"
            )
        if x.size(0) != part.local_length:
            raise ValueError(f"{name} has {x.size(0)} tokens, but the layout gives each rank {part.local_length}")
        if part.grid != layout.grid:
            raise ValueError("the layouts of queries and keys have different grids: use one grid for both")
    if len(masks) not in (1, q.size(1)):
        raise ValueError(f"{len(masks)} masks for {q.size(1)} samples: pass one mask, or one for each sample")
    rules = [replace(rule, mask=mask) for mask in masks]
    if len(rules) > 1 and rule.dropout is not None:
        rules = [replace(each, dropout=rule.dropout.of_samples(i, i + 1)) for i, each in enumerate(rules)]
    plans = [(plans or {}).get(mask) for mask in masks]
    local = partial(attention_between_all_to_alls, layout=layout, key_layout=key_layout, kept=kept)

    def by_sample(*qkv: Tensor) -> Tensor:
        if len(rules) == 1:
            return local(*qkv, rule=rules[0], plan=plans[0])
        samples = zip(*(x.split(1, dim=1) for x in qkv))
        parts = zip(samples, rules, plans)
        return torch.cat([local(*sample, rule=each, plan=plan) for sample, each, plan in parts], dim=1)

    return ulysses_attention(q, k, v, axis=layout.grid.ulysses, attention=by_sample)


def attention_between_all_to_alls(
    q_SBHD: Tensor,
    k_SBHD: Tensor,
    v_SBHD: Tensor,
    *,
    layout: SequenceLayout,
    rule: AttentionRule,
    key_layout: SequenceLayout | None = None,
    kept: Kept | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Attention of this rank's heads over the ring, between Ulysses' two all-to-alls."""
    grid = layout.grid
    longest = max(layout.seq_length, (key_layout or layout).seq_length)
    up = rule.local_up(q_SBHD, grid.ulysses)
    # The letters of AttentionRule.up: up has N + V rows a head, q d elements and k d - N; N + V - d + (d - N) = V.
    value_dim = v_SBHD.size(3) if up is None else up.size(1) - q_SBHD.size(3) + k_SBHD.size(3)
    kernel = rule.tile_kernel(q_SBHD, grid.ulysses, longest, value_dim)
    plan = plan or attention_plan(layout, rule.mask, key_layout)
    source = key_source(rule.exchange, plan, grid.ring)
    sinks = rule.local_sinks(q_SBHD, grid.ulysses)
    return tiled_attention(q_SBHD, k_SBHD, v_SBHD, source=source, kernel=kernel, sinks=sinks, up=up, kept=kept)
