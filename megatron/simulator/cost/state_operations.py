# SPDX-License-Identifier: Apache-2.0
"""Weights, gradients and optimizer states over DP x CP: DDP and ZeRO 1 once a step, ZeRO 2 and 3 once a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.formulas.communication import whole_vectors
from megatron.formulas.parameters import model_states, numel, shard_numel, stage_parameters
from megatron.formulas.strategy import Group, Shape, Strategy
from megatron.simulator.cost.operations import BF16, FP32, collective, memory
from megatron.simulator.cost.trace import Kernel, Transfer

# An Adam step reads gradient, weight and two moments and writes three of these; then weights are read and written in
# bf16. Before it, the gradient is read for its norm, scaled into memory of its own, and copied back; a kernel of apex
# or Transformer Engine, which papers' programs have, scales it in its place. Bytes a parameter.
ADAM_BYTES, SCALED_IN_PLACE = 7 * FP32 + FP32 + BF16 + 5 * FP32, 2 * FP32


@dataclass(frozen=True)
class States:
    """Parameters on one rank of a pipeline stage, in whole, with the padding that travels with them.

    Attributes:
        layer: of each of ``layers`` layers; ends: of the stage's ends; table: of an embedding alone.
        all: of the stage.
        vectors: those of norms and biases, that TP-sp sums over TP.
    """

    layer: int
    layers: int
    ends: int
    table: int
    all: int
    vectors: int


def states(shape: Shape, strategy: Strategy, stage: int) -> States:
    """Raises ValueError where pipeline stages do not divide the layers."""
    if (shape.layers + strategy.first_less + strategy.last_less) % strategy.pipeline:
        raise ValueError(f"{strategy.pipeline} pipeline stages do not divide {shape.layers} layers")
    layers = strategy.stage_layers(shape.layers, stage)
    return _states(shape, strategy.tensor, strategy.pipeline, stage, layers, strategy.zero, strategy.group("dp").size,
                   strategy.overlap_grad_reduce)  # fmt: skip


@lru_cache(maxsize=4096)
def _states(
    shape: Shape, tensor: int, pipeline: int, stage: int, layers: int, zero: int, ranks: int, bucketed: bool
) -> States:
    held = replace(stage_parameters(shape, tensor, pipeline, stage), layers=layers)
    table = numel(stage_parameters(shape, tensor, 1, 0).embedding[:1])
    if zero < 2:
        every, layer = model_states(held, zero, ranks, BF16, bucketed=bucketed).gradients // FP32, held.layer_numel
    else:
        every, layer = (ranks * shard_numel(tensors, ranks) for tensors in (held.tensors, held.layer))
    vectors = whole_vectors(shape, held)
    return States(layer, held.layers, every - layer * held.layers, table, every, vectors)


def last_bucket(strategy: Strategy, held: States, *, ours: bool = True) -> int:
    """Parameters of the layers' last transfer under DDP: core's buckets have at least so many
    (core/distributed/distributed_data_parallel.py). Of the papers' programs we do not know, and take a layer's."""
    return (
        min(held.layer, max(40_000_000, 1_000_000 * strategy.group("dp").size))
        if strategy.fused and ours
        else held.layer
    )


def reduce_gradients(strategy: Strategy, parameters: int, itemsize: int = FP32) -> Transfer:
    """Onto shards; ZeRO 0 keeps all of them. ``itemsize``: bytes of a gradient on its way."""
    kind = "reduce_scatter" if strategy.zero else "all_reduce"
    return collective(kind, "dp", strategy.group("dp"), itemsize * parameters)


def gather_parameters(strategy: Strategy, parameters: int) -> Transfer:
    """In bf16, from shards."""
    return collective("all_gather", "dp", strategy.group("dp"), BF16 * parameters)


def sum_shared_gradients(shape: Shape, strategy: Strategy, held: States) -> list[Transfer]:
    """Once a step: of what every TP rank has whole; of a tied embedding, on the first and on the last stage."""
    found = []
    if strategy.tensor > 1 and strategy.sequence_parallel:
        found.append(collective("all_reduce", "tp", strategy.group("tp"), FP32 * held.vectors))
    if shape.tied and strategy.pipeline > 1:
        stages = strategy.group("pp")
        ends = Group(2, stages.stride * (stages.size - 1))
        found.append(collective("all_reduce", "pp", ends, FP32 * held.table))
    return found


def optimizer_step(strategy: Strategy, parameters: int, *, ours: bool = True) -> Kernel:
    """Adam on this rank's shard, and all of its gradients set to zero (ZeRO 2 and 3 have a shard of them)."""
    share = strategy.context * strategy.data if strategy.zero else 1
    each = ADAM_BYTES if strategy.fused and ours else ADAM_BYTES - SCALED_IN_PLACE
    return memory("optimizer", each * parameters / share + FP32 * parameters / (share if strategy.zero > 1 else 1))


def split_and_join(strategy: Strategy, parameters: int) -> Kernel:
    """FSDP's copies: gathered weights into their tensors, gradients into one buffer in fp32."""
    gathers = 2 if strategy.zero == 3 else 1
    return memory("shards", (gathers * 2 * BF16 + BF16 + FP32) * parameters)
