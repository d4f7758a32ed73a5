# SPDX-License-Identifier: Apache-2.0
"""Each rule of the model of PyTorch's caching allocator, on sequences written by hand."""

from __future__ import annotations

import random

import pytest

from megatron.simulator.dry_run.allocation import reserved as module
from megatron.simulator.dry_run.allocation.allocator import (
    MIB,
    CachingAllocator,
    OutOfMemory,
    Settings,
    from_environment,
    replayed,
    rounded,
    segment_size,
)
from megatron.simulator.dry_run.allocation.reserved import (
    Allocations,
    NoPattern,
    added,
    extrapolated,
    lifetimes,
    peak,
    reserved,
)
from megatron.simulator.dry_run.dry_run import dry_run, run_job
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal

EXPANDABLE = Settings(expandable_segments=True)


def free_blocks(allocator: CachingAllocator) -> list[tuple[int, int, int]]:
    """(segment, begin, size) of each free block."""
    free = [block for pool in allocator._pools.values() for block in pool.free]
    return sorted((segment, begin, size) for size, segment, begin, _ in free)


def test_sizes_are_rounded_to_512_bytes() -> None:
    assert [rounded(size) for size in (1, 512, 513, 1000, MIB)] == [512, 512, 1024, 1024, MIB]


@pytest.mark.parametrize(
    "request_size, segment",
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 512, 12 * MIB),
        (100 * MIB, 100 * MIB),
    ],
)
def test_segments_that_a_request_takes_from_the_driver(request_size: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(request_size)
    assert segment_size(rounded(request_size)) == allocator.reserved == segment
    assert allocator.allocated == (
        rounded(request_size) if segment - request_size > MIB or segment == 2 * MIB else segment
    )


def test_small_requests_share_a_segment_of_2_mib() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.malloc(MIB // 2)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 2 * MIB)
    allocator.malloc(1)
    assert allocator.reserved == 4 * MIB


def test_large_and_small_requests_use_separate_segments() -> None:
    allocator = CachingAllocator()
    allocator.malloc(2 * MIB)  # 18 MiB of its 20 are free
    allocator.malloc(1000)
    assert allocator.reserved == 22 * MIB


def test_a_remainder_of_one_mebibyte_is_not_split_off_a_large_block() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(19 * MIB)  # in a separate segment of 20 MiB
    assert (block.size, allocator.reserved) == (20 * MIB, 20 * MIB)
    assert allocator.malloc(9 * MIB).size == 9 * MIB and allocator.reserved == 40 * MIB


def test_the_smallest_block_that_is_enough_is_taken() -> None:
    allocator = CachingAllocator()
    wide, narrow = allocator.malloc(64 * MIB), allocator.malloc(32 * MIB)
    allocator.free(wide)
    allocator.free(narrow)
    assert allocator.malloc(30 * MIB).segment == narrow.segment
    assert allocator.reserved == 96 * MIB


def test_freed_neighbours_become_one_block() -> None:
    allocator = CachingAllocator()
    one, two, three = (allocator.malloc(6 * MIB) for _ in range(3))
    assert allocator.reserved == 20 * MIB  # 2 MiB are left
    allocator.free(one)
    allocator.free(three)
    assert allocator.malloc(9 * MIB).segment != one.segment  # 6 and 8 MiB are free, separated by a block in use
    allocator.free(two)
    assert free_blocks(allocator)[0] == (one.segment, 0, 20 * MIB)
    assert allocator.malloc(16 * MIB).segment == one.segment


def test_a_full_device_frees_its_cached_segments_before_it_refuses() -> None:
    allocator = CachingAllocator(capacity=100 * MIB)
    for size in (20, 30, 40):
        allocator.free(allocator.malloc(size * MIB))
    assert allocator.reserved == 90 * MIB
    allocator.malloc(60 * MIB)
    assert (allocator.reserved, allocator.retries) == (60 * MIB, 1)
    with pytest.raises(OutOfMemory):
        allocator.malloc(60 * MIB)


def test_segments_that_are_partly_in_use_stay() -> None:
    allocator = CachingAllocator()
    kept, gone = allocator.malloc(4 * MIB), allocator.malloc(4 * MIB)
    allocator.free(gone)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 0


def test_blocks_above_max_split_size_are_kept_whole() -> None:
    allocator = CachingAllocator(Settings(max_split_size=32 * MIB))
    allocator.free(allocator.malloc(64 * MIB))
    allocator.malloc(8 * MIB)  # not from the large block
    assert allocator.reserved == 84 * MIB
    assert allocator.malloc(50 * MIB).size == 64 * MIB  # gets the 64 MiB block, which is not split
    allocator = CachingAllocator(Settings(max_split_size=32 * MIB))
    allocator.free(allocator.malloc(64 * MIB))
    allocator.malloc(40 * MIB)  # 24 MiB would be wasted
    assert allocator.reserved == 104 * MIB


def test_an_expandable_segment_grows_by_pages_and_uses_the_free_block_at_its_end() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.malloc(30 * MIB)
    assert allocator.reserved == 40 * MIB
    second = allocator.malloc(9 * MIB)
    assert (second.begin, allocator.reserved) == (30 * MIB, 40 * MIB)
    allocator.free(second)
    third = allocator.malloc(25 * MIB)  # the 10 free MiB and one more page
    assert (third.begin, allocator.reserved) == (30 * MIB, 60 * MIB)
    allocator.free(first)
    allocator.empty_cache()  # the first page is free, the second one only partly
    assert allocator.reserved == 40 * MIB
    assert allocator.malloc(20 * MIB).begin == 0 and allocator.reserved == 60 * MIB


def test_a_small_expandable_segment_has_pages_of_2_mib() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(1000)
    allocator.malloc(MIB)
    assert allocator.reserved == 2 * MIB
    allocator.malloc(MIB)
    assert allocator.reserved == 4 * MIB


@pytest.mark.parametrize("settings", [Settings(), EXPANDABLE, Settings(max_split_size=64 * MIB)])
def test_any_sequence_leaves_blocks_that_do_not_overlap(settings: Settings) -> None:
    draw, allocator, live = random.Random(3), CachingAllocator(settings), []
    for _ in range(3000):
        if live and draw.random() < 0.5:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            live.append(allocator.malloc(round(2 ** draw.uniform(1, 28))))
        if draw.random() < 0.01:
            allocator.empty_cache()
        assert allocator.allocated == sum(block.size for block in live) <= allocator.reserved
    spans = sorted((block.segment, block.begin, block.begin + block.size) for block in live)
    assert all(one[0] != two[0] or one[2] <= two[1] for one, two in zip(spans, spans[1:]))
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.allocated == allocator.reserved == 0
    with pytest.raises(ValueError, match="already free"):
        allocator.free(block)


def test_a_recorded_sequence_is_replayed() -> None:
    changes = [(0, 30 * MIB), (1, 5 * MIB), (0, -30 * MIB), (2, 4 * MIB), (2, 8 * MIB), (1, -5 * MIB)]  # block 2 grows
    result = replayed(changes, Settings())
    assert result.allocated == 12 * MIB and result.peak_allocated == 35 * MIB and result.peak_reserved == 50 * MIB


def test_an_expandable_range_returns_its_free_pages_before_it_refuses() -> None:
    allocator = CachingAllocator(EXPANDABLE, 122 * MIB)
    first, second = allocator.malloc(40 * MIB), allocator.malloc(40 * MIB)
    allocator.free(first)
    third = allocator.malloc(60 * MIB)
    assert (third.begin, allocator.reserved, allocator.retries) == (80 * MIB, 100 * MIB, 1)
    assert second.used and allocator.allocated == 100 * MIB


def test_free_memory_stays_usable_if_an_expandable_range_cannot_grow() -> None:
    allocator = CachingAllocator(EXPANDABLE, 102 * MIB)
    kept, gone = allocator.malloc(50 * MIB), allocator.malloc(20 * MIB)  # 10 MiB of the fourth page are never used
    allocator.free(gone)
    with pytest.raises(OutOfMemory):
        allocator.malloc(80 * MIB)
    assert free_blocks(allocator) == [(1, 50 * MIB, allocator.reserved - 50 * MIB)]
    assert kept.used and allocator.malloc(40 * MIB).begin == 50 * MIB  # fits into the free memory


def test_a_full_device_frees_one_large_block_under_max_split_size() -> None:
    allocator = CachingAllocator(Settings(max_split_size=32 * MIB), 200 * MIB)
    for block in [allocator.malloc(size * MIB) for size in (40, 60, 80)]:
        allocator.free(block)
    allocator.malloc(30 * MIB)  # below the limit: the block of 40 is returned, others stay
    assert (allocator.reserved, allocator.retries) == (170 * MIB, 0)
    allocator.malloc(100 * MIB)  # none is large enough: the largest ones are returned, 80 and 60
    assert (allocator.reserved, allocator.retries) == (130 * MIB, 0)


def test_sizes_are_rounded_to_parts_of_powers_of_two() -> None:
    """The parts have at least 512 bytes."""
    assert rounded(1200, (4,) * 16) == 1536 and rounded(4000, (4,) * 16) == 4096
    assert [rounded(size * MIB, (4,) * 16) // MIB for size in (33, 40, 41, 64, 65)] == [40, 40, 48, 64, 80]
    allocator = CachingAllocator(Settings(divisions=(1,) * 8 + (2,) * 8))
    allocator.malloc(300 * MIB)
    assert allocator.allocated == 384 * MIB


def test_a_program_may_be_given_a_share_of_the_memory() -> None:
    with pytest.raises(OutOfMemory):
        CachingAllocator(Settings(fraction=0.5), 100 * MIB).malloc(60 * MIB)


def test_settings_of_the_environment() -> None:
    assert from_environment({}) is None
    name, result, notes = from_environment(
        {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True, max_split_size_mb:64,"
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],max_non_split_rounding_mb:40,"
            "per_process_memory_fraction:0.9,pinned_use_background_threads:True"
        }
    )
    assert (name, notes) == ("PYTORCH_CUDA_ALLOC_CONF", [])
    assert result == Settings(True, 64 * MIB, 40 * MIB, (1,) * 9 + (2, 4) + (8,) * 5, 0.9)
    both = {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4", "PYTORCH_CUDA_ALLOC_CONF": "nonsense"}
    assert from_environment(both)[:2] == ("PYTORCH_ALLOC_CONF", Settings(divisions=(4,) * 16))


@pytest.mark.parametrize("option", ["garbage_collection_threshold:0.8", "backend:cudaMallocAsync"])
def test_settings_that_are_not_modelled_are_named(option: str) -> None:
    _, settings, (note,) = from_environment({"PYTORCH_ALLOC_CONF": option})
    assert settings == Settings() and option.partition(":")[0] in note and "not modelled" in note


@pytest.mark.parametrize(
    "text",
    ["expandable_segment:True", "expandable_segments:yes", "max_split_size_mb:8", "roundup_power2_divisions:3",
     "roundup_power2_divisions:[3:2]", "per_process_memory_fraction:2", "garbage_collection_threshold:x", "backend"],
)  # fmt: skip
def test_settings_that_pytorch_refuses_are_refused(text: str) -> None:
    with pytest.raises(Refusal, match="PYTORCH_ALLOC_CONF"):
        from_environment({"PYTORCH_ALLOC_CONF": text})


# Lists of allocations, extrapolated to more layers and micro-batches; memory reserved in a complete step.


Changes = list[tuple[int, int]]


class Tape:
    """A list of allocations and frees that is written by hand. Sizes are in MiB."""

    def __init__(self) -> None:
        self.changes: Changes = []
        self.sizes: list[int] = []

    def new(self, size: float) -> int:
        self.sizes.append(int(size * MIB))
        self.changes.append((len(self.sizes) - 1, self.sizes[-1]))
        return len(self.sizes) - 1

    def end(self, block: int) -> None:
        self.changes.append((block, -self.sizes[block]))


def step(layers: int, micro_batches: int = 1, warm_up: int = 0, shared: float = 0.0) -> tuple[Changes, list[int]]:
    """(changes of a step, indices at which forward passes begin). The backward pass frees what layers kept, last layer
    first, and each layer keeps one gradient. ``shared``: MiB per layer of a buffer that grows with the layers."""
    tape, marks, waiting = Tape(), [], []
    if shared:
        tape.new(shared * layers)
    for _ in range(layers):
        tape.new(24)
    gradients: list[int] = []

    def forward() -> None:
        marks.append(len(tape.changes))
        kept, x = [], tape.new(8)
        for _ in range(layers):
            inside = tape.new(30)
            kept += [x, tape.new(11)]
            x = tape.new(8)
            tape.end(inside)
        waiting.append([*kept, x])

    def backward() -> None:
        kept = waiting.pop(0)
        gradient = tape.new(8)
        tape.end(kept.pop())
        for _ in range(layers):
            if len(gradients) < layers:
                gradients.append(tape.new(24))
            inside = tape.new(41)
            tape.end(kept.pop())
            before, gradient = gradient, tape.new(8)
            tape.end(before)
            tape.end(inside)
            tape.end(kept.pop())
        tape.end(gradient)

    for _ in range(warm_up):
        forward()
    for _ in range(micro_batches - warm_up):
        forward()
        backward()
    for _ in range(warm_up):
        backward()
    norms = [tape.new(1.5) for _ in gradients]
    for norm in norms:
        tape.end(norm)
    return tape.changes, marks


@pytest.mark.parametrize("shared", [0.0, 2.0])
def test_extrapolated_layers_equal_a_run_of_all_layers(shared: float) -> None:
    few, more, many = (lifetimes(step(layers, shared=shared)[0])[0] for layers in (4, 5, 17))
    stretches, larger = added(few, more)
    assert sum(end - begin for begin, end in stretches) == len(more) - len(few)
    result, places = extrapolated(more, stretches, 12, larger)
    assert result == many
    assert places[0] == 0 and places[-1] == len(many)


@pytest.mark.parametrize("warm_up", [0, 1, 2])
def test_extrapolated_micro_batches_equal_a_run_of_all_micro_batches(warm_up: int) -> None:
    """Under 1F1B a repeated stretch frees blocks that the forward pass of an earlier micro-batch allocated."""
    (some, marks), (many, _) = step(3, warm_up + 3, warm_up), step(3, warm_up + 9, warm_up)
    some, places = lifetimes(some)
    begin, end = (places[marks[at]] for at in (warm_up + 1, warm_up + 2))
    assert extrapolated(some, [(begin, end)], 6)[0] == lifetimes(many)[0]


def test_a_block_that_is_resized_ends_and_begins() -> None:
    changes, places = lifetimes([(7, 1000), (7, 2000), (7, -3000), (7, 100)])
    assert changes == [(0, 1024), (0, -1024), (1, 3072), (1, -3072), (2, 512)]
    assert places == [0, 1, 3, 4, 5]


def test_lists_that_differ_in_more_than_layers_are_not_extrapolated() -> None:
    few, more = lifetimes(step(4)[0])[0], lifetimes(step(5)[0])[0]
    with pytest.raises(NoPattern, match="more than layers"):
        added([*few[:3], (99, 5 * MIB), *few[4:]], more)
    with pytest.raises(NoPattern, match="no other makes"):
        extrapolated([(0, MIB), (0, -MIB)], [(1, 2)], 3)


def test_a_whole_step_is_replayed() -> None:
    """The result equals a run of all layers; it is not scaled by the peak."""
    ran = [Allocations(step(layers)[0]) for layers in (4, 5)]
    (whole, _), result = step(17), reserved(ran, [4, 5], 17, 1e12, 0)
    assert result == reserved([Allocations(whole)], [17], 17, 1e12, 0)
    few = reserved(ran[1:], [5], 5, 1e12, 0)
    share = peak(whole) / peak(ran[1].changes)
    assert result.bytes["default"] != pytest.approx(share * few.bytes["default"], rel=0.01)
    assert not result.scaled and set(result.bytes) == {"default", "expandable_segments"}


def test_of_very_many_layers_some_are_replayed_and_the_others_are_added_without_fragmentation(monkeypatch) -> None:
    ran = [Allocations(step(layers)[0]) for layers in (4, 5)]
    whole = reserved(ran, [4, 5], 40, 1e12, 0)
    monkeypatch.setattr(module, "LONGEST", 16 * (len(ran[1].changes) - len(ran[0].changes)))
    result = reserved(ran, [4, 5], 40, 1e12, 0)
    assert "reserved: 21 of 40 layers were replayed" in result.notes[0] and not whole.notes and not result.scaled
    some = reserved(ran, [4, 5], 21, 1e12, 0)
    rest = peak(step(40)[0]) - peak(step(21)[0])
    for setting, size in whole.bytes.items():
        assert result.bytes[setting] == pytest.approx(some.bytes[setting] + rest, rel=0.02)
        assert peak(step(40)[0]) < result.bytes[setting] <= size


def test_steps_that_cannot_be_extrapolated_are_run_if_cheap_and_scaled_otherwise(monkeypatch) -> None:
    few, more, whole = (step(layers)[0] for layers in (4, 5, 17))
    odd = Allocations([(500, 3 * MIB), (500, -3 * MIB), *more])
    ran = [Allocations(few), Allocations([*odd.changes, (501, MIB), (500, 2 * MIB), (501, -MIB)])]
    monkeypatch.setattr(module, "added", lambda *_: (_ for _ in ()).throw(NoPattern("odd")))
    assert reserved(ran, [4, 5], 17, 1e12, 0, lambda: Allocations(whole)) == reserved(
        [Allocations(whole)], [17], 17, 1e12, 0
    )
    monkeypatch.setattr(module, "CHEAP", 0)
    assert reserved(ran, [4, 5], 17, 1e12, 0, lambda: Allocations(whole)).scaled == "5 of 17 layers"


def test_a_full_device_frees_cached_memory_and_a_device_that_is_too_small_is_reported() -> None:
    changes = [(0, 40 * MIB), (1, 40 * MIB), (0, -40 * MIB), (2, 60 * MIB)]
    result = reserved([Allocations(changes)], [1], 1, 110 * MIB, 0)
    assert result.bytes["default"] == 100 * MIB and result.retries == {"default": 1, "expandable_segments": 1}
    result = reserved([Allocations(changes)], [1], 1, 90 * MIB, 0)
    assert result.bytes["default"] == 140 * MIB and result.retries == {"default": None, "expandable_segments": None}


def test_settings_are_read_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:20,garbage_collection_threshold:0.5")
    result = reserved([Allocations([(0, 64 * MIB), (0, -64 * MIB), (1, 4 * MIB)])], [1], 1, 1e12, 0)
    assert result.bytes["PYTORCH_CUDA_ALLOC_CONF"] == 84 * MIB and result.bytes["default"] == 64 * MIB
    assert "garbage_collection_threshold is not modelled" in result.notes[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "flags, ranks",
    [
        ("--zero-stage 3 --bf16 --ulysses-parallel-size 2 --global-batch-size 8", 2),
        ("--use-distributed-optimizer --bf16 --global-batch-size 8", 2),
        ("--pipeline-model-parallel-size 2 --bf16 --global-batch-size 8", 2),
    ],
)
def test_reserved_memory_of_a_shortened_step_equals_that_of_a_complete_step(flags: str, ranks: int) -> None:
    from tests.unit.test_dry_run import LLAMA, TINY

    layers = 12 * (2 if "pipeline" in flags else 1)
    shape = "--hidden-size 512 --ffn-hidden-size 1408 --seq-length 4096"
    config = parse(f"{TINY} {shape} {flags} --num-layers {layers}".split(), LLAMA, ranks)
    machine = load("H100-80G")
    few = dry_run(config, ranks, machine, vocab_size=301)
    rank = few.ranks[-1].rank
    every = run_job((config, ranks, rank, 301, machine, True))[-1]
    assert few.ranks[-1].layers[1] < few.ranks[-1].layers[0] and not few.ranks[-1].reserved.scaled
    own = module.reserved([every], [12], 12, 1e12, 32 * MIB)
    assert few.ranks[-1].reserved.bytes == own.bytes
