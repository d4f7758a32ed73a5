# SPDX-License-Identifier: Apache-2.0
"""Parses launch commands: the program, its flags and the number of processes; and the variables that Slurm sets."""

from __future__ import annotations

import re
from typing import NamedTuple

TRAINING = ("--num-layers", "--hidden-size", "--seq-length", "--micro-batch-size", "--tensor-model-parallel-size",
            "--model")  # fmt: skip
PER_NODE = ("nproc_per_node", "num_gpus", "nproc")
NODES = ("nnodes", "num_nodes")
TASKS = {"srun": ("n", "ntasks"), "mpirun": ("np", "n"), "mpiexec": ("np", "n"), "aprun": ("n",), "jsrun": ("n", "np")}
GPUS = 8  # per node, if the command leaves the number to the launcher
COUNT = re.compile(r"[0-9]{1,9}")  # of processes, nodes or GPUs


class Launch(NamedTuple):
    """One training command."""

    program: str
    flags: list[str]
    launcher: list[str]
    processes: int | None  # None: the command does not say


def launch(words: list[str], tasks: int | None = None) -> Launch | None:
    """The training command among the words of a command; None if there is none.

    Args:
        tasks: number of tasks of the Slurm job, if srun does not give it.
    """
    for at, word in enumerate(words):
        flags = words[at + 1 :]
        if word.endswith(".py") and any(flag.split("=")[0] in TRAINING for flag in flags):
            return Launch(word, flags, words[:at], processes(words[:at], tasks))
    return None


def processes(launcher: list[str], tasks: int | None = None) -> int | None:
    """How many processes a launcher starts; None if its words do not say."""
    names = [word.split("/")[-1] for word in launcher]
    given = _options(launcher)
    nodes = next((given[name] for name in NODES if name in given), None)
    nodes = int(nodes.split(":")[-1]) if nodes and COUNT.fullmatch(nodes.split(":")[-1]) else None
    per_node = next((given[name] for name in PER_NODE if name in given), None)
    if per_node or "deepspeed" in names or "torchrun" in names:
        known = COUNT.fullmatch(per_node or "")
        count = int(known[0]) if known else GPUS if per_node or "deepspeed" in names else 1
        if "deepspeed" in names and not per_node and nodes is None:
            return None
        return count * (nodes or 1)
    for name, options in TASKS.items():
        if name not in names:
            continue
        for option in options:
            if COUNT.fullmatch(given.get(option, "")):
                return int(given[option])
        if COUNT.fullmatch(given.get("ntasks_per_node", "")):
            places = given.get("nodes") or given.get("N") or "1"
            return int(given["ntasks_per_node"]) * int(places) if COUNT.fullmatch(places) else None
        return tasks if name == "srun" else None
    return 1


def grid(flags: list[str]) -> int:
    """Number of processes of one copy of the model, from the flags that give the sizes of its axes."""
    given, ranks = _options(flags), 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
                 "ds_sequence_parallel_size", "ulysses_parallel_size", "ring_parallel_size"):  # fmt: skip
        ranks *= int(given[name]) if COUNT.fullmatch(given.get(name, "")) else 1
    return ranks


def _options(words: list[str]) -> dict[str, str]:
    """Options with their values in any notation, by name with underscores."""
    given = {}
    for at, word in enumerate(words):
        if match := re.fullmatch(r"--?([A-Za-z][\w-]*)(?:=(.*))?", word):
            name, value = match[1].replace("-", "_"), match[2]
            if value is None and at + 1 < len(words):
                value = words[at + 1]
            if re.fullmatch(r"[nN]\d+", name):
                name, value = name[0], name[1:]
            given[name] = value or ""
    return given


def slurm(script: str) -> dict[str, str]:
    """The variables that Slurm sets for a script with these ``#SBATCH`` lines; empty without such lines."""
    lines = re.findall(r"^#SBATCH\s+(.*)", script, re.MULTILINE)
    if not lines:
        return {}
    given = _options([word for line in lines for word in line.split("#")[0].split()])

    def number(*names: str) -> int:
        for name in names:
            if result := re.search(r"([0-9]{1,9})$", given.get(name, "")):
                return int(result[1])
        return 0

    nodes = number("nodes", "N") or 1
    gpus = number("gpus_per_node", "gres") or GPUS
    tasks = number("ntasks_per_node") or 1
    total = number("ntasks", "n") or nodes * tasks
    hosts = ",".join(f"node{index}" for index in range(nodes)) if nodes <= 1000 else f"node[0-{nodes - 1}]"
    names = {
        "SLURM_JOB_ID": 1, "SLURM_JOBID": 1, "SLURM_JOB_NAME": given.get("job_name", given.get("J", "job")),
        "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS": total, "SLURM_NPROCS": total,
        "SLURM_NTASKS_PER_NODE": tasks, "SLURM_NODEID": 0, "SLURM_PROCID": 0, "SLURM_LOCALID": 0,
        "SLURM_GPUS_PER_NODE": gpus, "SLURM_GPUS_ON_NODE": gpus, "SLURM_CPUS_PER_TASK": number("cpus_per_task") or 8,
        "SLURM_JOB_NODELIST": hosts, "SLURM_NODELIST": hosts, "SLURM_SUBMIT_DIR": ".", "SLURMD_NODENAME": "node0",
    }  # fmt: skip
    return {name: str(value) for name, value in names.items()}
