# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels in Triton's interpreter, on CPU tensors, against attention's definition in float64."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron.context_parallel.attention.kernels.triton_kernels import triton_call, triton_tiles
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Call
from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import TritonKernel, missing_triton
from megatron.context_parallel.attention.kernels.triton_kernels.triton_tiles import walk
from megatron.context_parallel.layout.masks import Causal, Documents, Full, MaskFunction, Window
from megatron.context_parallel.layout.spans import count
from megatron.context_parallel.layout.tiles import Tile, Tiles, tiles
from megatron.context_parallel.layout.tree import Tree
from megatron.context_parallel.positions.position_dropout import Dropout
from megatron.context_parallel.sparse_attention.blocks import block_edges, mask_of_blocks
from megatron.decisions.block_sizes import INTERPRETED, Blocks
from megatron.simulator.machines.machine_file import load
from megatron.training.model.attention_rule import measured_blocks
from tests.distributed.pool import fork_server
from tests.patience import patience
from tests.unit import triton_cases
from tests.unit.triton_cases import Case, some_pairs

pytestmark = pytest.mark.skipif(missing_triton() is not None, reason=missing_triton() or "")

# 90 tokens on a zigzag ring of two: queries of rank 0, then the keys of rank 0 and those of rank 1.
ZIGZAG = {"q_at": ((0, 23), (67, 90)), "blocks": (((0, 23), (67, 90)), ((23, 67),))}
LONGEST = 577  # of the sequences of these tests
EDGES = block_edges(Causal(), LONGEST, 16)
MASKS = {
    "causal": Causal(),
    "full": Full(),
    "window": Window(33),
    "two-sided": Window(20, 11, global_tokens=3),
    "narrow": Window(5, 2),
    "documents": Documents((13, 40, 41, 90)),
    "tree": Documents(Tree((13, 40, 41, 60, 90), (-1, 0, 0, 2, 2))),
    "function": MaskFunction(some_pairs, Causal()),
    "chosen blocks": mask_of_blocks(torch.tensor([[n // 32, n // 16] for n in range(LONGEST)]), EDGES, Causal()),
    "blocks of each query": mask_of_blocks(torch.tensor([[n % 3, n // 16] for n in range(LONGEST)]), EDGES, Causal()),
}
CAP = {"softcap": 2.0}
EXTRAS = {
    "plain": {},
    "alibi": {"slopes": (0.25, 0.0625)},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout": Dropout(0.3, seed=5, stream=2, samples=(3,), head=4)},
    "all": {"slopes": (0.25, 0.0625), "softcap": 2.0, "dropout": Dropout(0.1, seed=5)},
}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable]:
    """Calls a function in a separate process with Triton's interpreter, which is chosen at the first import."""
    with ProcessPoolExecutor(1, fork_server()) as process:  # its processes have imported Triton
        yield lambda function, *arguments: process.submit(function, *arguments).result(patience(60))


def check(errors: dict[str, float], limit: float = 5e-6) -> None:
    assert all(error < limit for error in errors.values()), errors


@pytest.mark.parametrize("mask", ["two-sided", "function", "chosen blocks", "blocks of each query"])
@pytest.mark.usual(1)
def test_masks_on_a_ring(interpreted, mask):
    check(interpreted(triton_cases.errors, Case(MASKS[mask], **ZIGZAG)))


@pytest.mark.parametrize("extra", ["alibi", "softcap", "dropout", "all"])
@pytest.mark.usual(2)
def test_softcaps_sinks_and_dropout_of_scores(interpreted, extra):
    mask = MASKS["function" if extra == "all" else "causal"]
    check(interpreted(triton_cases.errors, Case(mask, **ZIGZAG, **EXTRAS[extra])))


@pytest.mark.parametrize("h, hk", [(2, 1), pytest.param(4, 2, marks=pytest.mark.full)])
def test_each_sample_and_head_has_its_own_dropout(interpreted, h, hk):
    dropout = Dropout(0.3, seed=5, stream=2, samples=(3, 8), head=4)
    check(interpreted(triton_cases.errors, Case(MASKS["two-sided"], **ZIGZAG, b=2, h=h, hk=hk, dropout=dropout)))
    blocks = (((0, 64),), ((64, 88), (128, 152)))  # complete groups of four keys
    check(interpreted(triton_cases.errors, Case(Causal(), ((0, 88), (128, 152)), blocks, b=2, dropout=dropout)))
    apart = ((0, 23), (66, 130))  # a row and its position are in other places of their groups of four
    check(interpreted(triton_cases.errors, Case(Full(), ((0, 40),), (apart,), dropout=replace(dropout, samples=(3,)))))


@pytest.mark.parametrize("keys", [((0, 70),), ((2, 72),)])
def test_a_pair_whose_number_is_the_threshold_is_kept(interpreted, keys):
    case = triton_cases.with_a_pair_at_the_threshold(Case(Full(), ((0, 40),), (keys,)))
    check(interpreted(triton_cases.errors, case))


@pytest.mark.parametrize("mask, extra", [("causal", "dropout"), ("full", "all")])
@pytest.mark.usual(0)
def test_four_keys_share_a_hash_of_dropout(interpreted, mask, extra):
    """Key blocks of complete groups of four; the blocks of the other tests are not."""
    blocks = (((0, 64),), ((64, 88), (128, 152)))
    check(interpreted(triton_cases.errors, Case(MASKS[mask], ((0, 88), (128, 152)), blocks, **EXTRAS[extra])))


@pytest.mark.parametrize(
    "keys, mask, in_steps, in_blocks",
    [
        (((0, 64), (96, 160)), Causal(), True, True),
        (((0, 64), (96, 161)), Causal(), True, True),
        (((0, 62), (96, 160)), Causal(), False, False),
        (((2, 66),), Causal(), False, False),
        (((0, 64), (96, 160)), Window(70), False, True),
        (((0, 64), (96, 160)), Documents((40, 161)), True, True),
        (((0, 64), (96, 160)), Documents((42, 161)), False, True),
    ],
)
def test_keys_share_hashes_where_their_groups_are_complete(keys, mask, in_steps, in_blocks):
    q, k = (torch.empty(rows, 1, 1, 16, device="meta") for rows in (161, count(keys)))
    call = Call(q, k, k, 1.0, dropout=Dropout(0.1, seed=1), capability=None)
    out, row = torch.empty(161, 1, 1, 16, device="meta"), torch.empty(161, 1, 1, device="meta")
    results = tiles(((0, 161),), keys, mask)
    launches = [call.forward(results, out, row), *call.backward(results, q, row, row, out, *2 * [k])]
    expected = [2 if in_steps else 1, 4 if in_steps else 1, 4 if in_blocks else 1]
    assert [launch.arguments["DROPS"] for launch in launches] == expected
    for capability, together in ((90, 2), (100, 4)):  # in the forward pass
        launch = replace(call, capability=capability).forward(results, out, row)
        assert launch.arguments["DROPS"] == (together if in_steps else 1)


@pytest.mark.full
@pytest.mark.parametrize("one_pass", [False, True], ids=["two passes", "one pass"])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", MASKS)
def test_all_masks_with_all_options(interpreted, mask, extra, one_pass):
    check(interpreted(triton_cases.errors, Case(MASKS[mask], **ZIGZAG, **EXTRAS[extra], one_pass=one_pass)))


@pytest.mark.parametrize("mask, sizes", [("causal", {}), ("documents", {"b": 2, "h": 4, "hk": 2, "d": 32})])
@pytest.mark.usual(0)
def test_plain_ranges_by_their_own_kernel(interpreted, mask, sizes):
    kernels = interpreted(triton_cases.kernels_of, Case(MASKS[mask], **ZIGZAG, **sizes, plain=True))
    assert "plain_kernel" in kernels and "forward_kernel" in kernels
    check(interpreted(triton_cases.errors, Case(MASKS[mask], **ZIGZAG, **sizes, plain=True)))


@pytest.mark.parametrize("mask, extra", [("function", "all"), ("two-sided", "plain")])
@pytest.mark.parametrize("one_pass", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.usual(1)
def test_a_backward_by_descriptors(interpreted, mask, extra, one_pass):
    sizes = {"b": 2, "h": 4, "hk": 2, "d": 16, "dv": 32, "layout": "surrounded"} if extra == "plain" else EXTRAS[extra]
    check(interpreted(triton_cases.errors, Case(MASKS[mask], **ZIGZAG, **sizes, one_pass=one_pass, described=True)))


ONE = {"q_at": ((0, 37),), "blocks": (((0, 11),), ((11, 37),)), "one_pass": True}


@pytest.mark.parametrize(
    "case",
    [
        Case(MASKS["function"], **ONE, **EXTRAS["all"], h=2, hk=1, d=24, dv=40, layout="surrounded"),
        Case(MASKS["two-sided"], **ONE, b=2, h=4, hk=2, d=24, dv=40),
        Case(MASKS["documents"], **ONE, b=2, h=4, hk=2, dropout=Dropout(0.1, 5, samples=(3, 8))),
        Case(MASKS["window"], **ONE, layout="strided"),
    ],
    ids=["all", "groups", "dropout", "strided"],
)
@pytest.mark.usual(0)
def test_a_backward_of_one_pass(interpreted, case):
    check(interpreted(triton_cases.errors, case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_of_tiles_merge(interpreted, dtype):
    """Whatever the strides, and for rows without keys; the merged output of bf16 is fp32."""
    check(interpreted(triton_cases.merge_errors, dtype), 1e-6)


@pytest.mark.parametrize("rule, keys, values", [("gated_delta", 24, 20), ("kda", 16, 40), ("decay", 40, 16)])
def test_states_of_linear_attention(interpreted, rule, keys, values):
    errors = interpreted(triton_cases.errors_of_states, rule, keys, values)
    assert all(error < 1e-6 for error in errors), errors


@pytest.mark.parametrize(
    "sizes, rows, starts, packed, skip, dtype, states",
    [
        ((130, 1, 1, 2, 20, 12), (3, 130), (3, 70, 71), True, True, torch.float32, 1),  # segments of a block
        ((150, 2, 2, 4, 32, 16), (0, 150), (), False, False, torch.float32, 2**27),
        ((150, 1, 1, 4, 32, 16), (0, 150), (0, 5, 64, 127), False, True, torch.float32, 2**27),
        ((70, 1, 2, 2, 16, 40), (0, 70), (69,), True, False, torch.float32, 2**27),
        ((130, 1, 2, 4, 64, 64), (0, 130), (40,), True, True, torch.bfloat16, 2**27),
    ],
)
@pytest.mark.usual(3)
def test_kernels_for_rules_without_a_delta(interpreted, sizes, rows, starts, packed, skip, dtype, states):
    """States at both ends, maps, starts of documents, groups of heads, and blocks that are not full."""
    errors = interpreted(triton_cases.errors_of_decays, sizes, rows, starts, packed, skip, dtype, states)
    assert all(error < (1e-5 if dtype == torch.float32 else 1e-2) for error in errors), errors


@pytest.mark.parametrize(
    "sizes",
    [
        {"b": 2, "h": 4, "hk": 2, "d": 24, "dv": 40},
        pytest.param({"h": 4, "hk": 1, "d": 64, "dv": 16}, marks=pytest.mark.full),
        pytest.param({"h": 1, "hk": 1, "d": 80, "dv": 96}, marks=pytest.mark.full),
        pytest.param({"h": 1, "hk": 1, "d": 256, "dv": 128}, marks=pytest.mark.full),
        pytest.param({"b": 3, "h": 2, "hk": 2, "d": 8, "dv": 128}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_head_sizes_and_groups(interpreted, sizes):
    check(interpreted(triton_cases.errors, Case(q_at=((0, 45),), blocks=(((0, 45),),), **sizes)))


def test_any_strides_of_inputs_and_sums(interpreted):
    case = Case(Window(20, 5), layout="strided", b=2, q_at=((0, 40),), blocks=(((0, 40),),))
    check(interpreted(triton_cases.errors, case))


@pytest.mark.parametrize("mask", [Window(20, 5), MASKS["function"]], ids=["window", "function"])
@pytest.mark.usual(0)
def test_nothing_around_the_inputs_is_read(interpreted, mask):
    case = Case(mask, ((0, 37),), (((0, 11),), ((11, 37),)), layout="surrounded", b=2, hk=2, d=13, dv=21)
    check(interpreted(triton_cases.errors, case))


@pytest.mark.full
def test_addresses_in_64_bits(interpreted, tmp_path):
    case = Case(q_at=((0, 40),), blocks=(((0, 40),),), hk=2, dtype=torch.bfloat16)
    near = interpreted(triton_cases.errors, case)
    assert interpreted(triton_cases.errors_far_apart, case, tmp_path) == near


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)], ids=["bf16", "fp16"]
)
def test_errors_are_about_those_of_flash_attention(interpreted, dtype):
    case = Case(q_at=((0, 96),), blocks=(((0, 96),),), h=1, d=32, dv=32, dtype=dtype)
    ours, flash = interpreted(triton_cases.errors_and_flash_errors, case)
    assert all(ours[name] < 1.25 * flash[name] + 1e-6 for name in ours), (ours, flash)


def test_the_interpreter_rounds_to_bf16_as_pytorch(interpreted):
    """Every fourth number lies in the middle between two of bf16."""
    x = 1 + torch.arange(512) * 2.0**-9
    for values in (x, -x):
        assert torch.equal(interpreted(_rounded_to_bf16, values), values.bfloat16().float())


def _rounded_to_bf16(x):
    from tests.unit.triton_rounding import rounded_to_bf16  # imports Triton

    return rounded_to_bf16(x)


@pytest.mark.parametrize("block, step", [(64, 64), (16, 128)])
def test_a_step_of_several_words_of_a_mask(interpreted, block, step):
    case = Case(MASKS["function"], **{**ZIGZAG, "blocks": (((0, 90),),)})
    check(interpreted(triton_cases.errors_in_blocks_of, case, block, step))


def test_one_pass_only_where_it_was_measured_and_may_vary(monkeypatch):
    table, two = {"backward": {128: Blocks(128, 64)}}, ("forward", "queries", "keys")
    q = torch.empty(70, 1, 2, 128, dtype=torch.bfloat16, device="meta")
    for call, expected in (
        (Call(q, q, q, 1.0, capability=90), two),
        (Call(q, q, q, 1.0, capability=90, measured=table), ("forward", "backward")),
        (Call(*3 * [q[..., :64]], 1.0, capability=90, measured=table), two),
        (Call(*3 * [q.float()], 1.0, capability=90, measured=table), two),
    ):
        assert call.passes() == expected
        with monkeypatch.context() as patch:  # as --deterministic-mode sets it
            patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
            assert call.passes() == two


@pytest.mark.parametrize("mask", ["window", pytest.param("function", marks=pytest.mark.full)])
@pytest.mark.lab
def test_all_ranges_in_one_loop(interpreted, mask):
    case = Case(MASKS[mask], **ZIGZAG, **EXTRAS["softcap"])
    check(interpreted(triton_cases.errors_in_blocks_of, case, 32, 16, False, True))


def test_dk_and_dv_in_separate_programs(interpreted):
    case = Case(MASKS["function"], **ZIGZAG, **EXTRAS["all"], h=2, hk=1, d=24, dv=40)
    check(interpreted(triton_cases.errors_in_blocks_of, case, 32, 16, True))


@pytest.mark.parametrize("mask", MASKS)
def test_all_rows_that_dk_and_dv_read_are_prepared(mask):
    """The kernel for dq prepares lse and delta of the rows of its blocks."""
    whole = sum(count(at) for at in ZIGZAG["blocks"])
    for q_at, k_at in itertools.product([((0, 90),), ZIGZAG["q_at"]], [((0, 90),), *ZIGZAG["blocks"]]):
        some, device = tiles(q_at, k_at, MASKS[mask]), torch.device("cpu")
        ready = torch.zeros(whole + 32, dtype=torch.bool)
        for block in walk(some, ("q", count(q_at), 32, 16), device).blocks[:, 0].tolist():
            ready[32 * block : 32 * block + 32] = True
        for start, stop in walk(some, ("k", count(k_at), 32, 16), device).ranges[:, :2].tolist():
            assert ready[start:stop].all()


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("block, step, one_loop", [(32, 16, False), (128, 64, False), (16, 128, False), (32, 16, True)])
@pytest.mark.parametrize("mask", MASKS)
def test_ranges_cover_each_pair_once_and_few_others(mask, block, step, one_loop, side):
    """Test only the ranges: which pairs are computed, and which of these are kept."""
    results = tiles(((0, 200), (400, 577)), ((0, 300), (300, 577)), MASKS[mask])
    wanted = torch.zeros(377, 577, dtype=torch.int32)
    for tile in results:
        i, j = torch.arange(*tile.q)[:, None], torch.arange(*tile.k)
        beyond = (j - i) - (tile.k[0] - tile.q[0])
        wanted[i, j] += {"full": beyond < 10**6, "causal": beyond <= 0, "anticausal": beyond >= 0}[tile.kind].int()
    wanted = wanted if side == "q" else wanted.t()
    met = torch.zeros_like(wanted)
    walked = walk(results, (side, wanted.size(0), block, step, one_loop), torch.device("cpu"))
    steps = 0
    for number, *ends in walked.blocks.tolist():
        rows = torch.arange(number * block, min(number * block + block, wanted.size(0)))
        for index in range(ends[0], ends[3]):
            start, stop, first, last, low, high, bits, _, other = walked.ranges[index].tolist()
            columns = torch.arange(start, stop)
            away = columns - rows[:, None]
            inside = ((rows >= first) & (rows < last))[:, None] & (away >= low) & (away <= high)
            assert (bits >= 0) == (index >= ends[2])
            if index < ends[1]:
                assert not one_loop, "plain ranges are edges"
                assert inside.all() and (stop - start) % step == 0, "a plain range has full steps without masked pairs"
            else:
                # Full steps are counted from the start of the range, so that up to one step more is left out.
                few = int(inside.all(0).sum()) < 2 * step
                assert one_loop or bits >= 0 or few, "an edge has no two steps without masked pairs"
            assert bits < 0 or (start - other) % triton_tiles.WORD == 0, "a masked range begins with a word"
            met[rows[:, None], columns] += inside.int()
            steps += -(-(stop - start) // step)
    assert torch.equal(met, wanted) and wanted.max() == 1
    assert walked.pairs == steps * block * step


@pytest.mark.parametrize("queries, keys, size", [(33, 65, 4 * 65 * 2), (40, 33, 4 * 40 * 2), (32, 32, 4 * 32)])
def test_bytes_of_the_bits_of_a_tile(queries, keys, size):
    assert triton_tiles._bit_bytes(Tile((5, 5 + queries), (7, 7 + keys), "full", True)) == size
    assert triton_tiles._bit_bytes(Tile((5, 5 + queries), (7, 7 + keys), "full")) == 0


def test_a_mask_is_evaluated_for_few_queries_at_once(monkeypatch):
    monkeypatch.setattr(triton_tiles, "ROW_MASK_BYTES", 24 * 100 * 95)  # of 95 queries, in whole words 64
    seen = []

    def pairs(q, k):
        seen.append((q.numel(), k.numel()))
        return q >= k

    results = tiles(((0, 200),), ((0, 100),), MaskFunction(pairs, Full()))
    triton_tiles.pack(results, MaskFunction(pairs, Full()), torch.device("cpu"), ["q"])
    assert seen == [(64, 100), (64, 100), (64, 100), (8, 100)]


def test_long_sequences_have_few_ranges():
    """The number of ranges grows with the blocks, not with their pairs."""
    results = tiles(((0, 2**20),), ((0, 2**20),), Window(2**15 - 1))
    walked = walk(results, ("q", 2**20, 128, 64), torch.device("cpu"))
    assert len(walked.blocks) == 2**13 and len(walked.ranges) <= 6 * 2**13
    wanted = sum(tile.pairs for tile in results)
    assert wanted < walked.pairs < 1.02 * wanted


def test_bits_of_long_tiles_come_in_several_launches(monkeypatch):
    monkeypatch.setattr(triton_tiles, "BITS_AT_ONCE", 64)
    monkeypatch.setattr(triton_tiles, "MASKED_ROWS", 16)
    results = tiles(((0, 40),), ((0, 40),), MASKS["function"])
    parts = list(triton_tiles.groups(Tiles((*results, *tiles(((0, 40),), ((0, 40),), Causal())))))
    assert len(parts) == 6, "six masked squares of 64 bytes; other tiles share their launches"
    assert sum(tile.pairs for part in parts for tile in part) == 2 * (40 * 41 // 2)


def test_bits_of_a_launch_may_fill_the_limit(monkeypatch):
    one = tiles(((0, 40),), ((0, 40),), MASKS["function"])
    size = triton_tiles._bit_bytes(one[0])
    for limit, times, counts in ((size, 1, [1]), (size, 3, [1, 1, 1]), (2 * size, 3, [2, 1]), (3 * size, 3, [3])):
        monkeypatch.setattr(triton_tiles, "BITS_AT_ONCE", limit)
        assert [len(part) for part in triton_tiles.groups(Tiles(one[:1] * times))] == counts


def test_measured_passes_are_causal_attention(interpreted):
    """Those of tools/measure_hardware.py and benchmarks/gpu.sh, with a kernel that computes lists of tiles."""
    check(interpreted(triton_cases.errors_of_measured_passes))


def test_queries_in_no_tile(interpreted):
    """Queries that are in no tile keep their values."""
    case = Case(Documents((30, 60)), q_at=((30, 60),), blocks=(((0, 30),), ((30, 60),)))
    check(interpreted(triton_cases.errors, case))


@pytest.mark.parametrize(
    "device, dtype, size, reason",
    [
        ("cpu", torch.float64, 64, "needs fp32, bf16 or fp16"),
        ("cpu", torch.bfloat16, 264, "at most 256"),
        ("cpu", torch.bfloat16, 64, "needs a GPU"),
    ],
)
def test_refusals(device, dtype, size, reason):
    assert reason in TritonKernel().why_not(device=torch.device(device), dtype=dtype, head_dim=size)


@pytest.mark.parametrize(
    "capability, dtype, reason",
    [((8, 0), torch.bfloat16, None), ((7, 5), torch.bfloat16, "needs"), ((9, 0), torch.float64, "needs fp32, bf16")],
)
def test_which_gpus_have_the_kernels(capability, dtype, reason):
    why = TritonKernel().why_not_on(capability, dtype, 64)
    assert why is None if reason is None else why.startswith(reason)


@pytest.mark.parametrize(
    "version, fits", [("3.3.9", False), ("3.4.0", True), ("3.10", True), ("4.0.1", True), ("2.9", False)]
)
def test_which_versions_of_triton_have_what_the_kernels_need(monkeypatch, version, fits):
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    assert (missing_triton.__wrapped__() is None) is fits


def test_what_a_launch_depends_on(monkeypatch):
    """Block sizes on the larger head; the width of addresses on the longer of block and step."""
    q, k, v = (torch.empty(70, 1, 2, size, device="meta") for size in (16, 16, 40))
    out, row = torch.empty(70, 1, 2, 40, device="meta"), torch.empty(70, 1, 2, device="meta")
    some, kinds, rows = tiles(((0, 70),), ((0, 70),), Causal()), [], []
    monkeypatch.setattr(triton_call, "_wide", lambda most, *_: rows.append(most))
    for sizes in (Blocks(16, 64), Blocks(64, 16)):
        monkeypatch.setattr(triton_tiles, "blocks", lambda *kind, sizes=sizes: kinds.append(kind) or sizes)
        Call(q, k, v, 1.0, capability=None).forward(some, out, row)
        Call(v[..., :40], v, q, 1.0, capability=None).forward(some, out[..., :16], row)
    assert [kind[2] for kind in kinds] == [40] * 4 and rows == [64] * 4
    assert [triton_call._power(size) for size in (1, 16, 17, 64, 65, 128)] == [16, 16, 32, 64, 128, 128]
    monkeypatch.setattr(triton_call, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert Call(q, k, v, 1.0).capability == 86
    for wrong in ({"scale": 0.0}, {"scale": 1.0, "softcap": 0.0}):
        with pytest.raises(ValueError, match="must be above 0"):
            Call(q, k, v, **wrong, capability=90)


def test_runs_on_the_cpu_where_it_is_interpreted(interpreted):
    kernel = TritonKernel()
    assert interpreted(_why_not, kernel) is None


def _why_not(kernel: TritonKernel) -> str | None:
    return kernel.why_not(device=torch.device("cpu"), dtype=torch.bfloat16, head_dim=64)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"hk": 3}, "does not fit k"),
        ({"softcap": 0.0}, "the soft-cap must be above 0"),
        ({"softcap": -1.0}, "the soft-cap must be above 0"),
        ({"slopes": (1.0, 1.0, 1.0)}, "give one number for each of 2 heads"),
        ({"dropout": Dropout(0.1, 1, samples=(0, 1))}, "dropout.samples has 2 numbers, not 1"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(interpreted, change, reason):
    with pytest.raises(ValueError, match=reason):
        interpreted(triton_cases.errors, replace(Case(), **change))


@pytest.mark.parametrize("heads, refused", [(2**15 - 1, False), (2**15, True)])
def test_more_heads_than_a_gpus_grid_has_are_refused(heads, refused):
    x = torch.empty(1).expand(4, 2, heads, 16)
    with pytest.raises(ValueError, match="2 samples of") if refused else nullcontext():
        triton_call.Call(x, x, x, 1.0, capability=90)


def test_sums_must_have_their_shape_and_dtype():
    shape = (4, 1, 2)
    triton_call._check_sums({"lse": (torch.empty(shape), shape)})
    for x in (torch.empty(4, 1, 3), torch.empty(shape, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"lse must be fp32 \[4, 1, 2\]"):
            triton_call._check_sums({"lse": (x, shape)})


@pytest.mark.parametrize(
    "rows, strides, wide",
    [
        (2048, (2**20 - 1, 1), False),
        (2048, (2**20, 1), True),
        (2047, (2**20, 1), False),
        (1, (2**10, 2**26), True),
        (1, (2**31 - 32, 1), True),
        (1, (2**31 - 33, 1), False),
    ],
)
def test_offsets_beyond_31_bits_are_wide(rows, strides, wide):
    """The 32 elements of a row follow the rows of a block."""
    assert triton_call._wide(rows, torch.empty_strided((1, 32), strides, device="meta")) is wide


def test_heads_are_padded_to_a_power_of_two_from_16_on():
    sizes = {1: 16, 16: 16, 17: 32, 32: 32, 33: 64, 64: 64, 128: 128, 129: 256}
    assert {size: triton_call._power(size) for size in sizes} == sizes


@pytest.mark.lab
def test_measured_block_sizes_are_written_read_and_launched(interpreted, tmp_path):
    fast = {"forward": Blocks(16, 16), "queries": Blocks(64, 16, 8, 1), "keys": Blocks(16, 32, split=True)}
    too_large = Blocks(64, 64)
    candidates = {which: [too_large, sizes] for which, sizes in fast.items()} | {"backward": [Blocks(16, 32)]}
    fields = interpreted(triton_cases.measured_fields, candidates, [*fast.values(), too_large], too_large)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"extends": "H100-80G", "capability": [9, 0], **fields}))
    table, capability = measured_blocks(str(path))
    assert table == {which: {16: sizes} for which, sizes in fast.items()} | {"backward": {}} and capability == (9, 0)
    assert load(path).attention_blocks == table
    sizes, errors = interpreted(triton_cases.launched, table, torch.float16)
    check(errors, 2e-3)
    delta, *keys = [each for each in sizes if each not in (fast["forward"], fast["queries"])]
    assert {fast["forward"], fast["queries"]} < set(sizes) and keys == [fast["keys"]] * 2 and delta not in fast.values()
    one_pass = table | {"backward": {16: Blocks(32, 32, 8)}}
    sizes, errors = interpreted(triton_cases.launched, one_pass, torch.float16)
    check(errors, 2e-3)
    assert set(one_pass["backward"].values()) < set(sizes) and not {fast["queries"], fast["keys"]} & set(sizes)
    assert INTERPRETED not in sizes, "gradients of short sequences are one pass, too"
    for known, dtype, options in ((None, torch.float16, {}), (table, torch.float32, {}), (table, torch.float16, CAP)):
        sizes, errors = interpreted(partial(triton_cases.launched, **options), known, dtype)
        check(errors, 2e-3)
        assert INTERPRETED in sizes and not set(sizes) & set(fast.values())
