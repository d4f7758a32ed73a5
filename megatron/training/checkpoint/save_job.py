# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on its way to the disk: described by all ranks together, written by each alone, published by rank 0.

What is written is what was there when the save began. In the background the tensors are first copied to host memory
while the next step computes, and only that step's update waits, if it comes before the copies are done (the idea of
CheckFreq, FAST '21). Ranks agree on the state of a save with two small messages, both sent by the main thread: no
other thread may send any.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron.platform.streams import Event
from megatron.training.checkpoint import checkpoint_folder
from megatron.training.checkpoint.checksums import write_list
from megatron.training.checkpoint.megatron_lm.file_list import FileList, Sum
from megatron.training.checkpoint.owner import Owner
from megatron.training.checkpoint.rank_file import HostCopies, Writer, packed, write_bytes
from megatron.training.refusal import one_line


class Save:
    """One checkpoint, planned. All ranks make it, call :meth:`write` or :meth:`start`, and :meth:`finish`.

    Args:
        final: where it will be.
        describe: makes core's sharded state of it; may talk to other ranks.
        content: core's description of the state's form.
        after: called on rank 0 when the checkpoint is published, in the thread that did so.
        beside: small files by name, which rank 0 writes.
        owner: of the folder; None where nobody else can be saving there.
        run: identity of the run, which the list of files names; empty if it has none.

    Raises:
        OSError: on every rank; nothing can be written there.
    """

    def __init__(
        self,
        final: Path,
        describe: Callable[[], dict[str, Any]],
        content: dict[str, Any],
        after: Callable[[], Any],
        beside: Mapping[str, bytes] | None = None,
        owner: Owner | None = None,
        run: str = "",
    ) -> None:
        self._owner, self._token, self.run = owner, owner.token if owner else "", run
        self.final, self.partial = final, checkpoint_folder.partial_of(final, self._token)
        self.after, self.beside = after, beside or {}
        self.copied = threading.Event()  # tensors may change from now on
        self._sums: dict[str, Sum] = {}
        self._results: list[Any] = []
        self._error: str | None = None
        self._thread: threading.Thread | None = None
        self._publishing = False
        self._first = dist.get_rank() == 0
        try:
            if self._first:
                self._check_owner()
                self.final.parent.mkdir(parents=True, exist_ok=True)
                checkpoint_folder.clear(self.final.parent)
                self.partial.mkdir()
        except OSError as problem:
            self._error = words(problem)
        try:
            common, self._writer, self._metadata = _planned(describe(), content, self.partial)
            self._common = packed(common) if self._first else b""  # now, for it may refer to what a step changes
        except (Exception, CheckpointException) as problem:  # torch's kind is no Exception
            self._error = self._error or words(problem)
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, self._error)
        self._fail(errors)

    def write(self) -> None:
        """Write this rank's files, from the tensors as they are. An error is kept until all ranks learn of it."""
        try:
            if self._first:
                write_bytes(self.partial / "common.pt", self._common, self._sums)
            self._results = self._writer.write(self._sums)
        except (Exception, CheckpointException) as problem:
            self._error = words(problem)
        self._common, self._writer.parts = b"", []
        self.copied.set()

    def start(self, copies: HostCopies) -> None:
        """The same in the background, from copies."""
        made = copies.begin()
        self._work(lambda: self._copy_and_write(copies, made))

    @property
    def bytes(self) -> int:
        """Of the tensors that this rank is to write."""
        return self._writer.bytes

    @property
    def busy(self) -> bool:
        """Whether this rank is still at it. Once none is, :meth:`advance` has something to do."""
        return self._thread is not None and self._thread.is_alive()

    def advance(self, *, background: bool = True) -> bool:
        """Go on; returns whether the checkpoint is there. All ranks call it together, none of them busy.

        Raises:
            OSError: on every rank; some rank could not write. Earlier checkpoints are untouched.
        """
        if not self._publishing:
            self._publishing = True
            every: list[Any] = [None] * dist.get_world_size()
            dist.gather_object((self._results, self._sums, self._error), every if self._first else None)
            if self._first:
                self._work(lambda: self._publish(every)) if background else self._publish(every)
            return False
        error = [self._error]
        dist.broadcast_object_list(error)
        self._fail(error)
        return True

    def finish(self) -> Path:
        """Wait until the checkpoint is there; where it is. Raises OSError as :meth:`advance`."""
        while True:
            if self._thread is not None:
                self._thread.join()
            if self.advance(background=False):
                return self.final

    def _work(self, task: Callable[[], None]) -> None:
        def run() -> None:
            try:
                task()
            except Exception as problem:
                self._error = words(problem)

        self._thread = threading.Thread(target=run, daemon=True, name="checkpoint")
        self._thread.start()

    def _copy_and_write(self, copies: HostCopies, made: Event) -> None:
        try:
            copies.take(self._writer, made)
        finally:
            self.copied.set()
        self.write()

    def _publish(self, every: list[tuple[list[Any], dict[str, Sum], str | None]]) -> None:
        """On rank 0: what all ranks have written becomes a checkpoint."""
        failed = [f"rank {rank}: {error}" for rank, (_, _, error) in enumerate(every) if error]
        if failed:
            self._error = failed[0]
            return
        try:
            sums = {name: one for _, of_rank, _ in every for name, one in of_rank.items()}
            self._writer.finish(self._metadata, [results for results, _, _ in every], sums)
            config = json.dumps(asdict(CheckpointingConfig("torch_dist", 1)))
            write_bytes(self.partial / CONFIG_FNAME, config.encode(), sums)
            for name, data in self.beside.items():
                write_bytes(self.partial / name, data, sums)
            number = self.final.name.removeprefix("iter_")
            iteration = int(number) if number.isdigit() else None
            write_list(self.partial, FileList(sums, folder=self.final.name, iteration=iteration, run=self.run))
            self._check_owner()
            checkpoint_folder.publish(self.final, self._token)
        except Exception as problem:
            self._error = words(problem)
            return
        with suppress(OSError):  # what should have gone stays
            self._check_owner()
            self.after()

    def _check_owner(self) -> None:
        """Raises OSError where another job has taken over the folder, or nobody can tell."""
        if self._owner is not None:
            self._owner.check()

    def _fail(self, errors: list[str | None]) -> None:
        """If any rank has failed, every rank raises: nobody is left waiting."""
        failed = [(rank, error) for rank, error in enumerate(errors) if error]
        if failed:
            rank, error = failed[0]
            if self._first:
                shutil.rmtree(self.partial, ignore_errors=True)
            error = error if error.startswith("rank ") else f"rank {rank}: {error}"
            raise OSError(f"no checkpoint was written to {self.final.parent} ({error})")


def _planned(
    state: dict[str, Any], content: dict[str, Any], folder: Path
) -> tuple[dict[str, Any], Writer, Metadata | None]:
    """(what is no tensor, this rank's writer, on rank 0 the list of all ranks' tensors); by core's own steps."""
    sharded, common = save_preprocess({**state, "content_metadata": content})
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    (writer, metadata, _), *_ = save_state_dict_async_plan(
        mcore_to_pyt_state_dict(by_key), Writer(folder), planner=planner
    )
    if metadata is not None:
        vars(metadata).pop("all_local_plans", None)  # as large as the rest; readers do without
    return common, writer, metadata


def words(problem: BaseException) -> str:
    """An error in one line."""
    return one_line(f"{type(problem).__name__}: {problem}")
