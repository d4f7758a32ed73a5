# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, evaluations, checkpoints, reports."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from megatron.training.arguments.schedule import length_in_step
from megatron.training.data.read_tokens import DataError
from megatron.training.evaluation.eval_report import lines, write
from megatron.training.evaluation.tasks import Subject, evaluate_tasks, metrics
from megatron.training.features.bad_batches import Watch, roll_back, write_batch
from megatron.training.features.replicas import ReplicasDiffer, check_replicas
from megatron.training.features.save_policy import Saver
from megatron.training.features.stopping import Stopper
from megatron.training.features.stragglers import SlowLinks, Stragglers
from megatron.training.job import Job, batches_for, evaluations, params_norm
from megatron.training.refusal import Refusal
from megatron.training.report.memory_profile import MemoryProfile, write_profile
from megatron.training.report.mfu import peak_flops, step_flops
from megatron.training.report.reporter import Reporter
from megatron.training.report.tensor_memory import PeakBytes
from megatron.training.step import Batches, Diverged, StepResult, evaluate, train_step


def training_loop(job: Job, reporter: Reporter, stopper: Stopper) -> bool:
    """Train until the end or until told to stop; returns whether the last checkpoint could be saved.

    Raises:
        Diverged: the loss or the gradient norm is not finite, and no more may be left out; nothing is saved then.
        ReplicasDiffer: --check-weight-hash-across-dp-replicas-interval has found it; nor is anything then.
    """
    saver = Saver(job, reporter)
    stopper.begin()
    try:
        _train(job, reporter, stopper, saver)
    except ReplicasDiffer:
        saver.finish()
        saver.discard()  # some copy may hold what has changed
        raise
    except Diverged:
        saver.finish()
        saver.abandon()
        raise
    except Exception:
        saver.abandon()
        raise
    return saver.end()


def _train(job: Job, reporter: Reporter, stopper: Stopper, saver: Saver) -> None:
    config, runtime, progress = job.config, job.runtime, job.progress
    if progress.iteration >= job.iterations:
        reporter.say(f" > iteration {progress.iteration} is reached already: nothing to train")
        if config.checkpoint.save and job.on_disk is not None:
            saver.save()
        return
    batches = batches_for(job, job.datasets[0], progress.consumed_train_samples, config.data.num_workers)
    flops = step_flops(config, job.vocab_size)
    dist.barrier()  # so that ranks that share a machine measure its rate at the same time
    peak = peak_flops(config, runtime.device)
    offload = runtime.offload
    peaks = PeakBytes(
        runtime.device,
        host_bytes=(lambda: offload.pool.peak) if offload else None,
        resized=config.parallel.zero_stage >= 2,
    )
    profiled = progress.iteration + config.logging.profile_memory_step if config.logging.profile_memory else None
    watch, left_out = Watch(config), 0
    stragglers = Stragglers(runtime) if config.faults.log_straggler else None
    links = SlowLinks(runtime.device) if config.faults.log_straggler else None
    if config.run.manual_gc:
        gc.disable()
    for chunk in job.chunks:
        chunk.train()
    evaluated_at, held_out = None, None
    while progress.iteration < job.iterations and not stopper.stopped:
        job.batch_sizes.update(progress.consumed_train_samples, False)
        samples = job.batch_sizes.get_current_running_global_batch_size()
        length = length_in_step(config, progress.iteration + 1)
        if progress.iteration in (config.faults.iterations_to_skip or ()):
            pass_over(batches, job.batch_sizes.get())
            progress.advance(samples, length)
            reporter.say(f" > iteration {progress.iteration}: its batch is left out, as --iterations-to-skip says")
            continue
        learning_rate = job.optimizer.param_groups[0]["lr"]
        begin = time.perf_counter()
        if stragglers:
            stragglers.begin()
        with peaks.step(record=progress.iteration + 1 == profiled) as meter:
            profile = MemoryProfile(meter, job.chunks, job.optimizer) if meter and meter.history is not None else None
            result = train_step(
                runtime,
                job.chunks,
                job.optimizer,
                job.schedule,
                batches,
                config,
                job.batch_sizes.get(),
                saver.before_update(profile.mark if profile else None),
                length if length < config.data.seq_length else None,
                watch,
            )
            timeline = profile.finish() if profile else None
        seconds = time.perf_counter() - begin
        if stragglers:
            stragglers.end()
        if result.bad:
            left_out += 1
            saver.finish()  # what is loaded, if it is, must be whole
            leave_out(job, reporter, result, left_out)
        progress.advance(samples, length)
        slow = links.is_slow(seconds) if links else False
        device_peak, host_peak, writing, slow, lost = stopper.agree(
            peaks.bytes, peaks.host_bytes, saver.writing, slow, saver.lost
        )
        per_device = flops.model * samples / seconds / dist.get_world_size()
        row: dict[str, Any] = {
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
            "host_peak_bytes": host_peak,
        }
        if result.bad:
            row["bad_batch"] = result.bad
        iteration, last = progress.iteration, progress.iteration == job.iterations
        if last or _due(config.run.eval_interval, iteration):
            losses = evaluate_held_out(job, reporter, "validation")
            evaluated_at, held_out = iteration, statistics.fmean(losses.values()) if losses else None
            row |= losses
            row |= evaluate_on_tasks(job, reporter)
        if last:
            row |= evaluate_held_out(job, reporter, "test")
        scale = float(job.optimizer.get_loss_scale())
        reporter.step(row, learning_rate=learning_rate, loss_scale=scale, extra=extras(job, result))
        for line in watch.told():
            reporter.say(f" WARNING: iteration {iteration}: {line}")
        if _due(config.faults.check_weight_hash_across_dp_replicas_interval, iteration):
            check_replicas(job)
        if stragglers and (last or _due(config.logging.log_interval, iteration)) and (line := stragglers.tell()):
            reporter.say(f" WARNING: {line}")
        if links and (line := links.tell(bool(slow))):
            reporter.say(f" WARNING: {line}")
        if timeline is not None:
            reporter.say(write_profile(config.logging.profile_memory, iteration, timeline, runtime.device.type))
        if config.run.manual_gc and _due(config.run.manual_gc_interval, iteration):
            gc.collect()
        if _due(config.run.exit_interval, iteration):
            stopper.stop("--exit-interval")
        saver.go_on(writing)
        if lost:
            stopper.stop(saver.give_up())
            break
        if _due(config.checkpoint.non_persistent_save_interval, iteration):
            saver.copy()
        if _due(config.checkpoint.save_interval, iteration):
            saver.save(held_out if evaluated_at == iteration else None)
    if stragglers:
        stragglers.stop()
    if config.checkpoint.save and saver.saved_at != progress.iteration:
        saver.save(held_out if evaluated_at == progress.iteration else None)
    gc.enable()


def _due(interval: int | None, iteration: int) -> bool:
    return bool(interval) and iteration % interval == 0


def pass_over(batches: Batches | list[Batches] | None, microbatches: int) -> None:
    """Read the micro-batches of a step, and do nothing with them: they may be what cannot be read."""
    for one in batches if isinstance(batches, list) else [batches]:
        for _ in range(microbatches if one is not None else 0):
            with suppress(DataError):
                next(one)


def leave_out(job: Job, reporter: Reporter, result: StepResult, count: int) -> None:
    """Go on without a bad batch, from the weights before it or from those of the last checkpoint.

    Raises:
        Diverged: so many may not be left out, or there is no checkpoint.
    """
    faults = job.config.faults
    if count > faults.skip_bad_batches:
        raise Diverged(result)
    where, since = write_batch(job, result) if reporter.active else "", ""
    if faults.rollback_on_bad_batch:
        iteration = roll_back(job, reporter.say)
        if iteration is None:
            raise Diverged(result)
        since = f", with all since iteration {iteration}, whose weights were loaded"
    reporter.say(
        f" WARNING: {result.bad} at iteration {job.progress.iteration + 1}: its batch is left out{since} "
        f"({count} of {faults.skip_bad_batches}); {where}"
    )


def evaluate_held_out(job: Job, reporter: Reporter, kind: str) -> dict[str, float]:
    """Mean loss on the validation or the test data, as {"KIND_loss": loss}; of several sets, {"KIND_NAME_loss": loss}.

    Args:
        kind: ``validation`` or ``test``.
    """
    if sets := job.named.get(kind):
        losses: dict[str, float] = {}
        for name, dataset in sets.items():
            losses |= evaluate_on(job, reporter, f"{kind}_{name}", dataset)
        return losses
    return evaluate_on(job, reporter, kind, job.datasets[1 if kind == "validation" else 2])


def evaluate_on(job: Job, reporter: Reporter, name: str, dataset: Dataset | None) -> dict[str, float]:
    """Mean loss on held-out data, as {"NAME_loss": loss}: the same samples whenever the same iteration is evaluated."""
    config = job.config
    there = torch.tensor(dataset is not None, dtype=torch.int, device=job.runtime.device)
    dist.all_reduce(there, op=dist.ReduceOp.MAX)  # a middle pipeline stage holds no data and cannot know
    if not there or not config.run.eval_iters:
        return {}
    stretch = 0
    if name.startswith("validation") and config.run.eval_interval:
        stretch = min(job.progress.iteration // config.run.eval_interval, evaluations(config, job.iterations) - 1)
    batch = config.data.global_batch_size
    batches = batches_for(job, dataset, stretch * config.run.eval_iters * batch, 0)
    microbatches = batch // (config.data.micro_batch_size * job.runtime.grid.data.size)
    result = evaluate(job.runtime, job.chunks, batches, config, microbatches, config.run.eval_iters)
    reporter.evaluation(job.progress.iteration, name, result.lm_loss)
    return {f"{name}_loss": result.lm_loss}


def evaluate_on_tasks(job: Job, reporter: Reporter) -> dict[str, float]:
    """Scores of --eval-tasks, as flat numbers; with --eval-output also as files."""
    if job.plan is None:
        return {}
    subject, folder = Subject(job.config, job.runtime, job.chunks), job.config.evaluation.eval_output
    found = evaluate_tasks(job.plan, subject, job.datasets[1])
    for line in lines(found):
        reporter.say(f" iteration {job.progress.iteration}: {line}")
    if folder and reporter.active:
        try:
            write(folder, {"iteration": job.progress.iteration}, found)
        except Refusal as refusal:  # a full disk: as with --log-jsonl, training goes on
            reporter.say(f" WARNING: {refusal}")
    return metrics(found)


def extras(job: Job, result: StepResult) -> dict[str, float]:
    """What flags add to the console line."""
    values: dict[str, float] = {"skipped": float(result.skipped)}
    if job.config.logging.log_num_zeros_in_grad and result.zeros_in_grad is not None:
        values["num_zeros"] = float(result.zeros_in_grad)
    if job.config.logging.log_params_norm:
        values["params_norm"] = params_norm(job)
    return values
