# SPDX-License-Identifier: Apache-2.0
"""Closed forms compared with steps of the real program; the papers' forms compared with the papers and with ours."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.formulas import papers
from megatron.formulas.device_memory import device_memory
from megatron.formulas.flops import step_flops
from megatron.formulas.kinds.attention_figures import attention_working
from megatron.formulas.kinds.expert_figures import Mixture
from megatron.formulas.kinds.latent_figures import Latent
from megatron.formulas.kinds.state_figures import LinearAttention
from megatron.formulas.parameters import model_states, rank_parameters, rank_states, stage_parameters
from megatron.formulas.sizes import sizes_of
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.training.arguments.parser import parse
from megatron.training.report import mfu as program
from megatron.training.settings.models import model_shape
from tests.distributed.pool import fork_server
from tests.patience import patience
from tests.shared import Shared
from tests.unit import paper_forms
from tests.unit.closed_forms import count_parameters, sent_bytes
from tests.unit.formula_runs import LLAMA, Case, Measured, flags, measure_all

S = Strategy
GQA = Shape(layers=4, hidden=256, ffn=768, heads=8, kv_heads=4, head_dim=32, vocab=512)
TWO = replace(GQA, layers=2)
MHA = replace(GQA, layers=2, kv_heads=8, vocab=2048)
LONG, MANY_WORDS = replace(GQA, layers=10), replace(GQA, vocab=16384)
STREAMED = {"fpdt_chunk": 512, "recompute": "full", "stream_hidden": True}
OPT = Shape(4, 256, 1024, 8, 8, 32, 512, gated=False, bias=True, layer_norm=True, tied=True, positions=2048)
FULL_RECOMPUTE = {"recompute": "full"}
KEPT = {"recompute": "full", "keep_attention": True}
BLOCK = {"recompute": "full", "recompute_method": "block", "recompute_layers": 2}
IN_RUNS = {"recompute": "full", "recompute_layers": 2, "ffn_chunks": 4}
UNITS = {"recompute": "full", "recompute_layers": 2, "fpdt_chunk": 512, "data": 2}
SOME_LAYERS = {"fpdt_chunk": 512, "data": 2, **BLOCK}

EXPERTS = Mixture(experts=8, topk=2, ffn=256, layers=(1, 1, 1, 1))
SECOND, RUNS_OF_TWO = replace(EXPERTS, layers=(0, 1, 0, 1)), {"recompute": "full", "recompute_layers": 2}
MOE, SOME = replace(GQA, mixture=EXPERTS), Mixture(8, 4, 384, shared=256, layers=(0, 0, 1, 1))
LATENT = replace(GQA, kv_heads=8, head_dim=48, qk_norm=True, latent=Latent(queries=128, keys=64, rotated=16, value=32))
NARROW = replace(LATENT, qk_norm=False, latent=Latent(queries=0, keys=64, rotated=16, value=32))


def case(name: str, shape: Shape, strategy: Strategy, batch: int = 1, **more: int) -> Case:
    return Case(name, Workload(shape, 2048, batch), strategy, **more)


def long_case(name: str, shape: Shape, strategy: Strategy, batch: int = 1, times: int = 1, **more: int) -> Case:
    return Case(name, Workload(shape, times * 8192, batch), strategy, **more)


# TP, and DP with few other axes, are compared on a simulated GPU, because gloo reduces copies, which formulas leave
# out.
USUAL = [
    case("gpt", OPT, S(zero=0)),
    case("tensor without TP-sp", TWO, S(tensor=2, sequence_parallel=False, data=2), 2, itemsize=2),
    case("ulysses, more ranks than keys", TWO, S(ulysses=8, data=2, recompute="full"), 2, itemsize=2),
    case("everything", TWO, S(tensor=2, ulysses=2, ring=2, data=2), 2, rank=4, itemsize=2),
    case("fpdt, ring", GQA, S(fpdt_chunk=512, ring=2, data=2, recompute="full"), 2, rank=1, itemsize=2),
    case("pipeline, last", GQA, S(pipeline=2), 4, rank=1, stage=1),
    case("latents, FPDT, ZeRO 3", LATENT, S(fpdt_chunk=512, zero=3, ulysses=2, data=2), 2, itemsize=2),
    case("experts, ZeRO 3, recomputed", MOE, S(zero=3, data=2, expert=2, **FULL_RECOMPUTE), 2, itemsize=2),
    case(
        "latents, some experts, recomputed",
        replace(LATENT, mixture=SOME),
        S(ring=2, data=2, expert=2, **FULL_RECOMPUTE),
        2,
        rank=1,
    ),
]
FULL_MIXTURES = [
    case("gates on attention's output", replace(GQA, output_gate=True), S(zero=0)),
    case("gates, bf16, Ulysses", replace(GQA, output_gate=True), S(ulysses=2, data=2), 2, itemsize=2),
    case(
        "gates, bf16, Ring, recomputed",
        replace(GQA, output_gate=True),
        S(ring=2, data=2, **FULL_RECOMPUTE),
        2,
        rank=1,
        itemsize=2,
    ),
    case(
        "gates, TP, selective",
        replace(GQA, output_gate=True),
        S(tensor=2, data=2, recompute="selective"),
        2,
        itemsize=2,
    ),
    case("experts on EP", MOE, S(data=4, expert=2), 4, itemsize=2),
    case("latents, Ulysses", LATENT, S(ulysses=2, data=2), 2, itemsize=2),
    case("norms of heads", replace(GQA, qk_norm=True, head_dim=64), S(zero=0)),
    case("norms of heads, bf16", replace(GQA, qk_norm=True, head_dim=64), S(ulysses=2, data=2), 2, itemsize=2),
    case("experts", MOE, S(zero=0)),
    case("few experts", replace(MOE, mixture=SOME), S(ulysses=2, data=2, expert=4), 2, itemsize=2),
    case("experts, recomputed", MOE, S(data=2, expert=2, **FULL_RECOMPUTE), 2, itemsize=2),
    case("experts, replayed", replace(MOE, mixture=replace(EXPERTS, replay=True)), S(data=2, **FULL_RECOMPUTE), 2),
    case("one expert a rank", MOE, S(data=8, expert=8), 8, itemsize=2),
    case("experts split over TP", MOE, S(tensor=2, data=2, expert=2, expert_tensor=2), 2, itemsize=2),
    case("experts with biases", replace(OPT, mixture=EXPERTS), S(data=2, expert=2), 2),
    case("experts not split, TP", MOE, S(tensor=2, data=2, expert=4), 2, itemsize=2),
    case("experts, pipeline", replace(MOE, mixture=SOME), S(pipeline=2, data=2, expert=2), 4, stage=1, rank=2),
    case("experts, dense stage", replace(MOE, mixture=SOME), S(pipeline=2, data=2, expert=2), 4, itemsize=2),
    case("experts, ZeRO 2", MOE, S(zero=2, data=4, expert=2), 4, itemsize=2),
    case("experts, ZeRO 2, fp32", MOE, S(zero=2, data=4, expert=2), 8),
    case("experts, ZeRO 2, units of two", MOE, S(zero=2, data=4, expert=2, **RUNS_OF_TWO), 4, itemsize=2),
    case("few experts, ZeRO 3", replace(MOE, mixture=SOME), S(zero=3, ulysses=2, data=4, expert=2), 4, itemsize=2),
    case(
        "few experts, ZeRO 3, Ring, recomputed",
        replace(MOE, mixture=SOME),
        S(zero=3, ring=2, data=2, expert=2, **FULL_RECOMPUTE),
        2,
        rank=1,
        itemsize=2,
    ),
    case("every second layer, ZeRO 3", replace(MOE, mixture=SECOND), S(zero=3, data=4, expert=2), 4, itemsize=2),
    case(
        "latents, some experts, ZeRO 3",
        replace(LATENT, mixture=SOME),
        S(zero=3, ring=2, data=2, expert=2, **FULL_RECOMPUTE),
        2,
        rank=1,
    ),
    case("experts, selective", MOE, S(data=2, expert=2, recompute="selective"), 2, itemsize=2),
    case("latents", LATENT, S(zero=0)),
    case("latents, Ring", LATENT, S(ring=4), rank=1, itemsize=2),
    case("latents, selective", LATENT, S(recompute="selective"), itemsize=2),
    case("latents, TP", LATENT, S(tensor=2, data=2), 2, itemsize=2),
    case("latents, recomputed, ZeRO 3", LATENT, S(zero=3, data=2, **FULL_RECOMPUTE), 2, itemsize=2),
    case("latents, FPDT, fp32", LATENT, S(fpdt_chunk=512)),
    case("latents, FPDT, fp32, recomputed", LATENT, S(fpdt_chunk=512, ulysses=2, **FULL_RECOMPUTE)),
    case("latents, FPDT, USP", LATENT, S(fpdt_chunk=512, ulysses=2, ring=2, **FULL_RECOMPUTE), rank=2, itemsize=2),
    case("latents, FPDT, Ring", LATENT, S(fpdt_chunk=512, ring=2, data=2), 2, rank=1, itemsize=2),
    case("latents, FPDT, TP", LATENT, S(fpdt_chunk=512, tensor=2, ulysses=2, data=2), 2, itemsize=2),
    case("latents, FPDT on the device", LATENT, S(fpdt_chunk=512, fpdt_offload=False, ulysses=2), itemsize=2),
    case("latents, FPDT, streamed", LATENT, S(zero=3, ulysses=2, **STREAMED), itemsize=2),
    case("latents without queries, FPDT", NARROW, S(fpdt_chunk=512, ulysses=2, **FULL_RECOMPUTE), itemsize=2),
    case("latents, without those of queries", NARROW, S(ulysses=2, ring=2), itemsize=2),
]
LINEAR = LinearAttention(layers=(1, 1, 1, 0), key_heads=4, heads=8, keys=32, values=64, width=4)
HYBRID, ALL_STATES = replace(GQA, linear=LINEAR), replace(GQA, linear=replace(LINEAR, layers=(1,) * 4))
FEW_HEADS = replace(GQA, linear=replace(LINEAR, key_heads=1, heads=3))
LARGE_KEYS = replace(GQA, linear=replace(LINEAR, key_heads=2, heads=4, keys=64, values=32))
USUAL.append(case("states, Ulysses and Ring", HYBRID, S(ulysses=2, ring=2), itemsize=2, rank=2))
FULL_MIXTURES += [
    case("states", HYBRID, S(zero=0)),
    case("states alone, bf16", ALL_STATES, S(), itemsize=2),
    case("large keys", LARGE_KEYS, S(zero=0)),
    case("states, Ring", HYBRID, S(ring=2, data=2), 2, rank=1),
    case("few states by Ulysses", FEW_HEADS, S(ulysses=2, ring=2), rank=2, itemsize=2),
    case("states, TP", HYBRID, S(tensor=2, data=2), 2, itemsize=2),
    case("states, TP without TP-sp", HYBRID, S(tensor=2, sequence_parallel=False, data=2), 2, itemsize=2),
    case("states, recomputed", HYBRID, S(data=2, **FULL_RECOMPUTE), 2, itemsize=2),
    case("states, selective", HYBRID, S(recompute="selective"), itemsize=2),
    case("states, selective, fp32", HYBRID, S(recompute="selective")),
    case("states, offloaded", HYBRID, S(offload_checkpoints=True, **FULL_RECOMPUTE), itemsize=2),
    case("states, first stage", HYBRID, S(pipeline=2, data=2), 4, itemsize=2),
    case("states, last stage", HYBRID, S(pipeline=2, data=2), 4, stage=1, rank=2, itemsize=2),
    case("states, ZeRO 2", HYBRID, S(zero=2, data=2), 2, itemsize=2),
    case("states, ZeRO 3, recomputed", HYBRID, S(zero=3, data=2, **FULL_RECOMPUTE), 2, itemsize=2),
    case("states, ZeRO 3, Ring", HYBRID, S(zero=3, ring=2), itemsize=2, rank=1),
    case("states, chunks", HYBRID, S(ffn_chunks=4, loss_chunks=8, **FULL_RECOMPUTE)),
    case("states, two samples", HYBRID, S(micro_batch=2), 2),
    case("states and experts", replace(HYBRID, mixture=EXPERTS), S(data=2, expert=2), 2, itemsize=2),
    case("states and experts, ZeRO 3", replace(HYBRID, mixture=EXPERTS), S(zero=3, data=4, expert=2), 4, itemsize=2),
]
# Layers of Mamba2, attention, MLP and experts alone; in the wide model a span has several segments.
MAMBA2 = LinearAttention(layers=(1, 0, 1, 0), key_heads=4, heads=8, keys=32, values=64, width=4, delta=False)
MAMBA = replace(GQA, linear=MAMBA2, pattern="M*M-")
NEMOTRON = replace(MAMBA, hidden=512, ffn=1024, head_dim=64, gated=False, linear=replace(MAMBA2, heads=32, keys=64))
ALL_MAMBA = replace(MAMBA, linear=replace(MAMBA2, layers=(1,) * 4), pattern="MMMM")
ONE_GROUP = replace(MAMBA, linear=replace(MAMBA2, key_heads=1))
ALL_KINDS = replace(
    MAMBA,
    linear=replace(MAMBA2, layers=(1, 0, 0, 0)),
    mixture=replace(EXPERTS, layers=(0, 0, 0, 1)),
    pattern="M*-E",
)
USUAL += [
    case("Mamba2, all kinds, ZeRO 3", ALL_KINDS, S(zero=3, ring=2, expert=2), itemsize=2, rank=1),
]
FULL_MIXTURES += [
    case("Mamba2", MAMBA, S(zero=0)),
    case("Mamba2 alone, bf16", ALL_MAMBA, S(data=2), 2, itemsize=2),
    long_case("Mamba2, wide", NEMOTRON, S(zero=0)),
    long_case("Mamba2, wide, bf16", NEMOTRON, S(), itemsize=2),
    case("Mamba2, Ulysses", MAMBA, S(ulysses=4), itemsize=2, rank=1),
    long_case("Mamba2, wide, Ulysses and Ring", NEMOTRON, S(ulysses=2, ring=2), rank=2, itemsize=2),
    long_case("Mamba2, wide, Ulysses", NEMOTRON, S(ulysses=4), itemsize=2, rank=1),
    case("Mamba2, Ring", MAMBA, S(ring=2, data=2), 2, rank=1),
    case("Mamba2, one group", ONE_GROUP, S(ulysses=2, ring=2), rank=2, itemsize=2),
    long_case("Mamba2, wide, eight ranks", NEMOTRON, S(ulysses=2, ring=4), rank=2, itemsize=2, times=4),
    case("Mamba2, TP", MAMBA, S(tensor=2, sequence_parallel=False, data=2), 2, itemsize=2),
    case("Mamba2, TP-sp", MAMBA, S(tensor=2, data=2), 2, itemsize=2),
    long_case("Mamba2, wide, TP-sp, Ring", NEMOTRON, S(tensor=2, ring=2), rank=2, itemsize=2),
    case("Mamba2, first stage", MAMBA, S(pipeline=2, data=2), 4, itemsize=2),
    case("Mamba2, last stage", MAMBA, S(pipeline=2, data=2), 4, stage=1, rank=2, itemsize=2),
    case("Mamba2, ZeRO 2", MAMBA, S(zero=2, data=2), 2, itemsize=2),
    case("Mamba2, ZeRO 3", MAMBA, S(zero=3, data=2), 4),
    long_case("Mamba2, wide, ZeRO 3", NEMOTRON, S(zero=3, data=2), 2, itemsize=2),
    case("Mamba2, ZeRO 3, recomputed", MAMBA, S(zero=3, data=2, **FULL_RECOMPUTE), 2, itemsize=2),
    long_case("Mamba2, wide, recomputed", NEMOTRON, S(data=2, **FULL_RECOMPUTE), 2, itemsize=2),
    case("Mamba2, offloaded", MAMBA, S(offload_checkpoints=True, **FULL_RECOMPUTE), itemsize=2),
    case("Mamba2, selective, fp32", MAMBA, S(recompute="selective")),
    long_case("Mamba2, wide, selective", NEMOTRON, S(recompute="selective"), itemsize=2),
    case("Mamba2, chunks", MAMBA, S(ffn_chunks=4, loss_chunks=8, **FULL_RECOMPUTE)),
    case("Mamba2, two samples", MAMBA, S(micro_batch=2), 2),
    case("Mamba2, all kinds, recomputed", ALL_KINDS, S(ulysses=2, ring=2, expert=4, **FULL_RECOMPUTE), rank=2),
]
BUSY = replace(case("busy experts", MOE, S(data=4, expert=4), 4, itemsize=2).workload, imbalance=1.5)
FULL_MIXTURES.append(Case("busy experts", BUSY, S(data=4, expert=4), 2))
FULL = [  # combinations of the settings above
    case("ffn and loss in chunks", TWO, S(ffn_chunks=4, loss_chunks=8, recompute="full")),
    case("virtual stages", GQA, S(pipeline=2, virtual=2), 4),
    case("fpdt on the device, units of two", GQA, S(fpdt_offload=False, zero=3, **UNITS), 2, itemsize=2),
    case("fpdt, units of two, offloaded", GQA, S(offload_checkpoints=True, zero=2, **UNITS), 2, itemsize=2),
    case("fpdt, some layers, offloaded", GQA, S(offload_checkpoints=True, zero=3, **SOME_LAYERS), 2, itemsize=2),
    case("ffn in runs, units of two, offloaded", GQA, S(**IN_RUNS, offload_checkpoints=True)),
    case("two samples", TWO, S(micro_batch=2), 2),
    case("fpdt", GQA, S(fpdt_chunk=512)),
    case("streamed", LONG, S(zero=3, ulysses=4, **STREAMED), itemsize=2),
    case("streamed, many words", MANY_WORDS, S(zero=3, ulysses=2, data=2, **STREAMED), 2, itemsize=2),
    case("streamed, not sharded", GQA, S(zero=0, **STREAMED), itemsize=2),
    case("large vocabulary, bf16", MHA, S(), itemsize=2),
    case("pipeline, first", GQA, S(pipeline=2), 4),
    case("plain", TWO, S(zero=0)),
    case("zero 1", TWO, S(data=2), 2),
    case("zero 3", GQA, S(zero=3, data=2), 2),
    case("selective", TWO, S(recompute="selective")),
    case("tensor, more ranks than keys", TWO, S(tensor=8), itemsize=2),
    case("tensor, ZeRO 3, ring", GQA, S(tensor=2, zero=3, ring=2), itemsize=2),
    case("experts, tensor, ZeRO 3", MOE, S(tensor=2, zero=3, data=2, expert=2, expert_tensor=2), 2, itemsize=2),
    case("fpdt, ring of four", GQA, S(fpdt_chunk=512, ring=4), rank=1),
    case("fpdt in one chunk, ring of four", GQA, S(fpdt_chunk=2048, ring=4), rank=1),
    case("latents, fpdt, ring of four", LATENT, S(fpdt_chunk=512, ring=4), rank=1),
    case("fpdt, recomputed", GQA, S(fpdt_chunk=512, recompute="full"), itemsize=2),
    case("fpdt, as many keys", OPT, S(fpdt_chunk=512, recompute="full")),
    case("bf16", TWO, S(zero=0), itemsize=2),
    case("zero 2", GQA, S(zero=2, data=2), 2),
    case("recomputed", GQA, S(recompute="full")),
    case("attention kept", GQA, S(**KEPT)),
    case("attention kept, bf16", GQA, S(data=2, **KEPT), 2, itemsize=2),
    case("attention kept, Ulysses", TWO, S(ulysses=8, data=2, **KEPT), 2, itemsize=2),
    case("attention kept, Ring, ZeRO 3", GQA, S(ring=2, zero=3, data=2, **KEPT), 2, rank=1, itemsize=2),
    case("attention kept, pipeline", GQA, S(pipeline=4, **KEPT), 8),
    case("attention kept, offloaded", GQA, S(offload_checkpoints=True, **KEPT)),
    case("attention kept, some layers", GQA, S(data=2, keep_attention=True, **BLOCK), 2, itemsize=2),
    case("attention kept, latents", LATENT, S(ulysses=2, **KEPT), itemsize=2),
    case("attention kept, latents, fp32", LATENT, S(**KEPT)),
    case("attention kept, states", HYBRID, S(data=2, **KEPT), 2, itemsize=2),
    case("attention kept, all kinds", ALL_KINDS, S(ulysses=2, ring=2, expert=4, **KEPT), rank=2),
    case("attention kept, experts, ZeRO 3", MOE, S(zero=3, data=2, expert=2, **KEPT), 2, itemsize=2),
    case("tensor", TWO, S(tensor=2, data=2), 2, itemsize=2),
    case("ulysses", TWO, S(ulysses=2, data=2), 2),
    case("ring", TWO, S(ring=2, data=2), 2, rank=1),
    case("fpdt on the device", GQA, S(fpdt_chunk=512, fpdt_offload=False)),
    case("pipeline, recomputed", GQA, S(pipeline=4, recompute="full"), 8),
    case("fpdt, units of four", GQA, S(zero=3, **{**UNITS, "recompute_layers": 4}), 2, itemsize=2),
    case("ffn in runs, some layers", GQA, S(ffn_chunks=4, **BLOCK)),
    case("zero 3, some layers", GQA, S(zero=3, data=2, **BLOCK), 2),
    case("fpdt, offloaded, nothing recomputed", GQA, S(fpdt_chunk=512, fpdt_offload=False, offload_checkpoints=True)),
    case("offloaded", GQA, S(recompute="full", offload_checkpoints=True)),
    case("ring of four, recomputed", TWO, S(ring=4, data=2, recompute="full"), 2, rank=1),
    case("fpdt, ulysses, tensor", GQA, S(fpdt_chunk=512, tensor=2, ulysses=2, data=2, recompute="full"), 2, itemsize=2),
    case("zero 3, recomputed", GQA, S(zero=3, data=2, recompute="full"), 4),
]
FULL += FULL_MIXTURES
CASES = USUAL + FULL
CASES_PER_PROCESS = 4  # cases that one process measures
TOLERANCE = 0.025  # most errors are a tenth of that: docs/use/memory.md


@pytest.fixture(scope="module")
def measured(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Measured]:
    """The measured step of each case by name. A few are measured at a time, so that test processes share the work."""

    def measure_some(cases: list[Case]) -> dict[str, Measured]:
        file: Path = tmp_path_factory.mktemp("formulas") / "measured"
        process = fork_server().Process(target=measure_all, args=(cases, file))
        process.start()
        process.join(patience(120))
        assert process.exitcode == 0
        return dict(zip((case.name for case in cases), pickle.loads(file.read_bytes())))

    class Results(dict[str, Measured]):
        def __missing__(self, name: str) -> Measured:
            first = [case.name for case in CASES].index(name) // CASES_PER_PROCESS * CASES_PER_PROCESS
            self.update(shared(("formulas", first), lambda: measure_some(CASES[first : first + CASES_PER_PROCESS])))
            return self[name]

    return Results()


names = pytest.mark.parametrize(
    "case",
    [
        *USUAL[:CASES_PER_PROCESS],
        *(pytest.param(case, marks=pytest.mark.lab) for case in USUAL[CASES_PER_PROCESS:]),
        *(pytest.param(case, marks=pytest.mark.full) for case in FULL),
    ],
    ids=lambda case: case.name,
)


@names
def test_device_peak(case: Case, measured: Mapping[str, Measured]) -> None:
    memory = device_memory(case.workload, case.strategy, itemsize=case.itemsize, stage=case.stage, fused=case.fused)
    assert memory.total == pytest.approx(measured[case.name].peak, rel=TOLERANCE)


@names
def test_model_states_are_exact(case: Case, measured: Mapping[str, Measured]) -> None:
    strategy = case.strategy
    states = rank_states(rank_parameters(case.workload.shape, strategy, case.stage), strategy, case.itemsize)
    result = measured[case.name].states
    counters = result.pop("optimizer") - states.optimizer  # Adam's step counters, one number per parameter tensor
    linear = case.workload.shape.linear  # the buffer pads two vectors of a state to 64 numbers each, its end to 128
    padding = 12 * 128 * (sum(linear.layers) + 1) if linear else 0
    if (mixture := case.workload.shape.mixture) and case.workload.shape.bias:  # and the router's bias
        padding += 8 * 64 * sum(mixture.layers)
    assert -padding <= counters <= 8 * 32 * case.workload.shape.layers + 64
    assert {"parameters": states.parameters, "gradients": states.gradients} == result


@names
def test_host_bytes_are_exact(case: Case, measured: Mapping[str, Measured]) -> None:
    result = device_memory(case.workload, case.strategy, itemsize=case.itemsize, fused=case.fused).host
    assert result == measured[case.name].host


@names
def test_sent_bytes_are_exact(case: Case, measured: Mapping[str, Measured]) -> None:
    sent = sent_bytes(case.workload, case.strategy, case.itemsize, stage=case.stage)
    result = measured[case.name].sent
    assert {axis for axis, size in sent.items() if size} == set(result)
    for axis, size in result.items():
        assert 0 <= size - sent[axis] < 64, axis  # the difference is the loss and the gradient norm


@pytest.mark.parametrize("name", ["llama3-8b", "gpt-2.7b"])
def test_parameters_are_those_of_the_model(name: str) -> None:
    config = parse(f"--model {name} --seq-length 2048 --max-position-embeddings 2048".split())
    shape = model_shape(config.model, 128000)
    whole = sum(stage_parameters(shape, 1, 4, stage).numel for stage in range(4))
    twice = shape.hidden * 128000 if shape.tied else 0  # on the first stage and on the last
    assert whole - twice == count_parameters(config.model, 128000)


def test_kernels_of_a_gpu_need_less_memory() -> None:
    for one in CASES:
        eager, fused = (device_memory(one.workload, one.strategy, fused=fused).total for fused in (False, True))
        # Copies to the host are still running and keep their sources alive.
        assert fused <= eager or (one.strategy.fpdt_chunk and one.strategy.fpdt_offload)


def test_flops_equal_those_of_the_program() -> None:
    one = case("", TWO, S())
    config = parse(flags(one), dict(LLAMA), 1)
    ours = step_flops(one.workload, one.strategy)
    assert ours.model == pytest.approx(program.step_flops(config, TWO.vocab).model)
    full = step_flops(one.workload, S(recompute="full"))
    assert full.model == ours.model
    logits = 3 * 2 * one.workload.seq_length * TWO.hidden * TWO.vocab
    assert full.gemm - logits == pytest.approx((ours.gemm - logits) * 4 / 3)
    assert full.attention == pytest.approx(ours.attention * 4.5 / 3.5)


# --- the papers ---


def test_the_memory_pages_model_states() -> None:
    for billions, gigabytes in ((0.5, 8), (3, 48), (7, 112), (70, 1120)):  # section 15.1.1
        assert papers.model_states(billions * 1e9) / papers.GB == gigabytes
    assert papers.model_states(7.5e9) / papers.GB == 120
    assert round(papers.model_states(7.5e9, 64, zero=1) / papers.GB, 1) == 31.4
    held = stage_parameters(TWO, 1, 1, 0)
    ours = model_states(held, 0, 1, 2)
    assert sum(vars(ours).values()) == papers.model_states(held.numel) + 2 * held.numel  # gradients in fp32


def test_the_memory_pages_activations() -> None:
    b, s, d, heads, p = 2, 64, 32, 4, 2
    assert papers.ffn_activations(b, s, d, p) == 9 * b * s * d * p + b * s * d
    whole = papers.activations(3, b, s, d, heads, p)
    assert whole == 3 * (16 * b * s * d * p + 2 * b * s * d + 2 * b * s * s * heads * p + b * s * s * heads)
    for row in papers.QWEN2:
        linear, square = row.formula
        assert linear + square == pytest.approx(
            (papers.activations(row.layers, 1, row.length, row.hidden, row.heads) / papers.GB)
            - 2 * row.layers * row.length * row.hidden / papers.GB
        )
        assert square > 10 * row.square  # the paper prints the quadratic term of one layer
        assert row.as_printed[1] <= row.square <= row.as_printed[1] + 0.6
        if "7B" not in row.name:
            assert row.as_printed[0] == pytest.approx(row.linear, rel=0.01)


def test_fpdts_table_2_equals_the_memory_of_our_attention() -> None:
    rows = (paper_forms.FPDT_FORWARD, paper_forms.FPDT_BACKWARD)
    forward, backward = (dict(zip(paper_forms.FPDT_STEPS, row)) for row in rows)
    assert paper_forms.fpdt_attention() == (forward["attention"], backward["attention"])
    assert paper_forms.fpdt_attention(4) == (1, 2)
    workload, strategy = Workload(MHA, 512), S()
    sizes = sizes_of(workload, strategy, 2)
    kept = sizes.local_q + sizes.local_kv + sizes.local_q
    assert (kept, kept + attention_working(workload, strategy, 2) - sizes.lse) == (4 * sizes.hidden, 8 * sizes.hidden)
    assert paper_forms.fpdt_attention(heads=8, kv_heads=4) == (3, 6)


def test_usps_table_2_equals_the_elements_that_we_send() -> None:
    table = {row.method: row for row in paper_forms.usp_table_2(4)}
    layers, one = MHA.layers, 512 * MHA.hidden * 2

    def activations(strategy: Strategy, axis: str) -> float:
        return sent_bytes(Workload(MHA, 512, strategy.data), strategy, 2)[axis] / layers / one

    # The paper approximates (n-1)/n by 1; under Ulysses a rank keeps a quarter. TP also has embedding, loss and norms.
    assert activations(S(ulysses=4), "ulysses") == pytest.approx(table["SP-Ulysses"].activations * 3 / 4)
    deep = replace(MHA, layers=200, vocab=128)
    for method, strategy in (("TP-sp", S(tensor=4)), ("TP", S(tensor=4, sequence_parallel=False))):
        sent = sent_bytes(Workload(deep, 512), strategy, 2)["tp"] / 200 / one
        assert sent == pytest.approx(table[method].activations * 3 / 4, rel=0.02)
    # The paper counts k and v in the forward pass, and as much in the backward pass. Our backward pass sends k and v
    # again, and their gradients in fp32: 2 bytes per element forward, 2 + 4 backward.
    full = sent_bytes(Workload(MHA, 512, causal=False), S(ring=4), 2)["ring"] / layers / one
    assert full == pytest.approx(2 * table["SP-Ring"].activations * 3 / 4)
    zero = {row.method: row.parameters for row in paper_forms.usp_table_2(4)}
    for stage in (0, 1):  # bytes per element: 2 x 4 for fp32 gradients; ZeRO 1: 4, and 2 for new weights
        sent = sent_bytes(Workload(deep, 512, 4), S(data=4, zero=stage), 2)["dp"]
        numel = stage_parameters(deep, 1, 1, 0).numel
        assert sent == pytest.approx((8 if stage == 0 else 6) * numel * 3 / 4, rel=0.01)
        assert zero["DP"] == zero["ZeRO-1"] == 2
    group = {row.method: row.activations for row in paper_forms.usp_table_2(4, group=4)}
    assert group["SP-Ulysses"] == 1 + 1 / 4 and group["SP-Ring"] == 1 and group["TP-sp"] == 10


def test_ulysses_section_3_2() -> None:
    for ranks in (2, 4, 8):
        sent = sent_bytes(Workload(MHA, 512), S(ulysses=ranks), 2)["ulysses"]
        forward = sent / 2 / MHA.layers / 2  # the forward half, in elements
        assert forward == paper_forms.ulysses_per_link(512, MHA.hidden, ranks) * (ranks - 1) / ranks
    assert paper_forms.megatron_sp_per_link(512, 128) == 4 * 512 * 128
