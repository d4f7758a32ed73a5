# SPDX-License-Identifier: Apache-2.0
"""Linear attention and short convolutions over layouts against one process, token by token, in float64 to 1e-10."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import megatron.context_parallel as cp
from megatron.context_parallel.linear_attention.mixer import linear_attention
from megatron.context_parallel.linear_attention.rules import RULES, LinearRule, recurrence
from megatron.context_parallel.linear_attention.short_convolution import short_convolution
from tests.errors import worst
from tests.pairs import by_pairs

CONTROL = 1e-2  # without the state, or without the rows before a span, the error is at least this


def tokens(rule: LinearRule, length: int, batch: int, heads: int, key_heads: int, keys: int = 6) -> list[Tensor]:
    """q, k, v, g and beta of a whole sequence."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(length, batch, *shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(key_heads, keys), dim=-1) for _ in range(2))
    g = -torch.nn.functional.softplus(normal(heads, *([keys] if rule.channels else [])) - 2)
    return [q, k, normal(heads, 5), g, normal(heads).sigmoid()]


def each_document(function, tensors: list[Tensor], ends) -> Tensor:
    """``function`` of the tokens of each document of each sample by itself."""
    batch, length = tensors[0].size(1), len(tensors[0])
    ends = ends or ((length,),)
    samples = []
    for sample in range(batch):
        own = ends[sample % len(ends)]
        parts = [function(*(x[a:b, sample : sample + 1] for x in tensors)) for a, b in zip((0, *own), own)]
        samples.append(torch.cat(parts))
    return torch.cat(samples, dim=1)


def random_like(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(6), dtype=x.dtype)


def errors_of(layout: cp.SequenceLayout, mine: list[Tensor], whole: list[Tensor]) -> list[float]:
    return [float((a - layout.shard(b)).abs().max() / b.abs().max()) for a, b in zip(mine, whole)]


def begins_with_spans(layout: cp.SequenceLayout) -> tuple[tuple[int, ...]]:
    """A document for each span of each rank: nothing passes from one span to another."""
    grid = layout.grid
    spans = (layout.spans(ulysses=u, ring=r) for r in range(grid.ring.size) for u in range(grid.ulysses.size))
    return (tuple(sorted(stop for of_rank in spans for _, stop in of_rank)),)


def compare_mixer(ulysses, ring, balance, documents, exchange, rule, length, batch, heads, key_heads, state=True):
    """Largest errors of out and of the gradients of all inputs on this rank."""
    rule = RULES[rule]
    layout = cp.SequenceLayout(
        length, cp.initialize_grid(ulysses=ulysses, ring=ring), balance,
        document_ends=documents[0] if balance == "documents" and documents else (),
    )  # fmt: skip
    whole = [x.requires_grad_() for x in tokens(rule, length, batch, heads, key_heads)]
    expected = each_document(lambda *x: recurrence(rule, *x)[0], whole, documents)
    dout = random_like(expected)
    grads = torch.autograd.grad(expected, whole, dout)
    local = [layout.shard(x).detach().requires_grad_() for x in whole]
    if not state:  # every span begins anew
        documents = begins_with_spans(layout)
    out = linear_attention(*local, rule=rule, layout=layout, documents=documents, exchange=exchange)
    mine = torch.autograd.grad(out, local, layout.shard(dout))
    return errors_of(layout, [out, *mine], [expected, *grads])


GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (4, 1), (1, 4), (3, 2)]
DOCUMENTS = {"one": (), "packed": ((5, 6, 51, 168),), "by sample": ((5, 51, 168), (1, 51, 101, 168))}
CASES = [
    (*grid, balance, list(DOCUMENTS)[(i + j) % 3], ["gather", "relay", "heads", "auto"][(i + 2 * j + n) % 4], rule)
    for i, grid in enumerate(GRIDS)
    for j, balance in enumerate(["zigzag", "contiguous", "documents"])
    for n, rule in enumerate(RULES)
]


@pytest.mark.parametrize(
    "ulysses, ring, balance, documents, exchange, rule",
    by_pairs(CASES, lambda u, r, *others: {(u, r), *others, (others[0], others[2])}),
)
def test_every_rule_on_every_grid(pool, ulysses, ring, balance, documents, exchange, rule):
    batch = 2 if documents == "by sample" else 1
    case = (ulysses, ring, balance, DOCUMENTS[documents], exchange, rule, 168, batch, 12, 6)
    errors = pool.run(compare_mixer, ulysses * ring, *case)
    assert worst(errors) < 1e-10, errors
    if ulysses * ring > 1 and balance != "documents":
        assert worst(pool.run(compare_mixer, ulysses * ring, *case, False)) > CONTROL


def compare_convolution(ulysses, ring, balance, documents, width, length, batch, activation, halo=True):
    """Largest errors of out, dx, dweight and dbias on this rank; those of dweight and dbias after a sum over ranks."""
    layout = cp.SequenceLayout(
        length, cp.initialize_grid(ulysses=ulysses, ring=ring), balance,
        document_ends=documents[0] if balance == "documents" and documents else (),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((length, batch, 3), (3, width), (3,))
    )
    act = torch.nn.functional.silu if activation else torch.nn.Identity()

    def dense(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x.permute(1, 2, 0), (width - 1, 0))
        return act(torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=3)).permute(2, 0, 1)

    expected = each_document(dense, [x], documents)
    dout = random_like(expected)
    grads = torch.autograd.grad(expected, (x, weight, bias), dout)
    local, own = layout.shard(x).detach().requires_grad_(), [p.detach().requires_grad_() for p in (weight, bias)]
    if not halo:
        documents = begins_with_spans(layout)
    out = short_convolution(local, *own, layout=layout, activation=activation, documents=documents)
    dx, *dparameters = torch.autograd.grad(out, (local, *own), layout.shard(dout))
    errors = errors_of(layout, [out, dx], [expected, grads[0]])
    for mine, whole in zip(dparameters, grads[1:]):
        if ulysses * ring > 1:
            torch.distributed.all_reduce(mine, group=layout.grid.context.group)
        errors.append(float((mine - whole).abs().max() / whole.abs().max()))
    return errors


CONVOLUTIONS = [
    (*grid, balance, list(DOCUMENTS)[(i + j) % 3], width, length, [None, "silu"][(i + j) % 2])
    for i, grid in enumerate(GRIDS)
    for j, balance in enumerate(["zigzag", "contiguous", "documents"])
    for width, length in ((4, 168), (5, 24))  # spans of one to three tokens in a sequence of 24
]


@pytest.mark.parametrize(
    "ulysses, ring, balance, documents, width, length, activation",
    by_pairs(CONVOLUTIONS, lambda u, r, *others: {(u, r), *others}),
)
def test_a_convolution_on_every_grid(pool, ulysses, ring, balance, documents, width, length, activation):
    ends = tuple(tuple(end for end in one if end < length) + (length,) for one in DOCUMENTS[documents])
    case = (ulysses, ring, balance, ends, width, length, 2 if len(ends) == 2 else 1, activation)
    errors = pool.run(compare_convolution, ulysses * ring, *case)
    assert worst(errors) < 1e-10, errors
    if ulysses * ring > 1 and balance != "documents":
        assert worst(pool.run(compare_convolution, ulysses * ring, *case, False)) > CONTROL
