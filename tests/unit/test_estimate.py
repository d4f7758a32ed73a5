# SPDX-License-Identifier: Apache-2.0
"""A step's time in closed form: by hand on a toy machine, against the program's byte counts, and by its trends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.decisions.division import goes_by_keys
from megatron.formulas.flops import step_flops
from megatron.formulas.kinds.expert_figures import Mixture
from megatron.formulas.kinds.latent_figures import Latent
from megatron.formulas.kinds.state_figures import LinearAttention
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.cost.estimate import Estimate, estimate, layer_works, step_parts
from megatron.simulator.cost.kinds.chunk_operations import (
    chunked_backward,
    chunked_forward,
    copied_in_ffn_backward,
    loaded_in_backward,
    stored_in_forward,
)
from megatron.simulator.cost.kinds.ring_operations import attended, to_heads, to_sequence
from megatron.simulator.cost.layer_operations import layer
from megatron.simulator.cost.operations import Segment
from megatron.simulator.cost.step_operations import (
    States,
    ends,
    gather_parameters,
    reduce_gradients,
    stage_transfer,
    states,
    sum_shared_gradients,
)
from megatron.simulator.cost.trace import Event, Kernel, Trace, Transfer
from megatron.simulator.machines.machine import Calibration, Link, Machine, Rate
from megatron.simulator.machines.machine_file import load
from tests.properties import examples
from tests.unit.closed_forms import busiest_share, copied_bytes, loads, sent_bytes

GEMM, FORWARD, BACKWARD = 1e14, 8e13, 5e13
TOY = Machine(
    name="toy",
    memory=1e12,
    reserved=0,
    peak={"bf16": 2e14, "fp32": 1e14},
    memory_bandwidth=1e18,  # kernels bound by memory cost nothing
    gemm=Rate(((1.0, GEMM),)),
    attention=Rate(((1.0, FORWARD),)),
    attention_backward=Rate(((1.0, BACKWARD),)),
    launch=0.0,
    gpus=8,
    link=Link(1e11, 0.0),
    host_link=Link(1e18, 0.0),
    host_memory=1e15,
    network=Link(1e10, 0.0),
)
LLAMA = Shape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
WORK = Workload(LLAMA, 65536)


def step(machine: Machine = TOY, workload: Workload = WORK, **grid: object) -> Estimate:
    return estimate(workload, Strategy(**grid), machine)


def attention_flops(seq_length: int) -> float:
    return 4.0 * seq_length**2 / 2 * LLAMA.layers * 4096


def linear_flops(seq_length: int) -> float:
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    return 2.0 * seq_length * (32 * layer + 4096 * 128256)


def test_one_gpu_by_hand():
    result = step()
    assert result.parts["gemm"] == pytest.approx(3 * linear_flops(65536) / GEMM, rel=1e-6)
    flash = attention_flops(65536)
    assert result.parts["attention"] == pytest.approx(flash / FORWARD + 2.5 * flash / BACKWARD, rel=1e-6)
    assert (
        result.seconds
        == pytest.approx(sum(result.parts.values()))
        == pytest.approx(result.parts["gemm"] + result.parts["attention"], rel=1e-3)
    )
    assert result.flops == pytest.approx(3 * (linear_flops(65536) + flash), rel=1e-9)
    assert result.mfu == pytest.approx(result.flops / result.seconds / 2e14)
    assert result.mfu_full_mask_with_recompute * result.seconds * 2e14 == pytest.approx(
        3 * (linear_flops(65536) + 2 * flash)
    )
    assert result.tokens_per_second == pytest.approx(65536 / result.seconds)


@pytest.mark.parametrize("grid", [{"ulysses": 4}, {"ring": 4}, {"tensor": 4}, {"tensor": 2, "ulysses": 2, "ring": 2}])
def test_ranks_share_the_work(grid):
    even = replace(WORK, shape=replace(LLAMA, vocab=2**17))  # no padding for TP
    one, many = step(workload=even), step(workload=even, **grid)
    ranks = Strategy(**grid).ranks
    for kind in ("gemm", "attention"):
        assert many.parts[kind] == pytest.approx(one.parts[kind] / ranks, rel=1e-6)


def test_all_to_alls_send_the_bytes_of_the_head_plan():
    strategy = Strategy(ulysses=16)
    a = attended(WORK, strategy)
    assert (a.heads, a.kv_heads, a.sent_kv) == (2, 1, 1)  # 8 key/value heads on 16 ranks: each is sent to two ranks
    to_heads_bytes, to_sequence_bytes = (
        sum(t.bytes for segment in work for t in segment.transfers)
        for work in (to_heads(a, strategy, a.rows), to_sequence(a, strategy, a.rows))
    )
    assert to_heads_bytes == 2 * (65536 // 16) * (2 + 1 + 1) * 128 * 15
    assert to_sequence_bytes == 2 * (65536 // 16) * 2 * 128 * 15


@pytest.mark.parametrize("kv_heads", [32, 8, 1])
def test_copies_are_those_of_the_program(kv_heads):
    shape, chunks = replace(LLAMA, kv_heads=kv_heads), 8
    strategy = Strategy(ulysses=4, fpdt_chunk=8192)
    a = attended(Workload(shape, 65536), strategy)
    program = copied_bytes(chunks, tokens=8192, heads=a.heads, kv_heads=a.kv_heads, head_dim=128, itemsize=2)

    def copied(work: list[Segment]) -> tuple[float, ...]:
        sizes = dict.fromkeys(("to_host", "to_device"), 0.0)
        for segment in work:
            for copy in segment.copies:
                sizes[copy.direction] += copy.bytes * segment.count
        return tuple(sizes.values())

    assert goes_by_keys(a.heads, a.kv_heads, 2) == (kv_heads == 32)
    overlapped = Segment(copies=stored_in_forward(a, strategy, chunks))
    assert copied([overlapped, *chunked_forward(a, strategy, chunks, saving=True)]) == program.forward
    overlapped = Segment(copies=copied_in_ffn_backward(a, strategy, chunks) + loaded_in_backward(a, strategy, chunks))
    assert copied([overlapped, *chunked_backward(a, strategy, chunks)]) == program.backward
    assert copied(chunked_forward(a, strategy, chunks, saving=False)) == (0, 0)


def test_fpdt_computes_the_same_and_waits_for_the_host_when_chunks_are_small():
    whole, chunked = step(ulysses=4, recompute="full"), step(ulysses=4, recompute="full", fpdt_chunk=8192)
    assert chunked.parts["attention"] == pytest.approx(whole.parts["attention"])
    # Projections and FFN run again in the backward pass, but the FFN only once more.
    assert chunked.parts["gemm"] == pytest.approx(whole.parts["gemm"], rel=0.2)
    slow = replace(TOY, host_link=Link(4e9, 0.0))
    waits = [
        step(slow, ulysses=4, recompute="full", fpdt_chunk=chunk).parts.get("host", 0.0) for chunk in (1024, 2048, 8192)
    ]
    assert waits[0] > waits[1] > waits[2]
    assert "host" not in step(slow, ulysses=4, recompute="full", fpdt_chunk=2048, fpdt_offload=False).parts


def test_gradients_wait_unless_they_overlap_with_the_backward_pass():
    late = step(data=8, workload=replace(WORK, global_batch=8), overlap_grad_reduce=False, overlap_param_gather=False)
    held = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 2 * 128256 * 4096
    assert late.parts["dp"] == pytest.approx(6 * held * 7 / 8 / 1e11, rel=1e-3)  # fp32 gradients, bf16 weights
    early = step(data=8, workload=replace(WORK, global_batch=8))
    # Not overlapped: the embedding's gradient, and a bucket of DDP.
    assert early.parts["dp"] == pytest.approx(late.parts["dp"] * (40e6 + 128256 * 4096) / held, rel=1e-3)
    # ZeRO 3 gathers twice per micro-batch and hides all but the first and last transfers
    sharded = step(data=8, workload=replace(WORK, global_batch=8), zero=3)
    assert early.parts["dp"] < sharded.parts["dp"] < late.parts["dp"]
    shown = step(data=8, workload=replace(WORK, global_batch=8), zero=3, overlap_grad_reduce=False)
    assert sharded.parts["dp"] < shown.parts["dp"]


def test_concurrent_transfers_slow_down_compute():
    slowed = replace(TOY, calibration=Calibration(overlap=0.5))
    assert step(slowed, ring=4).seconds > step(ring=4).seconds


@pytest.mark.parametrize(
    ("grid", "word"),
    [({"ulysses": 3}, "query heads"), ({"data": 2}, "global batch"), ({"tensor": 2, "ulysses": 32}, "heads")],
)
def test_sizes_that_do_not_divide_are_refused(grid, word):
    with pytest.raises(ValueError, match=word):
        step(**grid)


powers = st.sampled_from([1, 2, 4, 8])
machines = st.sampled_from([load(name) for name in ("A100-80G", "H100-80G", "L20-48G")])


@examples(60)
@given(
    machines, powers, powers, powers, powers, powers, st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(["none", "selective", "full"]), st.booleans(), st.booleans(), st.sampled_from([1, 2, 8]),
)  # fmt: skip
def test_no_step_is_faster_than_its_flops(
    machine, tensor, ulysses, ring, data, pipeline, zero, recompute, fpdt, contiguous, batches
):
    if ulysses * tensor > 32:
        return
    strategy = Strategy(
        tensor=tensor, ulysses=ulysses, ring=ring, data=data, pipeline=pipeline, zero=zero, recompute=recompute,
        fpdt_chunk=8192 if fpdt else 0, balance="contiguous" if contiguous else "zigzag",
    )  # fmt: skip
    result = estimate(Workload(LLAMA, 131072, batches * data), strategy, machine)
    assert all(seconds >= 0 for seconds in result.parts.values())
    assert result.seconds == pytest.approx(sum(result.parts.values()))
    assert 0 < result.mfu < 1


# --- the USP paper's third recommendation; test_planner.py has all seven ---

A800 = load("A800-80G")


def test_zero_spans_data_and_sequence_parallel_ranks():
    """3: all ranks share the optimizer's work, except setting complete gradients to zero."""
    shared, both, alone = (step(A800, ulysses=8, zero=zero).parts["optimizer"] for zero in (2, 1, 0))
    assert both < alone / 4 and shared < both
    clipped = 50 / 42  # bytes of a parameter: with ZeRO 2, gradients are clipped by a pass of its own
    assert shared == pytest.approx(clipped * alone / 8, rel=0.01)


# The estimate has exactly the bytes by axis and FLOPs of the closed forms.


COUNTED_LLAMA = Shape(layers=4, hidden=256, ffn=768, heads=16, kv_heads=4, head_dim=32, vocab=1000)
GPT = replace(COUNTED_LLAMA, kv_heads=16, gated=False, bias=True, layer_norm=True, tied=True, positions=4096)
SHAPES = {
    "gqa": COUNTED_LLAMA,
    "mqa": replace(COUNTED_LLAMA, kv_heads=1),
    "mha, tied": GPT,
    "norms of queries and keys": replace(COUNTED_LLAMA, qk_norm=True, qkv_bias=True),
}
MIXTURE = replace(COUNTED_LLAMA, mixture=Mixture(16, 4, 96, shared=128, layers=(0, 1, 1, 1)))
ALL_MIXED = replace(COUNTED_LLAMA, mixture=replace(MIXTURE.mixture, layers=(1, 1, 1, 1)))
LATENT = replace(
    COUNTED_LLAMA, kv_heads=16, head_dim=48, qk_norm=True, latent=Latent(queries=128, keys=64, rotated=16, value=32)
)
WITHOUT_QUERIES = replace(LATENT, latent=Latent(queries=0, keys=64, rotated=16, value=32))


def sharded_transfers(strategy: Strategy, held: States) -> Iterator[Transfer]:
    """The gathers and reductions of ZeRO 2 and 3 in each micro-batch."""
    gathers = 2 if strategy.zero == 3 else 1  # forward, and again backward
    yield replace(gather_parameters(strategy, held.layer), count=gathers * held.layers)
    yield replace(reduce_gradients(strategy, held.layer), count=held.layers)
    yield gather_parameters(strategy, held.ends)
    yield reduce_gradients(strategy, held.ends)
    yield replace(gather_parameters(strategy, held.experts, "expert dp"), count=gathers)
    yield reduce_gradients(strategy, held.experts, over="expert dp")


def step_trace(workload: Workload, strategy: Strategy) -> Trace:
    """All kernels, transfers and copies that `estimate` prices, except the
    optimizer's, without their concurrency."""
    batches, last = strategy.micro_batches(workload), strategy.pipeline - 1
    held, span = states(workload.shape, strategy, last), strategy.stage_span(workload.shape.layers, last)
    embedding, loss = ends(workload, strategy)
    events = []
    for how, layers in strategy.layer_kinds(held.layers):
        for kind, share in layer_works(workload, held.experts_share, span):
            forward, backward = layer(kind, how)
            events += _events([*forward, *backward], batches * layers * share)
    events += _events(loss, batches)
    if strategy.pipeline == 1:
        events += _events(embedding, batches)
    if strategy.zero >= 2:
        events += [replace(event, count=event.count * batches) for event in sharded_transfers(strategy, held)]
    else:
        events += [reduce_gradients(strategy, held.all)]
        events += [gather_parameters(strategy, held.all)] if strategy.zero else []
        events += [reduce_gradients(strategy, held.experts, over="expert dp")]
        events += [gather_parameters(strategy, held.experts, "expert dp")] if strategy.zero else []
    return Trace([*events, *sum_shared_gradients(workload.shape, strategy, held), stage_transfer(workload, strategy)])


def _events(segments: Iterable[Segment], times: int) -> Iterator[Event]:
    for segment in segments:
        for event in (*segment.kernels, *segment.transfers, *segment.copies):
            yield replace(event, count=event.count * segment.count * times)


def check(workload: Workload, strategy: Strategy) -> None:
    trace = step_trace(workload, strategy)
    sent, formula = trace.communication_bytes(), sent_bytes(workload, strategy, stage=strategy.pipeline - 1)
    assert sent.pop("other") == 0
    formula["pp"] -= formula.pop("other") and loads(workload, strategy.pipeline)  # numbers for the log
    mixed = workload.shape.mixture or workload.shape.linear  # then shares of layers are rounded
    expected = {axis: size for axis, size in formula.items() if size}
    assert {axis: size for axis, size in sent.items() if size} == pytest.approx(expected, abs=1 if mixed else 0)
    if workload.shape.linear:  # executed in blocks, which formulas do not count
        return

    def computed(kind: str, word: str = "") -> float:
        return sum(
            event.flops * event.count
            for event in trace.events
            if isinstance(event, Kernel) and event.kind == kind and word in event.name
        )

    logits, formula = computed("gemm", "logits"), step_flops(workload, strategy)
    gemm = computed("gemm") - logits + logits / strategy.pipeline  # only one stage has logits
    assert strategy.ranks * gemm == pytest.approx(formula.gemm, rel=1e-12)
    share = busiest_share(strategy.ring, strategy.balance, workload.causal)
    assert strategy.ranks * computed("attention") == pytest.approx(formula.attention * share, rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "given",
    [
        {"tensor": 16},  # more ranks than key/value heads
        {"tensor": 8, "sequence_parallel": False, "recompute": "full"},
        {"tensor": 2, "ulysses": 4, "ring": 2, "data": 2, "zero": 3, "recompute": "selective"},
        {"ring": 2, "recompute": "full"},
        {"ring": 4, "balance": "contiguous", "data": 2, "zero": 0},
        {"ring": 8, "ulysses": 8},
        {"ulysses": 16, "zero": 2, "micro_batch": 2, "ffn_chunks": 4, "loss_chunks": 8},
        {"fpdt_chunk": 512, "ring": 2, "tensor": 2, "recompute": "full"},
        {"fpdt_chunk": 1024, "ulysses": 4, "fpdt_offload": False, "recompute": "full", "recompute_layers": 2},
        {"fpdt_chunk": 4096, "ring": 4, "balance": "contiguous"},
        {"pipeline": 2, "tensor": 2, "data": 2},
        {"pipeline": 2, "virtual": 2, "recompute": "full", "offload_checkpoints": True},
    ],
    ids=lambda given: " ".join(f"{key}={value}" for key, value in given.items()),
)
def test_a_step_sends_and_computes_what_the_formulas_say(shape: str, given: dict) -> None:
    strategy = Strategy(**given)
    check(Workload(SHAPES[shape], 4096, 4 * strategy.data * strategy.micro_batch), strategy)


HYBRID = replace(COUNTED_LLAMA, linear=LinearAttention((1, 1, 1, 0), 8, heads=16, keys=32, values=64, width=4))
STATES = LinearAttention((1, 0, 1, 0), 8, 16, 32, 64, 4, "mamba2", delta=False)
MAMBA = replace(COUNTED_LLAMA, linear=STATES, pattern="M*M-")
ALL_KINDS = replace(
    MAMBA,
    linear=replace(MAMBA.linear, layers=(1, 0, 0, 0)),
    mixture=replace(MIXTURE.mixture, layers=(0, 0, 0, 1)),
    pattern="M-*E",
)
FEW_STATES = replace(HYBRID, linear=replace(HYBRID.linear, key_heads=2, heads=6))


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        (MIXTURE, {"data": 4, "expert": 4}),
        (MIXTURE, {"ulysses": 2, "ring": 2, "data": 2, "expert": 8, "recompute": "full", "zero": 0}),
        (MIXTURE, {"tensor": 2, "data": 4, "expert": 4, "expert_tensor": 2, "micro_batch": 2}),
        (ALL_MIXED, {"pipeline": 2, "tensor": 2, "data": 2, "expert": 4, "recompute": "selective"}),
        (LATENT, {"ulysses": 2, "ring": 2, "recompute": "full"}),
        (LATENT, {"tensor": 4, "ring": 4, "zero": 3}),
        (LATENT, {"pipeline": 2, "data": 2, "ffn_chunks": 4}),
        (WITHOUT_QUERIES, {"tensor": 2, "ulysses": 4}),
        (LATENT, {"fpdt_chunk": 512, "ulysses": 2, "ring": 2, "recompute": "full"}),
        (LATENT, {"fpdt_chunk": 1024, "ulysses": 4, "fpdt_offload": False}),
        (replace(LATENT, mixture=MIXTURE.mixture), {"ulysses": 2, "data": 2, "expert": 4}),
        (MIXTURE, {"data": 8, "expert": 4, "zero": 3}),
        (MIXTURE, {"ulysses": 2, "ring": 2, "data": 2, "expert": 2, "zero": 2, "recompute": "full"}),
        (HYBRID, {"ring": 4, "data": 2, "recompute": "full"}),
        (HYBRID, {"ulysses": 2, "ring": 2, "zero": 3}),
        (FEW_STATES, {"ulysses": 4, "ring": 2, "recompute": "selective"}),
        (HYBRID, {"tensor": 2, "pipeline": 2, "data": 2}),
        (MAMBA, {"ring": 4, "data": 2, "recompute": "full"}),
        (MAMBA, {"ulysses": 2, "ring": 2, "zero": 3, "ffn_chunks": 4}),
        (MAMBA, {"tensor": 2, "pipeline": 2, "data": 2, "recompute": "selective"}),
        (ALL_KINDS, {"tensor": 2, "ulysses": 2, "data": 2, "expert": 4}),
    ],
)
def test_a_step_of_other_layers_does_too(shape: Shape, given: dict) -> None:
    strategy = Strategy(**given)
    check(Workload(shape, 4096, 4 * strategy.data * strategy.micro_batch), strategy)


@pytest.mark.parametrize("shape", [HYBRID, MAMBA])
def test_the_bytes_of_states_do_not_grow_with_the_length(shape: Shape) -> None:
    strategy = Strategy(ulysses=2, ring=4)
    short, long = (sent_bytes(Workload(shape, length), strategy) for length in (2**13, 2**17))
    assert short["cp"] == long["cp"] > 0 and long["ring"] == 16 * short["ring"] > 0
    parts = [step_parts(Workload(shape, length), strategy, TOY) for length in (2**13, 2**17)]
    assert parts[0]["cp"] == pytest.approx(parts[1]["cp"])


def test_hybrids_without_a_formula() -> None:
    for shape in (HYBRID, MAMBA):
        with pytest.raises(ValueError, match="(linear attention has|hybrid models have) no formula with FPDT"):
            step_parts(Workload(shape, 4096, 8), Strategy(fpdt_chunk=1024), TOY)
    strategy, large = Strategy(pipeline=2, virtual=2), replace(MAMBA, linear=replace(MAMBA.linear, keys=256))
    with pytest.raises(ValueError, match="no formula with virtual pipeline stages"):
        step_parts(Workload(MAMBA, 4096, 8), strategy, TOY)
    with pytest.raises(ValueError, match="more than 128 keys a head have no formula"):
        step_parts(Workload(large, 4096, 8), Strategy(), TOY)


def test_a_hybrid_waits_for_its_slowest_stage() -> None:
    """Stages have other kinds of layers: the same layers in another order take another time."""
    even, uneven = (
        replace(MAMBA, pattern=pattern, linear=replace(MAMBA.linear, layers=tuple(kind == "M" for kind in pattern)))
        for pattern in ("M-M-", "--MM")
    )
    strategy = Strategy(pipeline=2)
    one, other = (step_parts(Workload(shape, 2**14, 8), strategy, TOY) for shape in (even, uneven))
    whole = [sum(step_parts(Workload(shape, 2**14, 8), Strategy(), TOY).values()) for shape in (even, uneven)]
    assert whole[0] == pytest.approx(whole[1])
    assert sum(other.values()) > 1.2 * sum(one.values())


def test_a_step_waits_for_the_busiest_experts() -> None:
    strategy = Strategy(ulysses=2, data=4, expert=8)
    even, busy = (step_parts(Workload(MIXTURE, 65536, 4, imbalance=factor), strategy, TOY) for factor in (1.0, 2.0))
    assert busy["ep"] > 1.5 * even["ep"] and busy["gemm"] > even["gemm"]
    assert busy["attention"] == even["attention"]
    for wrong in ({"ffn_chunks": 4}, {"fpdt_chunk": 4096}):
        with pytest.raises(ValueError, match="experts have no formula"):
            step_parts(Workload(MIXTURE, 65536, 4), strategy.but(**wrong), TOY)
    with pytest.raises(ValueError, match="gates .* have no formula with FPDT"):
        step_parts(Workload(replace(COUNTED_LLAMA, output_gate=True), 65536, 4), Strategy(fpdt_chunk=4096), TOY)
    whole, one = (step_parts(Workload(MIXTURE, 65536, 4, imbalance=factor), Strategy(), TOY) for factor in (1.0, 2.0))
    assert whole == one  # a rank with all experts gets all tokens


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(SHAPES.values())), st.booleans(),
    st.builds(
        Strategy, tensor=powers, ulysses=st.sampled_from([1, 2]), ring=powers, data=st.sampled_from([1, 2]),
        pipeline=st.sampled_from([1, 2, 4]), micro_batch=st.sampled_from([1, 2]), zero=st.integers(0, 3),
        recompute=st.sampled_from(["none", "selective", "full"]), recompute_layers=st.sampled_from([1, 2]),
        offload_checkpoints=st.booleans(), fpdt_chunk=st.sampled_from([0, 512, 2048]), fpdt_offload=st.booleans(),
        ffn_chunks=st.sampled_from([0, 4]), loss_chunks=st.sampled_from([0, 4]),
        balance=st.sampled_from(["zigzag", "contiguous"]), sequence_parallel=st.booleans(),
        overlap_grad_reduce=st.booleans(),
    ),
)  # fmt: skip
def test_any_step_sends_and_computes_what_the_formulas_say(shape: Shape, causal: bool, strategy: Strategy) -> None:
    assume(strategy.pipeline == 1 or strategy.zero < 2)
    assume(not strategy.fpdt_chunk or strategy.recompute != "selective")
    check(Workload(shape, 4096, 2 * strategy.data * strategy.micro_batch, causal), strategy)
