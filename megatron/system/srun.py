# SPDX-License-Identifier: Apache-2.0
"""Processes that srun or mpirun started, and not torchrun, whose variables say which process of a run this one is."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

SLURM = {  # torchrun's variable -> that of a task of srun
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "SLURM_STEP_TASKS_PER_NODE",
}
COUNTS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
PORT = "29500"  # torchrun's default
LEAST = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1,
         "OMPI_COMM_WORLD_SIZE": 1, "PMI_SIZE": 1}  # fmt: skip
MOST = {"MASTER_PORT": 2**16 - 1}


def take_ranks_of_srun(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables in a task of srun, if MASTER_ADDR is set, as scripts for Megatron-LM do.

    Nothing is set if RANK or WORLD_SIZE is. A batch script is no task, and has no SLURM_STEP_NUM_TASKS.

    Raises:
        ValueError: a launcher started several processes, each of which would be a run of its own; or torchrun's
            variables are wrong.
    """
    check_ranks(environment)
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return
    several = [name for name in COUNTS if environment.get(name, "").isdigit() and int(environment[name]) > 1]
    if not several or environment.get("SLURM_STEP_NUM_TASKS") == "1":
        return
    values = {name: environment.get(theirs, "").partition("(")[0] for name, theirs in SLURM.items()}
    values["LOCAL_WORLD_SIZE"] = values["LOCAL_WORLD_SIZE"].partition(",")[0]  # as in 8(x2),4
    if environment.get("MASTER_ADDR") and all(value.isdigit() for value in values.values()):
        environment.update(values)
        environment.setdefault("MASTER_PORT", PORT)
        return
    raise ValueError(
        f"{several[0]}={environment[several[0]]}, but RANK and WORLD_SIZE are not set, so that each process would run "
        f"by itself: start with torchrun, or with srun and MASTER_ADDR; for one process, unset {several[0]}"
    )


def check_ranks(environment: Mapping[str, str]) -> None:
    """Raise ValueError if a variable of a launcher is not a number, or too large."""
    numbers = {}
    for name, least in LEAST.items():
        if (value := environment.get(name)) is None:
            continue
        most = MOST.get(name, 2**31 - 1)
        if not (value.isascii() and value.isdigit() and len(value) < 12 and least <= int(value) <= most):
            shown = value if len(value) < 40 and value.isprintable() else f"{len(value)} characters"
            raise ValueError(f"the environment has {name}={shown}, not a number from {least} to {most}: unset it")
        numbers[name] = int(value)
    for rank, ranks in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in numbers and ranks in numbers and numbers[rank] >= numbers[ranks]:
            raise ValueError(
                f"the environment has {rank}={numbers[rank]} and {ranks}={numbers[ranks]}: ranks count from 0; start "
                "with torchrun, or unset both"
            )
