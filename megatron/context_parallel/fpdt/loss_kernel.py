# SPDX-License-Identifier: Apache-2.0
"""Softmax and cross-entropy of a chunk's logits as two Triton kernels for NVIDIA GPUs.

The logits stay in the dtype of their product. One kernel reads them and makes the sums of each row; the other reads
them again and writes their gradient in their place. Separate operations in fp32 move ten times as many bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # logits that a program reads at a time
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def scaled_logits(row, bias, column, real, cap, coldness, BIAS: tl.constexpr, CAP: tl.constexpr):
    """fp32 logits of some columns: (capped and divided by the temperature, the soft-cap's derivative)."""
    x = tl.load(row + column, column < real, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + column, column < real, other=0.0).to(tl.float32)
    slope = 1.0
    if CAP:
        bent = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x / cap))  # tanh
        x, slope = bent * cap, 1.0 - bent * bent
    return x * coldness, slope


@triton.jit
def sums_kernel(
    logits, bias, targets, sums, stride, rows, real, first, cap, coldness,
    BIAS: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a row: the largest logit m, the target's logit (0 if another rank has it), and the sums of e and of e (x - m)
    for all logits x and e = exp(x - m)."""
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * stride
    largest = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    for start in range(0, real, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x, _ = scaled_logits(row, bias, column, real, cap, coldness, BIAS, CAP)
        most = tl.maximum(largest, tl.max(tl.where(column < real, x, LOWEST), 0))
        lower = largest - most
        shrink = tl.where(total > 0, tl.exp(lower), 0.0)
        weighted = shrink * (weighted + lower * total)
        e = tl.where(column < real, tl.exp(x - most), 0.0)
        weighted += tl.sum(tl.where(column < real, e * (x - most), 0.0), 0)
        total = shrink * total + tl.sum(e, 0)
        largest = most
    target = tl.load(targets + place) - first
    own = (target >= 0) & (target < real)
    value, _ = scaled_logits(row, bias, tl.where(own, target, 0), real, cap, coldness, BIAS, CAP)
    tl.store(sums + place, largest)
    tl.store(sums + rows + place, tl.where(own, value, 0.0))
    tl.store(sums + 2 * rows + place, total)
    tl.store(sums + 3 * rows + place, weighted)


@triton.jit
def gradient_kernel(
    logits, bias, targets, factors, stride, rows, width, real, first, cap, coldness,
    BIAS: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replaces logits by ``exp(x - m) (a - b (x - m)) - c``, c for the target alone; m, a, b, c are a row's factors."""
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    largest, a = tl.load(factors + place), tl.load(factors + rows + place)
    b, c = tl.load(factors + 2 * rows + place), tl.load(factors + 3 * rows + place)
    x, slope = scaled_logits(row, bias, column, real, cap, coldness, BIAS, CAP)
    x -= largest
    grad = tl.exp(x) * (a - b * x)
    grad = tl.where(column == tl.load(targets + place) - first, grad - c, grad) * slope * coldness
    grad = tl.where(column < real, grad, 0.0)
    tl.store(row + column, grad.to(logits.dtype.element_ty), column < width)


def row_sums(
    logits_TV: Tensor, bias: Tensor | None, targets: Tensor, real: int, first: int, cap: float | None, heat: float
) -> Tensor:
    """fp32 [4, tokens]: the largest logit m, the target's logit, and the sums of exp(x - m) and exp(x - m) (x - m).

    Args:
        logits_TV: [tokens, vocab / TP] in bf16, fp16 or fp32; rows are contiguous.
        bias: [vocab / TP].
        targets: [tokens], ids in the complete vocabulary. Elsewhere than here their logit is 0.
        real: columns without padding.
        first: id of the first column.
        cap: soft-cap of the logits. heat: temperature, by which they are divided after it.
    """
    sums = logits_TV.new_empty((4, logits_TV.size(0)), dtype=torch.float32)
    _launch(sums_kernel, (), logits_TV, bias, targets, sums, (real, first), cap, heat)
    return sums


def write_gradient(
    logits_TV: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    factors: Tensor,
    real: int,
    first: int,
    cap: float | None,
    heat: float,
) -> None:
    """Write the gradient of the logits in their place; ``factors``, fp32 [4, tokens]: see :func:`gradient_kernel`."""
    width = logits_TV.size(1)
    blocks = (triton.cdiv(width, BLOCK),)
    _launch(gradient_kernel, blocks, logits_TV, bias, targets, factors, (width, real, first), cap, heat)


def _launch(
    kernel: triton.JITFunction,
    blocks: tuple[int, ...],
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    per_row: Tensor,
    sizes: tuple[int, ...],
    cap: float | None,
    heat: float,
) -> None:
    if not len(logits):
        return
    arguments, options = call(logits, bias, targets, per_row, sizes, cap, heat)
    with torch.cuda.device_of(logits):
        kernel[(len(logits), *blocks)](*arguments, **options)


def call(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    per_row: Tensor,
    sizes: tuple[int, ...],
    cap: float | None,
    heat: float,
) -> tuple[tuple, dict[str, int | bool]]:
    """The arguments of a kernel, and its constants and options by name. ``sizes``: those between rows and cap."""
    numbers = (logits.stride(0), len(logits), *sizes, cap or 1.0, 1 / heat)
    constants = {"BIAS": bias is not None, "CAP": cap is not None, "BLOCK": BLOCK}
    return (logits, logits if bias is None else bias, targets, per_row, *numbers), constants | {"num_warps": WARPS}
