# SPDX-License-Identifier: Apache-2.0
"""Tiles as intervals and as lists of blocks, against the table of pairs of the mask."""

from __future__ import annotations

import random
from importlib import metadata

import numpy as np
import pytest
import torch

import megatron.context_parallel as cp
from megatron.context_parallel.attention.kernels import available, select
from megatron.context_parallel.attention.kernels.interval_kernels import cudnn_flex_kernel, flash_attn_4_kernel
from megatron.context_parallel.attention.kernels.interval_kernels.cudnn_flex_kernel import CudnnFlexKernel
from megatron.context_parallel.attention.kernels.interval_kernels.flash_attn_4_kernel import FlashAttn4Kernel
from megatron.context_parallel.attention.kernels.interval_kernels.intervals import (
    block_lists,
    intervals,
    pieces,
    split_intervals,
)
from megatron.context_parallel.layout.masks import inside_tiles
from megatron.context_parallel.layout.spans import Spans, positions
from megatron.context_parallel.layout.tiles import tiles
from tests.library_stand_ins import in_window

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
        parents = [draw.randrange(-1, number) for number in range(len(ends))]
        return cp.Documents(draw.choice([ends, cp.Tree(ends, parents)]), inner())
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


def listed(count: np.ndarray, numbers: np.ndarray, columns: int) -> np.ndarray:
    """bool [blocks, columns]."""
    result = np.zeros((len(count), columns), bool)
    for row, (some, which) in enumerate(zip(count, numbers)):
        result[row, which[:some]] = True
        assert list(which[:some]) == sorted(which[:some])
    return result


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 1040), marks=pytest.mark.lab)], ids=len)
def test_blocks_pieces_and_parts_of_intervals_are_the_same_pairs(seeds):
    as_pieces = 0
    for seed in seeds:
        draw = random.Random(seed)
        mask, q_at, k_at = random_mask(draw), random_spans(draw), random_spans(draw)
        table = intervals(tiles(q_at, k_at, mask), inside_tiles(mask))
        if table is None:
            continue
        seen, rows, columns = table.pairs(), draw.choice([4, 8, 16]), draw.choice([4, 8])
        for lists, pairs, size in zip(
            block_lists(table, rows, columns), (seen, seen.T), ((rows, columns), (columns, rows))
        ):
            blocks = [[pairs[i : i + size[0], j : j + size[1]] for j in range(0, pairs.shape[1], size[1])]
                      for i in range(0, len(pairs), size[0])]  # fmt: skip
            full = np.array([[block.all() for block in line] for line in blocks])
            part = np.array([[block.any() and not block.all() for block in line] for line in blocks])
            assert np.array_equal(listed(lists.full_count, lists.full, full.shape[1]), full), seed
            assert np.array_equal(listed(lists.part_count, lists.part, full.shape[1]), part), seed
        parts = [part.pairs() for part in split_intervals(table, 2)]
        assert np.array_equal(np.sum(parts, axis=0), seen), seed  # each pair once
        assert all(len(part.table) <= 5 for part in split_intervals(table, 2)[1:])
        found = pieces(table)
        if found is not None:
            as_pieces += 1
            sizes = zip(np.diff(found.q), np.diff(found.k))
            whole = [in_window(int(n), int(m), found.left, found.right).int() for n, m in sizes]
            assert np.array_equal(torch.block_diag(*whole).bool().numpy(), seen), seed
    assert as_pieces > len(seeds) / 20


@pytest.mark.parametrize(
    "mask, q_at, k_at, form",
    [
        (cp.Causal(), ((0, 96),), ((0, 96),), (1, None, 0)),
        (cp.Full(), ((0, 96),), ((0, 96),), (1, None, None)),
        (cp.Causal(), ((64, 96),), ((0, 48),), (1, None, None)),
        (cp.Causal(), ((64, 96),), ((0, 96),), (1, None, 0)),
        (cp.Window(40), ((0, 96),), ((0, 96),), (1, 40, 0)),
        (cp.Window(40, 7), ((0, 96),), ((0, 96),), (1, 40, 7)),
        (cp.Documents((10, 50, 96)), ((0, 96),), ((0, 96),), (3, None, 0)),
        (cp.Documents((50, 96), cp.Window(30)), ((0, 96),), ((0, 96),), (2, 30, 0)),
        (cp.Window(40, 0, 4), ((0, 96),), ((0, 96),), None),
        (cp.BlockSparse(16, cp.BigBirdBlocks(1, 1, 1), LENGTH), ((0, 96),), ((0, 96),), None),
        (cp.Causal(), ((0, 24), (72, 96)), ((0, 24), (72, 96)), (1, None, 0)),
        (cp.Causal(), ((0, 24), (72, 96)), ((24, 72),), (1, None, None)),
    ],
)
def test_masks_that_a_library_has_arguments_for(mask, q_at, k_at, form):
    found = pieces(intervals(tiles(q_at, k_at, mask), inside_tiles(mask)))
    assert form == (found and (len(found.q) - 1, found.left, found.right))


BF16 = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 128}


KERNELS = {"cudnn_flex": (CudnnFlexKernel, cudnn_flex_kernel), "flash_attn_4": (FlashAttn4Kernel, flash_attn_4_kernel)}
ON_GPUS = [
    ("cudnn_flex", {}, (9, 0), None),
    ("cudnn_flex", {}, (10, 3), None),
    ("cudnn_flex", {"device": torch.device("cpu")}, (9, 0), "needs a GPU"),
    ("cudnn_flex", {"dtype": torch.float32}, (9, 0), "needs bf16 or fp16"),
    ("cudnn_flex", {}, (8, 0), "needs a GPU of compute capability 9.0, 10.0 or 10.3"),
    ("cudnn_flex", {"head_dim": 192}, (9, 0), "multiple of 8 and at most 128"),
    ("flash_attn_4", {}, (9, 0), None),
    ("flash_attn_4", {}, (8, 9), "needs a GPU of compute capability 9.0, 10 or 11"),
    ("flash_attn_4", {"head_dim": 36}, (9, 0), "multiple of 8 and at most 128"),
]


@pytest.mark.parametrize("name, changed, capability, reason", ON_GPUS)
def test_where_kernels_of_libraries_run(monkeypatch, name, changed, capability, reason):
    kernel, module = KERNELS[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(module, "missing", lambda: None)
    found = kernel().why_not(**BF16 | changed)
    assert found == reason if reason is None else reason in found


def test_flash_attn_4_is_refused_where_results_must_repeat():
    torch.use_deterministic_algorithms(True)
    try:
        assert "is not deterministic" in FlashAttn4Kernel().why_not_on((9, 0), torch.bfloat16, 128)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "is not simulated" in FlashAttn4Kernel().why_not_on((9, 0), torch.bfloat16, 128)


@pytest.mark.parametrize(
    "name, version, reason",
    [
        ("cudnn_flex", None, "needs the package nvidia-cudnn-frontend>=1.32,<1.33"),
        ("cudnn_flex", "1.31.0", "1.31.0 is installed"),
        ("cudnn_flex", "1.32.1", "cannot be imported: no CUDA"),
        ("flash_attn_4", None, "needs the package flash-attn-4"),
        ("flash_attn_4", "4.1.0", "4.1.0 is installed"),
        ("flash_attn_4", "4.0.0b36", "cannot be imported: no CUDA"),
    ],
)
def test_versions_of_packages(monkeypatch, name, version, reason):
    module = KERNELS[name][1]

    def installed(package: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    monkeypatch.setattr(module, "library", lambda: (_ for _ in ()).throw(OSError("no CUDA")))
    assert reason in module.missing.__wrapped__()


REFUSED = [("cudnn_flex", need) for need in ("needs_bias", "needs_dropout", "needs_softcap")]
REFUSED += [("flash_attn_4", need) for need in ("needs_bias", "needs_dropout", "needs_mask")]


@pytest.mark.parametrize("name, need", REFUSED)
def test_what_kernels_of_libraries_refuse(monkeypatch, name, need):
    monkeypatch.setattr(KERNELS[name][0], "why_not", lambda self, **_: None)
    options = {"device": "cpu", "dtype": torch.float32, "head_dim": 64}
    assert select(name, **options, needs_value_dim=True).name == name
    assert select("auto", **options).name != name and available(**options)[-1] == name
    with pytest.raises(ValueError, match=f'"{name}": does not support'):
        select(name, **options, **{need: True})
