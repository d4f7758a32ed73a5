# SPDX-License-Identifier: Apache-2.0
"""What the estimate prices, against the closed forms: the same bytes by axis, the same FLOPs, to the last one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.decisions.ring_work import busiest_share
from megatron.formulas.communication import sent_bytes
from megatron.formulas.flops import step_flops
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.cost.layer_operations import layer
from megatron.simulator.cost.operations import Segment
from megatron.simulator.cost.step_operations import (
    States,
    busiest_stage,
    gather_parameters,
    micro_batch,
    reduce_gradients,
    stage_transfer,
    states,
    sum_shared_gradients,
)
from megatron.simulator.cost.trace import Event, Kernel, Trace, Transfer

LLAMA = Shape(layers=4, hidden=256, ffn=768, heads=16, kv_heads=4, head_dim=32, vocab=1000)
GPT = replace(LLAMA, kv_heads=16, gated=False, bias=True, layer_norm=True, tied=True, positions=4096)
SHAPES = {
    "gqa": LLAMA,
    "mqa": replace(LLAMA, kv_heads=1),
    "mha, tied": GPT,
    "norms of queries and keys": replace(LLAMA, qk_norm=True, qkv_bias=True),
}


def sharded_transfers(strategy: Strategy, held: States) -> Iterator[Transfer]:
    """ZeRO 2 and 3, each micro-batch."""
    gathers = 2 if strategy.zero == 3 else 1  # forward, and again backward
    yield replace(gather_parameters(strategy, held.layer), count=gathers * held.layers)
    yield replace(reduce_gradients(strategy, held.layer), count=held.layers)
    yield gather_parameters(strategy, held.ends)
    yield reduce_gradients(strategy, held.ends)


def step_trace(workload: Workload, strategy: Strategy) -> Trace:
    """All kernels, transfers and copies that `estimate` prices, but for the
    optimizer's, without saying what goes on beside what."""
    batches, held = strategy.micro_batches(workload), states(workload.shape, strategy, busiest_stage(strategy))
    work, events = micro_batch(workload, strategy), []
    for how, layers in strategy.layer_kinds(held.layers):
        forward, backward = layer(workload, how)
        events += _events([*forward, *backward], batches * layers)
    events += _events(work.last, batches)
    if strategy.pipeline == 1:
        events += _events(work.first, batches)
    if strategy.zero >= 2:
        events += [replace(event, count=event.count * batches) for event in sharded_transfers(strategy, held)]
    else:
        events += [reduce_gradients(strategy, held.all)]
        events += [gather_parameters(strategy, held.all)] if strategy.zero else []
    return Trace([*events, *sum_shared_gradients(workload.shape, strategy, held), stage_transfer(workload, strategy)])


def _events(segments: Iterable[Segment], times: int) -> Iterator[Event]:
    for segment in segments:
        for event in (*segment.kernels, *segment.transfers, *segment.copies):
            yield replace(event, count=event.count * segment.count * times)


def check(workload: Workload, strategy: Strategy) -> None:
    trace, stage = step_trace(workload, strategy), busiest_stage(strategy)
    sent = trace.communication_bytes()
    assert sent.pop("other") == 0
    assert sent == sent_bytes(workload, strategy, stage=stage)

    def computed(kind: str, word: str = "") -> float:
        return sum(
            event.flops * event.count
            for event in trace.events
            if isinstance(event, Kernel) and event.kind == kind and word in event.name
        )

    logits, told = computed("gemm", "logits"), step_flops(workload, strategy)
    gemm = computed("gemm") - logits + logits / strategy.pipeline  # one stage has them
    assert strategy.ranks * gemm == pytest.approx(told.gemm, rel=1e-12)
    share = busiest_share(strategy.ring, strategy.balance, workload.causal)
    assert strategy.ranks * computed("attention") == pytest.approx(told.attention * share, rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "given",
    [
        {"tensor": 16},  # beyond the key/value heads
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


powers = st.sampled_from([1, 2, 4, 8])


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
