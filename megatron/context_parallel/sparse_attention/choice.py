# SPDX-License-Identifier: Apache-2.0
"""The choice of keys: scores of an indexer, streamed over blocks of keys with a running top-k.

A score is a weighted sum over the indexer's heads of relu(q . k), with one key for all heads ("lightning indexer" of
DeepSeek V3.2, arXiv 2512.02556, equation 1). Scores are fp32. Of equal ones the key that comes first is chosen, so that
every grid chooses the same keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron.context_parallel.layout.masks import Causal, Mask, inside_tiles
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, Spans, count, positions, positions_of, split
from megatron.context_parallel.layout.tiles import reach, tiles
from megatron.context_parallel.sparse_attention import chosen_triton
from megatron.context_parallel.sparse_attention.blocks_of_scores import (
    KEYS,
    ROWS,
    key_blocks,
    masks_of_samples,
    one_by_one,
    padded,
)
from megatron.decisions.division import SCORED_TOGETHER
from megatron.platform.autograd import without_autocast
from megatron.platform.collectives import gathered

NOTHING = -(2**63)
LAST = 2**32 - 1


@torch.no_grad()
@without_autocast
def choose_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    layout: SequenceLayout,
    top_k: int,
    mask: Mask | Sequence[Mask] = Causal(),
    kernel: str = "auto",
    group: Any = None,
) -> Tensor:
    """The keys that each of this rank's queries chooses: those with the highest scores that its mask allows.

    All ranks of ``layout.grid.context`` call it together. The largest temporary tensor has heads x 128 x 1,024 scores
    (128 x 16,384 on a GPU with Triton), and the keys of the complete sequence are held during the call.

    Args:
        q: queries of the indexer [s_local, b, heads, d].
        k: its keys [s_local, b, d].
        weights: of its heads [s_local, b, heads], all factors included.
        layout: of the sequence.
        top_k: number of keys.
        mask: which keys may be chosen; a sequence has one for each sample.
        kernel: ``auto``, ``triton`` or ``math``. Both round differently: use the same on all ranks.
        group: process group of ranks with the same arguments (TP): each chooses for a part of the queries.

    Returns:
        int32 [s_local, b, top_k]: positions in the sequence, ascending; -1 at the end where the mask allows fewer keys.

    Raises:
        ValueError: ``top_k`` is below 1, or the kernel cannot run.
    """
    if top_k < 1:
        raise ValueError(f"each query must choose at least one key, not {top_k}")
    masks = masks_of_samples(mask, q.size(1))
    complete = layout.gather(k)
    how: dict[str, Any] = {"top_k": top_k, "masks": masks, "kernel": kernel, "group": group}
    return choose_among(q, complete, weights, spans=layout.local_spans, **how)


def choose_among(
    q: Tensor,
    complete: Tensor,
    weights: Tensor,
    *,
    spans: Spans,
    top_k: int,
    masks: Sequence[Mask],
    kernel: str = "auto",
    group: Any = None,
) -> Tensor:
    """What :func:`choose_keys` returns for queries at the positions ``spans``; only ``group`` communicates.

    Args:
        complete: the keys of the sequence [s, b, d]; those to which no query attends may be missing (any numbers).
        masks: one for each sample.
    """
    if group is not None and group.size() > 1:
        return _choose_together(q, complete, weights, spans, group, {"top_k": top_k, "masks": masks, "kernel": kernel})
    local, length, fused = len(q), len(complete), _uses_triton(kernel, q, complete)
    block = KEYS * (SCORED_TOGETHER if fused else 1)
    top_k = min(top_k, length)
    chosen = torch.full((local, q.size(1), top_k), -1, dtype=torch.int32, device=q.device)

    def blocks(rows: Span, mask: Mask) -> list[Span]:
        return list(key_blocks(reach(positions_of([rows], spans), mask, length), length, block))

    for rows in one_by_one(split((0, local), ROWS), lambda rows: sum(len(blocks(rows, mask)) for mask in masks)):
        held = positions_of([rows], spans)
        for sample, own in enumerate(masks):
            best: list[Tensor] = []  # numbers of the best keys so far, then of all keys of some blocks
            mine = [x[rows[0] : rows[1], sample] for x in (q, weights)]
            for keys in blocks(rows, own):
                theirs = complete[keys[0] : keys[1], sample]
                at = torch.arange(*keys, device=q.device)
                ranked = ranked_keys(mine[0], theirs, mine[1], at, fused)
                allowed = _allowed(held, keys, own, q.device)
                best.append(ranked if allowed is None else ranked.masked_fill_(~allowed, NOTHING))
                if sum(x.size(1) for x in best) > 2 * top_k + 2 * block:
                    best = [_highest(best, top_k)]
            if not best:
                continue
            found = _highest(best, top_k)
            where = (LAST - (found & LAST)).masked_fill_(found == NOTHING, LAST).sort(dim=1).values
            chosen[rows[0] : rows[1], sample, : where.size(1)] = where.masked_fill_(where == LAST, -1).int()
    return chosen


def _choose_together(
    q: Tensor, complete: Tensor, weights: Tensor, spans: Spans, group: Any, how: dict[str, Any]
) -> Tensor:
    """:func:`choose_among`, shared by the ranks of ``group``.

    Each has an early and a late part of the queries, because later ones read more keys.
    """
    ranks, rank = group.size(), group.rank()
    each = -(-len(q) // (2 * ranks))
    parts = []
    for number in (rank, 2 * ranks - 1 - rank):
        rows = min(number * each, len(q)), min((number + 1) * each, len(q))
        own = slice(*rows)
        part = choose_among(q[own], complete, weights[own], spans=positions_of([rows], spans), **how)
        parts.append(functional.pad(part, (0, 0, 0, 0, 0, each - len(part)), value=-1))
    early, late = gathered(torch.cat(parts), group).unflatten(0, (ranks, 2, each)).unbind(1)
    return torch.cat((early, late.flip(0))).flatten(0, 1)[: len(q)]


def _highest(ranked: Sequence[Tensor], top_k: int) -> Tensor:
    """The highest numbers of each row of all tensors together, in any order."""
    every = torch.cat(tuple(ranked), dim=1)
    return every if every.size(1) <= top_k else every.topk(top_k, dim=1, sorted=False).values


def _allowed(held: Spans, keys: Span, mask: Mask, device: torch.device) -> Tensor | None:
    """Whether queries at ``held`` attend to the keys, bool; None: to all. Positions are not looked up on the device."""
    found, shape = tiles(held, (keys,), mask), (count(held), keys[1] - keys[0])
    if not found.masked and found.pairs == shape[0] * shape[1]:
        return None
    allowed, inner = torch.zeros(shape, dtype=torch.bool, device=device), inside_tiles(mask)
    for tile in found:
        part = allowed[slice(*tile.q), slice(*tile.k)]
        if tile.masked:
            at, there = positions(found.q_at(tile), device), positions(found.k_at(tile), device)
            within = inner.allowed(at[:, None], there[None])
        else:
            within = torch.ones_like(part)
        part |= within if tile.kind == "full" else within.tril() if tile.kind == "causal" else within.triu()
    return allowed


def _uses_triton(kernel: str, q: Tensor, k: Tensor) -> bool:
    if kernel == "math" or (kernel == "auto" and not chosen_triton.on_gpu(q)):
        return False
    if kernel not in ("auto", "triton"):
        raise ValueError(f"no kernel {kernel} for an indexer's scores: use auto, triton or math")
    reason = chosen_triton.cannot_run(q.device, q.dtype)
    reason = reason or (None if q.dtype == k.dtype else "needs queries and keys of one dtype")
    if reason and kernel == "triton":
        raise ValueError(f"kernel=triton for an indexer's scores: {reason}; use math")
    return reason is None


def _scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """q [r, heads, d], weights [r, heads], k [n, d] -> [r, n], fp32."""
    shape = len(q), len(k)
    q, weights, k = (padded(x.float(), rows) for x, rows in ((q, ROWS), (weights, ROWS), (k, KEYS)))
    each = torch.relu(q.flatten(0, 1) @ k.T).unflatten(0, q.shape[:2])
    return torch.bmm(weights.unsqueeze(1), each).squeeze(1)[: shape[0], : shape[1]]


def ranked_keys(q: Tensor, k: Tensor, weights: Tensor, at: Tensor, fused: bool = False) -> Tensor:
    """int64 numbers [r, n] in the order of the scores; of equal scores the one at the earlier position is larger.

    Args:
        q, weights: of r queries [r, heads, d] and [r, heads].
        k: n keys [n, d], at the positions ``at`` [n].
        fused: compute scores by Triton's kernel.
    """
    scores = chosen_triton.index_scores(q, k, weights) if fused else _scores(q, weights, k)
    bits = (scores + 0.0).view(torch.int32).long()  # adding zero makes -0 equal to 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) | (LAST - at)
