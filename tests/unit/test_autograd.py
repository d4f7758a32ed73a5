# SPDX-License-Identifier: Apache-2.0
"""Differentiation: layers that lack some parts, checkpoints, torch.func, second derivatives, autocast."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import megatron.context_parallel as cp
from megatron.context_parallel.fpdt.chunked_ffn import apply_in_chunks, even_spans
from megatron.context_parallel.fpdt.chunked_loss import chunked_linear_cross_entropy

LENGTH, WIDTH, HEADS = 24, 8, 2
ALONE = cp.abstract_grid()


def drawn(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=draw, dtype=torch.float64) / 2).requires_grad_()


def chunked(project, output, parameters, ffn=None, offload=None, chunks=4, **more):
    layout = cp.SequenceLayout(LENGTH, ALONE, chunks=chunks)
    return cp.ChunkedLayer(project, output, parameters, layout, cp.AttentionRule(kernel="math"), ffn, offload=offload,
                           **more)  # fmt: skip


def heads(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.unflatten(-1, (HEADS, -1)) for part in x.chunk(3, -1))


KEYS = torch.linspace(-1, 1, 6 * WIDTH, dtype=torch.float64).view(6, 1, HEADS, WIDTH // HEADS)


def layers(name: str, qkv: Tensor, out: Tensor):
    """(project, output, ffn) of a layer that lacks something; ``name`` says what."""

    def project(x, chunk):
        q, k, v = heads(x @ qkv)
        return (q, KEYS, v) if name == "keys without a gradient" else (q, k, v)

    def output(attended, x, chunk):
        if name == "no attention":
            return x @ out
        return out.sum(0) + torch.zeros_like(x) if name == "neither" else attended.flatten(2) @ out

    def ffn(x):
        return out.sum() * torch.ones_like(x)

    return project, output, ffn if name == "a constant ffn" else None


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "name", ["no residual", "no attention", "neither", "keys without a gradient", "a constant ffn"]
)
def test_a_layer_in_chunks_may_leave_things_out(name, recompute):
    x, qkv, out = drawn(LENGTH, 1, WIDTH), drawn(WIDTH, 3 * WIDTH), drawn(WIDTH, WIDTH)
    project, output, ffn = layers(name, qkv, out)
    mine = chunked(project, output, [qkv, out], ffn, recompute=recompute)(x)
    q, k, v = project(x, 0)
    k = k.repeat(LENGTH // k.size(0), 1, 1, 1)
    plain = output(cp.attention(q, k, v, layout=cp.SequenceLayout(LENGTH, ALONE), kernel="math"), x, 0)
    plain = ffn(plain) if ffn else plain
    torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-10)  # float64: sums in another order
    dy = drawn(LENGTH, 1, WIDTH).detach()
    some = [torch.autograd.grad(y, [x, qkv, out], dy, allow_unused=True) for y in (mine, plain)]
    for a, b in zip(*some):
        zeros = torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(zeros if a is None else a, zeros.expand_as(a) if b is None else b)


def test_a_function_of_positions_alone_may_be_applied_in_chunks():
    x, table = drawn(LENGTH, 1, WIDTH), drawn(LENGTH, 1, WIDTH)
    y = apply_in_chunks(lambda _, span: table[slice(*span)] * 2, x, [table], even_spans(LENGTH, 3))
    y.sum().backward()
    assert table.grad.eq(2).all() and x.grad.eq(0).all()


def usual_layer(offload: cp.Offload | None = None, **more):
    qkv, out = drawn(WIDTH, 3 * WIDTH), drawn(WIDTH, WIDTH)
    layer = chunked(lambda x, _: heads(x @ qkv), lambda a, x, _: x + a.flatten(2) @ out, [qkv, out], offload=offload,
                    **more)  # fmt: skip
    return layer, [qkv, out]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_frees_the_chunks_of_a_layer(reentrant):
    offload = cp.Offload(torch.device("cpu"))
    layer, parameters = usual_layer(offload)
    x = drawn(LENGTH, 1, WIDTH)
    y = x
    for _ in range(3):
        y = checkpoint(layer, y, use_reentrant=reentrant)
    gc.collect()
    assert offload.pool.in_use == 0
    y.sum().backward()
    expected = torch.autograd.grad(layer(layer(layer(x))).sum(), [x, *parameters])
    assert all(a.grad.equal(b) for a, b in zip([x, *parameters], expected))
    gc.collect()
    assert offload.pool.in_use == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_hooks_that_save_copies_change_nothing(recompute):
    layer, parameters = usual_layer(recompute=recompute)
    x = drawn(LENGTH, 1, WIDTH)
    expected = torch.autograd.grad(layer(x).sum(), [x, *parameters])
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        y = layer(x).sum()
    for mine, right in zip(torch.autograd.grad(y, [x, *parameters]), expected):
        assert mine.equal(right)


def attend_by_operator(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)
    with cp.context_parallel(cp.SequenceLayout(LENGTH, ALONE)):
        return functional.scaled_dot_product_attention(q, q, q, is_causal=True)


LAYER, VOCABULARY = usual_layer()[0], drawn(6, WIDTH).detach()  # torch.func permits no requires_grad_ inside


def loss_in_chunks(x: Tensor) -> Tensor:
    labels = torch.zeros(LENGTH, 1, dtype=torch.int64)
    return chunked_linear_cross_entropy(x, VOCABULARY, labels, torch.ones(LENGTH, 1), chunks=3, vocab_size=6)


def attend(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (HEADS, -1))
    return cp.attention(q, q, q, layout=cp.SequenceLayout(LENGTH, ALONE))


FUNCTIONS = {
    "attention": attend,
    "context_parallel": attend_by_operator,
    "ChunkedLayer": LAYER,
    "apply_in_chunks": lambda x: apply_in_chunks(lambda part, _: part.sin(), x, [], even_spans(LENGTH, 3)),
    "the chunked loss": loss_in_chunks,
    "gather": lambda x: cp.SequenceLayout(LENGTH, ALONE).gather(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("how", ["grad", "vjp", "vmap", "jvp"])
def test_transforms_of_torch_func_are_refused_by_name(name, how):
    x = drawn(LENGTH, 1, WIDTH).detach()

    def function(x: Tensor) -> Tensor:
        return FUNCTIONS[name](x).sum()

    calls = {
        "grad": lambda: torch.func.grad(function)(x),
        "vjp": lambda: torch.func.vjp(function, x),
        "vmap": lambda: torch.func.vmap(function)(x[None]),
        "jvp": lambda: torch.func.jvp(function, (x,), (x,)),
    }
    with pytest.raises(ValueError, match=r"does not support torch\.func: use torch\.autograd\.grad"):
        calls[how]()


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "gather"])
def test_a_second_derivative_is_refused_and_not_wrong(name):
    """The refusal does not depend on whether the incoming gradient is constant, as here."""
    x = drawn(LENGTH, 1, WIDTH)
    (grad,) = torch.autograd.grad(FUNCTIONS[name](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative: call backward or torch.autograd.grad without"):
        (grad * x).sum().backward()


def test_a_checkpoint_that_recomputes_permits_two_backward_passes():
    layer, parameters = usual_layer()
    x = drawn(LENGTH, 1, WIDTH)
    y = checkpoint(layer, x, use_reentrant=False).sum()
    once = torch.autograd.grad(y, [x, *parameters], retain_graph=True)
    assert all(a.equal(b) for a, b in zip(once, torch.autograd.grad(y, [x, *parameters])))


def test_contexts_that_have_ended_hold_no_layouts():
    """A program may open a context in each step, with a layout for that step's documents."""

    def attend():
        layout = cp.SequenceLayout(16, cp.abstract_grid())
        with cp.context_parallel(layout):
            q = torch.randn(1, 2, 16, 8, requires_grad=True)
            functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        return weakref.ref(layout)

    layouts = [attend() for _ in range(3)]
    gc.collect()
    assert [layout() for layout in layouts] == [None] * 3


# Under autocast our operations cast like PyTorch's, also when the backward pass recomputes.


TOKENS, HIDDEN, AUTOCAST_HEADS = 32, 32, 4


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def autocast_case(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def error(mine: Tensor, reference: Tensor) -> float:
    mine, reference = mine.detach().double(), reference.detach().double()
    return float((mine - reference).abs().max() / reference.abs().max())


def grads_of(y: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    for parameter in parameters:
        parameter.grad = None
    y.float().square().sum().backward()
    return [parameter.grad.clone() for parameter in parameters]


@pytest.mark.parametrize("kernel", ["math", "cpu"])
def test_attention_casts_as_pytorchs_does(kernel):
    layout = cp.SequenceLayout(TOKENS, cp.abstract_grid())
    qkv = [autocast_case(TOKENS, 2, AUTOCAST_HEADS, 8).detach().roll(index).requires_grad_() for index in range(3)]
    with autocast():
        mine = cp.attention(*qkv, layout=layout, kernel=kernel)
        heads_first = (x.permute(1, 2, 0, 3) for x in qkv)
        theirs = functional.scaled_dot_product_attention(*heads_first, is_causal=True).permute(2, 0, 1, 3)
    cast = cp.attention(*(x.bfloat16() for x in qkv), layout=layout, kernel=kernel)
    assert mine.dtype == theirs.dtype == torch.bfloat16
    assert mine.equal(cast) and error(mine, theirs) < 2**-6  # they differ by rounding to bf16
    for a, b in zip(grads_of(mine, qkv), grads_of(cast, qkv)):
        assert a.dtype == torch.float32 and a.equal(b)


def test_attention_in_float64_is_not_replaced():
    layout = cp.SequenceLayout(TOKENS, cp.abstract_grid())
    qkv = [autocast_case(TOKENS, 1, AUTOCAST_HEADS, 8).detach().double() for _ in range(3)]
    with autocast():
        inside = cp.attention(*qkv, layout=layout, kernel="math")
    assert inside.equal(cp.attention(*qkv, layout=layout, kernel="math"))


def test_queries_keys_and_values_of_different_dtypes_are_refused():
    q = autocast_case(TOKENS, 1, AUTOCAST_HEADS, 8)
    with pytest.raises(ValueError, match="q is torch.bfloat16, k torch.bfloat16 and v torch.float32: cast them"):
        cp.attention(q.bfloat16(), q.bfloat16(), q, layout=cp.SequenceLayout(TOKENS, cp.abstract_grid()))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_chunked_layer_repeats_the_forward_pass_as_it_was(recompute, inside):
    """Against the same layer in one chunk, and plain PyTorch. ``inside``: the backward pass is under autocast, too."""
    qkv, out, first = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    parameters = [*qkv.parameters(), *out.parameters(), *first.parameters()]
    dtypes = set()

    def project(x: Tensor, chunk: int) -> tuple[Tensor, ...]:
        q, k, v = (part.unflatten(2, (AUTOCAST_HEADS, -1)) for part in qkv(x).chunk(3, -1))
        return q.float(), k, v  # as after a rotation by fp32 angles

    def ffn(x: Tensor) -> Tensor:
        y = first(x)
        dtypes.add(y.dtype)
        return x + y

    def result(chunks: int) -> tuple[Tensor, list[Tensor]]:
        layout, x = cp.SequenceLayout(TOKENS, cp.abstract_grid(), chunks=chunks), autocast_case(TOKENS, 1, HIDDEN)
        layer = cp.ChunkedLayer(
            project=project,
            output=lambda o, x, chunk: x + out(o.flatten(2)),
            parameters=parameters,
            layout=layout,
            ffn=ffn,
            recompute=recompute,
        )
        with autocast():
            y = layer(x)
            other = first(x.detach())  # must not reuse the layer's cast weights, which have no gradients
            if inside:
                return y, grads_of(y.float() + other.float(), [x, *parameters])
        return y, grads_of(y.float() + other.float(), [x, *parameters])

    (whole, whole_grads), (parts, grads) = result(1), result(4)
    assert dtypes == {torch.bfloat16} and parts.dtype == torch.float32
    assert error(parts, whole) < 2**-6
    for a, b in zip(grads, whole_grads, strict=True):
        assert error(a, b) < 2**-6
    with autocast():  # the same in plain PyTorch
        x = autocast_case(TOKENS, 1, HIDDEN)
        heads = (part.permute(1, 2, 0, 3) for part in project(x, 0))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3)
        plain = ffn(x + out(attended.flatten(2))).float() + first(x.detach()).float()
    for a, b in zip(grads, grads_of(plain, [x, *parameters]), strict=True):
        assert error(a, b) < 2**-6


def test_a_token_wise_function_whose_result_is_narrower_than_x():
    layer, x = nn.Linear(HIDDEN, HIDDEN), autocast_case(TOKENS, 1, HIDDEN)
    parameters = [x, *layer.parameters()]
    with autocast():
        mine = apply_in_chunks(lambda part, _: layer(part), x, [*layer.parameters()], even_spans(TOKENS, 3))
        plain = layer(x)
    assert mine.detach().equal(plain.float())
    for a, b in zip(grads_of(mine, parameters), grads_of(plain, parameters)):
        assert error(a, b) < 2**-7


def test_the_chunked_loss_casts_as_a_linear_layer_does():
    hidden, weight = autocast_case(TOKENS, 1, HIDDEN), autocast_case(48, HIDDEN)
    labels, weights = torch.arange(TOKENS).view(-1, 1), torch.ones(TOKENS, 1)
    results = []
    for loss in (
        lambda: chunked_linear_cross_entropy(hidden, weight, labels, weights, chunks=4, vocab_size=48),
        lambda: functional.cross_entropy(functional.linear(hidden, weight)[:, 0], labels[:, 0], reduction="sum"),
    ):
        hidden.grad = weight.grad = None
        with autocast():
            value = loss()
        value.backward()
        results.append((value, hidden.grad, weight.grad))
    for a, b in zip(*results):
        assert a.dtype == torch.float32 and error(a, b) < 2**-6
    with autocast(enabled=False):
        exact = chunked_linear_cross_entropy(hidden, weight, labels, weights, chunks=4, vocab_size=48)
    assert not exact.equal(results[0][0])
