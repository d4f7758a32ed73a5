# SPDX-License-Identifier: Apache-2.0
"""The training program: from a command line to a trained checkpoint."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron.system.srun import check_ranks, take_ranks_of_srun
from megatron.training.arguments.argv import flat, options, take_ranks
from megatron.training.arguments.dry_run_flags import idle_in_dry_run
from megatron.training.arguments.elastic import Fastest
from megatron.training.arguments.parser import parse
from megatron.training.arguments.schedule import LengthStageEnded
from megatron.training.arguments.suggest import fixed
from megatron.training.launcher import follow_launcher
from megatron.training.refusal import Fix, Refusal, one_line
from megatron.training.settings.config import Config

if TYPE_CHECKING:  # these import torch, which --help does not need
    from megatron.training.features.heartbeat import Heartbeat
    from megatron.training.features.stopping import Stopper
    from megatron.training.job import Job
    from megatron.training.setup import Runtime
    from megatron.training.step import Diverged

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130
Work = Callable[[Config, "Runtime", "Heartbeat | None"], int]  # returns the exit code
Possible = Callable[[Fix], Fix | None]
"""A change without the flags that the command line does not have; None if the changed command line is refused."""
CORE = r"megatron\.core|torch\.distributed"  # modules whose warnings do not concern a run
SAVES_MEMORY = "--dry-run shows where memory is used, and docs/use/memory.md how to use less"


def main(
    argv: list[str] | None = None,
    defaults: dict[str, object] | None = None,
    simulate: Callable[[Config, Possible], int] | None = None,
    fastest: Fastest | None = None,
    work: Work | None = None,
    advise: Callable[[Config, Possible], list[str]] | None = None,
) -> int:
    """Entry point of pretrain_gpt.py and pretrain_llama.py; returns the exit code.

    0: finished, or stopped by request. 1: training failed (it diverged, read unusable data, or could not save the last
    checkpoint). 2: refused before the first step, with one line that gives the reason. 130: interrupted (Ctrl-C).

    Args:
        argv: command line without the program's name; default ``sys.argv``.
        defaults: settings in which this entry point differs from Megatron-LM, as {"section.field": value}.
        simulate: does the --dry-run of a checked configuration and returns an exit code. If several processes were
            started, only the first simulates; the others return 0 at once. It can ask whether a change of the command
            line is possible.
        fastest: chooses among grids, for --elastic with --gpu.
        work: replaces `train`.
        advise: lines to print when a GPU's memory runs out; it can ask as ``simulate``.
    """
    given = sys.argv[1:] if argv is None else argv
    warnings.filterwarnings("ignore", module=CORE)

    def possible(fix: Fix) -> Fix | None:
        """``fix`` without the flags that are not given; None if the changed command line is refused."""
        split = options(given)
        fix = replace(fix, drop=" ".join({*fix.drop.split()} & {flag for flag, *_ in split}))
        try:
            parse(flat(fixed(split, fix)), defaults, int(os.environ.get("WORLD_SIZE", "1")), _shape_of)
        except Refusal:
            return None
        return fix

    try:
        take_ranks(given, os.environ)
        follow_srun(simulated="--dry-run" in given)
        if idle_in_dry_run(given, os.environ):
            return 0

        def read(iteration: int) -> Config:
            return parse(argv, defaults, int(os.environ.get("WORLD_SIZE", "1")), _shape_of, fastest, iteration)

        config = read(0)
        quiet()
        if not config.simulation.dry_run:
            return run(config, work, config_at=read, advise=partial(advise, config, possible) if advise else None)
        if simulate is None:
            raise Refusal("--dry-run: this entry point only trains; use pretrain_gpt.py or pretrain_llama.py")
        return simulate(config, possible)
    except Refusal as refusal:
        print_refusal(refusal)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("error: interrupted: nothing was saved after the last checkpoint", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED


def follow_srun(simulated: bool = False) -> None:
    """Take the ranks of tasks that srun started; the parallel sizes depend on their number.

    Args:
        simulated: a dry run, for which one of them suffices.

    Raises:
        Refusal: several processes were started, and nothing says which of them this one is; or it says nonsense.
    """
    try:
        (check_ranks if simulated else take_ranks_of_srun)(os.environ)
    except ValueError as error:
        raise Refusal(str(error)) from None


def run(
    config: Config,
    work: Work | None = None,
    saves_memory: str = SAVES_MEMORY,
    config_at: Callable[[int], Config] | None = None,
    advise: Callable[[], list[str]] | None = None,
) -> int:
    """Set up, train (or do ``work``), and leave the process groups; returns the exit code.

    Args:
        saves_memory: the advice in the message when memory runs out.
        config_at: the settings of the length stage that goes on after an iteration, for --seq-length-schedule.
        advise: more lines when a GPU's memory runs out.
    """
    follow_launcher("TORCHELASTIC_RUN_ID" in os.environ)  # before the imports, which take seconds
    begin = time.monotonic()
    while True:
        try:
            return _run(config, work, saves_memory, advise)
        except LengthStageEnded as stage:
            after = stage.iteration
        from megatron.training.setup import free_memory

        free_memory()  # now that no exception refers to the job
        config = config_at(after)
        if config.run.exit_duration_in_mins is not None:
            config.run.exit_duration_in_mins -= (time.monotonic() - begin) / 60


def _run(config: Config, work: Work | None, saves_memory: str, advise: Callable[[], list[str]] | None = None) -> int:
    from megatron.training.data.read_tokens import DataError
    from megatron.training.features.heartbeat import COMMUNICATION_ERROR, heartbeat
    from megatron.training.setup import start, stop

    try:
        runtime = start(config)
    except RuntimeError as error:
        line = one_line(error, 200)
        if not COMMUNICATION_ERROR.search(line):
            raise
        rank = os.environ.get("RANK", "0")
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        over = f", over the network interface {interface} (--network-interface names another one)" if interface else ""
        print(
            f"error on rank {rank}: the processes could not connect{over}; one may have ended: {line}", file=sys.stderr
        )
        return EXIT_FAILED
    beats, goes_on = heartbeat(runtime.grid, config.parallel.distributed_timeout_minutes), False
    try:
        return (work or train)(config, runtime, beats)
    except LengthStageEnded:
        goes_on = True
        raise
    except DataError as error:
        line = f"error: {one_line(error)}"
        if beats is None:
            print(line, file=sys.stderr, flush=True)
        else:
            beats.end(line)  # ends the other ranks, which wait for this one
        return EXIT_FAILED
    except Exception as error:
        lines = None if beats is None or isinstance(error, Refusal) else beats.failed(error)
        if lines is None and (wanted := out_of_memory(error)):
            lines = [f"error: out of memory: {wanted}; {saves_memory}"]
            if advise is not None and runtime.is_rank_zero and runtime.device.type == "cuda":
                lines += advise()
        if lines is None:
            raise
        for line in lines:
            print(line, file=sys.stderr, flush=True)
        return EXIT_FAILED
    finally:
        if beats is not None:
            beats.stop()
        stop(keep_world=goes_on)


def out_of_memory(error: Exception) -> str:
    """PyTorch's message if memory has run out; empty for another error."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error):
        return one_line(str(error).partition("DefaultCPUAllocator: ")[2] or error, 200)
    return ""


def train(config: Config, runtime: Runtime, beats: Heartbeat | None = None) -> int:
    """Build the job, train, evaluate and save; returns the exit code."""
    from megatron.training.features.stopping import Stopper
    from megatron.training.job import prepare

    started = time.perf_counter()
    stopper = Stopper(runtime.device, config.run.exit_duration_in_mins)
    job = prepare(config, runtime)
    try:
        return _train(job, stopper, beats, started)
    finally:
        if job.owner is not None:
            job.owner.release()


def _train(job: Job, stopper: Stopper, beats: Heartbeat | None, started: float) -> int:
    from megatron.training.data.read_tokens import DataError
    from megatron.training.features.bad_batches import write_batch
    from megatron.training.features.held_out import evaluate_held_out, evaluate_on_tasks
    from megatron.training.features.replicas import ReplicasDiffer
    from megatron.training.job import describe
    from megatron.training.loop import training_loop
    from megatron.training.refusal import refuse_together
    from megatron.training.report.memory_profile import check_profile
    from megatron.training.report.reporter import Reporter
    from megatron.training.step import Diverged

    config, runtime = job.config, job.runtime
    if beats is not None:
        beats.iteration = lambda: job.progress.iteration
    refuse_together(lambda: check_profile(config, job.iterations - job.progress.iteration))
    reporter = refuse_together(
        lambda: Reporter(
            config, active=runtime.is_rank_zero, first_iteration=job.progress.iteration, last_iteration=job.iterations
        )
    )
    for line in (*config.notes, *describe(job)):
        reporter.say(f" > {line}")
    reporter.say(f" > ready after {time.perf_counter() - started:.1f} s")
    try:
        if config.run.skip_train:
            evaluate_held_out(job, reporter, "validation")
            evaluate_held_out(job, reporter, "test")
            evaluate_on_tasks(job, reporter)
            return 0
        saved = training_loop(job, reporter, stopper)
        if stopper.stopped:
            reporter.say(f" > stopped after iteration {job.progress.iteration}: {stopper.reason}")
        if saved and not stopper.stopped and config.stage is not None and job.iterations < config.run.train_iters:
            raise LengthStageEnded(job.progress.iteration)
        return 0 if saved else EXIT_FAILED
    except Diverged as error:
        ranks = not_finite(error, beats, runtime.grid.pipeline.size)
        if runtime.is_rank_zero:
            done, batch_file = job.progress.iteration, write_batch(job, error.result)
            reporter.say(
                f"error: {error} at iteration {done + 1}{ranks}, and nothing was saved: lower --lr, or "
                f"leave the batch out with --iterations-to-skip {done} or --skip-bad-batches, or pass "
                f"--no-check-for-nan-in-loss-and-grad to go on; the batch: {batch_file}"
            )
        return EXIT_FAILED
    except DataError as error:
        done = job.progress.iteration
        raise DataError(
            f"{error}; after iteration {done}: correct the data and start again, or leave a batch of training data "
            f"out with --iterations-to-skip {done}"
        ) from None
    except ReplicasDiffer as error:
        reporter.say(
            f"error: {error} after iteration {job.progress.iteration}, and nothing was saved: start again from the "
            "last checkpoint, without these hosts or after a test of their memory"
        )
        return EXIT_FAILED
    finally:
        reporter.close()
        stopper.restore()


def not_finite(error: Diverged, beats: Heartbeat | None, stages: int) -> str:
    """Report a Diverged to the other ranks; returns, on rank 0, a phrase naming ranks whose own loss is not finite.

    Empty if the losses of all ranks are not finite, because then no rank is to blame.

    Args:
        beats: the Heartbeat; None for a run on one process.
        stages: pipeline stages; only the last one has a loss.
    """
    if beats is None:
        return ""
    own = "; the loss of its own tokens is not finite"
    beats.failed(ArithmeticError(f"{error}{own if error.own else ''}").with_traceback(error.__traceback__))
    end = time.monotonic() + 5.0
    while beats.rank == 0 and time.monotonic() < end:
        table = beats.table()
        if all(beat and beat.failed for beat in table.values()):
            ranks = [rank for rank, beat in table.items() if own in beat.failed]
            few = 0 < len(ranks) < len(table) // stages
            named = ", ".join(f"{rank} on {table[rank].process.host}" for rank in ranks)
            return f" (in the loss of rank {named})" if few else ""
        time.sleep(0.1)
    return ""


def _shape_of(folder: str, step: int | None, skip: bool) -> dict[str, object] | None:
    from megatron.training.checkpoint.arguments_of import shape_of  # imports torch, which --help does not need

    return shape_of(folder, step, skip)


def quiet() -> None:
    """Silence warnings of libraries that do not concern a run."""
    from megatron.platform.core_versions import silence_notices  # imports torch, which --help does not need

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)  # warns that it is switched off
    silence_notices()
    warnings.filterwarnings("ignore", module=CORE)


def print_refusal(refusal: Refusal) -> None:
    """Print a refusal once. If only one rank refuses, it prints after the others had time to print theirs."""
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    if refusal.everywhere and rank != 0:
        return
    if local != 0:
        time.sleep(3 + 0.1 * local)  # if the node's first rank refuses too, its launcher ends this one meanwhile
    print(
        f"error: {refusal.render()}" if rank == 0 else f"error on rank {rank}: {refusal.render()}",
        file=sys.stderr,
        flush=True,
    )
