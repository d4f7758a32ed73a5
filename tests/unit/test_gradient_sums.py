# SPDX-License-Identifier: Apache-2.0
"""Sums of chunks' gradients: in DDP's buffers or separately, and how often the loss writes its sum."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.context_parallel.fpdt import chunked_loss
from megatron.context_parallel.fpdt.chunked_ffn import GradientSums, apply_in_chunks, even_spans
from megatron.context_parallel.fpdt.chunked_loss import add_product, chunked_linear_cross_entropy, pieces_together

HIDDEN, WORDS, TOKENS = 32, 48, 64


class Watch(TorchDispatchMode):
    """Counts operations by name, and records the bytes of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count[func._schema.name.removeprefix("aten::")] += 1
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out._base is None:
            self.largest = max(self.largest, out.nbytes)
        return out


def with_buffer(parameter: Tensor, start: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A parameter as core's DDP prepares it."""
    parameter.main_grad, parameter.grad_added_to_main_grad = torch.full(parameter.shape, start, dtype=dtype), False
    return parameter


def as_ddp_does(parameter: Tensor) -> Tensor:
    """Process a gradient like core's hook (distributed_data_parallel.py, _make_backward_post_hook)."""
    if parameter.grad is not None and not parameter.grad_added_to_main_grad:
        parameter.main_grad += parameter.grad
    parameter.grad = None
    return parameter.main_grad


def run(dtype: torch.dtype, buffer: torch.dtype | None, passes: int = 2) -> list[Tensor]:
    """Gradients of a layer in five spans and of the loss in eight chunks, summed over some passes."""
    draw = torch.Generator().manual_seed(4)
    weights = [torch.randn(s, generator=draw).div(6).to(dtype) for s in [(HIDDEN, HIDDEN), (HIDDEN,), (WORDS, HIDDEN)]]
    weights = [weight.requires_grad_() for weight in weights]
    if buffer is not None:
        weights = [with_buffer(weight, dtype=buffer) for weight in weights]
    matrix, bias, words = weights
    result = [torch.zeros(weight.shape, dtype=torch.float64) for weight in weights]
    for _ in range(passes):
        x = torch.randn(TOKENS, 1, HIDDEN, generator=draw).to(dtype)
        labels = torch.randint(WORDS, (TOKENS, 1), generator=draw)
        y = apply_in_chunks(lambda part, _: torch.tanh(part @ matrix + bias), x, [matrix, bias], even_spans(TOKENS, 5))
        loss = chunked_linear_cross_entropy(y, words, labels, torch.ones(TOKENS, 1), chunks=8, vocab_size=WORDS)
        (loss * 0.25).backward()
        for weight, total in zip(weights, result):
            if buffer is None:
                total += weight.grad
                weight.grad = None
            else:
                as_ddp_does(weight)
    return result if buffer is None else [weight.main_grad.double() for weight in weights]


def apart(mine: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(mine, other, strict=True))


def test_sums_in_the_buffers_equal_separate_sums():
    assert apart(run(torch.float32, torch.float32), run(torch.float32, None)) < 1e-6
    assert apart(run(torch.float64, torch.float64), run(torch.float64, None)) < 1e-14


def test_in_half_precision_sums_in_the_buffers_are_nearer_to_exact_ones():
    exact = run(torch.float64, None)
    separate, within, narrow = (apart(run(torch.bfloat16, b), exact) for b in (None, torch.float32, torch.bfloat16))
    assert within <= separate and narrow >= separate  # adding chunk by chunk to a narrow buffer loses precision


def test_a_weight_with_several_uses_takes_the_default_path():
    weight = with_buffer(torch.ones(4, 4, requires_grad=True), 2.0)
    weight.zero_out_wgrad = True
    apply_in_chunks(lambda part, _: part @ weight, torch.ones(6, 4), [weight], even_spans(6, 2)).sum().backward()
    assert not weight.grad_added_to_main_grad and weight.main_grad.eq(2).all() and weight.grad.eq(6).all()


def test_gradients_that_a_layer_has_added_are_not_added_again():
    weight = with_buffer(torch.ones(4, 4, requires_grad=True))

    class Fused(torch.autograd.Function):
        """Like core's linear layer with gradient accumulation fusion (tensor_parallel/layers.py)."""

        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            return x @ weight

        @staticmethod
        def backward(ctx, dy):
            weight.main_grad.addmm_(ctx.saved_tensors[0].t(), dy)
            weight.grad_added_to_main_grad = True
            return dy @ weight.t(), torch.full_like(weight, torch.nan)

    for _ in range(2):
        apply_in_chunks(
            lambda part, _: Fused.apply(part, weight), torch.ones(6, 4), [weight], even_spans(6, 3)
        ).sum().backward()
        assert weight.grad_added_to_main_grad
        weight.grad = None
    assert weight.main_grad.eq(12).all()


@pytest.mark.parametrize("buffer", [False, True])
def test_gradients_that_share_a_tensor_are_summed_separately(buffer):
    """Autograd returns one tensor as the gradient of both ``a`` and ``b``, and dy itself as that of ``added``."""
    shapes = ((HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (TOKENS // 4, 1, HIDDEN))
    a, b, added = (torch.randn(shape, requires_grad=True) for shape in shapes)
    x = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
    spans = even_spans(TOKENS, 4)

    def function(part: Tensor, span: object) -> Tensor:
        return torch.nn.functional.linear(part, a + b) + added

    result = []
    for chunked in (False, True):
        a.grad = b.grad = added.grad = x.grad = None
        if buffer and chunked:
            with_buffer(a), with_buffer(b)
        parts = [function(x[start:stop], None) for start, stop in spans]
        y = apply_in_chunks(function, x, [a, b, added, a], spans) if chunked else torch.cat(parts)  # a is named twice
        y.square().sum().backward()
        sums = [as_ddp_does(w) if buffer and chunked else w.grad for w in (a, b)]
        result.append([*sums, added.grad, x.grad])
    assert apart(*result) < 1e-6


def test_results_without_a_graph_have_gradients_of_zero():
    x, weight = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    sums = GradientSums([weight])
    constant, half = torch.ones(4), 0.5 * x
    assert sums.differentiate(constant, [x], torch.ones(4))[0].eq(0).all() and sums.take() == [None]
    assert sums.differentiate((constant, half), [x], (torch.ones(4), torch.ones(4)))[0].eq(0.5).all()


@pytest.mark.parametrize("chunks, products", [(1, 1), (8, 8), (16, 8), (64, 8)])
def test_chunks_of_few_tokens_are_added_to_the_weights_gradient_together(chunks, products):
    """With width 32 in fp32, chunks are collected up to eight rows."""
    assert pieces_together(TOKENS // chunks, HIDDEN, 4) == max(chunks // 8, 1)
    hidden, words = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True), torch.randn(WORDS, HIDDEN, requires_grad=True)
    with Watch() as seen:
        chunked_linear_cross_entropy(
            hidden, words, torch.zeros(TOKENS, 1).long(), torch.ones(TOKENS, 1), chunks=chunks, vocab_size=WORDS
        )
    assert seen.count["addmm_"] == products


def test_chunks_of_llama_3_are_added_in_groups_of_2048_rows():
    assert pieces_together(256, 4096, 2) * 256 == 2048 and pieces_together(4096, 4096, 2) == 1


@pytest.mark.parametrize("dtype, wide", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_a_product_is_added_without_a_temporary_of_the_sums_size(dtype, wide):
    total, a, b = torch.ones(400, 300, dtype=wide), torch.randn(400, 8).to(dtype), torch.randn(8, 300).to(dtype)
    expected = total.double() + a.double() @ b.double()
    with Watch() as seen:
        add_product(total, a, b)
    assert float((total - expected).abs().max() / expected.abs().max()) < (1e-6 if dtype == wide else 8e-3)
    assert seen.largest <= total.nbytes / 8 or dtype == wide


def test_half_precision_matrices_are_multiplied_into_the_fp32_sum_if_the_device_can(monkeypatch):
    calls = []

    def dtype_out(total, a, b, dtype, *, out):
        calls.append(dtype)
        return out.addmm_(a.to(dtype), b.to(dtype))

    monkeypatch.setattr(chunked_loss.adds_wide, "current", lambda *_: True)
    monkeypatch.setattr(torch.ops.aten.addmm, "dtype_out", dtype_out)
    total = torch.ones(6, 5)
    add_product(total, torch.ones(6, 3).bfloat16(), torch.ones(3, 5).bfloat16())
    assert total.eq(4).all() and calls == [torch.float32]
