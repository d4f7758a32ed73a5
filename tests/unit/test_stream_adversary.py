# SPDX-License-Identifier: Apache-2.0
"""Offload under random legal schedules of its copies; and every call that orders copies is necessary."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megatron.context_parallel as cp
from megatron.context_parallel.fpdt import host_store as offload_module
from megatron.context_parallel.fpdt.chunked_ffn import apply_in_chunks, even_spans
from megatron.context_parallel.fpdt.chunked_layer import ChunkedLayer
from megatron.context_parallel.fpdt.chunked_loss import chunked_linear_cross_entropy
from megatron.context_parallel.fpdt.host_store import Offload, SavedInHost
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.platform.streams import LOADS, STORES
from tests.adversary import Adversary, Mutant, call_sites

pytestmark = pytest.mark.lab

CPU = torch.device("cpu")
SITES = call_sites(Path(offload_module.__file__).parent)
LENGTH, WIDTH, SIZE, WORDS = 22, 16, 4, 30


def model(heads: int, kv_heads: int, mode: str, chunks: int = 5, mask: cp.Mask | None = None) -> Callable:
    """A function that runs three chunked layers with FFNs and the loss; it returns the loss and all gradients."""

    def run(offload: Offload) -> list[Tensor]:
        draw = torch.Generator().manual_seed(1)
        made = {"x": (LENGTH, 1, WIDTH), "qkv": (WIDTH, (heads + 2 * kv_heads) * SIZE), "out": (heads * SIZE, WIDTH)}
        made |= {"ffn": (WIDTH, WIDTH), "words": (WORDS, WIDTH)}
        x, qkv, out, ffn, words = (torch.randn(s, generator=draw) / 3 for s in made.values())
        weights = [weight.requires_grad_() for weight in (qkv, out, ffn)]
        sizes = [heads * SIZE, kv_heads * SIZE, kv_heads * SIZE]
        layer = ChunkedLayer(
            lambda x, _: tuple(part.unflatten(-1, (-1, SIZE)) for part in (x @ qkv).split(sizes, dim=-1)),
            lambda attended, x, _: x + attended.flatten(2) @ out,
            weights,
            cp.SequenceLayout(LENGTH, abstract_grid(), chunks=chunks),
            cp.AttentionRule(mask or cp.Causal()),
            ffn=lambda x: x + torch.tanh(x @ ffn),
            ffn_pieces=2,
            offload=offload,
            streamed=mode == "stream",
            recompute=mode == "recompute",
        )
        hooks = SavedInHost(offload, x.shape)
        y = offload.to_host(x) if mode == "stream" else x
        y.requires_grad_()
        spans = even_spans(LENGTH, 3)
        y = apply_in_chunks(lambda part, _: part * 2, y, [], spans, offload=offload if mode == "stream" else None)
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            for _ in range(3):
                y = layer(y)
        labels = torch.randint(WORDS, (LENGTH, 1), generator=draw)
        loss = chunked_linear_cross_entropy(
            y, words.requires_grad_(), labels, torch.ones(LENGTH, 1), chunks=4, vocab_size=WORDS, offload=offload
        )
        return [loss, *torch.autograd.grad(loss, [y, *weights, words])]

    return run


def saved_inputs(passes: int) -> Callable:
    """Plain layers whose inputs are kept in host memory; several passes may share the hooks."""

    def run(offload: Offload) -> list[Tensor]:
        x = torch.arange(12.0).view(3, 4).requires_grad_()
        hooks, result = SavedInHost(offload, x.shape), []
        for scale in range(passes):
            y = x + scale
            with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
                for _ in range(5):
                    y = y.sin()
            result += torch.autograd.grad(y.sum(), x)
        return result

    return run


def dropped_load(offload: Offload) -> list[Tensor]:
    """Host and device tensors are dropped during their copies, and the host block is given to another tensor."""
    kept = []
    for step in range(3):
        host = offload.to_host(torch.full((4,), float(step)))
        kept.append(offload.load(host))
        offload.load(host)  # this load is never waited for
        del host
    return [loading.wait() for loading in kept]


def dropped_host(offload: Offload) -> list[Tensor]:
    """A host buffer is dropped while it is loaded, and its block is given to another tensor."""
    kept = []
    for step in range(3):
        host = offload.to_host(torch.full((4,), float(step)))
        kept.append(offload.load(host))
        del host
    return [loading.wait() for loading in kept]


def closed_pool(offload: Offload) -> list[Tensor]:
    """The pool is freed while copies are running."""
    loading = offload.load(offload.to_host(torch.ones(4)))
    offload.pool = None
    gc.collect()
    return [loading.wait()]


SCENARIOS: dict[str, Callable[[Offload], list[Tensor]]] = {
    "host": model(4, 2, "host"),
    "host, by keys": model(4, 4, "host"),
    "streamed": model(4, 2, "stream"),
    "streamed, by keys": model(4, 4, "stream", 3),
    "recomputed": model(4, 1, "recompute", 3),
    "full mask": model(4, 2, "stream", 4, cp.Full()),
    "saved inputs": saved_inputs(1),
    "saved inputs, hooks used again": saved_inputs(3),
    "dropped load": dropped_load,
    "dropped host": dropped_host,
    "closed pool": closed_pool,
}


@cache
def expected(name: str) -> list[Tensor]:
    return [x.detach().clone() for x in SCENARIOS[name](Offload(CPU))]


def check(name: str, streams: Adversary) -> None:
    """Check that the scenario gives bit for bit the results of immediate copies."""
    result = SCENARIOS[name](streams.offload())
    gc.collect()
    streams.finish()
    for mine, right in zip(result, expected(name), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_schedule_does_not_change_results(name):
    check(name, Adversary(0))


@pytest.mark.parametrize("seed", range(1, 10))
def test_reused_blocks_are_correct_in_any_schedule(seed):
    """If a call of ``SITES`` is removed from the source, one of these tests fails."""
    check("dropped load", Adversary(seed))


@pytest.mark.full
@pytest.mark.parametrize("name", SCENARIOS)
def test_many_schedules_do_not_change_results(name, schedules):
    for seed in range(schedules):
        check(name, Adversary(seed))


def test_every_call_that_orders_streams_is_made():
    made = set()
    for name in ("host", "dropped load", "closed pool", "saved inputs"):
        streams = Adversary(2)
        check(name, streams)
        made |= streams.called
    assert SITES and set(SITES) == made


@pytest.mark.parametrize("site", SITES)
def test_no_call_can_be_left_out(site):
    for name in ["dropped load", "saved inputs", "closed pool", "host", "streamed", *SCENARIOS]:
        for seed in range(10):
            try:
                check(name, Mutant(seed, site))
            except AssertionError:
                return
    raise AssertionError(f"no schedule fails without {site}")


def test_late_copies_are_late_and_early_ones_early():
    late, early = Adversary(0), Adversary(1)
    for streams, copied in ((late, False), (early, True)):
        offload = streams.offload()
        host = offload.to_host(torch.ones(3))
        assert host.eq(1).all() == copied and host.isnan().all() == (not copied)
        loading = offload.load(host)
        assert loading.x.eq(1).all() == copied and loading.wait().eq(1).all()


def test_the_check_notices_a_source_that_changes_before_its_copy():
    offload = Adversary(0).offload()
    x = torch.ones(3)
    host = offload.to_host(x)
    x.zero_()
    assert offload.load(host).wait().eq(0).all()


def test_a_copy_into_freed_memory_is_detected():
    streams = Adversary(0)
    host = streams.offload().empty((3,), torch.float32)
    streams.wait(STORES, streams.record("compute"))
    streams.copy(STORES, host, torch.ones(3))  # freed at once
    streams.copy(LOADS, torch.empty(3), host)
    with pytest.raises(AssertionError, match="loads: a copy into freed memory"):
        streams.finish()
    assert host.isnan().all()
