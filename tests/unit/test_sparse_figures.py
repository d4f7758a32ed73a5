# SPDX-License-Identifier: Apache-2.0
"""Learned sparsity in closed forms, beside dry runs: memory, FLOPs, and the seconds of kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.formulas.device_memory import device_memory
from megatron.formulas.flops import forward_flops, step_flops
from megatron.formulas.kinds.sparse_figures import SparseLatent
from megatron.formulas.parameters import stage_parameters
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.cost.layer_operations import layer
from megatron.simulator.cost.seconds import kernel_seconds
from megatron.simulator.cost.trace import Kernel
from megatron.simulator.dry_run.one_rank import run_rank
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.parser import parse
from tests.unit.formula_runs import LLAMA, Case, flags

K, S = 1024, Strategy
V32 = Shape(
    layers=2, hidden=7168, ffn=2048, heads=128, kv_heads=128, head_dim=192, vocab=1024, qk_norm=True,
    latent=SparseLatent(1536, 512, 64, 128, index_heads=64, index_dim=128, chosen=2048, learns=False),
)  # fmt: skip
GLM = replace(
    V32, hidden=6144, heads=64, kv_heads=64, head_dim=256,
    latent=SparseLatent(2048, 512, 64, 256, index_heads=32, index_dim=128, chosen=2048, learns=False),
)  # fmt: skip
LEARNS = replace(V32, latent=replace(V32.latent, learns=True))
SHARED = replace(V32, layers=4, latent=replace(V32.latent, choosing=(True, False, True, False)))


def case(name: str, shape: Shape, length: int, strategy: Strategy, itemsize: int = 2, rank: int = 0) -> Case:
    return Case(name, Workload(shape, length * K), strategy, itemsize, rank)


CASES = [
    case("v3.2", V32, 128, S(ring=8)),
    case("v3.2, 512K", V32, 512, S(ring=8)),
    case("v3.2, 1M, ZeRO 3, recomputed", V32, 1024, S(ring=16, zero=3, recompute="full")),
    case("v3.2, selective", V32, 128, S(ring=8, recompute="selective")),
    case("v3.2, Ulysses, TP", V32, 128, S(ulysses=2, ring=4, tensor=4), rank=4),
    case("v3.2, learns", LEARNS, 128, S(ring=8)),
    case("v3.2, some layers choose", SHARED, 128, S(ring=8)),
    case("glm", GLM, 128, S(ring=8)),
    case("glm, 512K, TP, recomputed", GLM, 512, S(ring=8, tensor=2, recompute="full")),
]


def run(one: Case):
    config = parse(flags(one), dict(LLAMA), one.strategy.ranks)
    machine = load("H100-80G") if one.fused else None
    return run_rank(config, one.strategy.ranks, one.rank, one.workload.shape.vocab, machine=machine)


@pytest.mark.usual(0, 6)
@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_memory_and_seconds_are_those_of_a_dry_run(one: Case) -> None:
    step, machine = run(one), load("H100-80G")
    memory = device_memory(one.workload, one.strategy, itemsize=one.itemsize, fused=one.fused)
    assert memory.total == pytest.approx(step.device_peak, rel=0.025)
    counted, planned = Counter(), Counter()
    for event in step.trace.events:
        if isinstance(event, Kernel):
            counted[event.name] += kernel_seconds(event, machine)
    shape = one.workload.shape
    for index in range(shape.layers):
        for segment in sum(layer(replace(one.workload, shape=shape.kind(index)), one.strategy), []):
            for event in segment.kernels:
                planned[event.name] += segment.count * kernel_seconds(event, machine)
    for name in ("chosen_forward", "chosen_query_grads", "chosen_key_grads", "index_scores"):
        assert planned[name] == pytest.approx(counted[name], rel=0.15), name


@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.full), 2])
def test_flops_are_counted_on_a_cpu(tensor: int) -> None:
    one = case("", replace(GLM, hidden=512, heads=8, kv_heads=8), 8, S(tensor=tensor), itemsize=4)
    flops = step_flops(one.workload, one.strategy)
    assert flops.gemm + flops.attention == pytest.approx(tensor * run(one).trace.flops(), rel=0.06)


def test_only_layers_that_choose_have_an_indexer() -> None:
    all_choose = replace(SHARED, latent=V32.latent)
    index = 64 * 128 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168
    numel = [stage_parameters(shape, 1, 1, 0).numel for shape in (all_choose, SHARED)]
    assert numel[0] - numel[1] == 2 * index
    of_all, of_some = (forward_flops(shape, 128 * K) for shape in (all_choose, SHARED))
    assert (of_some.choice, of_some.attention) == (of_all.choice / 2, of_all.attention)


def test_a_dense_model_that_chooses_every_key_has_the_same_pairs() -> None:
    wide = replace(V32, latent=replace(V32.latent, chosen=4 * K))
    pairs = [forward_flops(wide, length * K).attention for length in (4, 8)]
    assert pairs[1] == pytest.approx(pairs[0] * 2 * (2 - 1 / 2))  # under a causal mask 4K of 8K keys, or all before


def test_the_indexers_work_is_balanced_on_a_zigzag_ring() -> None:
    """At 1M on 16 ranks, in pairs of a query and a key before it."""
    shares = {}
    for balance in ("zigzag", "contiguous"):
        layouts = [SequenceLayout(K * K, abstract_grid(ring=16).at(ring=rank), balance) for rank in range(16)]
        spans = [layout.local_spans for layout in layouts]
        work = [sum((stop - start) * (start + stop + 1) // 2 for start, stop in each) for each in spans]
        shares[balance] = max(work) * 16 / sum(work)
    assert shares == {"zigzag": 1.0, "contiguous": pytest.approx(31 / 16, rel=1e-4)}
