# SPDX-License-Identifier: Apache-2.0
"""--profile: PyTorch's traces of some steps, which Perfetto and TensorBoard open, or a range for NVIDIA's nsys."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import profiler

from megatron.training.features.feature import Feature, Step
from megatron.training.job import Job
from megatron.training.report.reporter import Reporter


class Profiler(Feature):
    """Records the iterations after ``--profile-step-start`` up to ``--profile-step-end``, on ``--profile-ranks``."""

    def __init__(self, job: Job, reporter: Reporter) -> None:
        self.job, self.reporter, self.settings = job, reporter, job.config.logging
        self.rank = dist.get_rank()
        self._recording: profiler.profile | torch.autograd.profiler.emit_nvtx | None = None
        self._begun = 0

    def before_step(self) -> None:
        done, settings = self.job.progress.iteration, self.settings
        if self._recording or not settings.profile_step_start <= done < settings.profile_step_end:
            return
        if self.rank not in settings.profile_ranks:
            return
        on_gpu = self.job.runtime.device.type == "cuda"
        if settings.use_pytorch_profiler:
            kinds = [profiler.ProfilerActivity.CPU] + [profiler.ProfilerActivity.CUDA] * on_gpu
            self._recording = profiler.profile(
                activities=kinds, record_shapes=settings.profile_shapes, with_stack=settings.profile_stacks
            )
        elif on_gpu:
            torch.cuda.cudart().cudaProfilerStart()
            self._recording = torch.autograd.profiler.emit_nvtx(record_shapes=settings.profile_shapes)
        if self._recording:
            self._recording.__enter__()
            self._begun = done + 1

    def after_step(self, step: Step) -> None:
        if step.iteration >= self.settings.profile_step_end:
            self.stop()

    def stop(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.__exit__(None, None, None)
        if not isinstance(recording, profiler.profile):
            torch.cuda.cudart().cudaProfilerStop()
            return
        folder, name = Path(self.settings.tensorboard_dir), f"rank-{self.rank}.iteration-{self._begun}.pt.trace.json.gz"
        folder.mkdir(parents=True, exist_ok=True)
        path, part = folder / name, folder / f".{os.getpid()}-{name}"
        try:
            recording.export_chrome_trace(str(part))
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        self.reporter.say(f" > --profile: rank {self.rank} wrote {path}")
