# SPDX-License-Identifier: Apache-2.0
"""A simulated cluster: any rank of a world of any size, in this one process.

Collectives of the fake process group return at once and move nothing, so shapes, plans and sizes are real and contents
are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def simulated_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be rank ``rank`` of ``world_size``: within, ``cp.initialize_grid(...)`` yields that rank's real grid.

        with simulated_world(16384, rank=77):
            grid = cp.initialize_grid(tensor=8, ulysses=8, ring=4, pipeline=4)

    On leaving, torch.distributed and megatron-core are as before: not initialized.

    Raises:
        ValueError: there is no such rank.
        RuntimeError: this process already is part of a world, real or simulated.
    """
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not 0 <= rank < world_size:
        raise ValueError(f"a world of {world_size} has no rank {rank}")
    if dist.is_initialized() or parallel_state.is_initialized():
        raise RuntimeError(
            "this process is part of a torch.distributed world already: simulate in a process of its own"
        )
    before = dict(vars(parallel_state))  # core keeps its groups in this module; destroy_model_parallel forgets some
    create_group = parallel_state.create_group

    def create_own_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup | None:
        """core makes every group of the world on every rank; only those with this rank in them are ever looked at."""
        if rank not in ranks:
            return None
        options["backend"] = None  # core would have real gloo groups beside the others
        return create_group(ranks, **options)

    parallel_state.create_group = create_own_group
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        yield
    finally:
        vars(parallel_state).update(before)
        if dist.is_initialized():
            dist.destroy_process_group()
