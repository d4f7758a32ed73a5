# SPDX-License-Identifier: Apache-2.0
"""--elastic: the grid for as many processes as there are."""

import pytest

from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 96 --max-position-embeddings 96 "
    "--micro-batch-size 1 --global-batch-size 24 --train-iters 4 --lr 1e-3 --mock-data --vocab-size 99 "
    "--tokenizer-type NullTokenizer --save c --load c"
)
LIST = "8: tp2 u2 r2; 6: U2 r3;4:u2 r2"


def grid(flags: list[str], processes: int) -> tuple[int, ...]:
    config = parse([*FLAGS.split(), *flags], world_size=processes)
    one = config.parallel
    assert any(note.startswith(f"elastic: {processes} processes") for note in config.notes)
    return (
        one.tensor_model_parallel_size,
        one.ulysses_parallel_size,
        one.ring_parallel_size,
        one.pipeline_model_parallel_size,
    )


@pytest.mark.parametrize(
    "processes, expected", [(8, (2, 2, 2, 1)), (6, (1, 2, 3, 1)), (4, (1, 2, 2, 1)), (12, (1, 2, 3, 1))]
)
def test_a_list_of_grids(processes, expected):
    assert grid(["--elastic-grids", LIST], processes) == expected


@pytest.mark.parametrize(
    "flags, processes, expected",
    [
        ("--ulysses-parallel-size 2 --ring-parallel-size 2", 8, (1, 2, 2, 1)),
        ("--ulysses-parallel-size 2 --ring-parallel-size 2", 6, (1, 1, 3, 1)),
        ("--ulysses-parallel-size 4 --ring-parallel-size 2", 6, (1, 2, 3, 1)),
        ("--context-parallel-size 8", 3, (1, 1, 3, 1)),
        ("--tensor-model-parallel-size 2 --context-parallel-size 4", 4, (2, 2, 1, 1)),
        ("--pipeline-model-parallel-size 2 --ulysses-parallel-size 4", 2, (1, 1, 1, 2)),
    ],
)
def test_the_flags_grid_as_far_as_it_fits(flags, processes, expected):
    assert grid(["--elastic", *flags.split()], processes) == expected


def test_the_planners_grid():
    """Long samples are split, short ones are not; as many GPUs as are left."""
    from megatron.simulator.planner.search import fastest

    def context(seq_length: int, processes: int) -> int:
        flags = f"--model llama3-8b --num-layers 4 --seq-length {seq_length} --max-position-embeddings {seq_length} "
        flags += "--micro-batch-size 1 --global-batch-size 24 --train-iters 4 --lr 1e-3 --mock-data --save c --load c "
        flags += "--bf16 --zero-stage 1 --elastic --gpu H100-80G --tokenizer-type NullTokenizer --vocab-size 128255"
        config = parse(flags.split(), world_size=processes, fastest=fastest)
        assert [note for note in config.notes if "the rest DP, the planner's choice for H100-80G" in note]
        return config.parallel.context_parallel_size

    assert context(4096, 8) == context(4096, 6) == 1 < min(context(2**17, 8), context(3 * 2**16, 6))
    with pytest.raises(Refusal, match="no grid of 2 processes fits H100-80G: save memory"):
        context(2**20, 2)


@pytest.mark.parametrize(
    "flags, processes, line",
    [
        (["--elastic-grids", LIST], 5, "no grid for 5 processes, nor for a divisor of it"),
        (["--elastic-grids", "8: tp3"], 8, "TP 3 x Ulysses 1 x Ring 1 x PP 1 does not divide 8 processes"),
        (["--elastic-grids", "8 tp2"], 8, "'8 tp2' cannot be read of --elastic-grids: write it as"),
        (["--elastic-grids", "8: tp2 tp4"], 8, "cannot be read"),
        (["--elastic-grids", "8: tp2; 8: u2"], 8, "8 processes have a grid already; leave one out"),
        (["--elastic-grids", " ; "], 8, "holds no grid"),
        (["--elastic", "--tensor-model-parallel-size", "4"], 6, "TP x PP = 4 does not divide 6 processes"),
        (["--gpu", "H100-80G"], 2, "add --dry-run, or --elastic, which takes the planner's grid"),
        (["--elastic", "--load", "d"], 2, "give --save DIR and --load with the same folder"),
    ],
)
def test_refusals(flags, processes, line):
    with pytest.raises(Refusal) as refused:
        parse([*FLAGS.split(), *flags], world_size=processes)
    assert line in str(refused.value)


def test_a_store_of_torchrun_that_keeps_later_nodes_out_is_noted(monkeypatch):
    flags = [*FLAGS.split(), "--elastic-grids", LIST]
    for keeps, noted in (("True", True), ("False", False)):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", keeps)
        notes = parse(flags, world_size=4).notes
        assert any("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in note for note in notes) == noted
