# SPDX-License-Identifier: Apache-2.0
"""--profile: PyTorch's traces of some steps, which Perfetto and TensorBoard open, or a range for NVIDIA's nsys.

--record-memory-history: PyTorch's own record of a GPU's memory in the same steps.
"""

from __future__ import annotations

import errno
import gzip
import os
import pickle
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import profiler

from megatron.system.whole_file import whole_file
from megatron.training.arguments.validate.check_memory import NO_HISTORY
from megatron.training.features.feature import Feature, Step
from megatron.training.job import Job
from megatron.training.refusal import reason
from megatron.training.report.reporter import Reporter

ENTRIES = 100_000  # allocations and frees that the history of memory keeps


class Profiler(Feature):
    """Records the iterations after ``--profile-step-start`` up to ``--profile-step-end``, on ``--profile-ranks``."""

    def __init__(self, job: Job, reporter: Reporter) -> None:
        self.job, self.reporter, self.settings = job, reporter, job.config.logging
        self.rank = dist.get_rank()
        self._recording: profiler.profile | torch.autograd.profiler.emit_nvtx | None = None
        self._begun, self._history = 0, False
        if self.settings.record_memory_history and job.runtime.device.type == "cpu" != job.config.run.device:
            reporter.say(f" > {NO_HISTORY}")  # for --device cpu, a note has said it

    def before_step(self) -> None:
        done, settings = self.job.progress.iteration, self.settings
        if self._recording or self._history or not settings.profile_step_start <= done < settings.profile_step_end:
            return
        if self.rank not in settings.profile_ranks:
            return
        on_gpu = self.job.runtime.device.type == "cuda"
        if settings.record_memory_history and on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
            self._history = True
        if not settings.profile:
            return
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
        if self._history:
            self._history = False
            self._write_history(Path(self.settings.memory_snapshot_path))
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.__exit__(None, None, None)
        if not isinstance(recording, profiler.profile):
            torch.cuda.cudart().cudaProfilerStop()
            return
        folder = Path(self.settings.tensorboard_dir)
        path = folder / f"rank-{self.rank}.iteration-{self._begun}.pt.trace.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory() as made, whole_file(path) as file:
                plain = Path(made, "trace.json")
                recording.export_chrome_trace(str(plain))
                if not ends_in_brace(plain):  # PyTorch says nothing if the disk is full
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), made)
                with open(plain, "rb") as trace, gzip.open(file, "wb") as packed:
                    shutil.copyfileobj(trace, packed)
        except OSError as error:  # a full disk must not end a run
            self.reporter.say(f" WARNING: --profile: rank {self.rank}: {reason(error)}; going on without it")
        else:
            self.reporter.say(f" > --profile: rank {self.rank} wrote {path}")

    def _write_history(self, path: Path) -> None:
        path = path.with_name(f"rank-{self.rank}-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                pickle.dump(torch.cuda.memory._snapshot(), file)
        except OSError as error:
            self.reporter.say(f" WARNING: --record-memory-history: {reason(error)}; going on without it")
        else:
            self.reporter.say(f" > --record-memory-history: rank {self.rank} wrote {path}")
        torch.cuda.memory._record_memory_history(enabled=None)


def ends_in_brace(path: Path) -> bool:
    """Whether the file ends as a complete JSON object does."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")
