# SPDX-License-Identifier: Apache-2.0
"""The peak memory of each step, and the timeline of the step that ``--profile-memory`` records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.training.features.feature import Feature, Step
from megatron.training.job import Job
from megatron.training.report.memory_profile import MemoryProfile, Profile, write_profile
from megatron.training.report.reporter import Reporter
from megatron.training.report.tensor_memory import PeakBytes
from megatron.training.step import Mark


class StepMemory(Feature):
    """Measures each step on this rank; ``peak`` has the peak bytes on the device and in host memory."""

    def __init__(self, job: Job, reporter: Reporter) -> None:
        self.job, self.reporter, self.settings = job, reporter, job.config.logging
        offload = job.runtime.offload
        self.peak = PeakBytes(
            job.runtime.device,
            host_bytes=(lambda: offload.pool.peak) if offload else None,
            resized=job.config.parallel.zero_stage >= 2,
        )
        self._recorded = None  # the iteration to record
        if self.settings.profile_memory:
            self._recorded = job.progress.iteration + self.settings.profile_memory_step
        self._profile: Profile | None = None

    @contextmanager
    def measure(self, iteration: int) -> Iterator[Mark | None]:
        """Measure the step in the block; yields a function to call when each of its phases begins, or None."""
        record = iteration == self._recorded
        with self.peak.step(record=record) as meter:
            profile = MemoryProfile(meter, self.job.model_chunks, self.job.optimizer) if record else None
            yield profile.mark if profile else None
            self._profile = profile.finish() if profile else None

    def after_log(self, step: Step) -> None:
        if self._profile is not None:
            kind = self.job.runtime.device.type
            self.reporter.say(write_profile(self.settings.profile_memory, step.iteration, self._profile, kind))
            self._profile = None
