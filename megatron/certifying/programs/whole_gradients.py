# SPDX-License-Identifier: Apache-2.0
"""Gradients and weights of whole parameters, from the ranks that hold their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.parallel_state import get_expert_tensor_and_model_parallel_group, get_expert_tensor_parallel_group
from torch import Tensor, nn

from megatron.context_parallel.core.experts import EXPERT
from megatron.context_parallel.layout.grid import Axis
from megatron.platform.collectives import all_gather, gathered, gathered_objects
from megatron.training.checkpoint.checkpoint import gather_parameters, unwrap
from megatron.training.job import Job
from megatron.training.model.weights import VOCABULARY, canonical_parameters, in_sections, sections


def full_gradients(job: Job) -> dict[str, Tensor]:
    """This stage's gradients, before clipping, by canonical name: gathered over ZeRO shards and TP, padding cut off."""
    if job.config.parallel.zero_stage == 1:
        for chunk in job.model_chunks:
            gather_gradient_shards(chunk)

    def gradient(parameter: nn.Parameter) -> Tensor:
        if job.config.parallel.zero_stage < 2:
            grad = parameter.main_grad.detach()
            return grad.to(torch.promote_types(grad.dtype, torch.float32))
        return parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad

    return _whole(job, gradient)


def full_parameters(job: Job) -> dict[str, Tensor]:
    """This stage's weights that are trained, by canonical name, gathered like the gradients."""
    gather_parameters(job.model_chunks, job.config)

    def weight(parameter: nn.Parameter) -> Tensor:
        parameter = parameter.detach()
        return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter

    return _whole(job, weight)


def _whole(job: Job, part_of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    result, tensor = {}, job.runtime.grid.tensor
    of_experts = Axis.of(get_expert_tensor_parallel_group())
    for chunk in job.model_chunks:
        for name, parameter in canonical_parameters(unwrap(chunk)):
            if not parameter.requires_grad:
                continue
            part = part_of(parameter)
            if hasattr(parameter, "spans"):
                part = gather_by_position(part, parameter.spans)
            elif getattr(parameter, "tensor_model_parallel", False):
                axis = of_experts if EXPERT in name else tensor
                part = gather_over_tensor_parallel(part, parameter.partition_dim, sections(parameter), axis)
            if name in VOCABULARY:
                part = part[: job.vocab_size]
            result[name] = part.clone()
    return result


def gather_gradient_shards(chunk: Any) -> None:
    """Gather a chunk's gradients under ZeRO 1, where each rank holds the sums of only one shard of each bucket."""
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        for bucket in buffer.buckets:
            group = buffer.data_parallel_group
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            all_gather(bucket.grad_data, shard, group=group)


def gather_over_tensor_parallel(grad: Tensor, dim: int, shares: Sequence[int], axis: Any) -> Tensor:
    """The whole gradient from the parts of all TP ranks, which weights.tensor_parallel_part cuts."""
    if axis.size == 1:
        return grad
    parts = gathered(grad, axis.group).chunk(axis.size)
    by_section = zip(*(in_sections(part, dim, shares) for part in parts))
    return torch.cat([piece for section in by_section for piece in section], dim)


def gather_by_position(grad: Tensor, spans: Any) -> Tensor:
    """The gradient of the complete table of positions, from the ranks that hold its rows (TP x CP)."""
    parts = gathered_objects((spans, grad), get_expert_tensor_and_model_parallel_group())
    whole = grad.new_full((max(stop for spans, _ in parts for _, stop in spans), grad.size(1)), torch.nan)
    for spans, rows in parts:
        for start, stop in spans:
            whole[start:stop], rows = rows[: stop - start], rows[stop - start :]
    return whole
