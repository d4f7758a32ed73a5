# SPDX-License-Identifier: Apache-2.0
"""The number of kernel launches: one for all tiles between a query block and a key block."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

import megatron.context_parallel as cp
from megatron.context_parallel.attention import ring_plan
from megatron.context_parallel.attention.kernels.base import Final, Scores
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.attention.kernels.triton_kernels import triton_call, triton_kernel, triton_tiles
from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import TritonKernel
from megatron.context_parallel.attention.kernels.triton_kernels.triton_tiles import walk
from megatron.context_parallel.attention.ring_plan import AttentionPlan, attention_plan
from megatron.context_parallel.attention.rule import AttentionRule, TileKernel
from megatron.context_parallel.attention.usp import attention_by_rule
from megatron.context_parallel.layout import sequence_layout
from megatron.context_parallel.layout.documents import document_rows
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.spans import count
from megatron.context_parallel.layout.tiles import Tile
from megatron.training.data.batches import micro_batches
from megatron.training.data.read_tokens import DataError
from megatron.training.model.batch_plans import BatchPlans, TritonCalls, complete, walks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def launches(monkeypatch):
    """The recorded launches; none is executed."""
    results = []
    monkeypatch.setattr(triton_call.Launch, "run", lambda launch: results.append(launch))
    monkeypatch.setattr(triton_call, "interpreted", lambda: True)
    return results


def count_launches(ring, mask, rank, launches):
    """(hops with tiles, tiles, forward launches, backward launches) of a rank, with tensors on the meta device."""
    plan = attention_plan(RINGS[ring], mask).ring(rank=rank)
    kernel = TileKernel(triton_kernel.TritonKernel(), Scores(0.1, mask))
    rows = RINGS[ring].seq_length // RINGS[ring].grid.ring.size

    def empty(rows, *shape, dtype=torch.bfloat16):
        return torch.empty(rows, 1, *shape, dtype=dtype, device="meta")

    q, lse = empty(rows, 8, 64), empty(rows, 8, dtype=torch.float32)
    result, dq, counts = Accumulator(q, 64), GradientSum(q), []
    hops = [hop for hop in plan.hops if hop.tiles]
    for hop in hops:
        k = v = empty(count(hop.held), 2, 64)
        before = len(launches)
        kernel.attend(hop.tiles, q, k, v, result)
        forward = len(launches)
        kernel.attend_grad(hop.tiles, q, k, v, Final(q, None, lse, lse), dq, KeyGradients(k, v))
        counts.append((forward - before, len(launches) - forward))
    return len(hops), sum(len(hop.tiles) for hop in hops), *map(sum, zip(*counts))


RINGS = {2: cp.SequenceLayout(2**17, abstract_grid(ring=2)), 8: cp.SequenceLayout(2**20, abstract_grid(ring=8))}
DOCUMENTS = tuple(round(2**20 * (i + 1) / 1000) for i in range(1000))


def test_a_narrow_window_on_a_long_sequence(launches):
    hops, tiles, forward, backward = count_launches(2, cp.Window(1022), 0, launches)
    assert tiles > 150 and forward == hops <= 4 and backward == 2 * hops


def test_a_thousand_documents_on_a_ring(launches):
    hops, tiles, forward, backward = count_launches(8, cp.Documents(DOCUMENTS), 3, launches)
    assert tiles > 100 and forward == hops <= 8 and backward == 2 * hops


class Calls(TorchDispatchMode):
    """The operations of PyTorch that fill or cast."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if result.is_floating_point() and name in ("zeros", "new_zeros", "full", "_to_copy", "copy_", "zero_", "fill_"):
            self.names.append(name)
        return result


@pytest.mark.parametrize("ring", [1, 2])
def test_the_first_launch_writes_and_the_only_one_in_the_final_dtype(launches, monkeypatch, ring):
    """On one rank nothing is filled before or cast after attention."""
    heads = {"q": 4, "k": 2, "v": 2}
    made = {name: torch.empty(2**12, 1, n, 64, dtype=torch.bfloat16, device="meta") for name, n in heads.items()}
    mask, kernel = cp.Documents((700, 1400, 2**12 * ring)), triton_kernel.TritonKernel()
    plan = attention_plan(cp.SequenceLayout(2**12 * ring, abstract_grid(ring=ring)), mask).ring(rank=0)
    scores, only = Scores(0.1, mask), ring == 1
    lse = torch.empty(2**12, 1, 4, device="meta")
    with Calls() as calls:
        result, dq = Accumulator(made["q"], 64, only=only), GradientSum(made["q"], only=only)
        for hop in plan.hops:
            k, v = (made[name][: count(hop.held)] for name in "kv")
            dkv = KeyGradients(k, v, only=only)
            kernel.attend(hop.tiles, made["q"], k, v, scores, result)
            kernel.attend_grad(hop.tiles, made["q"], k, v, scores, Final(made["q"], None, lse, lse), dq, dkv)
        result.finish()
    wide = torch.bfloat16 if only else torch.float32
    for launch in launches:
        for name in {"out", "dq", "dk", "dv"} & set(launch.arguments):
            assert launch.arguments[name] is None or launch.arguments[name].dtype == wide
    first = [launch.arguments["FIRST"] for launch in launches]
    if only:
        assert first == [True] * 3 and not calls.names
    else:
        assert first[:3] == [True] * 3 and not all(first[3:]) and "_to_copy" in calls.names


SPARSE = cp.BlockSparse(64, cp.BigBirdBlocks(1, 1, 3), 2**13)
LOCAL = cp.SequenceLayout(2**13, abstract_grid())


@pytest.mark.parametrize("mask", [SPARSE, cp.Documents(tuple(range(8, 2**13 + 1, 8))), cp.Causal()])
def test_a_second_layer_uses_the_plan_of_the_first_layer(launches, monkeypatch, mask):
    """The second layer makes no tiles and no tables for the kernels."""

    def layer():
        q, k, v = (torch.empty(2**13, 1, 2, 16, device="meta", requires_grad=True) for _ in range(3))
        out = cp.attention(q, k, v, layout=LOCAL, mask=mask, kernel="triton")
        out.backward(torch.empty_like(out))

    monkeypatch.setattr(TritonKernel, "why_not", lambda *_, **__: None)
    monkeypatch.setattr(
        TritonKernel, "delta", lambda self, out, dout: out.new_empty(out.shape[:3], dtype=torch.float32)
    )
    layer()
    made = []
    monkeypatch.setattr(Tile, "__new__", lambda *arguments, **_: made.append(arguments))
    monkeypatch.setattr(triton_tiles, "_walk", lambda *arguments: made.append(arguments))
    layer()
    assert len(launches) == 6 and not made


def test_chunks_of_a_regular_mask_share_their_tables():
    """16 chunks on a ring of 4: 544 pairs of a chunk and a hop, and a few kinds of tiles."""
    layout = cp.SequenceLayout(2**15, abstract_grid(ring=4), chunks=16)
    plan, kinds, pairs = attention_plan(layout, cp.Causal()), set(), 0
    for query in range(16):
        for key in plan.keys_of(query):
            for hop in plan.ring(chunk=key, query_chunk=query).hops:
                pairs += bool(hop.tiles)
                kinds.add(hop.tiles.geometry)
    assert pairs > 400 and len(kinds) < 16


class Packed(Dataset):
    """Samples of a few documents, which end with token 0."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        tokens = torch.ones(512, dtype=torch.int64)
        tokens[torch.randperm(512, generator=torch.Generator().manual_seed(i))[: 9 + i]] = 0
        return {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(512)}


@pytest.fixture
def derived(monkeypatch):
    """The names of the functions that were called to derive a plan."""
    called = []
    for module, name in [(ring_plan, "tiles"), (ring_plan, "_plan"), (ring_plan, "reach"), (triton_tiles, "_walk"),
                         (sequence_layout, "balance_documents")]:  # fmt: skip
        work = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, w=work, n=name, **more: called.append(n) or w(*args, **more))
    return called


def read(plans, workers, micro_batch=2):
    ring_plan._attention_plan.cache_clear()
    options = {"consumed_samples": 0, "data_parallel_rank": 0, "data_parallel_size": 1, "eod": 0}
    return micro_batches(Packed(), micro_batch_size=micro_batch, num_workers=workers, plans=plans, **options)


CPU, MASKS = torch.device("cpu"), (cp.Causal(), cp.Window(100))
CALLS = TritonCalls(2, 64, None)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("ring, balance", [(1, "zigzag"), (4, "zigzag"), (4, "documents"), (2, "contiguous")])
def test_a_loader_process_makes_the_plan_that_layers_would_derive(derived, ring, balance, chunks):
    grid = abstract_grid(ulysses=2, ring=ring).at(ulysses=1, ring=ring - 1)
    layout = cp.SequenceLayout(512, grid, balance, chunks)
    batches = read(BatchPlans(layout, MASKS, CPU, triton=CALLS), workers=1)
    for batch in batches:
        rows = document_rows(batch["document_ends"])
        of_batch = layout.of_documents(rows[0])
        for mask in (cp.Documents(row, inside) for row in rows for inside in MASKS):
            plan, fresh = batch["plans"][mask], AttentionPlan(replace(of_batch, chunks=chunks), mask)
            found = [(tiles, sizes) for tiles in complete(plan) if tiles for sizes in walks(tiles, CALLS)]
            for tiles, sizes in found:
                walk(tiles, sizes, CPU)
            _ = of_batch.positions
            assert not derived
            again = complete(fresh)
            assert again == complete(plan) and derived
            assert {key: value for key, value in fresh.memo.items() if key[0][0] != "_"} == plan.memo
            others = (t for t in again if t for _ in walks(t, CALLS))
            for (tiles, sizes), other in zip(found, others, strict=True):
                one, two = walk(tiles, sizes, CPU), walk(other, sizes, CPU)
                assert one.blocks.equal(two.blocks) and one.ranges.equal(two.ranges) and one.pairs == two.pairs
            derived.clear()


@pytest.mark.parametrize("workers", [0, 1])
def test_layers_derive_nothing_for_a_batch_of_documents(launches, derived, monkeypatch, workers):
    monkeypatch.setattr(TritonKernel, "why_not", lambda *_, **__: None)
    layout = cp.SequenceLayout(512, abstract_grid())

    def layer(batch):
        masks = [cp.Documents(row) for row in document_rows(batch["document_ends"])]
        qkv = (torch.empty(512, 2, 4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3))
        rule, plans = AttentionRule(kernel="triton"), batch.get("plans")
        out = attention_by_rule(*qkv, layout=layout, rule=rule, masks=masks, plans=plans)
        out.backward(torch.empty_like(out))

    batches = read(BatchPlans(layout, (cp.Causal(),), torch.device("meta"), triton=CALLS), workers)
    for _ in range(2):
        batches.prepare()
        derived.clear()  # without processes, prepare derives the plans
        layer(next(batches))
        assert not derived
    assert next(batches, None) is None
    layer(next(read(None, workers)))
    assert {"tiles", "_walk"} <= set(derived), "without plans a layer derives them"


def test_an_unreadable_batch_and_the_end_come_in_their_turn(monkeypatch):
    plans = BatchPlans(cp.SequenceLayout(512, abstract_grid()), (cp.Causal(),), CPU)
    whole = Packed.__getitem__

    def broken(self, i):
        if i == 1:
            raise DataError("sample 1 is broken")
        return whole(self, i)

    monkeypatch.setattr(Packed, "__getitem__", broken)
    batches, numbers = read(plans, 0, micro_batch=1), []
    for _ in range(6):
        batches.prepare()
        batches.prepare()
        try:
            numbers.append(next(batches)["numbers"].item())
        except (DataError, StopIteration) as error:
            numbers.append(type(error).__name__)
    assert numbers == [0, "DataError", 2, 3, "StopIteration", "StopIteration"]
