# SPDX-License-Identifier: Apache-2.0
"""Where ranks send and receive at the same time, receives are posted first, or gloo sends one direction at a time.

How much slower the other order is over a link of limited rate, tests/faults/test_nodes.py measures.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.training_runs import make_job, train_job


def posted(what: str, folder: Path) -> list[str]:
    """What this rank posts before it waits, batch by batch: an ``r`` for a receive, an ``s`` for a send."""
    batches: list[str] = [""]
    batch, send, receive = dist.batch_isend_irecv, dist.isend, dist.irecv

    def spy(operations: list[dist.P2POp]) -> list[dist.Work]:
        batches.append("".join("r" if one.op is receive else "s" for one in operations))
        return batch(operations)

    def noted(letter: str, call: object) -> object:
        def post(*args: object, **options: object) -> dist.Work:
            batches[-1] += letter
            return call(*args, **options)

        return post

    try:
        dist.batch_isend_irecv = spy
        if what == "ring":
            train_job(make_job("--ring-parallel-size 3 --seq-length 48"), 1)
        elif what == "fpdt":
            train_job(make_job("--ring-parallel-size 3 --seq-length 96 --fpdt --fpdt-chunk-size 48"), 1)
        elif what == "links":
            from megatron.simulator.machines.measure_links import transfer

            transfer("p2p", 64, dist.group.WORLD, torch.device("cpu"))[0]()
        else:
            from megatron.training.checkpoint.in_memory import copy_file

            dist.isend, dist.irecv = noted("s", send), noted("r", receive)
            rank, mine = dist.get_rank(), folder / f"{dist.get_rank()}"
            mine.write_bytes(bytes(range(64)))
            copy_file.swap((mine, (rank + 1) % 3), (folder / f"{rank}.copy", (rank - 1) % 3, 64), dist.group.WORLD)
            assert (folder / f"{rank}.copy").read_bytes() == bytes(range(64))
    finally:
        dist.batch_isend_irecv, dist.isend, dist.irecv = batch, send, receive
    return [one for one in batches if one]


@pytest.mark.parametrize("what", ["ring", pytest.param("fpdt", marks=pytest.mark.full), "links", "copies"])
def test_receives_are_posted_before_sends(pool, tmp_path, what):
    every = [one for batches in pool.run(posted, 3, what, tmp_path) for one in batches]
    assert any("r" in one and "s" in one for one in every)
    assert not [one for one in every if "sr" in one]
