# SPDX-License-Identifier: Apache-2.0
"""Linear layers of Transformer Engine in FP8: their memory, communication and compute by formula, without the library.

Transformer Engine 2 (its modules ``Linear`` and ``LayerNormLinear``, and its quantizers) works as follows:

- the weight stays in bf16, with an FP8 copy that is kept between steps and updated by the first micro-batch;
- the input is cast, and its FP8 copy is saved for backward; gradients of the output are cast, too;
- the three products read FP8 and write bf16. Before Blackwell, tensor cores multiply one layout only, so weights and
  gradients are stored twice, by row and by column; with one scale per tensor Blackwell needs one copy;
- TP with sequence parallel gathers inputs and gradients in FP8, and reduces in bf16.

Not modelled: norms that write FP8 directly (here the cast reads the norm's output), and the four bytes of each
tensor's scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    dist_all_gather_func,
    dist_reduce_scatter_func,
)
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import Tensor, nn

from megatron.simulator.cost.trace import Kernel
from megatron.simulator.dry_run.recording.recorder import Recorder
from megatron.simulator.machines.machine import Machine
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig

SCALES = {"delayed": 0.0, "tensorwise": 0.0, "blockwise": 4 / 128, "mxfp8": 1 / 32}  # bytes per element, by recipe
PER_TENSOR = ("delayed", "tensorwise")  # recipes with one scale per tensor
AMAXES = 5  # amax histories of a layer under delayed scaling: input, weight, output and two gradients


@dataclass(frozen=True)
class Fp8:
    """How FP8 tensors are stored."""

    scales: float  # bytes of scales per element
    copies: int  # number of copies of weights and gradients
    finds_amax: bool  # whether a kernel finds the largest value before the cast
    history: int  # length of each amax history

    def size(self, elements: int) -> int:
        """Bytes of one copy."""
        return elements + round(self.scales * elements)


def check_fp8(model: ModelConfig, machine: Machine | None) -> None:
    """Check that the machine supports the model's FP8 settings.

    Raises:
        Refusal: the machine does not support them.
    """
    if model.fp8_format is None or machine is None:
        return
    if "fp8" not in machine.peak:
        raise Refusal(
            f"--fp8-format {model.fp8_format}: {machine.name} has no FP8, or its file has no peak.fp8; "
            "use only --bf16, or another GPU, for example H100-80G"
        )
    if model.fp8_recipe == "mxfp8" and "mxfp8" not in machine.peak:
        raise Refusal(
            f"--fp8-recipe mxfp8: {machine.name} has no MXFP8, or its file has no peak.mxfp8; use "
            "another --fp8-recipe, or a Blackwell GPU, for example B200-192G"
        )


def held_by(model: ModelConfig, machine: Machine | None) -> Fp8:
    """How Transformer Engine stores tensors under the model's recipe; without a machine, as before Blackwell."""
    blackwell = machine is not None and "mxfp8" in machine.peak
    recipe = model.fp8_recipe
    return Fp8(
        SCALES[recipe],
        1 if blackwell and recipe in PER_TENSOR else 2,
        recipe == "tensorwise",
        model.fp8_amax_history_len if recipe == "delayed" else 0,
    )


def use_fp8(chunks: Sequence[nn.Module], fp8: Fp8, recorder: Recorder) -> None:
    """Replace the linear layers of every transformer layer by FP8 ones, and allocate their copies of weights."""
    for chunk in chunks:
        for layer in (module for module in chunk.modules() if isinstance(module, BaseTransformerLayer)):
            for module in layer.modules():
                if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                    _replace(module, Linear(module, fp8, recorder))


def _replace(module: nn.Module, linear: Linear) -> None:
    fp8, weight = linear.fp8, module.weight
    copies = torch.empty(fp8.copies * fp8.size(weight.numel()), dtype=torch.uint8)
    module.register_parameter("fp8_weight", nn.Parameter(copies, requires_grad=False))
    if fp8.history:
        module.register_parameter(
            "fp8_history", nn.Parameter(torch.empty(fp8.history + 1, AMAXES), requires_grad=False)
        )
    module.forward = linear.forward


class Linear:
    """Replaces a column- or row-parallel layer of core, with the same shapes and communication."""

    def __init__(self, module: nn.Module, fp8: Fp8, recorder: Recorder) -> None:
        self.module, self.fp8, self.recorder = module, fp8, recorder
        self.row = isinstance(module, RowParallelLinear)
        self.group = module.tp_group
        self.ranks = self.group.size()
        self.sequence = module.sequence_parallel and self.ranks > 1
        self.weight_is_cast = False

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        module = self.module
        bias = None if module.skip_bias_add else module.bias
        out = _Linear.apply(x, module.weight, bias, self, torch.is_grad_enabled())
        return out, module.bias if module.skip_bias_add else None

    def cast(self, x: Tensor, copies: int) -> list[Tensor]:
        """``copies`` FP8 copies of ``x``, as bytes."""
        self._price_cast(x, copies * self.fp8.size(x.numel()))
        return [torch.empty(self.fp8.size(x.numel()), dtype=torch.uint8) for _ in range(copies)]

    def cast_weight(self) -> None:
        """Update the weight's FP8 copies, once per step."""
        if not self.weight_is_cast:
            self._price_cast(self.module.weight, self.module.fp8_weight.numel())
            self.weight_is_cast = True

    def _price_cast(self, x: Tensor, written: int) -> None:
        read = x.numel() * x.element_size()
        if self.fp8.finds_amax:
            self.recorder.price(Kernel("fp8_amax", "memory", 0.0, read, itemsize=x.element_size()))
        self.recorder.price(Kernel("fp8_cast", "memory", 0.0, read + written, itemsize=1))

    def transpose(self, x: Tensor) -> Tensor:
        """The other layout of gathered bytes, if the GPU needs it."""
        if self.fp8.copies == 1:
            return x
        self.recorder.price(Kernel("fp8_transpose", "memory", 0.0, 2.0 * x.numel(), itemsize=1))
        return torch.empty_like(x)

    def product(self, m: int, n: int, k: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """The product of FP8 [m, k] and [k, n], with ``shape`` and ``dtype``."""
        out = torch.empty(shape, dtype=dtype)
        size = self.fp8.size(m * k) + self.fp8.size(k * n) + out.numel() * out.element_size()
        self.recorder.price(Kernel("fp8_gemm", "gemm", 2.0 * m * n * k, size, (1, m, n, k), 1))
        return out

    def gather(self, x: Tensor, *, overlap: bool = False) -> tuple[Tensor, Any]:
        """(bytes of all TP ranks, handle to wait for if ``overlap``)."""
        whole = torch.empty(self.ranks * x.numel(), dtype=torch.uint8)
        return whole, dist_all_gather_func(whole, x, group=self.group, async_op=overlap)

    def scatter(self, x: Tensor, *, overlap: bool = False) -> tuple[Tensor, Any]:
        """(this rank's rows summed over TP ranks, handle to wait for if ``overlap``)."""
        mine = torch.empty((x.size(0) // self.ranks, *x.shape[1:]), dtype=x.dtype)
        return mine, dist_reduce_scatter_func(mine, x, group=self.group, async_op=overlap)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear, saves: bool) -> Tensor:
        out_size, in_size = weight.shape
        gathers = linear.sequence and not linear.row
        linear.cast_weight()
        # A gathered input is saved in one layout, and transposed in the backward pass.
        copies = linear.cast(x, linear.fp8.copies if saves and not gathers else 1)
        shape = (x.size(0) * (linear.ranks if gathers else 1), *x.shape[1:-1])
        whole, _ = linear.gather(copies[0]) if gathers else (copies[0], None)
        saved = copies.pop()
        out = linear.product(prod(shape), out_size, in_size, x.dtype, (*shape, out_size))
        del whole
        if linear.row and linear.sequence:
            out, _ = linear.scatter(out)
        elif linear.row and linear.ranks > 1:
            dist.all_reduce(out, group=linear.group)
        ctx.save_for_backward(saved, weight)
        ctx.linear, ctx.shape, ctx.bias = linear, shape, bias
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        saved, weight = ctx.saved_tensors
        linear, shape, (out_size, in_size) = ctx.linear, ctx.shape, weight.shape
        rows, waits = prod(shape), []
        if linear.row and linear.sequence:
            (mine,) = linear.cast(dy, 1)
            gradient = [linear.gather(mine)[0]]
            gradient.append(linear.transpose(gradient[0]))
        else:
            gradient = linear.cast(dy, linear.fp8.copies)
        if linear.sequence and not linear.row:
            saved, work = linear.gather(saved, overlap=True)
            waits.append(work)
        dx = linear.product(rows, in_size, out_size, dy.dtype, (*shape, in_size))
        while waits:
            waits.pop().wait()
            saved = linear.transpose(saved)
        if linear.sequence and not linear.row:
            dx, work = linear.scatter(dx, overlap=True)
            waits.append(work)
        elif linear.ranks > 1 and not linear.row:
            waits.append(dist.all_reduce(dx, group=linear.group, async_op=True))
        dw = linear.product(out_size, in_size, rows, weight.dtype, weight.shape)
        for work in waits:
            work.wait()
        return dx, dw, None if ctx.bias is None else torch.empty_like(ctx.bias), None, None
