# SPDX-License-Identifier: Apache-2.0
"""Processes that srun or mpirun started, and not torchrun, whose variables say which process of a run this one is."""

from __future__ import annotations

from collections.abc import MutableMapping

SLURM = {  # torchrun's variable -> that of a task of srun
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "SLURM_STEP_TASKS_PER_NODE",
}
COUNTS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
PORT = "29500"  # torchrun's default


def take_ranks_of_srun(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables in a task of srun, if MASTER_ADDR is set, as scripts for Megatron-LM do.

    Nothing is set if RANK or WORLD_SIZE is. A batch script is no task, and has no SLURM_STEP_NUM_TASKS.

    Raises:
        ValueError: a launcher started several processes, each of which would be a run of its own.
    """
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
