# SPDX-License-Identifier: Apache-2.0
"""The loss that teaches an indexer which keys attention reads, for some queries, and its gradients.

The loss of a query is the Kullback-Leibler divergence of the indexer's softmax over the chosen keys from attention's
own distribution, the mean over its heads (DeepSeek V3.2, arXiv 2512.02556, equation 4).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.context_parallel.sparse_attention.chosen_math import add_at, take, wide


class Indexer(NamedTuple):
    """An indexer's queries [s_local, b, heads, d], keys [s_local, b, d] and weights of heads [s_local, b, heads]."""

    q: Tensor
    k: Tensor
    weights: Tensor


def index_loss(index: Indexer, chosen: Tensor, target: Tensor) -> Tensor:
    """[r, b].

    Args:
        index: of r queries, with the keys of the complete sequence [s, b, d].
        chosen: their choice [r, b, n].
        target: the mean softmax weight of each key over all heads [r, b, n].
    """
    found = _Scores(index, chosen)
    apart = torch.special.xlogy(target, target) - target * found.scores.log_softmax(-1)
    return apart.masked_fill(~found.valid, 0).sum(-1)


def index_loss_grads(
    index: Indexer, chosen: Tensor, target: Tensor, dloss: Tensor, dkeys: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the indexer's queries and weights; those of its keys are added to ``dkeys`` [s, b, d]."""
    found, weights = _Scores(index, chosen), index.weights.to(dkeys.dtype)
    dscores = (dloss.unsqueeze(-1) * (found.scores.softmax(-1) - target)).masked_fill(~found.valid, 0)
    deach = dscores.unsqueeze(2) * weights.unsqueeze(-1) * (found.each > 0)
    add_at(dkeys, found.at, torch.einsum("rbhn,rbhd->rbnd", deach, index.q.to(dkeys.dtype)))
    dq = torch.einsum("rbhn,rbnd->rbhd", deach, found.keys)
    return dq.to(index.q.dtype), torch.einsum("rbn,rbhn->rbh", dscores, found.each).to(index.weights.dtype)


class _Scores:
    """The scores of chosen keys.

    Attributes:
        at, valid: positions [r, b, n], and whether there is one.
        keys: [r, b, n, d]. each: relu(q . k), [r, b, heads, n]. scores: [r, b, n].
    """

    def __init__(self, index: Indexer, chosen: Tensor) -> None:
        self.at, self.valid = chosen.long().clamp(min=0), chosen >= 0
        self.keys = take(index.k, self.at).to(wide(index.q.dtype))
        self.each = torch.relu(torch.einsum("rbhd,rbnd->rbhn", index.q.to(self.keys.dtype), self.keys))
        scores = torch.einsum("rbh,rbhn->rbn", index.weights.to(self.keys.dtype), self.each)
        self.scores = scores.masked_fill(~self.valid, float("-inf"))
