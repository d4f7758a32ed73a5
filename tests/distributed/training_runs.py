# SPDX-License-Identifier: Apache-2.0
"""Run the real training program on a worker of the pool, and return its losses and gradients."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.flags import LLAMA, RUN, SHAPE


def make_job(flags: str, llama: bool = True, offload: Any = None) -> Any:
    """The job that ``pretrain_llama.py`` (or ``pretrain_gpt.py``) would train with these flags."""
    from megatron.training.arguments.parser import parse
    from megatron.training.job import prepare
    from megatron.training.setup import start

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    config = parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA if llama else None, dist.get_world_size())
    return prepare(config, start(config, offload=offload))


def train_job(job: Any, steps: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train some steps: losses, gradient norms, and the gradients of the first step by canonical name."""
    batches = data_of(job, consumed=job.progress.consumed_train_samples)
    losses, norms = [], []
    with first_gradients(job) as grads:
        for _ in range(steps):
            (result,) = take_steps(job, 1, batches)
            job.progress.advance(job.config.data.global_batch_size, job.config.data.seq_length)
            losses.append(result.lm_loss)
            norms.append(result.grad_norm)
    return losses, norms, grads


def data_of(job: Any, dataset: int = 0, consumed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's micro-batches for training (0), validation (1) or test (2)."""
    from megatron.training.job import batches_for

    return batches_for(job, job.datasets[dataset], consumed, 0)


def take_steps(job: Any, count: int = 1, batches: Any = None) -> list[Any]:
    """What some steps return that count nothing; on the first batches unless others are given."""
    from megatron.training.step import train_step

    batches = data_of(job) if batches is None else batches
    parts = job.model_chunks, job.optimizer, job.schedule, batches, job.config
    return [train_step(job.runtime, *parts, job.batch_sizes.get(), objective=job.objective) for _ in range(count)]


def evaluated_loss(job: Any, batches: Any = None, count: int | None = None, iterations: int = 1) -> float:
    """The loss of an evaluation: of ``count`` micro-batches (default: those of a step), some times."""
    from megatron.training.step import evaluate

    batches = data_of(job) if batches is None else batches
    count = job.batch_sizes.get() if count is None else count
    return evaluate(job.runtime, job.model_chunks, batches, job.config, count, iterations).lm_loss


def run_loop(job: Any, reporter: Any = None) -> bool:
    """Run the program's loop to its end, silently unless a reporter is given; whether the last checkpoint was saved."""
    from megatron.training.features.stopping import Stopper
    from megatron.training.loop import training_loop
    from megatron.training.report.reporter import Reporter

    stopper = Stopper(job.runtime.device, None)
    silent = Reporter(job.config, active=False, first_iteration=0, last_iteration=job.iterations)
    try:
        return training_loop(job, reporter or silent, stopper)
    finally:
        stopper.restore()


def damage(path: Any, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with a checkpoint, in one line that names the first damaged file; None if nothing is."""
    from megatron.training.checkpoint.megatron_lm.checked import examine
    from megatron.training.checkpoint.megatron_lm.file_list import Damaged

    try:
        examine(path, share, shares)
    except Damaged as error:
        return str(error)
    return None


def save_job(folder: Any, job: Any) -> Any:
    """Save a checkpoint; returns its path."""
    from megatron.training.checkpoint import checkpoint

    state = (job.model_chunks, job.optimizer, job.schedule, job.config)
    begun = checkpoint.begin_save(str(folder), job.progress, *state)
    begun.write()
    return begun.finish()


def refusal_of(flags: str, llama: bool = True, make: Callable[..., Any] = make_job) -> str:
    """The refusal of a run that is about to start; "" if it may."""
    from megatron.training.refusal import Refusal

    try:
        make(flags, llama)
    except Refusal as refusal:
        return str(refusal)
    return ""


def weights_of(job: Any) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by canonical name."""
    from megatron.training.checkpoint.checkpoint import unwrap
    from megatron.training.model.weights import canonical_parameters

    return {name: weight for chunk in job.model_chunks for name, weight in canonical_parameters(unwrap(chunk))}


@contextmanager
def first_gradients(job: Any) -> Iterator[dict[str, torch.Tensor]]:
    """A dictionary that the first step within this context fills with the complete gradients, by canonical name."""
    from megatron.certifying.programs.whole_gradients import full_gradients

    grads: dict[str, torch.Tensor] = {}
    prepare = job.optimizer.prepare_grads

    def keep_gradients_and_prepare() -> bool:
        if not grads:
            grads.update(full_gradients(job))
        return prepare()

    job.optimizer.prepare_grads = keep_gradients_and_prepare
    try:
        yield grads
    finally:
        del job.optimizer.prepare_grads


def compare_gradients(
    by_rank: Sequence[Mapping[str, torch.Tensor]],
    expected: Mapping[str, torch.Tensor],
    tolerance: float = 1e-5,
    *,
    smallest: float = 0.0,
    padded: bool = False,
) -> None:
    """Assert that each rank's gradients are the expected ones, and that all ranks together have all of them.

    Args:
        tolerance: for the largest error, relative to the largest expected entry of the same parameter.
        smallest: used in place of that entry where it is smaller.
        padded: gradients may have further rows, of a padded vocabulary, which are not compared.
    """
    assert expected, "no gradients to compare with"
    for rank, grads in enumerate(by_rank):
        for name, grad in grads.items():
            whole = expected[name]
            grad = grad[: len(whole)] if padded else grad
            error = float((grad - whole).abs().max() / whole.abs().max().clamp(min=smallest))
            assert error < tolerance, f"gradient of {name} on rank {rank}: {error:.1e} of its largest entry"
    assert set().union(*by_rank) == set(expected), "gradients of other parameters"


def compare_runs(results: Sequence[tuple], expected: tuple, tolerance: float = 1e-5, of_gradients: float = 0.0) -> None:
    """Assert that (losses, gradient norms, gradients) of each rank are the expected ones.

    ``of_gradients``: the limit of gradients' errors where it is larger than ``tolerance``.
    """
    for rank, (losses, norms, _) in enumerate(results):
        assert losses == pytest.approx(expected[0], rel=tolerance), f"losses of rank {rank}"
        assert norms == pytest.approx(expected[1], rel=10 * tolerance), f"gradient norms of rank {rank}"
    compare_gradients([grads for *_, grads in results], expected[2], max(tolerance, of_gradients), smallest=1e-12)


def wrong_by(wrong: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], name: str) -> float:
    """The largest error of a gradient, relative to its largest entry."""
    return float((wrong[name] - right[name]).abs().max() / right[name].abs().max())


def train_and_save(flags: str, folder: str, before: int = 2, after: int = 2, llama: bool = True) -> list[list[float]]:
    """Train, save and continue: the losses before the save, and after it."""
    job = make_job(flags, llama)
    losses = train_job(job, before)[0]
    save_job(folder, job)
    return [losses, train_job(job, after)[0]]


def resume(flags: str, folder: str, steps: int = 2, llama: bool = True) -> tuple[int, list[float]]:
    """The iteration at which a run continues from a checkpoint, and the losses of its next steps."""
    job = make_job(f"{flags} --load {folder}", llama)
    return job.progress.iteration, train_job(job, steps)[0]


def run_training(flags: str, llama: bool = True, steps: int = 20) -> tuple[list[float], list[float], dict]:
    """Losses, gradient norms and first gradients of a fresh run."""
    return train_job(make_job(flags, llama), steps)


def run_training_with_fused_sums(flags: str, steps: int) -> tuple[list[float], list[float], dict]:
    """Like :func:`run_training`; products add to DDP's sums, as on a GPU."""
    from megatron.training.model import core_config, weight_gradients

    calls = []

    def add(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        calls.append(total)
        total.addmm_(a, b)

    with (
        mock.patch.object(core_config, "products_add", lambda _, dtype: weight_gradients.products_add(True, dtype)),
        mock.patch.object(weight_gradients, "add_product", add),
    ):
        result = train_job(make_job(flags), steps)
    assert calls
    return result


def schedules_that_differ(flags: str, llama: bool, schedules: int) -> tuple[int, list[str]]:
    """Compare the first step under several schedules of host copies (tests/adversary.py) with immediate copies.

    Returns the number of copies in a step, and the names of gradients that differ in any bit.
    """
    from megatron.certifying.programs.whole_gradients import full_gradients
    from tests.adversary import Adversary

    streams, result = Adversary(1), []
    job = make_job(flags, llama, streams.offload())
    job.optimizer.prepare_grads = lambda: (result.append(full_gradients(job)), True)[1]  # and skip the update
    for seed in range(1, schedules + 1):  # the first is as early as possible
        streams.start_again(seed * dist.get_world_size() + dist.get_rank() if seed > 1 else 1)
        take_steps(job)
        streams.finish()
    differ = {name for other in result for name, grad in other.items() if not torch.equal(grad, result[0][name])}
    return streams.now // schedules, sorted(differ)
