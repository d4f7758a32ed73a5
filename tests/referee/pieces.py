# SPDX-License-Identifier: Apache-2.0
"""What the programs share: a small decoder, batches, and sums over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, HEAD, WORDS, LENGTH, ROWS = 16, 4, 4, 40, 16, 4
SEED = 0  # of the program that runs, which its story and its weights depend on


def mine(x: Tensor, dim: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's part of a tensor."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def summed(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return x


def averaged(x: Tensor) -> Tensor:
    return summed(x) / dist.get_world_size()


def gather(x: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The whole tensor from the ranks' parts, without gradients."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, dim)


class AllGather(torch.autograd.Function):
    """The whole tensor from the ranks' parts; the gradient of a part is the sum of all ranks' gradients of it.

    ``torch.distributed.nn.functional.all_gather`` is wrong in silence on gloo (2.13) if gradients are not contiguous.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return mine(summed(gradient.contiguous(), ctx.group), ctx.dim, ctx.group), None, None


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def story(rows: int = ROWS, length: int = LENGTH, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and the next token of each; rows end after different numbers of tokens, and the rest has no labels."""
    ids = torch.randint(WORDS, (rows, length + 1), generator=torch.Generator().manual_seed(seed + SEED))
    labels = ids[:, 1:].clone()
    for row in range(rows):
        labels[row, length - 3 * (row % 4) :] = -100
    return ids[:, :-1].contiguous(), labels


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over all labels that count."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def rotated(x: Tensor, at: Tensor) -> Tensor:
    """RoPE of [rows, length, heads, dim]."""
    half = x.size(-1) // 2
    angles = at[:, None].double() * 30.0 ** -(torch.arange(half) / half).double()
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Of [rows, length, heads, dim]; without a mask, causal."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=allowed is None).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, attend: Callable[..., Tensor], kv_heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, kv_heads * HEAD, bias=False) for _ in range(2))
        self.attend = attend

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)) for part in (self.q, self.k, self.v))
        return self.o(self.attend(rotated(q, at), rotated(k, at), v).flatten(2))


class Block(nn.Module):
    def __init__(self, attend: Callable[..., Tensor], kv_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(attend, kv_heads)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), at)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A decoder whose attention may be given as a function of queries, keys and values."""

    def __init__(
        self, attend: Callable[..., Tensor] = attention, kv_heads: int = HEADS, layers: int = 2, tied: bool = False,
        learned_positions: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH) if learned_positions else None
        self.blocks = nn.ModuleList(Block(attend, kv_heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, at: Tensor | None = None) -> Tensor:
        x, at = self.embed(ids), torch.arange(ids.size(1)) if at is None else at
        if self.places is not None:
            x = x + self.places(at)
        for block in self.blocks:
            x = block(x, at)
        return self.head(self.norm(x))
