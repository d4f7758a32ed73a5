# SPDX-License-Identifier: Apache-2.0
"""Two steps of the training program, as a program for ``cp.certify``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import rerun_state_machine
from torch import Tensor, nn

from megatron.certifying.programs.small_shape import flags_of_grid
from megatron.certifying.programs.whole_gradients import full_gradients, full_parameters
from megatron.certifying.recording import Outcome
from megatron.training.arguments.parser import parse
from megatron.training.checkpoint.checkpoint import unwrap
from megatron.training.job import Job, batches_for, prepare
from megatron.training.setup import start
from megatron.training.step import train_step

STEPS = 2


@dataclass(frozen=True)
class TrainingProgram:
    """A training command without its grid."""

    flags: tuple[str, ...]

    def __call__(self, **sizes: int) -> Outcome:
        rerun_state_machine.destroy_rerun_state_machine()  # left from an earlier call
        ranks = torch.distributed.get_world_size()
        config = parse(flags_of_grid(list(self.flags), sizes), world_size=ranks)
        return train(prepare(config, start(config)))


def train(job: Job) -> Outcome:
    """Train two steps; gradients, norm and updates are those of the first."""
    before = full_parameters(job)
    gradients: dict[str, Tensor] = {}
    updates: dict[str, Tensor] = {}
    prepare = job.optimizer.prepare_grads

    def first_gradients() -> bool:
        gradients.update(full_gradients(job))
        del job.optimizer.prepare_grads
        return prepare()

    job.optimizer.prepare_grads = first_gradients
    batches = batches_for(job, job.datasets[0], 0, 0)
    for chunk in job.model_chunks:
        chunk.train()
    arguments = job.runtime, job.model_chunks, job.optimizer, job.schedule, batches, job.config, job.batch_sizes.get()
    results = []
    for _ in range(STEPS):
        results.append(train_step(*arguments, objective=job.objective))
        updates = updates or {name: x - before[name] for name, x in full_parameters(job).items()}
    grid = job.runtime.grid
    return Outcome(
        dict(_modules(job)),
        [result.lm_loss for result in results],
        gradients=gradients,
        norm=results[0].grad_norm,
        updates=updates,
        positions=_positions(job),
        calls=(grid.data.rank, grid.data.size),
    )


def _modules(job: Job) -> Iterator[tuple[str, nn.Module]]:
    """(name, module), with the complete model's layer numbers; without modules that span several pipeline stages."""
    for chunk in job.model_chunks:
        chunk = unwrap(chunk)
        for name, module in chunk.named_modules():
            if name in ("", "decoder") and job.runtime.grid.pipeline.size > 1:
                continue
            if match := re.match(r"decoder\.layers\.(\d+)(.*)", name):
                name = f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}{match[2]}"
            yield name, module


def _positions(job: Job) -> dict[int, Tensor]:
    """{number of tokens: positions} of this rank's tokens and, with TP sequence parallelism, of its part of them."""
    positions, tensor = job.runtime.layout.positions, job.runtime.grid.tensor
    if not job.config.parallel.sequence_parallel:
        return {len(positions): positions}
    part = positions.chunk(tensor.size)[tensor.rank]
    return {len(positions): positions, len(part): part}
