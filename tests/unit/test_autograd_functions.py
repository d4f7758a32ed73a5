# SPDX-License-Identifier: Apache-2.0
"""Every autograd.Function of this project, in every way in which a program may reach its backward pass."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import megatron.context_parallel as cp
from megatron.context_parallel.attention.ulysses import ulysses_attention
from megatron.context_parallel.fpdt.chunked_ffn import apply_in_chunks, even_spans
from megatron.context_parallel.fpdt.chunked_loss import chunked_linear_cross_entropy
from megatron.context_parallel.positions.position_dropout import Dropout, drop
from megatron.context_parallel.positions.rope import Rope
from tests.pairs import also_in_full

ROOT = Path(__file__).parents[2]
LENGTH, HEADS, WIDTH = 8, 2, 4
HEAD = (LENGTH, 1, HEADS, WIDTH)
ROWS = (LENGTH, 1, WIDTH)
Differentiable = Callable[..., Tensor]
IN_A_DRY_RUN = {"_Linear", "_RmsNorm"}  # of fake tensors, whose gradients have no values (tests/unit/test_dry_run*)


def attention(grid: cp.Grid) -> Differentiable:
    layout = cp.SequenceLayout(2 * LENGTH, grid)
    return lambda q, k, v, sinks: cp.attention(q, k, v, layout=layout, kernel="math", sinks=sinks)


def linear_attention(grid: cp.Grid) -> Differentiable:
    layout = cp.SequenceLayout(2 * LENGTH, grid)
    return lambda q, k, v, g, beta: cp.linear_attention(
        q, k, v, -g.exp(), beta.sigmoid(), rule="gated_delta", layout=layout, documents=[[5, 2 * LENGTH]],
    )  # fmt: skip


def short_convolution(grid: cp.Grid) -> Differentiable:
    return partial(cp.short_convolution, layout=cp.SequenceLayout(2 * LENGTH, grid), activation="silu")


def chunked_layer(grid: cp.Grid, recompute: bool) -> Differentiable:
    layout = cp.SequenceLayout(2 * LENGTH, grid, chunks=2)

    def forward(x: Tensor, qkv: Tensor) -> Tensor:
        def project(x: Tensor, chunk: int) -> tuple[Tensor, ...]:
            return tuple(part.unflatten(-1, (HEADS, -1)) for part in (x @ qkv).chunk(3, -1))

        layer = cp.ChunkedLayer(project, lambda attended, x, chunk: x + attended.flatten(2), [qkv], layout,
                                cp.AttentionRule(kernel="math"), recompute=recompute)  # fmt: skip
        return layer(x)

    return forward


def chunks(grid: cp.Grid) -> Differentiable:
    return lambda x, w: apply_in_chunks(lambda part, _: (part @ w).sin(), x, [w], even_spans(LENGTH, 3))


def chunked_loss(grid: cp.Grid) -> Differentiable:
    labels, weights = torch.arange(LENGTH)[:, None] % WIDTH, torch.ones(LENGTH, 1)
    return lambda x, w: chunked_linear_cross_entropy(x, w, labels, weights, chunks=3, vocab_size=WIDTH)


def log_probs(grid: cp.Grid) -> Differentiable:
    tokens = torch.arange(LENGTH)[:, None] % WIDTH
    return lambda x, w: torch.stack(cp.log_probs(x, w, tokens, chunks=3, entropy=True)[:2])


def of_hugging_face(grid: cp.Grid) -> Differentiable:
    from megatron.context_parallel.huggingface.decoder_loss import sum_for_averaged_gradients

    return lambda x: sum_for_averaged_gradients(grid.context, x)


def of_experts(name: str, grid: cp.Grid) -> Differentiable:
    from megatron.context_parallel.core import experts

    group, function = grid.context.group, getattr(experts, name)
    if name == "_Share":
        return lambda bias: function.apply(bias, group)
    sizes = [3, 5]
    mine = sizes[grid.context.rank]
    return lambda x: function.apply(x[:mine] if name == "GatherRows" else x, group, sizes)


def sum_over_ranks(grid: cp.Grid) -> Differentiable:
    from megatron.context_parallel.core.spec import _SumOverRanks

    return lambda x: _SumOverRanks.apply(x, grid.context)


def sparse_attention(grid: cp.Grid) -> Differentiable:
    layout = cp.SequenceLayout(2 * LENGTH, grid)
    chosen = (layout.positions[:, None, None] - torch.arange(3)).int()
    chosen = chosen.expand(-1, HEAD[1], -1)

    def function(q: Tensor, kv: Tensor, *indexer: Tensor) -> Tensor:
        given = {"layout": layout, "value_size": 1, "scale": 1.0, "indexer": cp.Indexer(*indexer)}
        out, loss = cp.sparse_attention(q, kv, chosen, **given)
        return out.sum((2, 3)) + loss

    return function


def dense_loss(grid: cp.Grid) -> Differentiable:
    from megatron.context_parallel.sparse_attention.dense_loss import dense_indexer_loss

    layout = cp.SequenceLayout(2 * LENGTH, grid)
    q, k = torch.ones(HEAD), torch.linspace(-1, 1, LENGTH * WIDTH).view(ROWS)
    return lambda *indexer: dense_indexer_loss(
        q, k, cp.Indexer(*indexer), torch.ones(ROWS[:2]), layout=layout, scale=1.0
    )


def with_loss(_: cp.Grid) -> Differentiable:
    from megatron.context_parallel.core.mixers.sparse_attention import _WithLoss

    return lambda x, loss: _WithLoss.apply(x, loss.sum(), None)


def rotated(grid: cp.Grid) -> Differentiable:
    rope = Rope(WIDTH)
    angles = (torch.arange(LENGTH)[:, None] * rope.inverse_frequencies()).float()[:, None, None]
    return lambda x: rope.rotate(x, angles)


ULYSSES, RING = {"ulysses": 2}, {"ring": 2}
# By name: a grid, a function of it that makes a function that uses the autograd.Function, and the shapes of its inputs.
TABLE: dict[str, tuple[dict[str, int], Callable[[cp.Grid], Differentiable], list[tuple[int, ...]]]] = {
    "_TiledAttention": (RING, attention, [HEAD, HEAD, HEAD, (HEADS,)]),
    "_SequenceToHeads": (
        ULYSSES,
        lambda grid: partial(ulysses_attention, axis=grid.ulysses, attention=lambda q, k, v: q * k + v),
        [HEAD] * 3,
    ),
    "_HeadsToSequence": (ULYSSES, attention, [HEAD, HEAD, HEAD, (HEADS,)]),
    "_LinearAttention": (RING, linear_attention, [HEAD, HEAD, HEAD, HEAD[:3], HEAD[:3]]),
    "_ShortConvolution": (RING, short_convolution, [ROWS, (WIDTH, 3), (WIDTH,)]),
    "_Gather": (RING, lambda grid: cp.SequenceLayout(2 * LENGTH, grid).gather, [ROWS]),
    "_SparseAttention": (RING, sparse_attention, [HEAD, HEAD, HEAD, (*HEAD[:2], HEAD[3]), HEAD[:3]]),
    "_DenseLoss": (RING, dense_loss, [HEAD, (*HEAD[:2], HEAD[3]), HEAD[:3]]),
    "_WithLoss": (RING, with_loss, [ROWS, ROWS]),
    "_Sum": (RING, of_hugging_face, [ROWS]),
    "_Drop": (RING, lambda _: lambda x: drop(x, Dropout(0.5, seed=1), torch.arange(LENGTH)), [ROWS]),
    "_Rotate": (RING, rotated, [HEAD]),
    "GatherRows": (RING, partial(of_experts, "GatherRows"), [ROWS]),
    "SumRows": (RING, partial(of_experts, "SumRows"), [ROWS]),
    "_Share": (RING, partial(of_experts, "_Share"), [ROWS]),
    "_SumOverRanks": (RING, sum_over_ranks, [ROWS]),
    "_InChunks": (RING, chunks, [ROWS, (WIDTH, WIDTH)]),
    "_Chunked": (RING, partial(chunked_layer, recompute=False), [ROWS, (WIDTH, 3 * WIDTH)]),
    "_Chunked, recompute": (ULYSSES, partial(chunked_layer, recompute=True), [ROWS, (WIDTH, 3 * WIDTH)]),
    "_ChunkedLoss": (RING, chunked_loss, [ROWS, (WIDTH, WIDTH)]),
    "_LogProbs": (RING, log_probs, [ROWS, (WIDTH, WIDTH)]),
}
LINEAR = {"_Share", "_SumOverRanks"}  # second derivatives are right: their backward passes are differentiable


def functions_of_the_project() -> set[str]:
    texts = (path.read_text() for path in (ROOT / "megatron").rglob("*.py"))
    trees = (ast.parse(text) for text in texts if "Function)" in text)
    classes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {one.name for one in classes if any(ast.unparse(base).endswith("Function") for base in one.bases)}


def test_the_table_has_every_function():
    assert functions_of_the_project() - IN_A_DRY_RUN == {name.partition(",")[0] for name in TABLE}


def nodes(y: Tensor) -> set[str]:
    """The names of all backward nodes of ``y``."""
    seen, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return {node.name() for node in seen}


def ways(function: Differentiable) -> dict[str, Differentiable]:
    """Functions that compute the same and save other tensors for the backward pass, or the same elsewhere."""

    def hooked(*hooks: object) -> Differentiable:
        def call(*inputs: Tensor) -> Tensor:
            with saved_tensors_hooks(*hooks) if hooks else save_on_cpu():
                return function(*inputs)

        return call

    again, reentrant = (partial(checkpoint, function, use_reentrant=how) for how in (False, True))
    return {
        "checkpoint": again,
        "reentrant checkpoint": reentrant,
        "checkpoint in a checkpoint": partial(checkpoint, again, use_reentrant=False),
        "reentrant in a checkpoint": partial(checkpoint, reentrant, use_reentrant=False),
        "saved on the host": hooked(),
        "saved as copies": hooked(torch.clone, torch.clone),
    }


def compiled(function: Differentiable) -> dict[str, Differentiable]:
    return {"compiled": torch.compile(function, backend="eager")}


def differentiated(name: str, ways: Callable[[Differentiable], dict[str, Differentiable]]) -> list[str]:
    """What is wrong with this function on this rank."""
    degrees, make, shapes = TABLE[name]
    grid = cp.initialize_grid(**degrees)
    draw = torch.Generator().manual_seed(grid.context.rank)
    inputs = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    used = make(grid)

    def function(*inputs: Tensor) -> Tensor:
        return used(*(x.sin() for x in inputs)).cos()

    y = function(*inputs)
    dy = torch.randn(y.shape, generator=draw)
    wrong = [] if f"{name.partition(',')[0]}Backward" in nodes(y) else ["the function is not used"]
    expected = grads_of(y, inputs, dy)
    # PyTorch compiles addcmul_ as a product and a sum, each of which it rounds.
    allowed = {"rtol": 1e-6, "atol": 1e-6} if ways is compiled else {"rtol": 0, "atol": 0}
    for how, other in ways(function).items():
        try:
            torch.testing.assert_close(grads_of(other(*inputs), inputs, dy), expected, **allowed)
        except Exception as error:
            wrong.append(f"{how}: {type(error).__name__} {str(error)[:300]}")
    torch._dynamo.reset()  # compiled code holds groups
    return wrong


def grads_of(y: Tensor, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    for x in inputs:
        x.grad = None
    y.backward(dy)
    return [x.grad for x in inputs]


@pytest.mark.parametrize("name", TABLE)
def test_gradients_do_not_depend_on_what_saves_tensors(pool, name):
    for wrong in pool.run(differentiated, 2, name, ways):
        assert not wrong


QUICK = ("_Gather", "_Rotate")


@pytest.mark.parametrize("name", [*QUICK, *also_in_full(*sorted(TABLE.keys() - QUICK))])
@pytest.mark.usual(1)
def test_gradients_of_a_compiled_function(pool, name):
    for wrong in pool.run(differentiated, 2, name, compiled):
        assert not wrong


def second_derivative(name: str) -> str:
    """The refusal of a second derivative; "" if there is one."""
    degrees, make, shapes = TABLE[name]
    function = make(cp.initialize_grid(**degrees))
    inputs = [torch.rand(shape).requires_grad_() for shape in shapes]
    grads = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
    try:
        sum(grad.square().sum() for grad in grads).backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", TABLE)
def test_a_second_derivative_is_refused(pool, name):
    for message in pool.run(second_derivative, 2, name):
        assert message == "" if name in LINEAR else "has no second derivative: call backward or" in message
