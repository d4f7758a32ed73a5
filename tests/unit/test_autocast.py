# SPDX-License-Identifier: Apache-2.0
"""Under autocast our operations do what PyTorch's own would, and repeat it in the backward pass."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import megatron.context_parallel as cp
from megatron.context_parallel.fpdt.chunked_ffn import apply_in_chunks, even_spans
from megatron.context_parallel.fpdt.chunked_loss import chunked_linear_cross_entropy

TOKENS, HIDDEN, HEADS = 32, 32, 4


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def drawn(*shape: int) -> Tensor:
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
    qkv = [drawn(TOKENS, 2, HEADS, 8).detach().roll(index).requires_grad_() for index in range(3)]
    with autocast():
        mine = cp.attention(*qkv, layout=layout, kernel=kernel)
        heads_first = (x.permute(1, 2, 0, 3) for x in qkv)
        theirs = functional.scaled_dot_product_attention(*heads_first, is_causal=True).permute(2, 0, 1, 3)
    cast = cp.attention(*(x.bfloat16() for x in qkv), layout=layout, kernel=kernel)
    assert mine.dtype == theirs.dtype == torch.bfloat16
    assert mine.equal(cast) and error(mine, theirs) < 2**-6  # which differ by rounding to bf16
    for a, b in zip(grads_of(mine, qkv), grads_of(cast, qkv)):
        assert a.dtype == torch.float32 and a.equal(b)


def test_attention_in_float64_stays_what_it_is():
    layout = cp.SequenceLayout(TOKENS, cp.abstract_grid())
    qkv = [drawn(TOKENS, 1, HEADS, 8).detach().double() for _ in range(3)]
    with autocast():
        inside = cp.attention(*qkv, layout=layout, kernel="math")
    assert inside.equal(cp.attention(*qkv, layout=layout, kernel="math"))


def test_queries_keys_and_values_of_different_dtypes_are_refused():
    q = drawn(TOKENS, 1, HEADS, 8)
    with pytest.raises(ValueError, match="q is torch.bfloat16, k torch.bfloat16 and v torch.float32: cast them"):
        cp.attention(q.bfloat16(), q.bfloat16(), q, layout=cp.SequenceLayout(TOKENS, cp.abstract_grid()))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_chunked_layer_repeats_the_forward_pass_as_it_was(recompute, inside):
    """Against the same layer in one piece. ``inside``: the backward pass runs under autocast too."""
    qkv, out, first = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    parameters = [*qkv.parameters(), *out.parameters(), *first.parameters()]
    dtypes = set()

    def project(x: Tensor, chunk: int) -> tuple[Tensor, ...]:
        q, k, v = (part.unflatten(2, (HEADS, -1)) for part in qkv(x).chunk(3, -1))
        return q.float(), k, v  # as rotated queries often are

    def ffn(x: Tensor) -> Tensor:
        y = first(x)
        dtypes.add(y.dtype)
        return x + y

    def result(chunks: int) -> tuple[Tensor, list[Tensor]]:
        layout, x = cp.SequenceLayout(TOKENS, cp.abstract_grid(), chunks=chunks), drawn(TOKENS, 1, HIDDEN)
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
            other = first(x.detach())  # a cast that was made without gradients must not be used here
            if inside:
                return y, grads_of(y.float() + other.float(), [x, *parameters])
        return y, grads_of(y.float() + other.float(), [x, *parameters])

    (whole, whole_grads), (parts, grads) = result(1), result(4)
    assert dtypes == {torch.bfloat16} and parts.dtype == torch.float32
    assert error(parts, whole) < 2**-6
    for a, b in zip(grads, whole_grads, strict=True):
        assert error(a, b) < 2**-6
    with autocast():  # the same in plain PyTorch
        x = drawn(TOKENS, 1, HIDDEN)
        heads = (part.permute(1, 2, 0, 3) for part in project(x, 0))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3)
        plain = ffn(x + out(attended.flatten(2))).float() + first(x.detach()).float()
    for a, b in zip(grads, grads_of(plain, [x, *parameters]), strict=True):
        assert error(a, b) < 2**-6


def test_a_token_wise_function_whose_result_is_narrower_than_x():
    layer, x = nn.Linear(HIDDEN, HIDDEN), drawn(TOKENS, 1, HIDDEN)
    parameters = [x, *layer.parameters()]
    with autocast():
        mine = apply_in_chunks(lambda part, _: layer(part), x, [*layer.parameters()], even_spans(TOKENS, 3))
        plain = layer(x)
    assert mine.detach().equal(plain.float())
    for a, b in zip(grads_of(mine, parameters), grads_of(plain, parameters)):
        assert error(a, b) < 2**-7


def test_the_chunked_loss_casts_as_a_linear_layer_does():
    hidden, weight = drawn(TOKENS, 1, HIDDEN), drawn(48, HIDDEN)
    labels, weights = torch.arange(TOKENS).view(-1, 1), torch.ones(TOKENS, 1)
    found = []
    for loss in (
        lambda: chunked_linear_cross_entropy(hidden, weight, labels, weights, chunks=4, vocab_size=48),
        lambda: functional.cross_entropy(functional.linear(hidden, weight)[:, 0], labels[:, 0], reduction="sum"),
    ):
        hidden.grad = weight.grad = None
        with autocast():
            value = loss()
        value.backward()
        found.append((value, hidden.grad, weight.grad))
    for a, b in zip(*found):
        assert a.dtype == torch.float32 and error(a, b) < 2**-6
    with autocast(enabled=False):
        exact = chunked_linear_cross_entropy(hidden, weight, labels, weights, chunks=4, vocab_size=48)
    assert not exact.equal(found[0][0])
