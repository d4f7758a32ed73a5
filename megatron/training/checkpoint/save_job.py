# SPDX-License-Identifier: Apache-2.0
"""One save of a checkpoint: all ranks plan it together, each writes its own files, and rank 0 publishes it.

A checkpoint holds the state at the moment the save began. A save in the background first copies the tensors to host
memory while the next step computes; only that step's update waits, if the copies are not done by then (CheckFreq,
FAST '21). Ranks agree on the state of a save with two small messages, which only the main thread may send.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron.platform.collectives import gathered_objects
from megatron.platform.streams import Event
from megatron.training.checkpoint import checkpoint_folder
from megatron.training.checkpoint.checksums import write_list
from megatron.training.checkpoint.megatron_lm.file_list import WRITTEN, FileList, Sum
from megatron.training.checkpoint.owner import Owner
from megatron.training.checkpoint.rank_file import HostCopies, Writer, packed, write_bytes
from megatron.training.checkpoint.sharded_state import METADATA
from megatron.training.ownership.own_files import remove_made
from megatron.training.refusal import one_line


class Save:
    """One planned checkpoint. All ranks create it, call :meth:`write` or :meth:`start`, and then :meth:`finish`.

    Args:
        final: the checkpoint's path.
        describe: returns core's sharded state; may communicate with other ranks.
        after: called on rank 0 after the checkpoint is published, in the thread that published it.
        extra_files: contents of small files by name, which rank 0 writes.
        owner: this job's lock on the folder; None if no other job can be saving there.
        run: identity of the run, written to the list of files; empty if it has none.

    Raises:
        OSError: on every rank; the folder cannot be written to.
    """

    def __init__(
        self,
        final: Path,
        describe: Callable[[], dict[str, Any]],
        after: Callable[[], Any],
        extra_files: Mapping[str, bytes] | None = None,
        owner: Owner | None = None,
        run: str = "",
    ) -> None:
        self._owner, self._token, self.run = owner, owner.token if owner else "", run
        self.final, self.partial = final, checkpoint_folder.partial_of(final, self._token)
        self.after, self.extra_files = after, extra_files or {}
        self.copied = threading.Event()  # set when training may change the tensors again
        self.lines: list[str] = []  # on rank 0: about files of users that stay when checkpoints are removed
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
                self.lines += checkpoint_folder.clear(self.final.parent)
                self.partial.mkdir()
        except OSError as problem:
            self._error = error_line(problem)
        try:
            common, self._writer, self._metadata = _planned(describe(), self.partial)
            self._common = packed(common) if self._first else b""  # packed now: a step may change objects in it
        except (Exception, CheckpointException) as problem:  # torch's CheckpointException is a BaseException
            self._error = self._error or error_line(problem)
        self._fail(gathered_objects(self._error))

    def write(self) -> None:
        """Write this rank's files from the current tensors. An error is kept until :meth:`advance` raises it."""
        try:
            if self._first:
                write_bytes(self.partial / "common.pt", self._common, self._sums)
            self._results = self._writer.write(self._sums)
        except (Exception, CheckpointException) as problem:
            self._error = error_line(problem)
        self._common, self._writer.parts = b"", []
        self.copied.set()

    def start(self, copies: HostCopies) -> None:
        """Write in the background, from copies in host memory."""
        computed = copies.begin()
        self._work(lambda: self._copy_and_write(copies, computed))

    @property
    def bytes(self) -> int:
        """Size of the tensors that this rank writes."""
        return self._writer.bytes

    @property
    def busy(self) -> bool:
        """Whether this rank's thread is still working. :meth:`advance` may be called once no rank is busy."""
        return self._thread is not None and self._thread.is_alive()

    def advance(self, *, background: bool = True) -> bool:
        """Start the next phase; True once the checkpoint is published. All ranks call it together, when none is busy.

        Raises:
            OSError: on every rank; a rank could not write. Earlier checkpoints are untouched.
        """
        if not self._publishing:
            self._publishing = True
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.gather_object((self._results, self._sums, self._error), of_ranks if self._first else None)
            if self._first:
                self._work(lambda: self._publish(of_ranks)) if background else self._publish(of_ranks)
            return False
        error = [self._error]
        dist.broadcast_object_list(error)
        self._fail(error)
        return True

    def finish(self) -> Path:
        """Wait until the checkpoint is published; returns its path. Raises OSError as :meth:`advance`."""
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
                self._error = error_line(problem)

        self._thread = threading.Thread(target=run, daemon=True, name="checkpoint")
        self._thread.start()

    def _copy_and_write(self, copies: HostCopies, computed: Event) -> None:
        try:
            copies.take(self._writer, computed)
        finally:
            self.copied.set()
        self.write()

    def _publish(self, of_ranks: list[tuple[list[Any], dict[str, Sum], str | None]]) -> None:
        """On rank 0: complete the checkpoint from the files of all ranks, and give it its final name."""
        failed = [f"rank {rank}: {error}" for rank, (_, _, error) in enumerate(of_ranks) if error]
        if failed:
            self._error = failed[0]
            return
        try:
            sums = {name: file_sum for _, sums, _ in of_ranks for name, file_sum in sums.items()}
            self._writer.finish(self._metadata, [results for results, _, _ in of_ranks], sums)
            config = json.dumps(asdict(CheckpointingConfig("torch_dist", 1)))
            write_bytes(self.partial / CONFIG_FNAME, config.encode(), sums)
            for name, data in self.extra_files.items():
                write_bytes(self.partial / name, data, sums)
            number = self.final.name.removeprefix("iter_")
            iteration = int(number) if number.isdigit() else None
            write_list(self.partial, FileList(sums, folder=self.final.name, iteration=iteration, run=self.run))
            self._check_owner()
            self.lines += checkpoint_folder.publish(self.final, self._token)
        except Exception as problem:
            self._error = error_line(problem)
            return
        with suppress(OSError):  # old checkpoints may then remain
            self._check_owner()
            self.after()

    def _check_owner(self) -> None:
        """Raises OSError if another job has taken over the folder, or if that cannot be determined."""
        if self._owner is not None:
            self._owner.check()

    def _fail(self, errors: list[str | None]) -> None:
        """Raise OSError on every rank if any rank has failed, so that none waits forever."""
        failed = [(rank, error) for rank, error in enumerate(errors) if error]
        if failed:
            rank, error = failed[0]
            if self._first:
                with suppress(OSError):  # otherwise the next save removes it
                    remove_made(self.partial, WRITTEN)
            error = error if error.startswith("rank ") else f"rank {rank}: {error}"
            raise OSError(f"no checkpoint was written to {self.final.parent} ({error})")


def _planned(state: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Writer, Metadata | None]:
    """(common state without tensors, this rank's writer, on rank 0 the metadata of all ranks' tensors).

    Follows the steps of core's ``dist_checkpointing.save``.
    """
    sharded, common = save_preprocess({"content_metadata": dict(METADATA), **state})
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    writer = Writer(folder)
    return common, writer, writer.plan_together(mcore_to_pyt_state_dict(by_key), planner)


def error_line(problem: BaseException) -> str:
    """The kind and message of an error, in one line."""
    return one_line(f"{type(problem).__name__}: {problem}")
