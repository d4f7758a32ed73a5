# SPDX-License-Identifier: Apache-2.0
"""NaN, or no memory left, on one rank only: all ranks end together, the rank is named, what was saved stays."""

import re
from pathlib import Path

import pytest

from megatron.training.checkpoint import checksums
from tests.distributed.test_program import FLAGS
from tests.faults.kills import ENVIRONMENT, losses
from tests.program import run_ranks

SCRIPT = Path(__file__).parent / "broken_rank.py"
ONE = f"{FLAGS} --train-iters 6 --eval-iters 0 --save-interval 1"
GRIDS = ("", "--ring-parallel-size 2", "--tensor-model-parallel-size 2", "--zero-stage 1", "--zero-stage 3",
         "--ulysses-parallel-size 2", "--pipeline-model-parallel-size 2")  # fmt: skip


def broken(folder, how, rank, more, ranks=2):
    flags = f"{ONE} --save {folder}/c --log-jsonl {folder}/log.jsonl {more}"
    done = run_ranks(SCRIPT, [how, str(rank), *flags.split()], ENVIRONMENT, ranks)
    return [one.returncode for one in done], [one.stdout for one in done], [one.stderr for one in done]


def whole(folder):
    """Iterations of the checkpoints, each of which must be whole."""
    paths = sorted((folder / "c").glob("iter_*"))
    assert not any(map(checksums.damage, paths))
    return [int(path.name[5:]) for path in paths]


@pytest.mark.parametrize(
    "rank, more", [(1, ""), *[pytest.param(r, g, marks=pytest.mark.full) for g in GRIDS for r in (0, 1) if g or not r]]
)
def test_nan_in_the_loss_of_one_rank(tmp_path, rank, more):
    codes, said, errors = broken(tmp_path, "loss", rank, more)
    assert "Traceback" not in "".join(errors), errors
    if "pipeline" in more and rank == 0:  # its first stage has no loss
        assert codes == [0, 0]
        return
    assert codes == [1, 1] and list(losses(tmp_path)) == [1, 2] == whole(tmp_path), (said, errors)
    (line,) = re.findall("error: .*", said[0])
    assert re.match("error: the (loss|gradient norm) is nan at iteration 3", line), line  # over TP each has its own
    named = re.findall(r"in the loss of rank (\d+) on", line)
    assert named == ([] if "pipeline" in more else [str(rank)]), line


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_nan_in_what_one_rank_has_of_the_sums(tmp_path, rank):
    codes, said, errors = broken(tmp_path, "norm", rank, "")
    assert 0 not in codes and "Traceback" not in "".join(errors), errors
    assert whole(tmp_path) == [1, 2]
    lines = "".join(said + errors)
    assert f"rank {rank} on" in lines and "the gradient norm is nan" in lines, lines


@pytest.mark.full
@pytest.mark.parametrize("ranks, rank", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("how, more", [("train", ""), ("save", ""), ("save", "--async-save")])
def test_memory_runs_out(tmp_path, how, more, ranks, rank):
    """On one rank, which may take no more from the system; a wide MLP makes each step ask for much."""
    codes, said, errors = broken(tmp_path, how, rank, f"--ffn-hidden-size 60000 {more}", ranks)
    told, there = [int(number) for number in re.findall(r"> saved \S+/iter_(\d+) ", said[0])], whole(tmp_path)
    assert set(told) <= set(there) and "Traceback" not in "".join(errors), errors
    if any(codes):
        assert codes == [1] * ranks and "can't allocate memory" in "".join(errors), errors
    else:
        assert there[-1] == 6 and how == "save"
    print(f"\n{how} {more}, rank {rank} of {ranks}: codes {codes}, told {told}, there {there}")
