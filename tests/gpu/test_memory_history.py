# SPDX-License-Identifier: Apache-2.0
"""--record-memory-history on a GPU: PyTorch's snapshot holds the allocations of the chosen steps."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.training.features.measuring.profiler import Profiler
from megatron.training.settings.job_settings import LoggingConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the history is kept of GPUs only")


def test_the_snapshot_has_the_allocations_of_the_chosen_steps(monkeypatch):
    folder = Path(tempfile.mkdtemp())
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    settings = LoggingConfig(
        record_memory_history=True, memory_snapshot_path=str(folder / "memory.pickle"), profile_step_start=1,
        profile_step_end=2, profile_ranks=[0],
    )  # fmt: skip
    job = SimpleNamespace(
        config=SimpleNamespace(logging=settings), progress=SimpleNamespace(iteration=0),
        runtime=SimpleNamespace(device=torch.device("cuda")),
    )  # fmt: skip
    feature, kept = Profiler(job, SimpleNamespace(say=print)), []
    for iteration in (1, 2, 3):
        feature.before_step()
        kept.append(torch.empty(iteration * 50_000_000, dtype=torch.uint8, device="cuda"))
        job.progress.iteration = iteration
        feature.after_step(SimpleNamespace(iteration=iteration))
    events = pickle.loads((folder / "rank-0-memory.pickle").read_bytes())["device_traces"][0]
    sizes = [event["size"] for event in events if event["action"] == "alloc"]
    assert len(sizes) == 1 and 100_000_000 <= sizes[0] < 101_000_000  # of the second iteration alone
