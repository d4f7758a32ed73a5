# SPDX-License-Identifier: Apache-2.0
"""Lists of allocations, continued to more layers and micro-batches; what is reserved in a whole step."""

from __future__ import annotations

import pytest

from megatron.simulator.dry_run.allocation import reserved as module
from megatron.simulator.dry_run.allocation.allocator import MIB
from megatron.simulator.dry_run.allocation.reserved import (
    Allocations,
    NoPattern,
    Reserved,
    added,
    extrapolated,
    lifetimes,
    peak,
    reserved,
)
from megatron.simulator.dry_run.dry_run import dry_run, run_job
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.parser import parse

Changes = list[tuple[int, int]]


class Tape:
    """Writes a list of changes by hand, in MiB."""

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
    """A step: what each forward pass of a layer keeps is freed in the opposite order; one gradient is kept of each.
    Returns where forward passes begin, too. ``shared``: a buffer that grows with the layers."""
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
def test_more_layers_are_written_down_as_they_would_run(shared: float) -> None:
    few, more, many = (lifetimes(step(layers, shared=shared)[0])[0] for layers in (4, 5, 17))
    stretches, larger = added(few, more)
    assert sum(end - begin for begin, end in stretches) == len(more) - len(few)
    found, places = extrapolated(more, stretches, 12, larger)
    assert found == many
    assert places[0] == 0 and places[-1] == len(many)


@pytest.mark.parametrize("warm_up", [0, 1, 2])
def test_more_micro_batches_are_written_down_as_they_would_run(warm_up: int) -> None:
    """Under 1F1B a stretch frees what the micro-batch of a forward pass before it made."""
    (some, marks), (many, _) = step(3, warm_up + 3, warm_up), step(3, warm_up + 9, warm_up)
    some, places = lifetimes(some)
    begin, end = (places[marks[at]] for at in (warm_up + 1, warm_up + 2))
    assert extrapolated(some, [(begin, end)], 6)[0] == lifetimes(many)[0]


def test_a_block_that_is_resized_ends_and_begins() -> None:
    changes, places = lifetimes([(7, 1000), (7, 2000), (7, -3000), (7, 100)])
    assert changes == [(0, 1024), (0, -1024), (1, 3072), (1, -3072), (2, 512)]
    assert places == [0, 1, 3, 4, 5]


def test_lists_that_differ_in_more_than_layers_are_not_continued() -> None:
    few, more = lifetimes(step(4)[0])[0], lifetimes(step(5)[0])[0]
    with pytest.raises(NoPattern, match="more than layers"):
        added([*few[:3], (99, 5 * MIB), *few[4:]], more)
    with pytest.raises(NoPattern, match="no other makes"):
        extrapolated([(0, MIB), (0, -MIB)], [(1, 2)], 3)


def test_a_whole_step_is_replayed() -> None:
    """As if all had run; not as much more as the peak is higher."""
    ran = [Allocations(step(layers)[0]) for layers in (4, 5)]
    (whole, _), found = step(17), reserved(ran, [4, 5], 17, 1e12, 0)
    assert found == reserved([Allocations(whole)], [17], 17, 1e12, 0)
    few = reserved(ran[1:], [5], 5, 1e12, 0)
    share = peak(whole) / peak(ran[1].changes)
    assert found.bytes["default"] != pytest.approx(share * few.bytes["default"], rel=0.01)
    assert not found.scaled and set(found.bytes) == {"default", "expandable_segments"}


def test_of_very_many_layers_some_are_replayed_and_the_others_counted_without_gaps(monkeypatch) -> None:
    ran = [Allocations(step(layers)[0]) for layers in (4, 5)]
    whole = reserved(ran, [4, 5], 40, 1e12, 0)
    monkeypatch.setattr(module, "LONGEST", 16 * (len(ran[1].changes) - len(ran[0].changes)))
    found = reserved(ran, [4, 5], 40, 1e12, 0)
    assert "reserved: 21 of 40 layers replayed" in found.notes[0] and not whole.notes and not found.scaled
    some = reserved(ran, [4, 5], 21, 1e12, 0)
    rest = peak(step(40)[0]) - peak(step(21)[0])
    for setting, size in whole.bytes.items():
        assert found.bytes[setting] == pytest.approx(some.bytes[setting] + rest, rel=0.02)
        assert peak(step(40)[0]) < found.bytes[setting] <= size


def test_what_cannot_be_continued_is_run_where_that_is_cheap_and_else_scaled_by_name(monkeypatch) -> None:
    few, more, whole = (step(layers)[0] for layers in (4, 5, 17))
    odd = Allocations([(500, 3 * MIB), (500, -3 * MIB), *more])
    ran = [Allocations(few), Allocations([*odd.changes, (501, MIB), (500, 2 * MIB), (501, -MIB)])]
    monkeypatch.setattr(module, "added", lambda *_: (_ for _ in ()).throw(NoPattern("odd")))
    assert reserved(ran, [4, 5], 17, 1e12, 0, lambda: Allocations(whole)) == reserved(
        [Allocations(whole)], [17], 17, 1e12, 0
    )
    monkeypatch.setattr(module, "CHEAP", 0)
    assert reserved(ran, [4, 5], 17, 1e12, 0, lambda: Allocations(whole)).scaled == "5 of 17 layers"


def test_a_device_that_is_full_gives_back_and_one_that_is_too_small_is_told() -> None:
    changes = [(0, 40 * MIB), (1, 40 * MIB), (0, -40 * MIB), (2, 60 * MIB)]
    found = reserved([Allocations(changes)], [1], 1, 110 * MIB, 0)
    assert found.bytes["default"] == 100 * MIB and found.retries == {"default": 1, "expandable_segments": 1}
    found = reserved([Allocations(changes)], [1], 1, 90 * MIB, 0)
    assert found.bytes["default"] == 140 * MIB and found.retries == {"default": None, "expandable_segments": None}


def test_the_environment_is_asked(monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:20,garbage_collection_threshold:0.5")
    found = reserved([Allocations([(0, 64 * MIB), (0, -64 * MIB), (1, 4 * MIB)])], [1], 1, 1e12, 0)
    assert found.bytes["PYTORCH_CUDA_ALLOC_CONF"] == 84 * MIB and found.bytes["default"] == 64 * MIB
    assert "garbage_collection_threshold is not modelled" in found.notes[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "flags, ranks",
    [
        ("--zero-stage 3 --bf16 --ulysses-parallel-size 2 --global-batch-size 8", 2),
        ("--use-distributed-optimizer --bf16 --global-batch-size 8", 2),
        ("--pipeline-model-parallel-size 2 --bf16 --global-batch-size 8", 2),
    ],
)
def test_what_a_step_reserves_is_what_it_reserves_when_all_of_it_runs(flags: str, ranks: int) -> None:
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


def test_without_a_gpu_nothing_is_reserved() -> None:
    assert Reserved().bytes == {} and not Reserved().scaled
