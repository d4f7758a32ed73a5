# SPDX-License-Identifier: Apache-2.0
"""Elastic runs: at each start, a grid is chosen for the number of processes.

Losses do not depend on the grid, checkpoints are read on any grid, and the schedule counts samples. A job that loses
nodes can therefore restart on another grid.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product

from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config

HOW = '--elastic-grids: write it as "8: tp2 u2 r2; 4: u2 r2"'
PART = re.compile(r"(tp|u|r|pp)(\d+)")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the axes in one entry of --elastic-grids; the remaining ranks are DP."""

    tp: int = 1
    u: int = 1
    r: int = 1
    pp: int = 1

    @property
    def model(self) -> int:
        return self.tp * self.u * self.r * self.pp

    def __str__(self) -> str:
        return f"TP {self.tp} x Ulysses {self.u} x Ring {self.r} x PP {self.pp}"


def read_grids(text: str) -> dict[int, Sizes]:
    """Grids by number of processes, from ``8: tp2 u2 r2; 4: u2 r2``.

    Raises:
        Refusal: an entry cannot be read, or its grid does not divide its processes.
    """
    grids: dict[int, Sizes] = {}
    refused = partial(Refusal, about="--elastic-grids")
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        processes, colon, words = entry.partition(":")
        parts = [PART.fullmatch(word) for word in words.lower().split()]
        names = [part[1] for part in parts if part]
        if not (colon and processes.strip().isdigit() and all(parts) and len(set(names)) == len(parts)):
            raise refused(f"{entry!r} cannot be read in {HOW}")
        number, sizes = int(processes), Sizes(**{part[1]: int(part[2]) for part in parts})
        if number < 1 or sizes.model < 1 or number % sizes.model:
            raise refused(f"{entry!r} of --elastic-grids: {sizes} does not divide {number} processes; make it smaller")
        if number in grids:
            raise refused(f"{entry!r} of --elastic-grids: {number} processes have a grid already; leave one out")
        grids[number] = sizes
    if not grids:
        raise refused(f"{text!r} holds no grid: {HOW}")
    return grids


Complete = Callable[[Config, int], Config]
Fastest = Callable[[list[Config], int], int | None]
"""Index of the fastest of some completed configurations on this number of processes; None if none fits in memory."""


def choose_grid(config: Config, world_size: int, complete: Complete, fastest: Fastest | None = None) -> Config:
    """A copy of ``config`` with a grid for ``world_size`` processes; ``config`` itself if the run is not elastic.

    With ``--elastic-grids``: the entry with the largest number of processes that divides ``world_size``.
    With ``--gpu``: the grid that the planner predicts to be fastest, with the memory savings of the flags.
    Otherwise: TP and PP as given, and the largest context-parallel size that fits.

    Args:
        complete: raises a :class:`Refusal` for a configuration that cannot run.
        fastest: the planner; None if the caller has none.
    """
    parallel = config.parallel
    if not (parallel.elastic or parallel.elastic_grids):
        return config
    folders = config.checkpoint.save, config.checkpoint.load
    if None in folders or folders[0] != folders[1]:
        raise Refusal("--elastic", "resumes from its own checkpoints: give --save DIR and --load with the same folder")
    data = config.data
    if data.global_batch_size is None and data.rampup_batch_size is None and data.step_batch_size_schedule is None:
        raise Refusal(
            "--elastic", ": without --global-batch-size the batch size would depend on the number of processes; give it"
        )
    if parallel.elastic_grids:
        grids = read_grids(parallel.elastic_grids)
        fitting = [number for number in sorted(grids) if world_size % number == 0]
        if not fitting:
            raise Refusal(
                "--elastic-grids",
                f"has no grid for {world_size} processes, nor for a divisor: add one, or raise the minimum of --nnodes",
            )
        chosen = _with(config, grids[fitting[-1]])
    elif config.simulation.gpu and fastest is not None:
        chosen = _planned(config, world_size, complete, fastest)
    else:
        chosen = _largest(config, world_size, complete)
    chosen.parallel.elastic_grids, chosen.parallel.elastic = None, False
    grid = chosen.parallel
    chosen.notes.append(
        f"elastic: {world_size} processes as TP {grid.tensor_model_parallel_size} x CP {grid.context_parallel_size} "
        f"x PP {grid.pipeline_model_parallel_size} x DP for the rest{_planner(config, fastest)}"
    )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        chosen.notes.append(  # torch 2.13: running agents publish no address for an agent that joins later
            "elastic: a node that joins later is not admitted, unless torchrun was started with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    return chosen


def _with(config: Config, sizes: Sizes) -> Config:
    chosen = deepcopy(config)
    grid = chosen.parallel
    grid.tensor_model_parallel_size, grid.pipeline_model_parallel_size = sizes.tp, sizes.pp
    grid.ulysses_parallel_size, grid.ring_parallel_size = sizes.u, sizes.r
    grid.context_parallel_size = sizes.u * sizes.r
    grid.hierarchical_context_parallel_sizes = grid.cp_comm_type = None
    grid.sequence_parallel = grid.sequence_parallel and sizes.tp > 1
    return chosen


def _planner(config: Config, fastest: Fastest | None) -> str:
    gpu = config.simulation.gpu
    if config.parallel.elastic_grids or not gpu:
        return ""
    return (
        f", the planner's choice for {gpu}" if fastest else f"; pretrain_*.py would use the planner's choice for {gpu}"
    )


def _planned(config: Config, world_size: int, complete: Complete, fastest: Fastest) -> Config:
    """The grid that ``fastest`` chooses among all that divide ``world_size`` and that the program accepts."""
    grids, completed, refused = [], [], None
    for sizes in _all_sizes(world_size):
        grid = _with(config, sizes)
        try:
            completed.append(complete(deepcopy(grid), world_size))
        except Refusal as refusal:
            refused = refused or refusal
            continue
        grids.append(grid)
    if not grids:
        raise refused or Refusal("--elastic", f": no grid of {world_size} processes can run this")
    best = fastest(completed, world_size)
    if best is None:
        raise Refusal(
            "--elastic",
            f": no grid of {world_size} processes fits {config.simulation.gpu}: save memory "
            "(--recompute-granularity full, --fpdt, --zero-stage 3), or raise the minimum of --nnodes",
        )
    return grids[best]


def _all_sizes(world_size: int) -> Iterator[Sizes]:
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for tp, u, r, pp in product(sizes, repeat=4):
        if world_size % (tp * u * r * pp) == 0:
            yield Sizes(tp, u, r, pp)


def _largest(config: Config, world_size: int, complete: Complete) -> Config:
    """The grid of the flags, with the context-parallel size reduced until the processes can run it."""
    parallel, refused = config.parallel, None
    ulysses, ring = parallel.ulysses_parallel_size, parallel.ring_parallel_size
    given = (ulysses or 1) * (ring or 1) if ulysses or ring else parallel.context_parallel_size or 1
    kept = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    for size in range(given, 0, -1):
        if world_size % (kept * size):
            continue
        chosen = deepcopy(config)
        if size != given:
            grid = chosen.parallel
            grid.context_parallel_size, grid.ulysses_parallel_size, grid.ring_parallel_size = size, None, None
            grid.hierarchical_context_parallel_sizes = grid.cp_comm_type = None
        else:
            chosen.parallel.context_parallel_size = size
        try:
            complete(chosen, world_size)
        except Refusal as refusal:
            refused = refused or refusal
            continue
        return chosen
    raise refused or Refusal(
        "--elastic",
        f": TP x PP = {kept} does not divide {world_size} processes: use --elastic-grids, or raise the "
        "minimum of --nnodes",
    )
