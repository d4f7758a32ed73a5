# SPDX-License-Identifier: Apache-2.0
"""A pool of host memory stays small, whatever lengths it is asked for."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path

import pytest
import torch

import megatron.context_parallel as cp
from megatron.context_parallel.fpdt import host_store
from megatron.context_parallel.fpdt.host_store import MOST, HostPool, Offload
from megatron.platform.streams import Streams
from tests.adversary import Adversary, Mutant, call_sites

CPU = torch.device("cpu")


class CountedStreams(Streams):
    """Knows what is pinned, and how often the host waited."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.pinned: dict[int, int] = {}
        self.waits = 0

    def pin(self, block):
        self.pinned[block.ctypes.data] = block.nbytes

    def unpin(self, block):
        del self.pinned[block.ctypes.data]

    def synchronize(self):
        self.waits += 1


def layer_of(length: int, offload: Offload) -> None:
    """A training step of a layer in chunks."""
    w = torch.ones(8, 8, requires_grad=True)
    layer = cp.ChunkedLayer(
        lambda x, _: (x.unflatten(2, (2, 4)),) * 3,
        lambda out, x, _: x + out.flatten(2) @ w,
        [w],
        cp.SequenceLayout(length, cp.abstract_grid(), chunks=4),
        offload=offload,
    )
    layer(torch.ones(length, 1, 8)).sum().backward()


def test_a_hundred_lengths_take_little_more_than_the_longest():
    streams = CountedStreams()
    offload = Offload(CPU, streams)
    for length in random.Random(0).sample(range(64, 1024), 100):
        layer_of(length, offload)
        gc.collect(0)
        pool = offload.pool
        assert pool.in_use == 0 and pool.allocated == sum(streams.pinned.values()) <= MOST * pool.peak
    assert streams.waits <= 20  # larger blocks serve, so that memory is seldom given back


def test_steps_that_are_alike_allocate_once():
    streams = CountedStreams()
    offload, seen = Offload(CPU, streams), []
    for _ in range(5):
        layer_of(100, offload)
        gc.collect(0)
        seen.append(dict(streams.pinned))
    assert seen[0] == seen[4] and streams.waits == 0


def test_any_order_of_sizes_stays_within_the_bound():
    draw, streams = random.Random(1), CountedStreams()
    pool, out = HostPool(streams), []
    for _ in range(2000):
        if out and draw.random() < 0.5:
            size, buffer = out.pop(draw.randrange(len(out)))
            assert bytes(buffer.numpy()) == bytes([size % 251]) * size  # nobody else has written to it
            del buffer
        else:
            size = draw.choice([1, 7, 64, 100, 1000, draw.randrange(1, 5000)])
            out.append((size, pool.empty((size,), torch.uint8).fill_(size % 251)))
        assert pool.in_use == sum(size for size, _ in out) <= pool.peak
        assert pool.allocated == sum(streams.pinned.values()) <= MOST * pool.peak
    assert len(pool.written) == len(pool.read) == 0


def test_a_block_is_forgotten_with_all_that_is_known_of_it():
    streams = Adversary(0)
    offload = streams.offload()
    blocks = []
    for length in (40, 41, 42):
        host = offload.to_host(torch.ones(length))
        offload.load(host).wait()
        blocks.append(weakref.ref(host.untyped_storage()))
        del host
    pool = offload.pool
    assert pool.allocated == 168 and len(pool.written) == len(pool.read) == 1
    assert [block() for block in blocks] == [None] * 3
    streams.finish()


def pass_on(streams: Adversary) -> bool:
    """Whether tensors of more and more sizes come back as they were."""
    offload, coming = streams.offload(), []
    for length in (100, 101, 102, 103, 104):
        coming.append((length, offload.load(offload.to_host(torch.full((length,), float(length))))))
    right = all(loading.wait().eq(length).all() for length, loading in coming)
    streams.finish()
    return right


@pytest.mark.parametrize("seed", range(3))
def test_a_block_goes_back_after_its_copies(seed):
    assert pass_on(Adversary(seed))


def test_without_the_hosts_wait_copies_would_meet_memory_of_another():
    (site,) = [site for site in call_sites(Path(host_store.__file__).parent) if site.endswith("synchronize")]
    with pytest.raises(AssertionError, match="a host block went back to the system before its copies"):
        pass_on(Mutant(0, site))
