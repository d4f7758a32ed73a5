# SPDX-License-Identifier: Apache-2.0
"""One update of the weights: gradient norm, clipping and Adam in few passes over memory and few launches.

megatron-core has fused calls from Transformer Engine or Apex. Without them it launches several kernels for each tensor,
and waits for the device at each. PyTorch has the same as multi-tensor calls, which this module puts in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from megatron.core.optimizer import optimizer as core_optimizer
from torch import Tensor
from torch.distributed.tensor import DTensor

FALLBACK = "megatron.core.utils"  # where core has its own functions for missing fused ones


def use_multi_tensor_calls() -> None:
    """Let core's norm, scaling and copies of several tensors use PyTorch's multi-tensor functions.

    Fused functions of Transformer Engine or Apex stay.
    """
    for module, name, ours in (
        (clip_grads, "l2_norm_impl", _norm),
        (clip_grads, "multi_tensor_scale_impl", _scale),
        (core_optimizer, "multi_tensor_scale_impl", _scale),
    ):
        if getattr(module, name).__module__ == FALLBACK:
            setattr(module, name, ours)
    core_optimizer._multi_tensor_copy_this_to_that = _copy  # its own has no form for bf16


def _norm(chunk_size: int, noop: Tensor, tensors: list[list[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """(norm of all tensors together [1], None), without waiting for the device; for ``local_multi_tensor_l2_norm``."""
    return torch.stack(torch._foreach_norm(tensors[0])).norm().view(1), None


def _scale(chunk_size: int, noop: Tensor, tensors: list[list[Tensor]], scale: float) -> None:
    """Copy tensors times ``scale`` to others, which may be the same; for ``local_multi_tensor_scale``."""
    sources, targets = tensors
    if any(source is not target for source, target in zip(sources, targets)):
        torch._foreach_copy_(targets, sources)
    if scale != 1.0:
        torch._foreach_mul_(targets, scale)


def _copy(this: list[Tensor], that: list[Tensor], overflow_buf: Tensor | None = None) -> None:
    if this:
        torch._foreach_copy_(that, this)


def use_fused_adam(optimizer: MegatronOptimizer) -> None:
    """Let PyTorch's Adam of one of core's optimizers read and write each number once. All its states are on the device.

    core makes it without this choice, which is a setting of each group.
    """
    for group in optimizer.optimizer.param_groups:
        group["fused"], group["foreach"] = True, False


def update(optimizer: MegatronOptimizer, allowed: Callable[[float], bool]) -> tuple[bool, float | None, int | None]:
    """core's ``optimizer.step()``, which changes weights and states only if ``allowed(gradient norm)``.

    Returns:
        (whether the weights were updated, gradient norm, number of zeros in the gradients or None); without a norm if
        a gradient of a scaled loss is not finite.
    """
    if optimizer.prepare_grads():
        return False, None, None
    norm = float(optimizer.get_grad_norm())
    zeros = optimizer.count_zeros() if optimizer.config.log_num_zeros_in_grad else None
    if not allowed(norm):
        return False, norm, zeros
    scaled = [part for part in parts(optimizer) if part.get_parameters() and _clip(part, norm)]
    try:
        return bool(optimizer.step_with_ready_grads()), norm, zeros
    finally:
        for part in scaled:
            part.optimizer.grad_scale = part.optimizer.found_inf = None


def parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """The optimizers in core's chain that have parameters on this rank."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(part, "is_stub_optimizer", False):
            yield part


def _clip(part: MegatronOptimizer, norm: float) -> bool:
    """Clip the gradients of one optimizer by their common norm; returns whether the update does so as it reads them."""
    most = part.config.clip_grad
    if most <= 0.0:
        return False
    factor, inner, parameters = most / (norm + 1e-6), part.optimizer, part.get_parameters()  # 1e-6 as in core
    if not _is_fused(inner.param_groups) or any(isinstance(one, DTensor) for one in parameters):
        clip_grads.clip_grad_by_total_norm_fp32(parameters, max_norm=most, total_norm=norm)
        return False
    if factor >= 1.0:
        return False
    inner.grad_scale = torch.tensor(1 / factor, dtype=torch.float32, device=parameters[0].device)
    inner.found_inf = torch.zeros((), device=parameters[0].device)
    return True


def _is_fused(groups: Sequence[dict[str, Any]]) -> bool:
    return all(group.get("fused") for group in groups)
