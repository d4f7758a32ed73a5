# SPDX-License-Identifier: Apache-2.0
"""This library: ``parallelize`` around a model, and DistributedDataParallel over the context-parallel group."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

import megatron.context_parallel as cp
from benchmarks.certify.cases import LENGTH, Case, counted, finish, whole
from megatron.context_parallel.huggingface import parallelize


def step(case: Case, ulysses: int = 1, ring: int = 1) -> cp.Outcome:
    if ulysses * ring == 1 and not case.dropout:  # our dropout depends on positions, that of transformers does not
        return whole(case)
    grid = cp.initialize_grid(ulysses=ulysses, ring=ring)
    model, batches, total = case.model("eager" if case.sinks else "sdpa"), case.batches(), torch.zeros(())
    with parallelize(model, grid, seq_length=LENGTH) as context:
        trained = DistributedDataParallel(model, process_group=grid.context.group)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with nullcontext() if last else trained.no_sync():
                loss = trained(**context.shard(batch | {"num_items_in_batch": counted(batches)})).loss
                loss.backward()
            total += loss.detach()
        return finish(model, total, case, context.layout.positions)
