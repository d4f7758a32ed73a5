# SPDX-License-Identifier: Apache-2.0
"""Checks that weights which several ranks hold are bit-identical; a difference means faulty memory or a faulty message.

Each rank sums the bits of each parameter on its device. The sums are compared over DP x CP (not under ZeRO 2 and 3,
which keep one copy of each weight), and over TP (expert TP) for parameters that it does not split. Each bit adds an odd
multiple of a power of two to its parameter's sum modulo 2**64, so a single flipped bit always changes the sum. As in
Megatron-LM, weights under --overlap-param-gather are gathered first; this overwrites a wrong weight on a rank that does
not own it, so that such an error is not noticed.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.parallel_state import (
    get_data_parallel_group,
    get_expert_data_parallel_group,
    get_expert_tensor_parallel_group,
    get_tensor_model_parallel_group,
)
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor, nn

from megatron.context_parallel.core.experts import EXPERT
from megatron.platform.collectives import gathered, gathered_objects
from megatron.training.checkpoint import checkpoint
from megatron.training.features.feature import Feature, Step, due
from megatron.training.job import Job
from megatron.training.model.weights import canonical_parameters

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
MOST = 4  # limit of the parameters that the message names
PIECE = 2**22  # elements summed at once: the sum converts them to int64, up to eight times their memory


class ReplicasDiffer(RuntimeError):
    """Raised on every rank. The message names each parameter that differs."""


class ReplicaCheck(Feature):
    """``--check-weight-hash-across-dp-replicas-interval``."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def after_log(self, step: Step) -> None:
        if due(self.job.config.faults.check_weight_hash_across_dp_replicas_interval, step.iteration):
            check_replicas(self.job)


@torch.no_grad()
def check_replicas(job: Job) -> None:
    """Compare weights. All ranks call it.

    Raises:
        ReplicasDiffer: some differ; the message names the parameters, the ranks and their hosts.
    """
    checkpoint.gather_parameters(job.model_chunks, job.config)
    own = [f"{name}: {difference}" for name, difference in _differences(job)]
    by_rank = gathered_objects((socket.gethostname(), own))
    lines = list(dict.fromkeys(line for _, of_rank in by_rank for line in of_rank))
    if lines:
        places = [f"{rank} on {host}" for rank, (host, _) in enumerate(by_rank)]
        more = f"; and {len(lines) - MOST} more" if len(lines) > MOST else ""
        raise ReplicasDiffer("; ".join(line.format(*places) for line in lines[:MOST]) + more)


def _differences(job: Job) -> Iterator[tuple[str, str]]:
    named = [pair for chunk in job.model_chunks for pair in canonical_parameters(checkpoint.unwrap(chunk))]
    if job.config.parallel.zero_stage < 2:
        copied = [pair for pair in named if getattr(pair[1], "allreduce", True)]
        yield from _compare(copied, get_data_parallel_group(with_context_parallel=True), "DP x CP")
        partitioned = [pair for pair in named if not getattr(pair[1], "allreduce", True)]  # positions, experts
        yield from _compare(partitioned, get_expert_data_parallel_group(), "DP")
    copied = [pair for pair in named if not getattr(pair[1], "tensor_model_parallel", False)]
    yield from _compare([pair for pair in copied if EXPERT not in pair[0]], get_tensor_model_parallel_group(), "TP")
    yield from _compare([pair for pair in copied if EXPERT in pair[0]], get_expert_tensor_parallel_group(), "expert TP")


def _compare(
    named: Sequence[tuple[str, nn.Parameter]], group: dist.ProcessGroup, axis: str
) -> Iterator[tuple[str, str]]:
    """(parameter, message) for each parameter that is not identical on all ranks of a group."""
    if not named or group.size() == 1:
        return
    own = torch.stack([bits(parameter) for _, parameter in named])
    table = gathered(own, group)
    ranks = dist.get_process_group_ranks(group)
    for (name, _), sums in zip(named, table.view(group.size(), -1).t().tolist()):
        usual, count = Counter(sums).most_common(1)[0]
        if count == len(sums):
            continue
        others = [rank for rank, value in zip(ranks, sums) if value != usual]
        if 2 * count > len(sums):
            same = next(rank for rank, value in zip(ranks, sums) if value == usual)
            yield name, f"rank {_places(others)} differs over {axis} from rank {_places([same])} and the others"
        else:  # no majority
            yield name, f"ranks {_places(ranks)} differ over {axis}"


def _places(ranks: Sequence[int]) -> str:
    """A template for `str.format`, which replaces each rank by the rank and its host."""
    return ", ".join(f"{{{rank}}}" for rank in ranks)


def bits(parameter: Tensor) -> Tensor:
    """A sum over the bits of a tensor, modulo 2**64: int64, on its device."""
    flat = to_local_if_dtensor(parameter).detach().reshape(-1)
    integers = flat.view(INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=integers.device)
    for begin in range(0, integers.numel(), PIECE):
        piece = integers[begin : begin + PIECE].long()
        total += (piece * torch.arange(2 * begin + 1, 2 * (begin + len(piece)), 2, device=piece.device)).sum()
    return total
