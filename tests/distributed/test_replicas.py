# SPDX-License-Identifier: Apache-2.0
"""One flipped bit on one rank is detected, and its place is named."""

import io
import socket
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.training.features.replicas import bits
from tests.distributed.flags import LLAMA, RUN, SHAPE
from tests.distributed.training_runs import make_job, train_job, weights_of


def flipped(flags: str, rank: int, name: str, bit: int) -> list[str]:
    """The report after two steps, and after one bit of a weight was flipped on one rank."""
    from megatron.training.features.replicas import ReplicasDiffer, check_replicas

    job = make_job(flags)
    train_job(job, 2)
    output = []
    for number in range(2):
        if number and dist.get_rank() == rank:
            weight = weights_of(job)[name]
            local = weight.data.to_local() if hasattr(weight.data, "to_local") else weight.data
            local.reshape(-1).view(torch.int32)[3] ^= torch.tensor(
                -(2**31) if bit == 31 else 1 << bit, dtype=torch.int32
            )
        try:
            check_replicas(job)
            output.append("")
        except ReplicasDiffer as error:
            output.append(str(error))
    return output


NORM = "decoder.final_layernorm.weight"
EXPERT = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"
FC1, LAST = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.3.mlp.linear_fc1.weight"


CASES = (  # ranks, flags; rank, weight and bit to change; expected message
    (4, "--ring-parallel-size 2", 2, FC1, 0, "rank 2 on {host} differs over DP x CP from rank 0 on {host}"),
    (2, "--tensor-model-parallel-size 2 --sequence-parallel", 1, NORM, 7,
     "ranks 0 on {host}, 1 on {host} differ over TP"),
    (4, "--tensor-model-parallel-size 2 --zero-stage 3", 3, NORM, 3, "ranks 2 on {host}, 3 on {host} differ over TP"),
    (4, "--ring-parallel-size 2 --num-experts 4 --expert-model-parallel-size 2", 2, EXPERT, 5,
     "ranks 0 on {host}, 2 on {host} differ over DP"),
    # Weights are gathered again before the comparison, which overwrites the change.
    (2, "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather", 1, NORM, 31, ""),
)  # fmt: skip
MORE = (
    (4, "--ring-parallel-size 2 --zero-stage 1", 0, NORM, 31,
     "rank 0 on {host} differs over DP x CP from rank 1 on {host} and the others"),
    (2, "--tensor-model-parallel-size 2", 1, FC1, 7, ""),  # TP splits it, so there is no copy
    (2, "--zero-stage 3", 1, FC1, 3, ""),
    (2, "--pipeline-model-parallel-size 2", 1, LAST, 3, ""),
)  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "flags", "rank", "name", "bit", "message"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)],
)
@pytest.mark.usual(1, 4)
def test_a_flipped_bit_is_named(pool, ranks: int, flags: str, rank: int, name: str, bit: int, message: str):
    results = pool.run(flipped, ranks, flags, rank, name, bit)
    assert all(result == results[0] for result in results)
    before, after = results[0]
    assert before == ""
    if message:
        assert after.startswith(f"{name}: {message.format(host=socket.gethostname())}"), after
    else:
        assert after == ""


def whole_program(flags: str, rank: int) -> tuple[int, str]:
    """Exit code and output of a run with a flipped bit on one rank and a slow rank."""
    from megatron.training import pretrain
    from megatron.training.arguments.parser import parse
    from megatron.training.features import replicas
    from megatron.training.features.measuring.stragglers import Stragglers
    from megatron.training.setup import start

    config = parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA, dist.get_world_size())
    other, console = dist.get_rank() == rank, io.StringIO()
    with (
        patch.object(replicas, "bits", lambda weight: bits(weight) + other),
        patch.object(Stragglers, "report", lambda _: "some rank is slow"),
        redirect_stdout(console),
    ):
        return pretrain.train(config, start(config)), console.getvalue()


@pytest.mark.lab
def test_the_run_ends_with_a_line_and_exit_code_1(pool, tmp_path):
    flags = "--check-weight-hash-across-dp-replicas-interval 2 --log-straggler --log-interval 1 --train-iters 4"
    flags += f" --micro-batch-size 1 --save {tmp_path}/c"
    (code, out), (other, _) = pool.run(whole_program, 2, flags, 1)
    assert code == other == 1
    (line,) = [line for line in out.splitlines() if line.startswith("error: ")]
    assert "weight: ranks 0 on " in line and line.count(" differ over DP x CP") == 4 and "; and " in line
    assert "after iteration 2, and nothing was saved" in line and not [*(tmp_path / "c").glob("iter_*")]
    code, out = pool.run(whole_program, 2, flags, -1)[0]
    assert code == 0 and "error" not in out and out.count(" WARNING: some rank is slow\n") == 4
    assert (tmp_path / "c" / "iter_0000004").exists()


def test_every_bit_counts():
    for dtype, size in ((torch.float32, 32), (torch.bfloat16, 16), (torch.float64, 64)):
        tensor = torch.randn(5, dtype=dtype)
        words = tensor.view({16: torch.int16, 32: torch.int32, 64: torch.int64}[size])
        sums = {int(bits(tensor))}
        for bit in range(size):
            value = 1 << bit if bit < size - 1 else -(1 << bit)
            words[4] ^= value
            sums.add(int(bits(tensor)))
            words[4] ^= value
        assert len(sums) == size + 1
    swapped = tensor.clone()
    swapped[0], swapped[1] = tensor[1], tensor[0]
    assert bits(swapped) != bits(tensor)
