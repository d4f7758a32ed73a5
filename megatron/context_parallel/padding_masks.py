# SPDX-License-Identifier: Apache-2.0
"""A mask tensor of scaled_dot_product_attention that only hides padding, as masks for complete samples."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.layout.masks import Documents, Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.tree import Tree

WHAT = (
    "a mask that hides the same keys from all queries of a sample, at its beginning or end (padding), is combined with "
    "mask= of context_parallel; no other mask can be: a rank's mask says nothing of other ranks' tokens"
)


def with_padding(attn_mask: Tensor, samples: int, layout: SequenceLayout, mask: Mask) -> list[Mask]:
    """One mask for each sample: ``mask``, with padding as separate documents.

    Padding attends to padding, so its own outputs, which nobody should read, are not those of PyTorch.

    Args:
        attn_mask: for this rank's queries and keys, boolean or added to scores.

    Raises:
        ValueError: on every rank, if any rank's mask does more than hide padding.
    """
    seen = _seen_keys(attn_mask, layout.local_length)
    fine = seen is not None and seen.size(0) in (1, samples)
    own = torch.ones(samples, layout.local_length, dtype=torch.uint8, device=attn_mask.device)
    if fine:
        own.copy_(seen.expand(samples, -1))
    axis = layout.grid.context
    agreed = torch.tensor(int(fine), device=own.device)
    if axis.size > 1:
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=axis.group)
    if not agreed:
        raise ValueError(WHAT)
    whole = layout.gather(own, 1).bool().cpu()
    return [_of_sample(row, mask) for row in whole]


def _seen_keys(attn_mask: Tensor, length: int) -> Tensor | None:
    """The keys [1 or b, s_local] that every query and head sees; None if they see different ones."""
    if attn_mask.dim() > 4 or attn_mask.size(-1) != length:
        return None
    seen = attn_mask
    if seen.is_floating_point():
        hidden = seen <= torch.finfo(seen.dtype).min / 2
        if bool((seen.ne(0) & ~hidden).any()):
            return None
        seen = ~hidden
    elif seen.dtype != torch.bool:
        return None
    seen = seen.view(*(1,) * (4 - seen.dim()), *seen.shape)
    first = seen[:, :1, :1]
    return first[:, 0, 0] if bool(seen.eq(first).all()) else None


def _of_sample(seen: Tensor, mask: Mask) -> Mask:
    """``mask`` for a sample of which the first and last tokens may be padding."""
    places = torch.nonzero(seen).flatten()
    if not len(places) or len(places) != int(places[-1]) - int(places[0]) + 1:
        raise ValueError(WHAT)  # all ranks see the same tokens
    ends = {int(places[0]), int(places[-1]) + 1, len(seen)} - {0}
    if ends == {len(seen)}:
        return mask
    if isinstance(mask, Documents):
        if isinstance(mask.ends, Tree):
            raise ValueError("padding does not go with a tree of documents: leave attn_mask out")
        return Documents(tuple(sorted(ends | set(mask.ends))), mask.within)
    return Documents(tuple(sorted(ends)), mask)
