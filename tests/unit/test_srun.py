# SPDX-License-Identifier: Apache-2.0
"""Processes that another launcher than torchrun started: their ranks are read, or they are refused."""

from __future__ import annotations

import pytest

import megatron.context_parallel as cp
from megatron.system.srun import take_ranks_of_srun
from megatron.training.pretrain import main

TASK = {
    "SLURM_NTASKS": "12", "SLURM_STEP_NUM_TASKS": "12", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8,4", "MASTER_ADDR": "node1",
}  # fmt: skip


@pytest.mark.parametrize("per_node, local", [("8,4", "8"), ("4(x3)", "4"), ("12", "12")])
def test_a_task_of_srun_takes_its_rank(per_node, local):
    environment = TASK | {"SLURM_STEP_TASKS_PER_NODE": per_node}
    take_ranks_of_srun(environment)
    assert environment == TASK | {
        "SLURM_STEP_TASKS_PER_NODE": per_node, "RANK": "9", "WORLD_SIZE": "12", "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": local, "MASTER_PORT": "29500",
    }  # fmt: skip


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun -n 1 in a larger job
        TASK | {"RANK": "0", "WORLD_SIZE": "4"},  # torchrun in a task
    ],
)
def test_other_processes_stay_as_they_are(environment):
    before = dict(environment)
    take_ranks_of_srun(environment)
    assert environment == before


@pytest.mark.parametrize(
    "environment, named",
    [
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM_NTASKS=2"),  # a batch script
        ({name: value for name, value in TASK.items() if name != "MASTER_ADDR"}, "SLURM_STEP_NUM_TASKS=12"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE=4"),
    ],
)
def test_processes_that_would_each_run_alone_are_refused(environment, named, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{named}, but RANK and WORLD_SIZE are not set.*: start with torchrun"):
        cp.initialize_grid()
    assert main(["--num-layers", "2"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {named}, but RANK and WORLD_SIZE are not set")


WRONG = [
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two, not a number from 1 to 2147483647: unset it"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0, not a number"),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1, not a number from 0"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2: ranks count from 0"),
    ({"LOCAL_RANK": "9", "LOCAL_WORLD_SIZE": "8"}, "LOCAL_RANK=9 and LOCAL_WORLD_SIZE=8: ranks count from 0"),
    ({"LOCAL_WORLD_SIZE": "9" * 5000}, "LOCAL_WORLD_SIZE=5000 characters, not a number"),
    ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000, not a number from 1 to 65535"),
    ({"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE=, not a number from 1"),
    ({"WORLD_SIZE": "\u0662"}, "WORLD_SIZE=\u0662, not a number from 1"),
]


@pytest.mark.parametrize("environment, line", WRONG)
@pytest.mark.parametrize("flags", [["--num-layers", "2"], ["--dry-run"]], ids=["run", "dry run"])
def test_variables_that_are_no_ranks_are_refused(environment, line, flags, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "LOCAL_RANK" not in environment:  # which waits for the first rank to print the line
        assert main(flags) == 2
        assert f": the environment has {line}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="^the environment has "):
        cp.initialize_grid()
