# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters for core's linear layers: y = W x + (alpha / rank) B A x, where only A and B are trained.

LoRA (Hu et al. 2021, section 4.1). Under TP the messages of an adapter are small: their width is LoRA's rank. In a
column-parallel layer B is sharded like W and A is replicated; in a row-parallel layer A is sharded and B is replicated.
With sequence parallelism the replicated matrix sees only one TP rank's tokens, and core sums its gradients over TP,
as it does for norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional

ADAPTERS = ("lora_a", "lora_b")  # in their names


@dataclass(frozen=True)
class Lora:
    """Which layers get adapters, and of what size.

    Attributes:
        targets: core's names of layers; a model has adapters on those that it has.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def is_adapter(name: str) -> bool:
    """Whether ``name`` is the name of an adapter's parameter, or of a kind of its rows in a checkpoint."""
    return any(part in ADAPTERS for part in name.split(".")[-2:])


def train_adapters_alone(model: nn.Module) -> None:
    """Freeze every parameter that does not belong to an adapter."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


class ColumnParallelLinearWithLora(ColumnParallelLinear):
    """[s, b, in] -> [s, b, out / TP] like core's; A is [rank, in] and B [out / TP, rank]."""

    def __init__(self, *args: Any, lora: Lora, stride: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, stride=stride, **kwargs)
        self.lora, self.stride = lora, stride
        self.lora_a = nn.Parameter(self.weight.new_empty(lora.rank, self.input_size))
        self.lora_b = nn.Parameter(self.weight.new_zeros(self.output_size_per_partition, lora.rank))
        self.lora_a.sequence_parallel = self.sequence_parallel
        set_tensor_model_parallel_attributes(self.lora_b, True, 0, stride)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)
        inner = functional.linear(input_, self.lora_a)
        if self.sequence_parallel:
            inner = gather_from_sequence_parallel_region(inner, group=self.tp_group)
        else:
            inner = copy_to_tensor_model_parallel_region(inner, group=self.tp_group)
        return output + functional.linear(inner * self.lora.scale, self.lora_b), bias

    def with_adapter(self) -> Tensor:
        """W + (alpha / rank) B A [out / TP, in], for a product with something else than the layer's input."""
        # core sums the gradient of A over TP only with sequence parallelism
        a = self.lora_a if self.sequence_parallel else copy_to_tensor_model_parallel_region(self.lora_a, self.tp_group)
        return torch.addmm(self.weight, self.lora_b, a, alpha=self.lora.scale)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Like core's; if the layer holds two matrices (SwiGLU, stride 2), B is sharded like its weight."""
        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0, "lora_b": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.stride == 2:
            key = f"{prefix}lora_b"
            state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets)
        return state


class RowParallelLinearWithLora(RowParallelLinear):
    """[s, b, in / TP] -> [s, b, out] like core's; A is [rank, in / TP] and B [out, rank]."""

    def __init__(self, *args: Any, lora: Lora, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lora = lora
        self.lora_a = nn.Parameter(self.weight.new_empty(lora.rank, self.input_size_per_partition))
        self.lora_b = nn.Parameter(self.weight.new_zeros(self.output_size, lora.rank))
        set_tensor_model_parallel_attributes(self.lora_a, True, 1, 1)
        self.lora_b.sequence_parallel = self.sequence_parallel

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        inner = functional.linear(input_, self.lora_a)
        if self.sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.tp_group)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner, group=self.tp_group)
        return output + functional.linear(inner * self.lora.scale, self.lora_b), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Like core's, with A sharded like the weight."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 1, "lora_a": 1},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def merged(weight: Tensor, a: Tensor, b: Tensor, lora: Lora) -> Tensor:
    """``weight`` [out, in] with its adapter added, in fp32."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=lora.scale)
