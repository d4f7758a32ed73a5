# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels for attention to chosen keys, in Triton's interpreter, against float64; and compiled for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import megatron.context_parallel as cp
from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import missing_triton
from megatron.context_parallel.sparse_attention import chosen_math, chosen_triton
from megatron.context_parallel.sparse_attention.choice import choose_among
from megatron.context_parallel.sparse_attention.chosen_math import Choice, Form
from tests.distributed.pool import fork_server
from tests.patience import patience

pytestmark = pytest.mark.skipif(missing_triton() is not None, reason=missing_triton() or "")
BATCH, KEYS, TOP = 2, 40, 13


class Case(NamedTuple):
    """Shapes of attention; ``shared``: the value is the last part of the key."""

    heads: int
    groups: int
    head: int
    value: int
    shared: bool


CASES = {
    "latent, 16 heads": Case(16, 1, 20, 12, True),
    "latent, 40 heads": Case(40, 1, 24, 16, True),
    "latent, 128 heads": Case(128, 1, 24, 16, True),
    "key heads": Case(6, 2, 16, 8, False),
    "one key head": Case(4, 1, 8, 16, False),
}


def draw(case: Case, dtype: torch.dtype, rows: int = 5) -> tuple[Tensor, Tensor, Choice, Tensor]:
    """Queries, keys, a choice with queries that have no keys or few, and a gradient that is not contiguous."""
    torch.manual_seed(1)
    width = case.head if case.shared else case.head + case.value
    q = torch.randn(rows, BATCH, case.heads, case.head).to(dtype)
    kv = torch.randn(KEYS, BATCH, case.groups, width).to(dtype)
    chosen = torch.full((rows, BATCH, TOP), -1, dtype=torch.int32)
    for row in range(rows):
        for sample in range(BATCH):
            count = (0, TOP, 3, TOP - 1, 1)[(row + sample) % 5]
            chosen[row, sample, :count] = torch.randperm(KEYS)[:count].sort().values.int()
    dout = torch.randn(case.value, rows, BATCH, case.heads).to(dtype).permute(1, 2, 3, 0)
    return q, kv, Choice.of(chosen), dout


def results(module, q: Tensor, kv: Tensor, choice: Choice, dout: Tensor, form: Form, parts: list[int]) -> dict:
    """Out, lse, mean weights and gradients, with the keys in parts that begin at these rows."""
    sums = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], form.value_size, dtype=q.dtype if len(parts) == 1 else sums)
    lse = q.new_empty(q.shape[:3], dtype=sums)
    pieces = []
    for first, stop in zip(parts, [*parts[1:], KEYS]):
        inside = (choice.at >= 0) & (choice.at < KEYS)
        begin, end = ((inside & (choice.at < edge)).sum(-1, dtype=torch.int32) for edge in (first, stop))
        pieces.append((kv[first:stop], Choice(choice.at - first, begin, end, len(parts) > 1), slice(first, stop)))
    for index, (part, own, _) in enumerate(pieces):
        module.forward(q, part, own, form, out, lse, first=not index)
    delta = (out.to(sums) * dout.to(sums)).sum(-1)
    dq, dkv = out.new_empty(q.shape), torch.zeros_like(kv, dtype=sums)
    weights = 0
    for index, (part, own, rows) in enumerate(pieces):
        module.grads(q, part, own, form, dout, lse, delta, dq, dkv[rows], first=not index)
        weights = weights + module.mean_weights(q, part, own, form, lse)
    return {"out": out, "lse": lse, "weights": weights, "dq": dq, "dkv": dkv}


def exact(q: Tensor, kv: Tensor, choice: Choice, dout: Tensor, form: Form) -> dict:
    """The same by dense attention in float64 under autograd."""
    q, kv = (x.double().requires_grad_() for x in (q, kv))
    each = q.size(2) // kv.size(2)
    full = kv.repeat_interleave(each, 2)
    seen = torch.zeros(len(q), BATCH, KEYS + 1, dtype=torch.bool).scatter(-1, choice.at.long() % (KEYS + 1), True)
    scores = torch.einsum("sbhd,tbhd->sbht", q, full[..., : q.size(3)]) * form.scale
    scores = scores.masked_fill(~seen[:, :, None, :KEYS], float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0)
    out = torch.einsum("sbht,tbhd->sbhd", weights, full[..., -form.value_size :])
    dq, dkv = torch.autograd.grad(out, (q, kv), dout.double())
    at = weights.sum(2).gather(-1, choice.at.long().clamp(min=0)).masked_fill(choice.at < 0, 0)
    found = {"out": out, "lse": scores.logsumexp(-1), "weights": at, "dq": dq, "dkv": dkv}
    return {name: x.detach() for name, x in found.items()}


def worst(found: dict, expected: dict) -> dict[str, float]:
    errors = {}
    for name, right in expected.items():
        mine = found[name].double()
        assert mine.isneginf().equal(right.isneginf()), name
        apart = (mine - right).masked_fill(right.isneginf(), 0).abs().max()
        errors[name] = float(apart / right.masked_fill(right.isneginf(), 0).abs().max())
    return errors


USUAL = [("latent, 16 heads", torch.bfloat16, 2), ("key heads", torch.float32, 1)]
OTHERS = [
    (name, dtype, parts)
    for name in CASES
    for dtype in (torch.float32, torch.bfloat16)
    for parts in (1, 2)
    if (name, dtype, parts) not in USUAL
]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable]:
    """Calls functions in a separate process, because Triton chooses its interpreter at its first import."""
    with ProcessPoolExecutor(1, fork_server()) as one:  # its processes have imported Triton with the interpreter
        yield lambda function, *arguments: one.submit(function, *arguments).result(patience(100))


def errors_of(name: str, dtype: torch.dtype, parts: int) -> tuple[dict[str, float], dict[str, float]]:
    """Of plain PyTorch in float64 and of the kernels."""
    case = CASES[name]
    form, drawn, starts = Form(case.head**-0.5, case.value), draw(case, dtype), [0, 17][:parts]
    expected = exact(*drawn, form)
    math = results(chosen_math, *(x.double() for x in drawn[:2]), *drawn[2:], form, starts)
    return worst(math, expected), worst(results(chosen_triton, *drawn, form, starts), expected)


@pytest.mark.parametrize(
    "name, dtype, parts", [*USUAL, *(pytest.param(*one, marks=pytest.mark.full) for one in OTHERS)]
)
def test_equals_float64(interpreted, name, dtype, parts):
    math, kernels = interpreted(errors_of, name, dtype, parts)
    assert max(math.values()) < 1e-12, math
    assert max(kernels.values()) < (2e-6 if dtype == torch.float32 else 1e-2), kernels


def twice() -> tuple[dict, dict]:
    case = CASES["latent, 16 heads"]
    q, kv, _, dout = draw(case, torch.float32)
    choice = Choice.of(torch.arange(TOP, dtype=torch.int32).expand(len(q), BATCH, TOP).contiguous())
    return tuple(results(chosen_triton, q, kv, choice, dout, Form(1.0, case.value), [0]) for _ in range(2))


def test_gradients_are_the_same_again(interpreted):
    """Many queries add to the same keys, in a fixed order; other keys get no gradient."""
    first, second = interpreted(twice)
    assert all(first[name].equal(second[name]) for name in first)
    assert not first["dkv"][TOP:].any() and first["dkv"][:TOP].ne(0).any()


def chosen_by_name(value: int, kernel: str) -> Tensor:
    layout = cp.SequenceLayout(4, cp.abstract_grid())
    torch.manual_seed(1)
    q, kv, chosen = torch.randn(4, 1, 2, 8), torch.randn(4, 1, 1, 12), torch.zeros(4, 1, 1, dtype=torch.int32)
    return cp.sparse_attention(q, kv, chosen, layout=layout, value_size=value, scale=1.0, kernel=kernel)[0]


def test_choice_of_a_kernel(interpreted):
    assert (interpreted(chosen_by_name, 4, "triton") - chosen_by_name(4, "math")).abs().max() < 1e-6
    with pytest.raises(ValueError, match="needs values that are the last part of the key, or follow it; use math"):
        chosen_by_name(6, "triton")
    with pytest.raises(ValueError, match="needs a GPU; use math"):
        chosen_by_name(4, "triton")
    with pytest.raises(ValueError, match="no such kernel for chosen keys, only auto, triton, math"):
        chosen_by_name(4, "flash")


def chosen_twice(top: int, whole: bool) -> tuple[int, int]:
    """Entries that the index kernel and plain PyTorch choose differently, in all queries and if a rank has a part."""
    torch.manual_seed(3)
    length, masks = 90, [cp.Documents((1, 30, 90)), cp.Causal()]
    q, k, weights = torch.randn(length, 2, 3, 24), torch.randn(length, 2, 24), torch.randn(length, 2, 3)
    if whole:  # exact scores, many of them equal
        q, k, weights = (x.round().clamp(-1, 1).bfloat16() for x in (q, k, weights))
    every = choose_among(q, k, weights, spans=((0, length),), top_k=top, masks=masks, kernel="triton")
    part = {"spans": ((40, 71),), "top_k": top, "masks": masks}
    some = choose_among(q[40:71], k, weights[40:71], **part, kernel="triton")
    right = choose_among(q, k, weights, spans=((0, length),), top_k=top, masks=masks, kernel="math")
    return int((every != right).sum()), int((some != every[40:71]).sum())


@pytest.mark.parametrize("top, whole", [(5, True), pytest.param(100, False, marks=pytest.mark.full)])
def test_the_index_kernel_chooses_the_same_keys(interpreted, top, whole):
    """With ties, with queries that may choose fewer keys than they want, and without keys of other documents."""
    assert interpreted(chosen_twice, top, whole) == (0, 0)


def test_kernels_of_the_choice():
    q = torch.randn(4, 1, 1, 4)
    given = {"layout": cp.SequenceLayout(4, cp.abstract_grid()), "top_k": 1}
    with pytest.raises(ValueError, match="kernel=triton for an indexer's scores: needs a GPU; use math"):
        cp.choose_keys(q, q[:, :, 0], q[..., 0], **given, kernel="triton")
    with pytest.raises(ValueError, match="no kernel flash for an indexer's scores: use auto, triton or math"):
        cp.choose_keys(q, q[:, :, 0], q[..., 0], **given, kernel="flash")


def _resources(capability: int, heads: int, key_heads: int, shared: bool) -> dict:
    from benchmarks.triton_compile import chosen_example, resources

    launches = chosen_example(heads, key_heads, shared)
    return {name: resources(launch, capability) for name, launch in launches.items()}


SHAPES = [(128, 1, True), (16, 1, True), (64, 4, False)]


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("heads, key_heads, shared", SHAPES)
def test_compiled(compiler, capability, heads, key_heads, shared):
    for name, taken in compiler(_resources, capability, heads, key_heads, shared).items():
        assert taken.programs >= 1, (name, "more shared memory or registers than a multiprocessor has")
        assert taken.products or name == "add", name
        assert not any(loop.spills for loop in taken.loops) and taken.spills <= 64, (name, taken)
