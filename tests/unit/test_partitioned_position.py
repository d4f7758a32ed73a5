# SPDX-License-Identifier: Apache-2.0
"""A partitioned table: every row is on one rank, is drawn as in the whole table, and takes its share of memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.context_parallel.core.learned_positions import PositionRows
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.decisions.division import length_unit
from megatron.platform.simulated_cluster import simulated_world
from megatron.training.arguments.parser import parse
from megatron.training.model import weights
from megatron.training.refusal import Refusal
from tests.distributed.training_runs import RUN, SHAPE
from tests.properties import examples

PARTITION = "--partition-position-embedding --hidden-dropout 0 --attention-dropout 0"
cases = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())


@examples(150)
@given(cases, st.integers(1, 4), st.integers(0, 40), st.data())
def test_every_position_has_one_row_and_tokens_theirs(case, times, spare, data):
    ulysses, ring, tensor, sequence_parallel, fpdt = case
    parts = tensor if sequence_parallel else 1
    length = length_unit(ulysses, ring, "zigzag", parts) * times
    chunks = data.draw(st.integers(1, length // (ulysses * ring * parts))) if fpdt else 1
    whole = SequenceLayout(
        length,
        abstract_grid(ulysses=ulysses, ring=ring, tensor=tensor),
        chunks=chunks,
        tensor_parts=parts if fpdt else 1,
    )
    held = []
    for u, r, t in ((u, r, t) for u in range(ulysses) for r in range(ring) for t in range(tensor)):
        layout = replace(whole, grid=whole.grid.at(ulysses=u, ring=r, tensor=t))
        rows = PositionRows(layout, length + spare, 3, sequence_parallel=sequence_parallel)
        positions = [position for start, stop in rows.weight.spans for position in range(start, stop)]
        assert rows.weight.shape == (len(positions), 3)
        # the tokens that this TP rank embeds: what core's scatter of the local tokens leaves it
        mine = layout.positions.chunk(parts)[t if sequence_parallel else 0].tolist()
        assert positions[: rows.tokens] == mine
        assert rows().shape == (len(mine), 3)
        if sequence_parallel or t == 0:
            held += positions
    assert sorted(held) == list(range(length + spare))


def config_of(flags: str, world_size: int = 1):
    return parse(f"{SHAPE} {RUN} {flags}".split(), None, world_size)


@pytest.mark.parametrize("flags", ["", "--init-method-xavier-uniform"])
def test_rows_are_those_of_the_whole_table(flags, monkeypatch):
    config = config_of(f"{PARTITION} {flags}")
    asked = []
    draw = weights.draw

    def watched(*args, **kwargs):
        values = draw(*args, **kwargs)
        asked.append(values.size(0))
        return values

    monkeypatch.setattr(weights, "draw", watched)
    rows = partial(weights.draw_rows, name=weights.POSITIONS, shape=(1000, 6), core=None, config=config, at_once=100)
    whole = torch.full((1000, 6), torch.nan)
    rows(whole, [(0, 1000)])
    assert len(asked) == 10 and whole.isfinite().all() and whole.unique().numel() > 5900
    std = 0.02 if not flags else (2 / 1006) ** 0.5
    assert float(whole.std()) == pytest.approx(std, rel=0.03)
    spans = [(950, 1000), (0, 7), (7, 130), (99, 101), (300, 300), (250, 501)]
    mine = torch.full((50 + 7 + 123 + 2 + 251, 6), torch.nan)
    rows(mine, spans)
    assert torch.equal(mine, torch.cat([whole[start:stop] for start, stop in spans]))
    assert max(asked) == 100  # never the whole


def test_a_short_table_is_one_drawing():
    """As every other parameter, so tables of up to 4,096 rows are what they were before tables were drawn in runs."""
    config, shape = config_of(PARTITION), (weights.ROWS_DRAWN, 2)
    part = torch.empty(shape)
    weights.draw_rows(part, [(0, shape[0])], weights.POSITIONS, shape, None, config)
    assert torch.equal(part, weights.draw(weights.POSITIONS, shape, None, config, torch.device("cpu")))


@pytest.mark.parametrize(
    "flags, world, told",
    [
        ("--position-embedding-type rope --ulysses-parallel-size 2", 2, "--position-embedding-type learned_absolute"),
        ("--position-embedding-type none --ulysses-parallel-size 2", 2, "--position-embedding-type none"),
        ("--fp16 --ulysses-parallel-size 2", 2, "--bf16"),
        ("--reset-position-ids --ring-parallel-size 2", 2, "--reset-position-ids"),
        (
            "--reset-attention-mask --context-parallel-balance documents --ring-parallel-size 2 --micro-batch-size 1",
            2,
            "use --context-parallel-balance zigzag",
        ),
    ],
)
def test_refused_by_name(flags, world, told):
    with pytest.raises(Refusal) as caught:
        config_of(f"{PARTITION} {flags}", world)
    assert "--partition-position-embedding" in str(caught.value) and told in str(caught.value)


@pytest.mark.parametrize(
    "flags, world, on",
    [
        ("", 2, False),
        ("--tensor-model-parallel-size 2", 2, False),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2, True),
        ("--ring-parallel-size 2", 2, True),
    ],
)
def test_nothing_to_split_is_said(flags, world, on):
    config = config_of(f"{PARTITION} {flags}", world)
    assert config.parallel.partition_position_embedding == on
    assert on != any("--partition-position-embedding" in note for note in config.notes)


def test_packed_documents_are_not_dealt():
    """Their balance would move positions from rank to rank with each batch: zigzag stays the default."""
    flags = "--attention-mask document --ring-parallel-size 2 --micro-batch-size 1"
    assert config_of(f"{PARTITION} {flags}", 2).parallel.context_parallel_balance == "zigzag"
    whole = f"--hidden-dropout 0 --attention-dropout 0 {flags}"
    assert config_of(whole, 2).parallel.context_parallel_balance == "documents"


GRIDS = [
    "--ulysses-parallel-size 8",
    "--ring-parallel-size 8",
    "--tensor-model-parallel-size 2 --sequence-parallel --ulysses-parallel-size 2 --ring-parallel-size 2",
    "--ulysses-parallel-size 8 --zero-stage 1",
]


def same_on_all_ranks(found, mine, group=None):
    """all_gather_object without messages, of which fake tensors have no lengths."""
    found[:] = [mine] * len(found)


@pytest.mark.parametrize("flags", GRIDS)
@pytest.mark.parametrize("rank", [0, 5])
def test_a_million_positions_over_8_ranks_are_an_eighth_on_each(flags, rank, monkeypatch):
    """1,048,576 x 1,024: weights, gradients, Adam's states, in bytes of the tensors that core makes for a rank."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    from megatron import platform
    from megatron.context_parallel.core.groups import initialize_grid
    from megatron.training.model.build import build_model
    from megatron.training.model.optimizer import build_optimizer, wrap_for_data_parallelism
    from megatron.training.report.memory_profile import owned

    positions, hidden = 2**20, 1024
    length = f"--seq-length {positions} --max-position-embeddings {positions} --hidden-size {hidden}"
    config = config_of(f"{PARTITION} {length} --num-layers 1 --micro-batch-size 1 --global-batch-size 1 {flags}", 8)
    parallel = config.parallel
    device = platform.select("cpu", 0, None).device
    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda *_: nullcontext())  # it would look into fake states
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, _: module)  # fake tensors cannot move, and need not
    monkeypatch.setattr(torch.distributed, "all_gather_object", same_on_all_ranks)
    with simulated_world(8, rank):
        grid = initialize_grid(
            ulysses=parallel.ulysses_parallel_size,
            ring=parallel.ring_parallel_size,
            tensor=parallel.tensor_model_parallel_size,
            core_options={"expert_model_parallel_size": parallel.context_parallel_size},
        )
        layout = SequenceLayout(positions, grid)
        with FakeTensorMode(allow_non_fake_inputs=True):
            chunks = wrap_for_data_parallelism(build_model(config, grid, layout, 64, device), config)
            optimizer = build_optimizer(chunks, config)
            found = {}
            for kind, tensor in owned(chunks, optimizer):
                storage = tensor.untyped_storage()
                found.setdefault(storage._cdata, (kind, storage.nbytes()))
    large = sorted((size, kind) for kind, size in found.values() if size > positions * hidden // 16)
    eighth = positions * hidden * 4 // 8
    assert large == [(eighth, kind) for kind in ("gradients", "optimizer", "optimizer", "parameters")]
