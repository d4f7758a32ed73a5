# SPDX-License-Identifier: Apache-2.0
"""Tiles as intervals and as lists of blocks, against the table of pairs of the mask."""

from __future__ import annotations

import random
import types

import numpy as np
import pytest
import torch

import megatron.context_parallel as cp
from megatron.context_parallel.attention.kernels import available, cudnn_flex_kernel, select
from megatron.context_parallel.attention.kernels.cudnn_flex_kernel import CudnnFlexKernel
from megatron.context_parallel.attention.kernels.intervals import intervals
from megatron.context_parallel.layout.masks import inside_tiles
from megatron.context_parallel.layout.spans import Spans, positions
from megatron.context_parallel.layout.tiles import tiles

CPU, LENGTH = torch.device("cpu"), 96


def random_mask(draw: random.Random) -> cp.Mask:
    def inner() -> cp.Mask:
        kind = draw.choice(["causal", "full", "window", "global", "function", "bigbird", "longformer"])
        if kind == "causal":
            return cp.Causal()
        if kind == "full":
            return cp.Full()
        if kind == "window":
            return cp.Window(draw.randrange(60), draw.choice([0, draw.randrange(40)]))
        if kind == "global":
            return cp.Window(draw.randrange(40), draw.choice([0, 5]), draw.randrange(1, 9))
        if kind == "function":
            a, b, c = draw.randrange(1, 9), draw.randrange(1, 9), draw.randrange(2, 7)
            return cp.MaskFunction(lambda q, k: (a * q + b * k) % c != 0, draw.choice([cp.Causal(), cp.Full()]))
        within = draw.choice([cp.Causal(), cp.Full()])
        pattern = cp.BigBirdBlocks(1, 1, 1) if kind == "bigbird" else cp.LongformerBlocks(1, 1)
        return cp.BlockSparse(draw.choice([8, 16, 20]), pattern, LENGTH, within)

    if draw.random() < 0.3:
        ends = sorted({*draw.sample(range(1, LENGTH), draw.randrange(1, 6)), LENGTH})
        return cp.Documents(tuple(ends), inner())
    if draw.random() < 0.1:  # a prefix that all later tokens see, and that sees itself both ways
        prefix = draw.randrange(1, 40)
        return cp.MaskFunction(lambda q, k: (k < prefix) | (k <= q), cp.Full())
    return inner()


def random_spans(draw: random.Random) -> Spans:
    """All tokens, the spans of a rank of a ring, or any."""
    kind = draw.randrange(3)
    if kind == 0:
        return ((0, LENGTH),)
    if kind == 1:
        ring = draw.choice([2, 3, 4])
        layout = cp.SequenceLayout(LENGTH, cp.abstract_grid(ring=ring), draw.choice(["zigzag", "contiguous"]))
        return layout.spans(ulysses=0, ring=draw.randrange(ring))
    ends = sorted(draw.sample(range(LENGTH + 1), 4))
    return ((ends[0], ends[1]), (ends[2], ends[3]))


def pairs_of(seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """By intervals, and by the mask: bool [queries, keys] of two random blocks; and the intervals of a query."""
    draw = random.Random(seed)
    mask, q_at, k_at = random_mask(draw), random_spans(draw), random_spans(draw)
    work = tiles(q_at, k_at, mask)
    q, k = positions(q_at, CPU)[:, None], positions(k_at, CPU)[None]
    expected = mask.allowed(q, k).expand(len(q), k.size(1)).numpy()
    table, found = intervals(work, inside_tiles(mask)), np.zeros_like(expected)
    if table is None:
        return found, expected, 0
    assert table.table.dtype == np.int32 and table.table.shape[0] % 2 == 1
    assert (np.diff(table.table, axis=0) >= 0).all() and table.table.max() <= table.k[1] - table.k[0]
    found[slice(*table.q), slice(*table.k)] = table.pairs()
    assert np.array_equal(table.empty, ~found[slice(*table.q)].any(1))
    return found, expected, table.table.shape[0] // 2 + 1


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 1060), marks=pytest.mark.lab)], ids=len)
def test_intervals_are_the_pairs_of_the_mask(seeds):
    most = 0
    for seed in seeds:
        found, expected, count = pairs_of(seed)
        assert np.array_equal(found, expected), seed
        most = max(most, count)
    assert most > 8  # some masks have many intervals a query


def test_an_interval_of_no_tiles():
    assert intervals(tiles(((0, 4),), ((8, 12),), cp.Causal())) is None


def test_masks_have_few_intervals():
    def count(mask: cp.Mask, at: Spans = ((0, LENGTH),)) -> int:
        return len(intervals(tiles(at, at, mask), inside_tiles(mask)).table)

    assert count(cp.Causal()) == count(cp.Full()) == 1
    assert count(cp.Window(40)) == count(cp.Documents((10, 50, LENGTH))) == 3
    assert count(cp.Window(40, 0, 4)) == 3 and count(cp.Causal(), ((0, 24), (72, 96))) == 1
    assert count(cp.BlockSparse(16, cp.LongformerBlocks(1, 1), LENGTH)) == 3


BF16 = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 128}


@pytest.mark.parametrize(
    "changed, capability, reason",
    [
        ({}, (9, 0), None),
        ({}, (10, 3), None),
        ({"device": torch.device("cpu")}, (9, 0), "needs a GPU"),
        ({"dtype": torch.float32}, (9, 0), "needs bf16 or fp16"),
        ({}, (8, 0), "needs a GPU of compute capability 9.0, 10.0 or 10.3"),
        ({"head_dim": 192}, (9, 0), "multiple of 8 and at most 128"),
    ],
)
def test_where_cudnn_flex_runs(monkeypatch, changed, capability, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(cudnn_flex_kernel, "missing", lambda: None)
    found = CudnnFlexKernel().why_not(**BF16 | changed)
    assert found == reason if reason is None else reason in found


@pytest.mark.parametrize(
    "version, reason",
    [(None, "needs the package nvidia-cudnn-frontend>=1.32,<1.33"), ("1.31.0", "1.31.0 is installed"),
     ("1.32.1", "cannot be imported: no CUDA")],
)  # fmt: skip
def test_versions_of_the_package(monkeypatch, version, reason):
    def installed(name: str) -> str:
        if version is None:
            raise cudnn_flex_kernel.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(cudnn_flex_kernel, "metadata", types.SimpleNamespace(
        version=installed, PackageNotFoundError=cudnn_flex_kernel.metadata.PackageNotFoundError))  # fmt: skip
    monkeypatch.setattr(cudnn_flex_kernel, "library", lambda: (_ for _ in ()).throw(OSError("no CUDA")))
    assert reason in cudnn_flex_kernel.missing.__wrapped__()


@pytest.mark.parametrize("need", ["needs_bias", "needs_dropout", "needs_softcap"])
def test_what_cudnn_flex_refuses(monkeypatch, need):
    monkeypatch.setattr(CudnnFlexKernel, "why_not", lambda self, **_: None)
    options = {"device": "cpu", "dtype": torch.float32, "head_dim": 64}
    assert select("cudnn_flex", **options, needs_mask=True, needs_value_dim=True).name == "cudnn_flex"
    assert select("auto", **options).name != "cudnn_flex" and available(**options)[-1] == "cudnn_flex"
    with pytest.raises(ValueError, match='"cudnn_flex": does not support'):
        select("cudnn_flex", **options, **{need: True})
