# SPDX-License-Identifier: Apache-2.0
"""Each rank has a part of every sequence. Each docstring says why it is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megatron.certifying.recording import Outcome
from tests.referee.pieces import (
    LENGTH,
    WIDTH,
    WORDS,
    AllGather,
    Decoder,
    attention,
    gather,
    losses,
    mine,
    story,
    summed,
)


def trained(model: nn.Module, ids: Tensor, labels: Tensor, at: Tensor, **more: Any) -> Outcome:
    """Own tokens' share of the mean over all labels; gradients are summed over the ranks."""
    loss = losses(model(ids, at), labels) / summed((labels != -100).sum())
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return Outcome(model, summed(loss), **more)


class SequenceToHeads(torch.autograd.Function):
    """[rows, part of the length, heads, dim] to [rows, length, part of the heads, dim], or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int) -> Tensor:
        ctx.dims = split, join
        given = [part.contiguous() for part in x.chunk(dist.get_world_size(), split)]
        received = [torch.empty_like(part) for part in given]
        for rank, part in enumerate(given):  # gloo has no all_to_all of lists
            gathered = [torch.empty_like(part) for _ in given] if rank == dist.get_rank() else None
            dist.gather(part, gathered, dst=rank)
            received = gathered or received
        return torch.cat(received, join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        split, join = ctx.dims
        return SequenceToHeads.apply(gradient, join, split), None, None


def by_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    whole = [SequenceToHeads.apply(x, 2, 1) for x in (q, k, v)]
    return SequenceToHeads.apply(attention(*whole), 1, 2)


def ulysses(ranks: int) -> Outcome:
    """Attention sees whole sequences of some heads; labels are shifted before the sequence is cut."""
    ids, labels = story(rows=2)
    return trained(Decoder(by_heads), mine(ids, 1), mine(labels, 1), mine(torch.arange(LENGTH)))


def ulysses_one_kv_head(ranks: int) -> Outcome:
    """A key head for all queries is repeated for each rank before the exchange, whose backward sums its gradients."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_heads(q, k.repeat_interleave(ranks, 2), v.repeat_interleave(ranks, 2))

    ids, labels = story(rows=2, seed=3)
    return trained(Decoder(attend, kv_heads=1), mine(ids, 1), mine(labels, 1), mine(torch.arange(LENGTH)))


def passed_on(*tensors: Tensor, back: bool = False) -> list[Tensor]:
    """What the rank before has (``back``: the rank after)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    step = -1 if back else 1
    received = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    if ranks == 1:
        return [x.clone() for x in tensors]
    work = []
    for x, new in zip(tensors, received):
        work.append(dist.P2POp(dist.isend, x.contiguous(), (rank + step) % ranks))
        work.append(dist.P2POp(dist.irecv, new, (rank - step) % ranks))
    for one in dist.batch_isend_irecv(work):
        one.wait()
    return received


class Ring(torch.autograd.Function):
    """Keys and values go round; outputs of their blocks are merged by their sums of exponentials."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        out, total, scale = torch.zeros_like(q), None, q.size(-1) ** -0.5
        kv = k, v
        for hop in range(ranks):
            source = (rank - hop) % ranks
            if source <= rank:
                scores = scale * q @ kv[0].mT
                if source == rank:
                    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
                lse = scores.logsumexp(-1, keepdim=True)
                block = (scores - lse).exp() @ kv[1]
                new = lse if total is None else torch.logaddexp(total, lse)
                out = block if total is None else out * (total - new).exp() + block * (lse - new).exp()
                total = new
            kv = passed_on(*kv)
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, total = ctx.saved_tensors
        rank, ranks, scale = dist.get_rank(), dist.get_world_size(), q.size(-1) ** -0.5
        delta = (gradient * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for hop in range(ranks):
            source = (rank - hop) % ranks
            if source <= rank:
                scores = scale * q @ k.mT
                if source == rank:
                    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
                p = (scores - total).exp()
                ds = p * (gradient @ v.mT - delta) * scale
                dq, dk, dv = dq + ds @ k, dk + ds.mT @ q, dv + p.mT @ gradient
            k, v, dk, dv = passed_on(k, v, dk, dv)
        return dq, dk, dv


def in_a_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Ring.apply(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def ring(ranks: int) -> Outcome:
    """After all hops the gradients of a rank's keys have come home."""
    ids, labels = story(rows=2)
    return trained(Decoder(in_a_ring), mine(ids, 1), mine(labels, 1), mine(torch.arange(LENGTH)))


def ring_recomputed(ranks: int) -> Outcome:
    """The ring again, with blocks that are computed again in the backward pass, in the same order on all ranks."""
    model = Decoder(in_a_ring)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, at, forward=forward: checkpoint(forward, x, at, use_reentrant=False)
    ids, labels = story(rows=2)
    return trained(model, mine(ids, 1), mine(labels, 1), mine(torch.arange(LENGTH)))


def with_all_keys(allowed: Callable[[Tensor, Tensor], Tensor], at: Tensor) -> Callable[..., Tensor]:
    """Attention of own queries to all ranks' keys, whose gradients come back through the gather."""
    everywhere = gather(at, 0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (AllGather.apply(x, 1) for x in (k, v))
        return attention(q, k, v, allowed(at[:, None], everywhere[None]))

    return attend


def zigzag(ranks: int) -> Outcome:
    """Each rank has a piece from the start and one from the end; masks and RoPE use true positions; two KV heads."""
    pieces, rank = torch.arange(LENGTH).chunk(2 * ranks), dist.get_rank()
    at = torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])
    ids, labels = story(rows=2)
    model = Decoder(with_all_keys(lambda query, key: key <= query, at), kv_heads=2)
    return trained(model, ids[:, at], labels[:, at], at)


def packed(ranks: int) -> Outcome:
    """Three documents in a sequence: positions restart, the mask separates them, and no label crosses an end."""
    ends = torch.tensor([5, 11])
    document = torch.bucketize(torch.arange(LENGTH), ends, right=True)
    places = torch.cat([torch.arange(5), torch.arange(6), torch.arange(5)])
    ids, labels = story(rows=1)
    labels[:, ends - 1] = -100

    def allowed(query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (document[key] == document[query])

    own = mine(torch.arange(LENGTH))
    return trained(Decoder(with_all_keys(allowed, own)), ids[:, own], labels[:, own], places[own])


class FromBefore(torch.autograd.Function):
    """The last ``size`` rows of dim 1 of the rank before; on the first rank, zeros. Gradients go back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.shape, ctx.size = x.shape, size
        (received,) = passed_on(x[:, -size:])
        return received if dist.get_rank() > 0 else torch.zeros_like(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (received,) = passed_on(gradient, back=True)
        result = gradient.new_zeros(ctx.shape)
        if dist.get_rank() < dist.get_world_size() - 1:
            result[:, -ctx.size :] = received
        return result, None


def window(ranks: int) -> Outcome:
    """A query sees 5 tokens: the last 4 keys of the rank before are enough, and the first rank has none."""
    size = 4
    at = mine(torch.arange(LENGTH))
    keys = torch.cat([torch.arange(-size, 0) + at[0], at])
    back = at[:, None] - keys[None]
    allowed = (back >= 0) & (back <= size) & (keys >= 0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat([FromBefore.apply(x, size), x], 1) for x in (k, v))
        return attention(q, k, v, allowed)

    ids, labels = story(rows=2)
    return trained(Decoder(attend), mine(ids, 1), mine(labels, 1), at)


class FromBelow(torch.autograd.Function):
    """Receive the state of the rank before, which has sent it; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, zeros: Tensor) -> Tensor:
        if dist.get_rank() > 0:
            zeros = zeros.clone()
            dist.recv(zeros, dist.get_rank() - 1)
        return zeros + 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if dist.get_rank() > 0:
            dist.send(gradient.contiguous(), dist.get_rank() - 1)
        return gradient


class ToAbove(torch.autograd.Function):
    """Send the state to the rank after, and take the gradient from there in the backward pass."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, state: Tensor) -> Tensor:
        ctx.shape = state.shape
        if dist.get_rank() < dist.get_world_size() - 1:
            dist.send(state.contiguous(), dist.get_rank() + 1)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_state = gradient.new_zeros(ctx.shape)
        if dist.get_rank() < dist.get_world_size() - 1:
            dist.recv(of_state, dist.get_rank() + 1)
        return gradient, of_state


class Decays(nn.Module):
    """Linear attention with a learned decay; the state goes from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 8) for _ in range(3))
        self.decay, self.o = nn.Linear(WIDTH, 1), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, decay = self.q(x), self.k(x), self.v(x), self.decay(x).sigmoid()
        state, out = FromBelow.apply(x.new_zeros(x.size(0), 8, 8, requires_grad=True)), []
        for t in range(x.size(1)):
            state = decay[:, t, :, None] * state + k[:, t, :, None] * v[:, t, None]
            out.append((q[:, t, None] @ state).squeeze(1))
        return self.o(ToAbove.apply(torch.stack(out, 1), state))


class States(nn.Module):
    """Layers of a causal convolution, whose first inputs come from the rank before, and of decaying states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.convolution = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixers = nn.ModuleList(Decays() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        x = self.embed(ids)
        for convolution, norm, mixer in zip(self.convolution, self.norms, self.mixers):
            x = x + F.silu(convolution(torch.cat([FromBefore.apply(x, 2), x], 1).mT)).mT
            x = x + mixer(norm(x))
        return self.head(x)


def states(ranks: int) -> Outcome:
    """State and last inputs are those of the token before; their gradients return."""
    ids, labels = story(rows=2)
    return trained(States(), mine(ids, 1), mine(labels, 1), mine(torch.arange(LENGTH)))


class Encoder(nn.Module):
    """Learned positions, attention in both directions without padded keys, dropout, and the mean of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.classes = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, at: Tensor, real: Tensor, keep: Tensor) -> Tensor:
        x = (self.words(ids) + self.places(at)) * keep
        q, k, v = (part(self.norm(x)).unflatten(-1, (2, -1)) for part in (self.q, self.k, self.v))
        k, v = (torch.cat(differentiable.all_gather(part.contiguous()), 1) for part in (k, v))
        seen = torch.cat(differentiable.all_gather(real.float()), 1)[:, None, None] > 0
        x = x + self.o(attention(q, k, v, seen).flatten(2))
        sums = differentiable.all_reduce(torch.cat([(x * real[..., None]).sum(1), real.sum(1, keepdim=True)], 1))
        return self.classes(sums[:, :-1] / sums[:, -1:])


def encoder(ranks: int) -> Outcome:
    """Dropout's mask is cut as the tokens are. All ranks have the same loss: gradients count ``ranks`` times."""
    model, kept = Encoder(), torch.Generator().manual_seed(8)
    ids, labels = story(rows=3)
    keep = (torch.rand(3, LENGTH, WIDTH, generator=kept) > 0.1) / 0.9
    ids, real, keep, at = mine(ids, 1), mine(labels != -100, 1), mine(keep, 1), mine(torch.arange(LENGTH))
    loss = F.cross_entropy(model(ids, at, real.float(), keep), torch.tensor([0, 2, 1]))
    loss.backward()
    for name, parameter in model.named_parameters():
        if not name.startswith("classes"):
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
    return Outcome(model, loss)


def pixels(ranks: int) -> tuple[nn.Module, Tensor]:
    """Images are cut in rows of pixels: a convolution gets the neighbours' border rows, and zeros outside."""
    first, second, classes = nn.Conv2d(2, 4, 3, padding=(0, 1)), nn.Conv2d(4, 4, 3, padding=(0, 1)), nn.Linear(4, 3)
    model = nn.ModuleDict({"first": first, "second": second, "classes": classes})
    x = mine(torch.randn(3, 2, 8, 6), 2)
    for convolution in (first, second):
        rows = x.transpose(1, 2)  # FromBefore cuts dim 1
        above, below = FromBefore.apply(rows, 1), FromAfter.apply(rows)
        x = convolution(torch.cat([above, rows, below], 1).transpose(1, 2)).tanh()
    sums = x.sum((2, 3)) / 48
    total = differentiable.all_reduce(sums)
    loss = F.cross_entropy(classes(total), torch.tensor([2, 0, 1])) / ranks
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return model, summed(loss)


class FromAfter(torch.autograd.Function):
    """The first row of dim 1 of the rank after; on the last rank, zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        (received,) = passed_on(x[:, :1], back=True)
        return received if dist.get_rank() < dist.get_world_size() - 1 else torch.zeros_like(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (received,) = passed_on(gradient)
        result = gradient.new_zeros(ctx.shape)
        if dist.get_rank() > 0:
            result[:, :1] = received
        return result


def data_and_ring(data: int, model: int) -> Outcome:
    """Rows over one axis, sequences over the other: sums go over both, and keys only over the second."""
    rank = dist.get_rank()
    rings = [dist.new_group(list(range(first, first + model))) for first in range(0, data * model, model)]
    own = rings[rank // model]
    at = mine(torch.arange(LENGTH), group=own)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (AllGather.apply(x, 1, own) for x in (k, v))
        return attention(q, k, v, torch.arange(LENGTH)[None] <= at[:, None])

    ids, labels = (x.chunk(data)[rank // model] for x in story(rows=4))
    return trained(Decoder(attend), mine(ids, 1, own), mine(labels, 1, own), at)
