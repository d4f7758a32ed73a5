# SPDX-License-Identifier: Apache-2.0
"""fp16's loss scale for weights that are fp32 already: those of FSDP (ZeRO 2 and 3).

megatron-core scales losses in its optimizers of 16-bit weights alone. Under FSDP the weights are fp32 shards, and
core's optimizer for those scales nothing: here it gets core's own scaler.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor

from megatron.training.arguments.config import OptimizerSettings


class ScaledFP32Optimizer(FP32Optimizer):
    """core's optimizer of fp32 weights, whose gradients are those of a scaled loss."""

    grad_scaler: ConstantGradScaler | DynamicGradScaler

    def get_loss_scale(self) -> Tensor:
        return self.grad_scaler.scale

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Divide the gradients by the scale; whether any rank has one that is not finite: then the step is skipped."""
        super().prepare_grads()
        grads = [
            to_local_if_dtensor(parameter.grad)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        found = torch.zeros(1, dtype=torch.float32, device=self.grad_scaler.scale.device)
        filled = [grad for grad in grads if grad.numel()]  # a small parameter leaves some ranks without a row
        if filled:
            torch._amp_foreach_non_finite_check_and_unscale_(filled, found, self.grad_scaler.inv_scale)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)  # each rank has shards of its own, so all of them are asked
        skipped = found.item() > 0
        self.grad_scaler.update(skipped)
        return skipped


def scale_losses(optimizer: FP32Optimizer, settings: OptimizerSettings) -> None:
    """Make core's fp32 optimizer one that scales, with the scaler that core takes for the same settings."""
    if settings.loss_scale:
        optimizer.grad_scaler = ConstantGradScaler(settings.loss_scale)
    else:
        optimizer.grad_scaler = DynamicGradScaler(
            initial_scale=settings.initial_loss_scale,
            min_scale=settings.min_loss_scale,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=settings.loss_scale_window,
            hysteresis=settings.hysteresis,
        )
    # core makes the optimizer and sets its groups: it is what it was, with two methods more.
    optimizer.__class__ = ScaledFP32Optimizer
