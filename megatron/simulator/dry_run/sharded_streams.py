# SPDX-License-Identifier: Apache-2.0
"""FSDP's streams on a simulated GPU: weights come while the unit before computes, gradients leave beside compute.

On a GPU FSDP gathers on a stream of its own, as soon as the host has got there, which is one unit ahead of the device
(its gathered weights wait for the copy-out of the unit before), and reduces on another, for which the backward pass
waits at its end. On a CPU, where the simulation runs, both are waited for at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

from megatron.simulator.cost.trace import Transfer
from megatron.simulator.dry_run.recorder import Recorder


@contextmanager
def sharded_streams(recorder: Recorder) -> Iterator[None]:
    """Within, FSDP's collectives are waited for where a GPU waits for them."""
    events = recorder.trace.events
    gathered: dict[int, list[int]] = {}  # tickets, by the id of FSDP's result
    reduced: list[int] = []
    free_since: list[int | None] = [None]  # place in the trace since when the stream of gathers has nothing to do
    gather, reduce = fsdp.foreach_all_gather, fsdp.foreach_reduce
    wait, finish = fsdp.FSDPParamGroup.wait_for_unshard, fsdp.FSDPParamGroup.finalize_backward

    @wraps(gather)
    def gather_ahead(*args: Any, **kwargs: Any) -> Any:
        begin = len(events)
        with recorder.deferring() as tickets:
            result = gather(*args, **kwargs)
        moved = [event for event in events[begin:] if isinstance(event, Transfer)]
        events[begin:] = [event for event in events[begin:] if not isinstance(event, Transfer)]
        place = begin if free_since[0] is None else free_since[0]
        events[place:place] = moved
        gathered[id(result)] = tickets
        return result

    @wraps(wait)
    def wait_for_gather(group: fsdp.FSDPParamGroup) -> None:
        for ticket in gathered.pop(id(group._all_gather_result), ()):
            recorder.wait(ticket)
            free_since[0] = len(events)
        wait(group)

    @wraps(reduce)
    def reduce_beside(*args: Any, **kwargs: Any) -> Any:
        with recorder.deferring() as tickets:
            result = reduce(*args, **kwargs)
        reduced.extend(tickets)
        return result

    @wraps(finish)
    def finish_backward(group: fsdp.FSDPParamGroup) -> None:
        while reduced:
            recorder.wait(reduced.pop(0))
        finish(group)

    with ExitStack() as stack:
        stack.enter_context(patch.object(fsdp, "foreach_all_gather", gather_ahead))
        stack.enter_context(patch.object(fsdp, "foreach_reduce", reduce_beside))
        stack.enter_context(patch.object(fsdp.FSDPParamGroup, "wait_for_unshard", wait_for_gather))
        stack.enter_context(patch.object(fsdp.FSDPParamGroup, "finalize_backward", finish_backward))
        yield
