# SPDX-License-Identifier: Apache-2.0
"""When a run saves, in the foreground or (``--async-save``) in the background, and which checkpoints it keeps."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.platform.streams import streams_of
from megatron.training.arguments.validate.host_memory import available_bytes
from megatron.training.checkpoint import checkpoint
from megatron.training.checkpoint.checkpoint_folder import remove_older
from megatron.training.checkpoint.in_memory.state import TrainingState
from megatron.training.checkpoint.rank_file import HostCopies
from megatron.training.checkpoint.save_job import Save
from megatron.training.features.feature import due
from megatron.training.job import Job
from megatron.training.report.reporter import Reporter
from megatron.training.step import Mark


class Saver:
    """Saves the checkpoints of a run. Every rank makes a Saver and calls its methods at the same steps.

    Attributes:
        saved_at: the iteration of the last checkpoint, written or being written.
        stall: seconds that training waited for it.
    """

    def __init__(self, job: Job, reporter: Reporter) -> None:
        self.job, self.reporter = job, reporter
        self.saved_at, self.stall = job.progress.iteration if job.on_disk is None else job.on_disk, 0.0
        self._copies = HostCopies(streams_of(job.runtime.device)) if job.config.checkpoint.async_save else None
        self._current: Save | None = None
        self._begun = 0.0
        self._saved_last, self._gave_up = True, False

    @property
    def writing(self) -> bool:
        """Whether this rank is writing in the background."""
        return self._current is not None and self._current.busy

    @property
    def lost(self) -> bool:
        """Whether this rank knows that another job has taken over the folder."""
        return self.job.owner is not None and bool(self.job.owner.lost)

    def give_up(self) -> str:
        """Save nothing more, because another job has taken over the folder. All ranks call it.

        Returns:
            the reason; on rank 0 it names the other job.
        """
        self.saved_at, self._gave_up = self.job.progress.iteration, True
        return self.job.owner.lost or "another job has taken over --save"

    def save(self, validation_loss: float | None = None) -> None:
        """Save now, or begin to. A failure, such as a full disk, is reported and does not end the run.

        Args:
            validation_loss: of the present weights, if they were evaluated.
        """
        self.finish()
        job, settings = self.job, self.job.config.checkpoint
        self.saved_at, self.stall, self._begun = job.progress.iteration, 0.0, time.perf_counter()
        try:
            with self._stalled():
                self._current = checkpoint.begin_save(
                    settings.save,
                    job.progress,
                    job.model_chunks,
                    job.optimizer,
                    job.schedule,
                    job.config,
                    after=self._remove_older,
                    validation_loss=validation_loss,
                    owner=job.owner,
                )
                if self._copies is not None and self._copies_fit():
                    self._current.start(self._copies)
                else:
                    self._current.write()
        except OSError as error:
            self._failed(error)
        if self._copies is None:
            self.finish()

    def save_if_due(self, validation_loss: float | None) -> None:
        """Copy the state to memory and save a checkpoint, each at its interval."""
        settings, iteration = self.job.config.checkpoint, self.job.progress.iteration
        if due(settings.non_persistent_save_interval, iteration):
            self.copy()
        if due(settings.save_interval, iteration):
            self.save(validation_loss)

    def copy(self) -> None:
        """Copy the state to memory now. It is sent to other hosts in the background; `advance` reports failures."""
        job = self.job
        state = TrainingState(job.model_chunks, job.optimizer, job.schedule, job.config)
        job.copies.begin(job.progress, state.tensors())

    def before_update(self, mark: Mark | None) -> Mark | None:
        """``mark``, or a function that also delays the step's update until the tensors to save are copied."""
        current = self._current
        if current is None or current.copied.is_set():
            return mark

        def wait(phase: str) -> None:
            if phase == "optimizer":
                with self._stalled():
                    current.copied.wait()
            if mark is not None:
                mark(phase)

        return wait

    def advance(self, writing: bool | int) -> None:
        """Start the next phase of a save in the background. All ranks call it after each step.

        Args:
            writing: whether any rank is still writing.
        """
        self._report_copies()
        if self._current is None or writing:
            return
        try:
            with self._stalled():
                done = self._current.advance()
            if done:
                self._saved()
        except OSError as error:
            self._failed(error)

    def finish(self) -> bool:
        """Wait for a save in the background; returns whether the last checkpoint could be saved."""
        if self._current is not None:
            try:
                with self._stalled():
                    self._current.finish()
                self._saved()
            except OSError as error:
                self._failed(error)
        return self._saved_last and not self._gave_up

    def end(self) -> bool:
        """Finish at the regular end of a run; returns whether the last checkpoint could be saved.

        If it could, the copies in memory are removed.
        """
        saved = self.finish()
        if self.job.copies is not None:
            self.job.copies.finish()
            self._report_copies()
        if saved:
            self.discard()
        return saved

    def discard(self) -> None:
        """Remove the copies in memory, so that no run resumes from them."""
        if self.job.copies is not None:
            self.job.copies.remove(self.job.config.checkpoint.save)

    def abandon(self) -> None:
        """Wait a moment for copies to arrive on other hosts, because the run ends with an error."""
        if self.job.copies is not None:
            self.job.copies.finish(seconds=2.0)

    def _report_copies(self) -> None:
        for line in self.job.copies.take_lines() if self.job.copies is not None else ():
            self.reporter.say(f" {'' if line.startswith('WARNING') else '> '}{line}")

    def _copies_fit(self) -> bool:
        """Whether the copies fit in host memory, which they allocate once and keep."""
        need = self._current.bytes - self._copies.pool.allocated
        free = available_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if need > 0 else 0
        if need > free:
            self.reporter.say(
                f" WARNING: --async-save needs {need / 2**30:.1f} GiB more of host memory per rank, and "
                f"{free / 2**30:.1f} GiB are free: training waits for this checkpoint to be written"
            )
        return need <= free

    def _remove_older(self) -> None:
        settings = self.job.config.checkpoint
        best = settings.keep_best_checkpoints
        if settings.save_retain_interval or settings.keep_last_checkpoints or best:
            keep = settings.keep_last_checkpoints or 1
            self._current.lines += remove_older(settings.save, self.saved_at, keep, settings.save_retain_interval, best)

    def _saved(self) -> None:
        path, lines, self._current, self._saved_last = self._current.final, self._current.lines, None, True
        stall = "" if self._copies is None else f" while training went on, except for {self.stall:.2f} s"
        self.reporter.say(f" > saved {path} in {time.perf_counter() - self._begun:.1f} s{stall}")
        for line in lines:
            self.reporter.say(f" > {line}")
        if self.job.config.logging.log_progress and self.job.runtime.is_rank_zero:
            try:
                with open(os.path.join(self.job.config.checkpoint.save, "progress.txt"), "a") as file:
                    file.write(f"{time.strftime('%F %T')}\tsaved iteration {self.saved_at}\t{path}\n")
            except OSError as error:
                self.reporter.say(f" WARNING: --log-progress: {error.strerror}")

    def _failed(self, error: OSError) -> None:
        self._current, self._saved_last = None, False
        self.reporter.say(f" WARNING: {error}; earlier checkpoints are untouched, training continues")

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        """Add the time spent in the block to the seconds that training waits for a save."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stall += time.perf_counter() - begin
