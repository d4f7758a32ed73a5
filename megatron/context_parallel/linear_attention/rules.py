# SPDX-License-Identifier: Apache-2.0
"""Rules of linear attention: how a token changes the state, token by token and in blocks of tokens.

Every rule here has a state S [keys, values] for each head. A token with query q, key k, value v, log-decay g and factor
beta changes it and reads it:

    S = exp(g) * S                        g: a number, or one for each key channel
    S = S + beta * k (v - k^T S)^T        a delta rule: what the state answers to k is replaced by v
    S = S + beta * k v^T                  otherwise
    out = S^T q + skip * v                skip: a factor that rules without delta may have

Sources: gated delta rule (arXiv 2412.06464), KDA (Kimi Linear, arXiv 2510.26692), Mamba2 (arXiv 2405.21060: k, q and v
are its B, C and x, beta its step dt, g its dt * A, skip its D), decay (RetNet, arXiv 2307.08621; Lightning, arXiv
2401.04658).

A block of tokens is *prepared* without the state. Its outputs and the state after it are then a few matrix products
(the WY form of DeltaNet, arXiv 2406.06484). A log-decay of -inf forgets everything: no difference of two infinite
numbers is formed, so that neither outputs nor gradients become NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearRule:
    """How a token changes the state.

    Attributes:
        name: for messages.
        delta: whether it is a delta rule; then a span's map has a matrix [keys, keys], otherwise a vector.
        channels: whether the log-decay has one number for each key channel; only delta rules may.
    """

    name: str
    delta: bool
    channels: bool

    def map_columns(self, keys: int) -> int:
        """Columns of M in a span's map."""
        return keys if self.delta else 1


GATED_DELTA = LinearRule("gated_delta", delta=True, channels=False)
KDA = LinearRule("kda", delta=True, channels=True)
MAMBA2 = LinearRule("mamba2", delta=False, channels=False)
DECAY = LinearRule("decay", delta=False, channels=False)
RULES = {rule.name: rule for rule in (GATED_DELTA, KDA, MAMBA2, DECAY)}


def recurrence(
    rule: LinearRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    skip: Tensor | None = None,
    *,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule token by token: the reference, and the step of generation. Differentiable.

    Args:
        q, k: [s, b, key heads, K]; v: [s, b, heads, V]; g: [s, b, heads] or, by channel, [s, b, heads, K]; beta and
            skip: [s, b, heads]. Consecutive heads share a key head.
        state: [b, heads, K, V] before the first token; None: 0.

    Returns:
        out [s, b, heads, V] and the state after the last token, in the widest dtype of the inputs.
    """
    shared = v.size(2) // k.size(2)
    q, k = (x.repeat_interleave(shared, dim=2) for x in (q, k))
    if state is None:
        state = v.new_zeros((*v.shape[1:3], k.size(3), v.size(3)))
    decay = (g if rule.channels else g.unsqueeze(-1)).exp().unsqueeze(-1)
    out = []
    for t in range(len(q)):
        state = state * decay[t]
        new = v[t] - torch.einsum("bhk,bhkv->bhv", k[t], state) if rule.delta else v[t]
        state = state + torch.einsum("bhk,bhv->bhkv", k[t], new * beta[t].unsqueeze(-1))
        out.append(torch.einsum("bhk,bhkv->bhv", q[t], state))
    out = torch.stack(out)
    return out if skip is None else out + skip.unsqueeze(-1) * v, state


class Prepared(NamedTuple):
    """Blocks of tokens, prepared: [b, heads, blocks, tokens of a block, ..]; S is the state before the block.

    With a delta rule ``new = own - erase @ S``; ``out = reads @ S + inside @ new``; the state after it is
    ``keep * S + writes^T @ new``.

    Otherwise heads that share a key are columns of one state: the dimension of heads is that of key heads, and S is
    [K, group * V]. ``out = entry * (reads @ S) + inside @ values``; the state after it is
    ``keep * S + writes^T @ own``.
    """

    erase: Tensor | None  # [.., c, K]
    own: Tensor  # [.., c, V] or [.., c, group, V]
    writes: Tensor  # [.., c, K]
    reads: Tensor  # [.., c, K]
    inside: Tensor  # [b, all heads, blocks, c, c]
    keep: Tensor  # [.., 1, 1], [.., K, 1] or [.., 1, group, 1]
    entry: Tensor | None = None  # [.., c, group, 1]
    values: Tensor | None = None  # [b, all heads, blocks, c, V]


def prepare(
    rule: LinearRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    skip: Tensor | None = None,
    *,
    block: int,
) -> Prepared:
    """Prepare blocks of tokens. Differentiable.

    Args:
        q, k: [b, key heads, tokens, K], in fp32 or fp64; v, g, beta and skip: as in :func:`recurrence`, but
            [b, heads, tokens, ..]. Heads that share a key head also share its products of queries and keys.
        block: a power of two that divides the number of tokens.
    """
    groups = (k.size(1), v.size(1) // k.size(1))
    q, k = (x.unflatten(2, (-1, block)).unsqueeze(2) for x in (q, k))
    v, g, beta = (x.unflatten(2, (-1, block)).unflatten(1, groups) for x in (v, g, beta))
    beta = beta.unsqueeze(-1)
    if rule.channels:
        entry, left, keep = _channel_decays(g)
        inside, overlap = _channel_pairs(torch.stack((q, k)), k, g)
    else:
        between, entry, left, keep = _decays(g)
        inside, overlap = q @ k.mT * between, k @ k.mT * between if rule.delta else None
    if not rule.delta:
        inside = inside * beta.mT
        if skip is not None:
            inside = inside + torch.diag_embed(skip.unflatten(2, (-1, block)).unflatten(1, groups))
        own, keep, entry = (x.movedim(2, 4) for x in (v * (left * beta), keep, entry))
        return Prepared(None, own, k.squeeze(2), q.squeeze(2), inside.flatten(1, 2), keep, entry, v.flatten(1, 2))
    right = torch.cat((v * beta, k * (beta * entry)), dim=-1)
    # Only entries below the diagonal are read.
    solved = torch.linalg.solve_triangular(overlap * beta, right, upper=False, unitriangular=True)
    own, erase = solved.split((v.size(-1), k.size(-1)), dim=-1)
    return Prepared(*(x.flatten(1, 2) for x in (erase, own, k * left, q * entry, inside, keep)))


def _decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decays of log-decays [.., c]: between tokens [.., c, c], from the block's entry to a token [.., c, 1], from a
    token to the block's end [.., c, 1], and of the whole block [.., 1, 1].

    A token's own decay is 1 whatever the sums are. It gives them no gradients, which would be large and only cancel.
    """
    forgets = torch.isneginf(g)
    sums, part = g.masked_fill(forgets, 0.0).cumsum(-1), forgets.cumsum(-1)

    def decay(exponent: Tensor, same: Tensor, own: Tensor) -> Tensor:
        return exponent.masked_fill(~same, -torch.inf).masked_fill(own, 0.0).exp()

    own = torch.eye(g.size(-1), dtype=torch.bool, device=g.device)
    before = torch.ones_like(own).tril()
    pairs = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    between = decay(pairs, (part.unsqueeze(-1) == part.unsqueeze(-2)) & before, own)
    left = decay(sums[..., -1:] - sums, part == part[..., -1:], own[-1])
    entry = sums.masked_fill(part != 0, -torch.inf).exp()
    return between, entry.unsqueeze(-1), left.unsqueeze(-1), entry[..., -1:].unsqueeze(-1)


def _channel_decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Like :func:`_decays` for log-decays by channel [.., c, K], without those between tokens."""
    entry = g.cumsum(-2).exp()
    return entry, _after(g).exp(), entry[..., -1, :].unsqueeze(-1)


def _after(g: Tensor) -> Tensor:
    """Sums of the log-decays [.., c, K] of all later tokens."""
    later = torch.nn.functional.pad(g[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2)


def _channel_pairs(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """For tokens i >= j of a block: the sum over channels of x_i * y_j * exp(sum of g from j + 1 to i); else 0.

    A factor of i alone and one of j alone would overflow. Therefore pairs are joined from halves: for i in the right
    and j in the left half, the decay is that from j to the middle times that from the middle to i, both at most 1.

    Args:
        x: [n, .., c, K]; y: [.., c, K]; g: the same, or with more heads than the others.

    Returns:
        [n, .., c, c].
    """
    result = (x * y).sum(-1).expand(*x.shape[:1], *g.shape[:-1])[..., None, None]
    half = 1
    while half < y.size(-2):
        halves = (-1, 2, half)
        left, right = y.unflatten(-2, halves)[..., 0, :, :], x.unflatten(-2, halves)[..., 1, :, :]
        g_left, g_right = g.unflatten(-2, halves).unbind(-3)
        across = (right * g_right.cumsum(-2).exp()) @ (left * _after(g_left).exp()).mT
        first, second = result.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat((first, torch.zeros_like(first)), dim=-1)
        result = torch.cat((upper, torch.cat((across, second), dim=-1)), dim=-2)
        half *= 2
    return result.squeeze(-3)
