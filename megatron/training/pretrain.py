# SPDX-License-Identifier: Apache-2.0
"""The training program: from a command line to a trained checkpoint."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.training.arguments import parse
from megatron.training.config import Config
from megatron.training.setup import Runtime, rank, start, stop, world_size
from megatron.training.validate import Refusal, data_parallel_size

EXIT_REFUSED = 2


def main(argv: list[str] | None = None, defaults: dict[str, Any] | None = None) -> int:
    """Entry point of pretrain_gpt.py and pretrain_llama.py; returns the exit code.

    Args:
        argv: command line without the program's name; default ``sys.argv``.
        defaults: settings that differ from Megatron-LM's for this entry point, as {"section.field": value}.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)  # warns that it is switched off
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed")
    try:
        config = parse(argv, defaults, world_size())
        runtime = start(config)
        try:
            return train(config, runtime)
        finally:
            stop()
    except Refusal as refusal:
        if rank() == 0:
            print(f"error: {refusal}", file=sys.stderr, flush=True)
        return EXIT_REFUSED


@dataclass
class Job:
    """Everything a run holds between steps."""

    config: Config
    runtime: Runtime
    chunks: list[nn.Module]
    optimizer: Any
    schedule: Any
    progress: Any
    datasets: tuple[Any, Any, Any]
    batch_sizes: Any  # core's calculator of micro-batches a step
    iterations: int
    vocab_size: int


def train(config: Config, runtime: Runtime) -> int:
    """Build the job, train, evaluate and save; returns the exit code."""
    from megatron.training.report import Reporter

    started = time.perf_counter()
    job = prepare(config, runtime)
    reporter = Reporter(
        config,
        active=runtime.is_rank_zero,
        first_iteration=job.progress.iteration,
        last_iteration=job.iterations,
    )
    for line in (*config.notes, *describe(job)):
        reporter.say(f" > {line}")
    reporter.say(f" > ready after {time.perf_counter() - started:.1f} s")
    stopper = Stopper(runtime, config.run.exit_duration_in_mins)
    saved = True
    try:
        if not config.run.skip_train:
            saved = training_loop(job, reporter, stopper)
        if not stopper.stopped:
            final_evaluation(job, reporter)
        if stopper.reason:
            reporter.say(f" > stopped after iteration {job.progress.iteration}: {stopper.reason}")
    finally:
        reporter.close()
        stopper.restore()
    return 0 if saved else 1


def prepare(config: Config, runtime: Runtime) -> Job:
    """Tokenizer, data, model, optimizer and checkpoint of a run."""
    from megatron.core.num_microbatches_calculator import _build_num_microbatches_calculator
    from megatron.training import checkpoint
    from megatron.training.data import build_datasets
    from megatron.training.model import build_model
    from megatron.training.optimizer import build_optimizer, build_schedule, wrap_for_data_parallelism
    from megatron.training.tokenizer import build_tokenizer, check_vocab

    found = checkpoint.find(config.checkpoint)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    vocab_size = check_vocab(config.model.vocab_size, tokenizer)
    ranks = data_parallel_size(config, dist.get_world_size())
    batch_sizes = _build_num_microbatches_calculator(
        dist.get_rank(),
        config.data.rampup_batch_size,
        config.data.global_batch_size,
        config.data.micro_batch_size,
        ranks,
        False,
    )
    iterations, samples = length_of_run(config, batch_sizes)
    evaluations = iterations // config.run.eval_interval + 1 if config.run.eval_interval else 1
    held_out = config.run.eval_iters * config.data.global_batch_size
    datasets = build_datasets(config, tokenizer, (samples, evaluations * held_out, held_out), needed=runtime.reads_data)
    model = build_model(config, runtime.grid, runtime.layout, vocab_size, runtime.device)
    chunks = wrap_for_data_parallelism(model, config)
    optimizer = build_optimizer(chunks, config)
    schedule = None if config.run.skip_train else build_schedule(optimizer, config)
    progress = checkpoint.Progress()
    if found:
        progress = checkpoint.load(found, chunks, optimizer, schedule, config)
        config.notes.append(f"loaded {found}, going on after iteration {progress.iteration}")
    elif config.checkpoint.load:
        config.notes.append(f"--load {config.checkpoint.load} holds no checkpoint: starting from iteration 0")
    batch_sizes.update(progress.consumed_train_samples, False)
    return Job(config, runtime, chunks, optimizer, schedule, progress, datasets, batch_sizes, iterations, vocab_size)


def length_of_run(config: Config, batch_sizes: Any) -> tuple[int, int]:
    """(iterations, samples) of the whole run, whichever of the two was given; none for --skip-train."""
    if config.run.skip_train:
        return 0, 0
    iterations, samples = 0, 0
    wanted_samples, wanted_iterations = config.run.train_samples, config.run.train_iters
    if config.data.rampup_batch_size is None:
        batch = config.data.global_batch_size
        iterations = wanted_samples // batch if wanted_samples is not None else wanted_iterations
        return iterations, iterations * batch
    while samples < wanted_samples if wanted_samples is not None else iterations < wanted_iterations:
        batch_sizes.update(samples, False)
        samples += batch_sizes.get_current_running_global_batch_size()
        iterations += 1
    batch_sizes.update(0, False)
    return iterations, samples


def describe(job: Job) -> Iterator[str]:
    """What rank 0 says before training."""
    config, runtime = job.config, job.runtime
    parameters = sum(parameter.numel() for chunk in job.chunks for parameter in chunk.parameters())
    yield f"{runtime.grid} on {dist.get_world_size()} x {runtime.platform.device_name()} ({dist.get_backend()})"
    yield (
        f"{config.data.seq_length} tokens a sample, {runtime.layout.local_length} a rank ({runtime.layout.balance}); "
        f"attention kernel {config.attention.attention_kernel}"
    )
    yield (
        f"{config.model.num_layers} layers, hidden size {config.model.hidden_size}, "
        f"{config.model.num_attention_heads} heads ({config.model.num_query_groups} for keys and values), vocabulary "
        f"{job.vocab_size}; {parameters:,} parameters on rank 0; ZeRO {config.parallel.zero_stage}"
    )


class Stopper:
    """Whether to stop early: a SIGTERM on any rank, or the time is up. Asked together, so that all ranks agree."""

    def __init__(self, runtime: Runtime, minutes: int | None) -> None:
        self.runtime = runtime
        self.deadline = time.monotonic() + 60 * minutes if minutes else None
        self.reason = ""
        self.stopped = False
        self._signalled = False
        self._before = signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *_: Any) -> None:
        self._signalled = True

    def restore(self) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def agree(self, peak_bytes: int) -> int:
        """Take part in the decision after a step; returns the largest ``peak_bytes`` of all ranks."""
        late = self.deadline is not None and time.monotonic() > self.deadline
        votes = torch.tensor([self._signalled, late, peak_bytes], dtype=torch.int64, device=self.runtime.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        signalled, late, peak = votes.tolist()
        if signalled or late:
            self.stopped = True
            self.reason = "SIGTERM" if signalled else "--exit-duration-in-mins is over"
        return peak


def training_loop(job: Job, reporter: Any, stopper: Stopper) -> bool:
    """Train until the end or until told to stop; returns whether the last checkpoint could be saved."""
    from megatron.training.flops import peak_flops, step_flops
    from megatron.training.memory import PeakBytes
    from megatron.training.step import train_step

    config, runtime, progress = job.config, job.runtime, job.progress
    batches = batches_for(job, job.datasets[0], progress.consumed_train_samples, config.data.num_workers)
    flops = step_flops(config, job.vocab_size)
    dist.barrier()
    peak = peak_flops(config, runtime.device)
    meter = PeakBytes(runtime.device)
    saved_at, saved = progress.iteration, True
    if config.run.manual_gc:
        gc.disable()
    for chunk in job.chunks:
        chunk.train()
    while progress.iteration < job.iterations and not stopper.stopped:
        job.batch_sizes.update(progress.consumed_train_samples, False)
        microbatches = job.batch_sizes.get()
        samples = job.batch_sizes.get_current_running_global_batch_size()
        learning_rate = job.optimizer.param_groups[0]["lr"]
        begin = time.perf_counter()
        with meter:
            result = train_step(runtime, job.chunks, job.optimizer, job.schedule, batches, config, microbatches)
        seconds = time.perf_counter() - begin
        progress.iteration += 1
        progress.consumed_train_samples += samples
        device_peak = stopper.agree(meter.bytes)
        per_device = flops.model * samples / seconds / dist.get_world_size()
        row = {
            "iteration": progress.iteration,
            "lm_loss": result.lm_loss,
            "grad_norm": result.grad_norm,
            "tokens": result.tokens,
            "iteration_ms": 1000 * seconds,
            "tokens_per_second": result.tokens / seconds,
            "model_tflops_per_device": per_device / 1e12,
            "mfu": per_device / peak,
            "mfu_full_mask_with_recompute": per_device / peak * flops.old_papers / flops.model,
            "device_peak_bytes": device_peak,
            "host_peak_bytes": 0,  # nothing is offloaded yet
        }
        reporter.step(row, learning_rate=learning_rate, loss_scale=scale_of(job), extra=extras(job, result))
        _stop_on_nan(config, result.lm_loss, progress.iteration)
        if (
            config.run.manual_gc
            and config.run.manual_gc_interval
            and progress.iteration % config.run.manual_gc_interval == 0
        ):
            gc.collect()
        if config.run.eval_interval and progress.iteration % config.run.eval_interval == 0:
            evaluate_on(job, reporter, "validation", job.datasets[1])
        if config.run.exit_interval and progress.iteration % config.run.exit_interval == 0:
            stopper.stopped, stopper.reason = True, stopper.reason or "--exit-interval"
        interval = config.checkpoint.save_interval
        if interval and progress.iteration % interval == 0:
            saved, saved_at = save(job, reporter), progress.iteration
    if config.checkpoint.save and saved_at != progress.iteration:
        saved = save(job, reporter)
    gc.enable()
    return saved


def batches_for(job: Job, dataset: Any, consumed: int, workers: int) -> Any:
    """An iterator over micro-batches, or one a virtual stage; None where this pipeline stage reads no data."""
    from megatron.training.data import micro_batches

    config, runtime = job.config, job.runtime

    def iterator() -> Any:
        if not runtime.reads_data or dataset is None:
            return None
        return micro_batches(
            dataset,
            consumed_samples=consumed,
            micro_batch_size=config.data.micro_batch_size,
            data_parallel_rank=runtime.grid.data.rank,
            data_parallel_size=runtime.grid.data.size,
            num_workers=workers,
            dataloader_type=config.data.dataloader_type,
            seed=config.run.seed,
        )

    return [iterator() for _ in job.chunks] if len(job.chunks) > 1 else iterator()


def evaluate_on(job: Job, reporter: Any, name: str, dataset: Any) -> None:
    """Mean loss on held-out data: the same samples whenever the same iteration is evaluated."""
    from megatron.training.step import evaluate

    config = job.config
    there = torch.tensor(dataset is not None, dtype=torch.int, device=job.runtime.device)
    dist.all_reduce(there, op=dist.ReduceOp.MAX)  # a middle pipeline stage holds no data and cannot know
    if not there or not config.run.eval_iters:
        return
    index = job.progress.iteration // config.run.eval_interval if config.run.eval_interval else 0
    index = 0 if name == "test" else max(index - 1, 0)
    batch = config.data.global_batch_size
    batches = batches_for(job, dataset, index * config.run.eval_iters * batch, 0)
    microbatches = batch // (config.data.micro_batch_size * job.runtime.grid.data.size)
    result = evaluate(job.runtime, job.chunks, batches, config, microbatches, config.run.eval_iters)
    reporter.evaluation(job.progress.iteration, name, result.lm_loss)


def final_evaluation(job: Job, reporter: Any) -> None:
    """At the end of a run: validation data (if not just done) and test data."""
    config = job.config
    just_done = config.run.eval_interval and job.progress.iteration % config.run.eval_interval == 0
    if config.run.skip_train or not just_done:
        evaluate_on(job, reporter, "validation", job.datasets[1])
    evaluate_on(job, reporter, "test", job.datasets[2])


def save(job: Job, reporter: Any) -> bool:
    """Save a checkpoint; a failure (a full disk) is told and does not end the run."""
    from megatron.training import checkpoint

    settings = job.config.checkpoint
    begin = time.perf_counter()
    try:
        path = checkpoint.save(settings.save, job.progress, job.chunks, job.optimizer, job.schedule, job.config)
    except OSError as error:
        reporter.say(f" WARNING: {error}; earlier checkpoints are untouched, training goes on")
        return False
    reporter.say(f" > saved {path} in {time.perf_counter() - begin:.1f} s")
    if settings.save_retain_interval and job.runtime.is_rank_zero:
        checkpoint.remove_older(settings.save, settings.save_retain_interval, job.progress.iteration)
    if job.config.logging.log_progress and job.runtime.is_rank_zero:
        with open(os.path.join(settings.save, "progress.txt"), "a") as file:
            file.write(f"{time.strftime('%F %T')}\tsaved iteration {job.progress.iteration}\t{path}\n")
    return True


def extras(job: Job, result: Any) -> dict[str, float]:
    """What flags add to the console line."""
    values: dict[str, float] = {"skipped": float(result.skipped)}
    if job.config.logging.log_num_zeros_in_grad and result.zeros_in_grad is not None:
        values["num_zeros"] = float(result.zeros_in_grad)
    if job.config.logging.log_params_norm:
        values["params_norm"] = params_norm(job)
    return values


@torch.no_grad()
def params_norm(job: Job) -> float:
    """L2 norm of all parameters of the model, each counted once."""
    from megatron.core.parallel_state import get_model_parallel_group
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    total = torch.zeros((), dtype=torch.float64, device=job.runtime.device)
    for chunk in job.chunks:
        for parameter in chunk.parameters():
            if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
                total += parameter.double().square().sum()
    dist.all_reduce(total, group=get_model_parallel_group())
    return float(total.sqrt())


def scale_of(job: Job) -> float:
    """The loss scale, 1 without fp16."""
    return float(job.optimizer.get_loss_scale())


def _stop_on_nan(config: Config, loss: float, iteration: int) -> None:
    if config.optimizer.check_for_nan_in_loss_and_grad and not config.optimizer.fp16 and loss != loss:
        raise Refusal(
            f"the loss is NaN at iteration {iteration}: lower --lr, or pass --no-check-for-nan-in-loss-and-grad to go on"
        )
