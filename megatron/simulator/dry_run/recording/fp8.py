# SPDX-License-Identifier: Apache-2.0
"""The linear layers of Transformer Engine in FP8, priced by formula: what they hold, send and compute, without it.

What Transformer Engine 2 does (its modules ``Linear`` and ``LayerNormLinear``, and its quantizers):

- the weight stays in bf16, and beside it an FP8 copy of it lives from step to step, made anew by the first micro-batch;
- the input is cast, and its FP8 copy is what is saved for the backward pass; so are the gradients of the output;
- the three products take FP8 and give bf16. Before Blackwell, tensor cores multiply one layout only, so weights and
  gradients are held twice, by row and by column; with a scale for each tensor Blackwell needs one copy;
- TP with sequence parallel gathers inputs and gradients in FP8, and sums in bf16.

Left out: a norm that casts as it writes (here the cast reads once more), and scales of whole tensors, four bytes each.
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
from megatron.training.arguments.config import ModelConfig
from megatron.training.refusal import Refusal

SCALES = {"delayed": 0.0, "tensorwise": 0.0, "blockwise": 4 / 128, "mxfp8": 1 / 32}  # bytes an element, by recipe
PER_TENSOR = ("delayed", "tensorwise")  # recipes with one scale a tensor
AMAXES = 5  # that delayed scaling remembers of a layer: of input, weight, output and two gradients


@dataclass(frozen=True)
class Fp8:
    """How tensors are held.

    Attributes:
        scales: bytes of scales an element.
        copies: of weights and gradients.
        finds_amax: a kernel finds the largest value before the cast.
        history: values of each amax that are remembered.
    """

    scales: float
    copies: int
    finds_amax: bool
    history: int

    def size(self, elements: int) -> int:
        """Bytes of one copy."""
        return elements + round(self.scales * elements)


def check_fp8(model: ModelConfig, machine: Machine | None) -> None:
    """
    Raises:
        Refusal: the machine cannot do what ``model`` asks for.
    """
    if model.fp8_format is None or machine is None:
        return
    if "fp8" not in machine.peak:
        raise Refusal(
            f"--fp8-format {model.fp8_format} with --gpu {machine.name}: it has no FP8, or its file no peak.fp8; use "
            "--bf16 alone, or another GPU, for example H100-80G"
        )
    if model.fp8_recipe == "mxfp8" and "mxfp8" not in machine.peak:
        raise Refusal(
            f"--fp8-recipe mxfp8 with --gpu {machine.name}: it has no MXFP8, or its file no peak.mxfp8; use another "
            "--fp8-recipe, or a Blackwell GPU, for example B200-192G"
        )


def held_by(model: ModelConfig, machine: Machine | None) -> Fp8:
    """How Transformer Engine holds tensors under the recipe of ``model``; without a machine, as before Blackwell."""
    blackwell = machine is not None and "mxfp8" in machine.peak
    recipe = model.fp8_recipe
    return Fp8(
        SCALES[recipe],
        1 if blackwell and recipe in PER_TENSOR else 2,
        recipe == "tensorwise",
        model.fp8_amax_history_len if recipe == "delayed" else 0,
    )


def use_fp8(chunks: Sequence[nn.Module], fp8: Fp8, recorder: Recorder) -> None:
    """Have the linear layers of every transformer layer be priced in FP8; their copies of weights are made now."""
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
    """Stands for a column- or row-parallel layer of core: same shapes in and out, same communication."""

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
        """So many copies of it in FP8, as bytes."""
        self._price_cast(x, copies * self.fp8.size(x.numel()))
        return [torch.empty(self.fp8.size(x.numel()), dtype=torch.uint8) for _ in range(copies)]

    def cast_weight(self) -> None:
        """Into the copies that stay, once a step."""
        if not self.weight_is_cast:
            self._price_cast(self.module.weight, self.module.fp8_weight.numel())
            self.weight_is_cast = True

    def _price_cast(self, x: Tensor, written: int) -> None:
        read = x.numel() * x.element_size()
        if self.fp8.finds_amax:
            self.recorder.price(Kernel("fp8_amax", "memory", 0.0, read, itemsize=x.element_size()))
        self.recorder.price(Kernel("fp8_cast", "memory", 0.0, read + written, itemsize=1))

    def transpose(self, x: Tensor) -> Tensor:
        """Of bytes that came by row where the product wants them by column."""
        if self.fp8.copies == 1:
            return x
        self.recorder.price(Kernel("fp8_transpose", "memory", 0.0, 2.0 * x.numel(), itemsize=1))
        return torch.empty_like(x)

    def product(self, m: int, n: int, k: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Of FP8 [m, k] and [k, n], as ``shape`` in ``dtype``."""
        out = torch.empty(shape, dtype=dtype)
        size = self.fp8.size(m * k) + self.fp8.size(k * n) + out.numel() * out.element_size()
        self.recorder.price(Kernel("fp8_gemm", "gemm", 2.0 * m * n * k, size, (1, m, n, k), 1))
        return out

    def gather(self, x: Tensor, *, overlap: bool = False) -> tuple[Tensor, Any]:
        """Bytes of all TP ranks; with ``beside`` also what to wait for."""
        whole = torch.empty(self.ranks * x.numel(), dtype=torch.uint8)
        return whole, dist_all_gather_func(whole, x, group=self.group, async_op=overlap)

    def scatter(self, x: Tensor, *, overlap: bool = False) -> tuple[Tensor, Any]:
        """The sum over TP ranks of this rank's rows."""
        mine = torch.empty((x.size(0) // self.ranks, *x.shape[1:]), dtype=x.dtype)
        return mine, dist_reduce_scatter_func(mine, x, group=self.group, async_op=overlap)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear, saves: bool) -> Tensor:
        out_size, in_size = weight.shape
        gathers = linear.sequence and not linear.row
        linear.cast_weight()
        # What TP gathers is kept as it came, and turned in the backward pass.
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
