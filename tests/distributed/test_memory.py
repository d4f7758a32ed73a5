# SPDX-License-Identifier: Apache-2.0
"""--profile-memory on several ranks: what it calls parameters, gradients and optimizer states is what is there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.training_runs import make_job


def train_and_count(flags: str, folder: str) -> dict[str, Any]:
    """On a rank: train two steps with --profile-memory, and count by other means what the profile should say."""
    from megatron.training.features.stopping import Stopper
    from megatron.training.loop import training_loop
    from megatron.training.report.reporter import Reporter

    job = make_job(f"{flags} --exit-interval 2 --profile-memory {folder}")
    stopper = Stopper(job.runtime.device, None)
    reporter = Reporter(job.config, active=False, first_iteration=0, last_iteration=2)
    assert training_loop(job, reporter, stopper)
    stopper.restore()
    parameters = [parameter for chunk in job.chunks for parameter in chunk.parameters()]
    buffers = [buffer for chunk in job.chunks for buffer in chunk.buffers]
    padded = [buffer.param_data.nbytes for buffer in buffers if buffer.param_data is not None]
    inner = job.optimizer.optimizer
    mine = [parameter for group in inner.param_groups for parameter in group["params"]]
    return {
        "numbers": sum(parameter.numel() for parameter in parameters),
        "parameters": sum(padded) if padded else sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(buffer.numel * 4 for buffer in buffers),
        "optimized": sum(parameter.numel() for parameter in mine),
        "counters": 4 * len(inner.state),
    }


@pytest.mark.parametrize(
    "flags, bytes_a_number",
    [
        pytest.param("--bf16", 12, marks=pytest.mark.full),
        pytest.param("--zero-stage 1", 8, marks=pytest.mark.full),
        ("--zero-stage 1 --bf16 --pipeline-model-parallel-size 2", 12),
    ],
)
def test_bytes_by_kind_are_those_of_the_buffers(pool, tmp_path, flags, bytes_a_number):
    from megatron.training.report.memory_picture import peak_of, read

    ranks = 2 * (1 + ("pipeline" in flags))
    counted = pool.run(train_and_count, ranks, flags, str(tmp_path))
    profiles = [read(tmp_path / f"memory_rank{rank}.json") for rank in range(ranks)]
    for rank, (truth, profile) in enumerate(zip(counted, profiles)):
        start = profile["start"]
        assert (tmp_path / f"memory_rank{rank}.png").read_bytes().startswith(b"\x89PNG")
        assert profile["rank"] == rank and profile["iteration"] == 2
        assert start["parameters"] == truth["parameters"] >= truth["numbers"] * (2 if "bf16" in flags else 4)
        assert start["gradients"] == truth["gradients"] >= truth["numbers"] * 4
        assert start["optimizer"] == bytes_a_number * truth["optimized"] + truth["counters"]
        assert peak_of(profile)[1]["activations"] > 64 * 64 * 4
        names = [name for name, _ in profile["phases"]]
        assert names[0] == "forward" and names[-1] == "optimizer" and "backward" in names
    if "zero" in flags:  # states are split over two ranks, and none is missing
        for first, second in zip(counted[::2], counted[1::2]):
            assert first["optimized"] + second["optimized"] == first["numbers"] == second["numbers"]
