# SPDX-License-Identifier: Apache-2.0
"""The training loop. What it does in addition to the steps (evaluate, log, save and more) is in features/."""

from __future__ import annotations

import time

from megatron.training.arguments.schedule import length_in_step
from megatron.training.data.batches import take_waited
from megatron.training.features.bad_batches import BadBatches, skip_batch
from megatron.training.features.feature import Feature, Step, due
from megatron.training.features.garbage_collection import GarbageCollection
from megatron.training.features.held_out import Evaluation
from megatron.training.features.measuring.profiler import Profiler
from megatron.training.features.measuring.step_log import StepLog
from megatron.training.features.measuring.step_memory import StepMemory
from megatron.training.features.measuring.stragglers import LogStragglers
from megatron.training.features.replicas import ReplicaCheck, ReplicasDiffer
from megatron.training.features.save_policy import Saver
from megatron.training.features.stopping import Stopper
from megatron.training.job import Job, batches_for
from megatron.training.report.reporter import Reporter
from megatron.training.step import Diverged, train_step


def training_loop(job: Job, reporter: Reporter, stopper: Stopper) -> bool:
    """Train until the last iteration or until a reason to stop; returns whether the last checkpoint could be saved.

    Raises:
        Diverged: the loss or the gradient norm is not finite and no more batches may be left out. Nothing is saved.
        ReplicasDiffer: by --check-weight-hash-across-dp-replicas-interval. Nothing is saved.
    """
    saver = Saver(job, reporter)
    stopper.begin()
    try:
        _train(job, reporter, stopper, saver)
    except ReplicasDiffer:
        saver.finish()
        saver.discard()  # a copy in memory may hold the changed weights
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
    config, progress = job.config, job.progress
    if progress.iteration >= job.iterations:
        reporter.say(f" > iteration {progress.iteration} is reached already: nothing to train")
        if config.checkpoint.save and job.on_disk is not None:
            saver.save()
        return
    batches = batches_for(job, job.datasets[0], progress.consumed_train_samples, config.data.num_workers)
    log, memory, bad_batches = StepLog(job, reporter), StepMemory(job, reporter), BadBatches(job, reporter)
    evaluation = Evaluation(job, reporter)
    features = [bad_batches, *_features(job, reporter), memory]
    for chunk in job.model_chunks:
        chunk.train()
    while progress.iteration < job.iterations and not stopper.stopped:
        step = _next_step(job)
        if progress.iteration in (config.faults.iterations_to_skip or ()):
            skip_batch(job, reporter, batches)
            progress.advance(step.samples, step.length)
            continue

        begin = time.perf_counter()
        for feature in features:
            feature.before_step()
        with memory.measure(step.iteration) as mark:
            step.result = train_step(
                job.runtime,
                job.model_chunks,
                job.optimizer,
                job.schedule,
                batches,
                config,
                job.batch_sizes.get(),
                mark=saver.before_update(mark),
                length=step.length if step.length < config.data.seq_length else None,
                watch=bad_batches.watch,
                objective=job.objective,
            )
        step.seconds = time.perf_counter() - begin
        for feature in features:
            feature.after_step(step)
        if step.result.bad:
            saver.finish()  # a checkpoint that is being written may be the one to load
            bad_batches.leave_out(step.result)
        progress.advance(step.samples, step.length)

        waited = round(1e6 * take_waited(batches))
        device_peak, host_peak, waited, writing, step.slow, lost = stopper.agree(
            memory.peak.bytes, memory.peak.host_bytes, waited, saver.writing, step.slow, saver.lost
        )
        row = log.row(step, device_peak, host_peak, waited / 1e3)
        row |= evaluation.after_step(step)
        log.write(step, row)
        for feature in features:
            feature.after_log(step)

        if due(config.run.exit_interval, step.iteration):
            stopper.stop("--exit-interval")
        saver.advance(writing)
        if lost:
            stopper.stop(saver.give_up())
        else:
            saver.save_if_due(evaluation.validation_loss)
    if config.checkpoint.save and saver.saved_at != progress.iteration:
        saver.save(evaluation.validation_loss)
    for feature in features:
        feature.stop()


def _features(job: Job, reporter: Reporter) -> list[Feature]:
    """The features that flags have switched on, in the order in which they are called."""
    config, chosen = job.config, []
    if config.faults.check_weight_hash_across_dp_replicas_interval:
        chosen.append(ReplicaCheck(job))
    if config.faults.log_straggler:
        chosen.append(LogStragglers(job, reporter))
    if config.logging.profile or config.logging.record_memory_history:
        chosen.append(Profiler(job, reporter))
    if config.run.manual_gc:
        chosen.append(GarbageCollection(config.run.manual_gc_interval))
    return chosen


def _next_step(job: Job) -> Step:
    job.batch_sizes.update(job.progress.consumed_train_samples, False)
    iteration = job.progress.iteration + 1
    return Step(
        iteration=iteration,
        samples=job.batch_sizes.get_current_running_global_batch_size(),
        length=length_in_step(job.config, iteration),
        learning_rate=job.optimizer.param_groups[0]["lr"],
        last=iteration == job.iterations,
    )
