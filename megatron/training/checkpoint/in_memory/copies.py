# SPDX-License-Identifier: Apache-2.0
"""Make copies of a run's state in host memory during training, and keep them until newer ones are complete.

The copies are files in tmpfs, which outlive the process that wrote them. A thread sends them to other nodes, in a
separate process group. Files get their final names once every rank has its own file and all files sent to it, and older
files are removed once all have their names. So at any moment, even after a kill, some step has every rank's state.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron.platform.collectives import gathered_objects
from megatron.training.arguments.stages import chunk_layers
from megatron.training.checkpoint.in_memory import copy_file
from megatron.training.checkpoint.in_memory.copy_file import (
    NotPrivate,
    PrivateFolder,
    copies_in,
    open_private,
    swap,
)
from megatron.training.checkpoint.owner import COPIES, run_of_copies
from megatron.training.checkpoint.run_state import Progress
from megatron.training.checkpoint.save_job import error_line
from megatron.training.refusal import Refusal, refuse_together, refusing
from megatron.training.settings.config import CheckpointConfig, Config

MEMORY = Path("/dev/shm")
PARTIAL = ".partial"


class Copies:
    """The copies of this rank. Every rank creates one, and all call its methods at the same steps.

    Args:
        folder: this run's folder on this node, which the ranks of the node share.
        distances: rank n's copy is also sent to rank n + each of these.
        about: metadata of each copy, for :mod:`restart`.
        group: a gloo group of all ranks that is used for nothing else.
        available: returns the bytes of memory that this host has free.
    """

    def __init__(
        self,
        folder: PrivateFolder,
        distances: Sequence[int],
        about: Mapping[str, str],
        group: dist.ProcessGroup,
        available: Callable[[], int],
    ) -> None:
        self.folder, self.distances, self.about, self.group = folder, distances, dict(about), group
        self.available = available
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._thread: threading.Thread | None = None
        self._lines: list[str] = []
        self._waited, self._first = 0.0, True

    def path(self, iteration: int, rank: int) -> Path:
        """The path of a rank's copy, the same on each node that has one."""
        return self.folder.at / f"iter_{iteration:07d}.rank_{rank:05d}.safetensors"

    def partial(self, iteration: int, rank: int) -> Path:
        """The temporary path of that copy while this rank writes it."""
        path = self.path(iteration, rank)
        return path.with_name(f".{path.name}.by_{self.rank}{PARTIAL}")

    def begin(self, progress: Progress, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy the tensors to a file; checksums and sending follow in a thread. A failure is only reported."""
        self.finish()
        begin, error, iteration = time.perf_counter(), "", progress.iteration
        path = self.partial(iteration, self.rank)
        about = {"iteration": str(iteration), "rank": str(self.rank), "progress": json.dumps(asdict(progress))}
        try:
            self._check_space(sum(tensor.nbytes for _, tensor in tensors) * (1 + len(self.distances)))
            copy_file.write(path, tensors, {**self.about, **about})
        except OSError as problem:
            error = error_line(problem)
        self._waited = time.perf_counter() - begin
        self._thread = threading.Thread(
            target=self._replicate, args=(iteration, error), daemon=True, name="copies in memory"
        )
        self._thread.start()

    def finish(self, seconds: float | None = None) -> None:
        """Wait until the copies in progress are complete, for at most this many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def take_lines(self) -> list[str]:
        """The messages since the last call; empty while a copy is in progress."""
        if self._thread is not None and self._thread.is_alive():
            return []
        lines, self._lines = self._lines, []
        return lines

    def remove(self, save: str) -> None:
        """Remove all copies at the end of a complete run. All ranks call it."""
        self.finish()
        with suppress(RuntimeError):
            gathered_objects(None, self.group)  # wait for the others: ranks of a node share the folder
        self.folder.remove()
        if self.rank == 0:
            (Path(save) / COPIES).unlink(missing_ok=True)

    def clear(self, stays: int | None) -> None:
        """Remove partial copies, and all complete ones except those of iteration ``stays``. No rank may be writing."""
        for path in copies_in(self.folder.at):
            if stays is None or not path.name.startswith(f"iter_{stays:07d}."):
                path.unlink(missing_ok=True)

    def _clear_before(self, iteration: int) -> None:
        """Remove older copies; another rank of this node may be writing a newer one."""
        for path in copies_in(self.folder.at):
            number = path.name.lstrip(".").removeprefix("iter_").partition(".")[0]
            if number.isdigit() and int(number) < iteration:
                path.unlink(missing_ok=True)

    def _check_space(self, need: int) -> None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = shutil.disk_usage(self.folder.at).free
        if self.folder.named.is_relative_to(MEMORY):
            free = min(free, self.available())
        if need > free // ranks:
            have, needed = (f"{size / 2**20:,.0f}" for size in (free / ranks, need))
            raise OSError(f"{self.folder.named} has room for {have} MiB per rank, but {needed} MiB are needed")

    def _replicate(self, iteration: int, error: str) -> None:
        """Runs in the thread: write the checksum, exchange files, give them their final names. Raises nothing."""
        own_path, written = self.partial(iteration, self.rank), [self.rank]
        try:
            size = 0 if error else copy_file.seal(own_path)
        except OSError as problem:
            size, error = 0, error_line(problem)
        try:
            results = gathered_objects((size, error), self.group)
            failed = _first_error(error for _, error in results)
            if not failed:
                for distance in self.distances:
                    to, source = (self.rank + distance) % self.ranks, (self.rank - distance) % self.ranks
                    path = self.partial(iteration, source)
                    written.append(source)
                    try:
                        swap((own_path, to), (path, source, results[source][0]), self.group)
                        if not copy_file.intact(path):
                            raise OSError(f"the file from rank {source} was damaged in transit")
                    except OSError as problem:
                        error = error_line(problem)
                failed = _first_error(gathered_objects(error, self.group))
            if not failed:
                for rank in written:
                    self.partial(iteration, rank).rename(self.path(iteration, rank))
                gathered_objects(None, self.group)
                self._clear_before(iteration)
                self._report_first(iteration, size)
                return
        except Exception as problem:  # a message failed: if a rank is gone, the next training step reports it
            failed = error_line(problem)
        for rank in written:
            self.partial(iteration, rank).unlink(missing_ok=True)
        self._lines.append(f"WARNING: no copy of iteration {iteration} in memory ({failed}); the previous one is kept")

    def _report_first(self, iteration: int, size: int) -> None:
        where = "".join(f", and on rank n + {distance}" for distance in self.distances)
        if self._first:
            self._lines.append(
                f"copies of iteration {iteration} in {self.folder.named}{where}: {size / 2**20:,.0f} MiB per rank, "
                f"training waited {self._waited:.2f} s; repeated every --non-persistent-save-interval iterations"
            )
        self._first = False


def _first_error(errors: Any) -> str:
    return next((f"rank {rank}: {error}" for rank, error in enumerate(errors) if error), "")


def open_copies(config: Config, grid: str, available: Callable[[], int], run: str) -> Copies | None:
    """Open the folder of this run's copies; None without --non-persistent-save-interval. All ranks call it.

    Args:
        grid: description of the grid; a copy can be used only on the same grid.
        available: returns the bytes of memory that this host has free.
        run: identity of the run.

    Raises:
        Refusal: on every rank; a folder cannot be created, or other users could change it.
    """
    settings = config.checkpoint
    if settings.non_persistent_save_interval is None:
        return None
    run = refuse_together(lambda: _id(settings.save, run) if dist.get_rank() == 0 else "")
    agreed: list[Any] = [(run, uuid.uuid4().hex, *_distances(settings))]  # nodes may have different numbers of ranks
    dist.broadcast_object_list(agreed)
    run, start, distances, notes = agreed[0]
    config.notes += notes
    folder = refuse_together(lambda: _folder(settings, run))
    group = dist.new_group(backend="gloo", timeout=timedelta(minutes=config.parallel.distributed_timeout_minutes))
    grid = f"{grid}, ZeRO {config.parallel.zero_stage}"
    about = {"run": run, "start": start, "grid": grid, "settings": _layout_settings(config)}
    return Copies(folder, distances, about, group, available)


def _layout_settings(config: Config) -> str:
    """The settings, apart from the grid, that determine the tensors of a rank's state."""
    parallel, optimizer, checkpoint = config.parallel, config.optimizer, config.checkpoint
    settings = {
        "model": asdict(config.model),
        "chunks": asdict(config.chunks),
        "seq_length": config.data.seq_length,
        "balance": parallel.context_parallel_balance,
        "positions": parallel.partition_position_embedding,
        "stages": [parallel.num_virtual_stages_per_pipeline_rank, chunk_layers(config)],
        "buckets": parallel.ddp_bucket_size,
        "precision": [optimizer.fp16, optimizer.bf16],
        "optimizer": optimizer.optimizer,
        "kept": checkpoint.non_persistent_local_ckpt_algo,
    }
    return json.dumps(settings, sort_keys=True, default=str)


def _id(save: str, run: str) -> str:
    """Identity of the run whose copies belong to this folder. If it has none, ``run`` is written to it and returned."""
    path = Path(save) / COPIES
    if known := run_of_copies(save):
        return known
    with refusing(f"--save {save} cannot be written to", OSError):
        partial = path.with_name(f".{path.name}{PARTIAL}")
        partial.write_text(run)
        partial.rename(path)
    return run


def _folder(settings: CheckpointConfig, run: str) -> PrivateFolder:
    """This run's folder on this node, which other users can neither read, nor write, nor replace."""
    flag, parent = "--non-persistent-local-ckpt-dir", settings.non_persistent_local_ckpt_dir
    if parent is None and not MEMORY.is_dir():
        raise Refusal(f"--non-persistent-save-interval: this machine has no {MEMORY}: give {flag} DIR")
    folder = Path(parent or MEMORY / f"megatron-{os.geteuid()}").absolute() / f"run-{run}"
    try:
        return open_private(folder)
    except OSError as error:
        raise Refusal(f"{flag} {folder.parent} cannot be written to: {error.strerror}: give another folder") from None
    except NotPrivate as reason:
        given = f"{flag} {parent}" if parent else "--non-persistent-save-interval"
        raise Refusal(
            f"{given}: {reason}: copies are written only where no other user can reach them; give {flag} DIR, a "
            "folder whose parents belong to you or root and cannot be written by others (except sticky ones like /tmp)"
        ) from None


def _distances(settings: CheckpointConfig) -> tuple[list[int], list[str]]:
    """(rank distances to send copies to, notes): no distances, and a note, if a copy would stay on its own node."""
    if not settings.replication:
        return [], []
    ranks, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    jump = settings.replication_jump or local
    distances = [number * jump for number in range(1, settings.replication_factor)]
    if all(local <= distance % ranks <= ranks - local for distance in distances):
        return distances, []
    return [], [
        f"no effect here: --replication (with --replication-jump {jump} and --replication-factor "
        f"{settings.replication_factor} a copy would lie on its own node, which has {local} of the {ranks} ranks)"
    ]
