# SPDX-License-Identifier: Apache-2.0
"""Attention to chosen keys in plain PyTorch: the reference, and the path for CPUs and fp64.

chosen_triton.py has the same functions as kernels. They work on complete tensors or on chunks of queries and of keys:
results of several chunks of keys are merged, and gradients added.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.decisions.division import GATHERED_ON_CPU

ENTRIES = GATHERED_ON_CPU  # of the keys gathered at a time


class Choice(NamedTuple):
    """The keys that some queries chose.

    Attributes:
        at: rows of keys, int32 [s, b, n].
        begin, end: int32 [s, b]; a query reads only these entries of ``at``.
        part: few of the entries are read, so that it is worth to wait for their number.
    """

    at: Tensor
    begin: Tensor
    end: Tensor
    part: bool = False

    @classmethod
    def of(cls, chosen: Tensor) -> Choice:
        """From the result of ``choose_keys``, whose entries without a key come last."""
        end = (chosen >= 0).sum(-1, dtype=torch.int32)
        return cls(chosen, torch.zeros_like(end), end)

    def rows(self, start: int, stop: int) -> Choice:
        """The choice of some of the queries."""
        return Choice(*(x[start:stop] for x in self[:3]), self.part)


class Form(NamedTuple):
    """How keys are attended to: the scale of scores, and the entries of a value."""

    scale: float
    value_size: int


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(dtype, torch.float32)


def take(complete: Tensor, at: Tensor) -> Tensor:
    """Rows of [s, b, ...] at positions [r, b, n]: [r, b, n, ...]."""
    return complete[at, torch.arange(complete.size(1), device=complete.device)[None, :, None]]


def add_at(total: Tensor, at: Tensor, parts: Tensor) -> None:
    """Add to ``total`` [s, b, ...] the gradients [r, b, n, ...] of what :func:`take` gives."""
    for sample in range(total.size(1)):
        total[:, sample].index_add_(0, at[:, sample].flatten(), parts[:, sample].flatten(0, 1))


def forward(q: Tensor, kv: Tensor, choice: Choice, form: Form, out: Tensor, lse: Tensor, *, first: bool = True) -> None:
    """Merge attention to the chosen rows of ``kv`` into ``out`` [s, b, heads, value size] and ``lse`` [s, b, heads].

    Args:
        q: [s, b, heads, d].
        kv: [t, b, key heads, D]: the first d entries of a row are the key, the last ones the value.
        first: out and lse are written, not read; otherwise both are in fp32, or fp64.
    """
    gathered = _Gathered(q, kv, choice, form)
    total, weights = gathered.scores.logsumexp(-1), gathered.weights(None)
    mean = torch.einsum("rbghn,rbngd->rbghd", weights, gathered.kv[..., -form.value_size :]).flatten(2, 3)
    total = total.flatten(2, 3)
    if not first:
        merged = torch.logaddexp(lse, total)
        finite = merged.masked_fill(merged == float("-inf"), 0)
        mean = out * (lse - finite).exp().unsqueeze(-1) + mean * (total - finite).exp().unsqueeze(-1)
        total = merged
    out.copy_(mean)
    lse.copy_(total)


def mean_weights(q: Tensor, kv: Tensor, choice: Choice, form: Form, lse: Tensor) -> Tensor:
    """The softmax weights summed over the heads, [s, b, n], for the final ``lse``; 0 where a query reads no entry."""
    gathered = _Gathered(q, kv, choice, form)
    return gathered.spread(gathered.weights(lse).sum((2, 3)), choice)


def grads(
    q: Tensor,
    kv: Tensor,
    choice: Choice,
    form: Form,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dkv: Tensor,
    *,
    first: bool = True,
) -> None:
    """Add the gradients to ``dq`` and ``dkv``, from the final ``lse`` and ``delta = sum(dout * out)`` [s, b, heads].

    Args:
        dkv: [t, b, key heads, D] in fp32, or fp64.
        first: dq is written, not read, and may have the dtype of q.
    """
    gathered, d = _Gathered(q, kv, choice, form), q.size(3)
    weights, value, (groups, each) = gathered.weights(lse), form.value_size, gathered.q.shape[2:4]
    dout = dout.to(gathered.q.dtype).unflatten(2, (groups, each))
    dweights = torch.einsum("rbghd,rbngd->rbghn", dout, gathered.kv[..., -value:])
    dscores = weights * (dweights - delta.unflatten(2, (groups, each)).unsqueeze(-1)) * form.scale
    of_q = torch.einsum("rbghn,rbngd->rbghd", dscores, gathered.kv[..., :d]).flatten(2, 3)
    dq.copy_(of_q) if first else dq.add_(of_q)
    parts = torch.zeros_like(gathered.kv)
    parts[..., :d] += torch.einsum("rbghn,rbghd->rbngd", dscores, gathered.q)
    parts[..., -value:] += torch.einsum("rbghn,rbghd->rbngd", weights, dout)
    add_at(dkv, gathered.at, parts)


class _Gathered:
    """Queries and copies of the keys that each of them reads.

    Attributes:
        at: rows of the keys [r, b, n]; 0 where there is none.
        places, valid: entries of the choice, and whether a query reads them; all, or as many as any query reads.
        q: [r, b, key heads, heads of each, d]. kv: [r, b, n, key heads, D].
        scores: [r, b, key heads, heads of each, n].
    """

    def __init__(self, q: Tensor, kv: Tensor, choice: Choice, form: Form) -> None:
        most = choice.at.size(2)
        if choice.part and choice.end.numel():
            most = int((choice.end - choice.begin).max())
        self.places = choice.begin.long().unsqueeze(-1) + torch.arange(most, device=q.device)
        self.valid = self.places < choice.end.unsqueeze(-1)
        self.places.masked_fill_(~self.valid, 0)
        self.at = choice.at.long().gather(-1, self.places).masked_fill_(~self.valid, 0)
        self.q = q.to(wide(q.dtype)).unflatten(2, (kv.size(2), -1))
        self.kv = take(kv, self.at).to(self.q.dtype)
        scores = torch.einsum("rbghd,rbngd->rbghn", self.q, self.kv[..., : q.size(3)]) * form.scale
        self.scores = scores.masked_fill(~self.valid[:, :, None, None], float("-inf"))

    def weights(self, lse: Tensor | None) -> Tensor:
        """The softmax weights; by a final lse [r, b, heads], or among these keys alone."""
        total = self.scores.logsumexp(-1) if lse is None else lse.unflatten(2, self.q.shape[2:4])
        return (self.scores - total.masked_fill(total == float("-inf"), 0).unsqueeze(-1)).exp()

    def spread(self, x: Tensor, choice: Choice) -> Tensor:
        """Numbers of these keys [r, b, n] at the places of their entries."""
        result = x.new_zeros(choice.at.shape)
        return result.scatter_add_(-1, self.places, x.masked_fill(~self.valid, 0))
