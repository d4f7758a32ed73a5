# SPDX-License-Identifier: Apache-2.0
"""Weights, gradients and optimizer states over DP x CP: DDP and ZeRO 1 once a step, ZeRO 2 and 3 once a layer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.formulas.strategy import Shape, Strategy
from megatron.simulator.cost.linear_operations import layer_parameters
from megatron.simulator.cost.operations import BF16, FP32, collective, memory
from megatron.simulator.cost.trace import Kernel, Transfer

# An Adam step reads gradient, weight and two moments and writes three of these, and the bf16 weight; before it, the
# gradient is read for its norm and scaled. Bytes a parameter, in fp32.
ADAM_BYTES = 7 * FP32 + BF16 + 3 * FP32


@dataclass(frozen=True)
class States:
    """Parameters on one rank of a pipeline stage: of each layer, of the stage's ends, and of the embedding alone."""

    layer: float
    layers: int
    ends: float
    table: float

    @property
    def all(self) -> float:
        return self.layer * self.layers + self.ends


def states(shape: Shape, strategy: Strategy) -> States:
    """Without pipeline stages both ends are on every rank; else the first or last stage has one."""
    end = shape.vocab * shape.hidden / strategy.tensor
    both = 1 if shape.tied else 2
    ends = end * (both if strategy.pipeline == 1 else 1) + shape.positions * shape.hidden
    return States(layer_parameters(shape, strategy.tensor), -(-shape.layers // strategy.pipeline), ends, end)


def reduce_gradients(strategy: Strategy, parameters: float) -> Transfer:
    """In fp32, onto shards; ZeRO 0 keeps all of them."""
    kind = "reduce_scatter" if strategy.zero else "all_reduce"
    return collective(kind, "dp", strategy.group("dp"), FP32 * parameters)


def gather_parameters(strategy: Strategy, parameters: float) -> Transfer:
    """In bf16, from shards."""
    return collective("all_gather", "dp", strategy.group("dp"), BF16 * parameters)


def optimizer_step(strategy: Strategy, parameters: float) -> Kernel:
    """Adam on this rank's shard, and all of its gradients set to zero (ZeRO 2 and 3 have a shard of them)."""
    share = strategy.context * strategy.data if strategy.zero else 1
    return memory(
        "optimizer", ADAM_BYTES * parameters / share + FP32 * parameters / (share if strategy.zero > 1 else 1)
    )


def split_and_join(strategy: Strategy, parameters: float) -> Kernel:
    """FSDP's copies: gathered weights into their tensors, gradients into one buffer in fp32."""
    gathers = 2 if strategy.zero == 3 else 1
    return memory("shards", (gathers * 2 * BF16 + BF16 + FP32) * parameters)
