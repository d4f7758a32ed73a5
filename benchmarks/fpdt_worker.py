# SPDX-License-Identifier: Apache-2.0
"""Trains one configuration step by step, for benchmarks/fpdt.py and benchmarks/gpu."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.gpu.profile import where_time_goes
from benchmarks.machine import busy_seconds, foreign_share
from megatron.training.arguments.parser import parse
from megatron.training.families.named import shape
from megatron.training.job import Job, batches_for, prepare
from megatron.training.report.mfu import peak_flops, step_flops
from megatron.training.report.tensor_memory import TensorMeter
from megatron.training.settings.models import LLAMA_DEFAULTS
from megatron.training.setup import start, stop
from megatron.training.step import train_step


def serve(words: list[str], requests: Iterable[str], answer: Callable[[dict], None]) -> None:
    """Prepare training with the flags ``words``; then answer each request, a kind of step, with its figures."""
    named = words[words.index("--model") + 1] if "--model" in words else None
    defaults = None if named and not shape(named).get("swiglu") else LLAMA_DEFAULTS
    config = parse(words, defaults, 1)
    runtime = start(config)
    try:
        job = prepare(config, runtime)
        batches = batches_for(job, job.datasets[0], 0, 0)
        job.model_chunks[0].train()
        for request in requests:
            answer({"step": step, "meter": metered_step, "profile": profiled_step}[request](job, batches))
    finally:
        stop()


def step(job: Job, batches: Any) -> dict:
    """Seconds of one step."""
    device = job.runtime.device
    busy, own, begin = busy_seconds(), time.process_time(), time.perf_counter()
    _train(job, batches)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - own
    foreign = foreign_share(busy, cpu, seconds) if device.type == "cpu" else 0.0
    flops = step_flops(job.config, job.vocab_size).model * job.config.data.global_batch_size
    peak = None if device.type == "cpu" else peak_flops(job.config, device)
    return {"seconds": seconds, "cpu_seconds": cpu, "foreign": foreign, "flops": flops, "peak_flops": peak}


def metered_step(job: Job, batches: Any) -> dict:
    """Bytes of one step: before it, in addition at its peak, and copied to and from host memory."""
    device, offload = job.runtime.device, job.runtime.offload
    begin = time.perf_counter()
    before = (offload.copies.to_host, offload.copies.to_device) if offload else (0, 0)
    if device.type == "cpu":
        with TensorMeter() as meter:
            states = meter.now
            _train(job, batches)
        peak = meter.peak
    else:
        torch.cuda.reset_peak_memory_stats(device)
        states = torch.cuda.memory_allocated(device)
        _train(job, batches)
        peak = torch.cuda.max_memory_allocated(device)
    return {
        "metered_seconds": time.perf_counter() - begin,
        "states": states,
        "activations": peak - states,
        "host": offload.pool.peak if offload else 0,
        "to_host": offload.copies.to_host - before[0] if offload else 0,
        "to_device": offload.copies.to_device - before[1] if offload else 0,
    }


def profiled_step(job: Job, batches: Any) -> dict:
    """The time of a step by kind of kernel."""
    return where_time_goes(lambda: _train(job, batches), job.runtime.device)


def _train(job: Job, batches: Any) -> None:
    train_step(job.runtime, job.model_chunks, job.optimizer, job.schedule, batches, job.config, job.batch_sizes.get())
    if job.runtime.device.type == "cuda":
        torch.cuda.synchronize(job.runtime.device)
