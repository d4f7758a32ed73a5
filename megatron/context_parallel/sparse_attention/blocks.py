# SPDX-License-Identifier: Apache-2.0
"""The choice of key blocks, and attention to them (MiniMax-M3; MoBA, arXiv 2502.13189).

A block's score is the largest or the mean score of those of its keys that the query's mask allows. The chosen blocks
become a mask, like any other: kernels, rings and chunks leave out the blocks that no query of a block has chosen.
Blocks are counted from the beginning of each document, as if it were alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron.context_parallel.attention.ring_plan import AttentionPlan
from megatron.context_parallel.attention.rule import AttentionRule
from megatron.context_parallel.attention.usp import attention_by_rule
from megatron.context_parallel.layout.block_sparse import ChosenBlocks, block_of
from megatron.context_parallel.layout.masks import Causal, Documents, Mask, MaskFunction, has_tree
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import positions, positions_of, split
from megatron.context_parallel.layout.tiles import reach
from megatron.context_parallel.sparse_attention.blocks_of_scores import KEYS, ROWS, key_blocks, masks_of_samples, padded
from megatron.platform.autograd import without_autocast

NO_SCORE = float("-inf")
Pool = Literal["max", "mean"]


@torch.no_grad()
@without_autocast
def choose_blocks(
    q: Tensor,
    k: Tensor,
    *,
    layout: SequenceLayout,
    block: int,
    top: int,
    local: int = 1,
    pool: Pool = "max",
    mask: Mask | Sequence[Mask] = Causal(),
) -> Tensor:
    """The key blocks that each of this rank's queries chooses. All ranks of ``layout.grid.context`` call it together.

    Scores q . k are fp32; of equal ones the earlier block is chosen, so that every grid chooses the same.

    Args:
        q: [s_local, b, groups, d]; every group of heads has its own choice.
        k: [s_local, b, d].
        layout: of the sequence.
        block: tokens of a block.
        top: number of blocks of a query, the local ones included.
        local: blocks that a query always reads, its own and those before it.
        pool: the score of a block is the "max" or the "mean" of the scores of its keys.
        mask: which keys may be chosen; a sequence has one for each sample.

    Returns:
        int32 [s_local, b, groups, top]: numbers of blocks, ascending; -1 at the end where there are fewer.

    Raises:
        ValueError: ``block`` or ``top`` is below 1, ``local`` above ``top``, or the mask is a tree.
    """
    if block < 1 or not 0 <= local <= top or top < 1:
        raise ValueError(f"blocks of {block} tokens, of which a query reads {top}, {local} of them local: not possible")
    masks, complete, length = masks_of_samples(mask, q.size(1)), layout.gather(k).float(), layout.seq_length
    chosen = torch.full((*q.shape[:3], top), -1, dtype=torch.int32, device=q.device)
    for rows in split((0, len(q)), ROWS):
        held = positions_of([rows], layout.local_spans)
        at = positions(held, q.device)[:, None]
        for sample, own in enumerate(masks):
            edges = block_edges(own, length, block)
            mine = padded(q[rows[0] : rows[1], sample].float(), ROWS).flatten(0, 1)
            largest = mine.new_full((len(at), q.size(2), len(edges) - 1), NO_SCORE)
            total, count = torch.zeros_like(largest), largest.new_zeros(len(at), len(edges) - 1)
            for keys in key_blocks(reach(held, own, length), length, KEYS):
                there = torch.arange(*keys, device=q.device)
                seen, number = own.allowed(at, there[None]), block_of(there, edges)
                scores = (mine @ padded(complete[keys[0] : keys[1], sample], KEYS).T).unflatten(0, (ROWS, -1))
                scores = scores[: len(at), :, : len(there)]
                largest.index_reduce_(2, number, scores.masked_fill(~seen[:, None], NO_SCORE), "amax")
                if pool == "mean":
                    total.index_add_(2, number, scores.masked_fill(~seen[:, None], 0))
                    count.index_add_(1, number, seen.float())
            score = largest if pool == "max" else (total / count[:, None]).masked_fill(largest == NO_SCORE, NO_SCORE)
            before = block_of(at, edges) - torch.arange(len(edges) - 1, device=q.device)
            near = ((before >= 0) & (before < local))[:, None] & (largest > NO_SCORE)
            score, order = score.masked_fill(near, float("inf")).sort(dim=2, descending=True, stable=True)
            order = order.masked_fill(score == NO_SCORE, len(edges))[..., :top].sort(dim=2).values
            order = order.masked_fill(order == len(edges), -1).int()
            chosen[rows[0] : rows[1], sample, :, : order.size(2)] = order
    return chosen


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    layout: SequenceLayout,
    block: int,
    mask: Mask | Sequence[Mask] = Causal(),
    kernel: str = "auto",
    scale: float | None = None,
) -> Tensor:
    """Attention in which each query reads the key blocks that it chose. All ranks of ``layout.grid.context`` call it.

    Args:
        q: [s_local, b, heads, d]; k: [s_local, b, kv_heads, d]; v: like k, but its head size may differ.
        chosen: [s_local, b, groups, n] of :func:`choose_blocks`; ``groups`` divides ``kv_heads``.
        layout: of the sequence.
        block, mask: as for :func:`choose_blocks`.
        kernel, scale: see :class:`~megatron.context_parallel.attention.rule.AttentionRule`. Queries of a block that
            choose differently need a kernel that supports masks.

    Returns:
        [s_local, b, heads, head size of v].
    """
    (_, b, groups, _), length = chosen.shape, layout.seq_length
    if k.size(2) % groups or q.size(2) % groups:
        raise ValueError(f"{groups} groups do not divide {q.size(2)} heads and {k.size(2)} heads of keys")
    masks = masks_of_samples(mask, b)
    every = layout.gather(chosen).cpu().unbind(1)
    late = [
        mask_of_blocks(choice, block_edges(own, length, block), own)
        for own, choices in zip(masks, every)
        for choice in choices.unbind(1)
    ]
    q, k, v = (x.unflatten(2, (groups, -1)).flatten(1, 2) for x in (q, k, v))  # each group is a sample of its own
    own_layout = layout.without_groups()
    plans = {one: AttentionPlan(own_layout, one) for one in late}
    rule = AttentionRule(kernel=kernel, scale=scale)
    out = attention_by_rule(q, k, v, layout=layout, rule=rule, masks=late, plans=plans)
    return out.unflatten(1, (b, groups)).flatten(2, 3)


def block_edges(mask: Mask, length: int, block: int) -> tuple[int, ...]:
    """The first position of each block, and the length. Blocks are counted from the beginning of each document."""
    if has_tree(mask):
        raise ValueError("blocks are not counted along the paths of a tree: use separate rows")
    ends = mask.ends if isinstance(mask, Documents) else (length,)
    return (*(at for start, stop in zip((0, *ends), ends) for at in range(start, stop, block)), length)


def mask_of_blocks(chosen: Tensor, edges: tuple[int, ...], within: Mask) -> Mask:
    """The mask of a choice of the complete sequence, int [s, n], in host memory.

    If all queries of a block chose alike, whole tiles decide; otherwise each pair does, in the tiles of all blocks that
    some query of a block chose.
    """
    blocks, choice = len(edges) - 1, chosen.numpy().astype(np.int64)
    row = np.repeat(np.arange(blocks), np.diff(edges))
    pairs = np.unique((row[:, None] * (blocks + 1) + choice)[choice >= 0])
    cuts = np.searchsorted(pairs, np.arange(1, blocks) * (blocks + 1))
    lists = [part.tolist() for part in np.split(pairs % (blocks + 1), cuts)]
    outer = ChosenBlocks(edges, lists, within)
    alike = bool((choice == choice[np.asarray(edges[:-1])][row]).all())
    return outer if alike else MaskFunction(partial(_chose, chosen, edges), outer)


def _chose(chosen: Tensor, edges: tuple[int, ...], q: Tensor, k: Tensor) -> Tensor:
    """Whether the queries [r, 1] chose the blocks of the keys [1, n]."""
    rows = chosen[q.flatten().to(chosen.device)].to(q.device).long()
    kept = torch.zeros(len(rows), len(edges), dtype=torch.bool, device=q.device)
    kept.scatter_(1, rows % len(edges), True)  # -1 is the last column, which no key has
    return kept[:, block_of(k.flatten(), edges)]
