# SPDX-License-Identifier: Apache-2.0
"""A GPU's kernels on a CPU: what is one kernel there and several operations here is recorded as the one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu
from torch import Tensor
from torch.nn import functional
from torch.optim import adam

from megatron.context_parallel.attention import kernels
from megatron.context_parallel.attention.kernels import math_kernel
from megatron.context_parallel.fpdt import chunked_loss
from megatron.context_parallel.positions import dropout, rope
from megatron.simulator.dry_run.recorder import Recorder
from megatron.simulator.dry_run.sharded_streams import sharded_streams
from megatron.simulator.dry_run.simulated_attention import simulated_kernel
from megatron.simulator.machines.machine import Machine

# torch.compile makes one kernel of each (core's @jit_fuser).
FUSED = (
    (fused_bias_swiglu, ("swiglu", "bias_swiglu", "swiglu_back", "bias_swiglu_back")),
    (fused_bias_dropout, ("bias_dropout_add_fused_train", "bias_dropout_add_fused_inference")),
)


@contextmanager
def gpu_kernels(recorder: Recorder, machine: Machine, fused_rope: bool = True) -> Iterator[None]:
    """Within, the kernels that a GPU fuses are recorded as one each, and their insides take no memory; attention runs
    on what stands for the kernel that ``machine`` would choose.

    Args:
        fused_rope: the rotation of queries and keys is one of them.
    """
    with ExitStack() as stack:
        for module, names in FUSED:
            for name in names:
                stack.enter_context(patch.object(module, name, _as_one(recorder, getattr(module, name))))
        stack.enter_context(patch.object(functional, "rms_norm", partial(_rms_norm, recorder)))
        stack.enter_context(patch.object(adam, "_single_tensor_adam", _adam(recorder, adam._single_tensor_adam)))
        stack.enter_context(sharded_streams(recorder))
        if fused_rope:
            stack.enter_context(patch.object(rope, "_rotated", _as_one(recorder, _rotate)))
        # Not the pieces that suit a CPU's caches.
        stack.enter_context(patch.dict(rope.PIECE, clear=True))
        stack.enter_context(patch.dict(math_kernel.SCORE_BYTES, cpu=math_kernel.SCORE_BYTES["cuda"]))
        stack.enter_context(patch.dict(dropout.ELEMENTS_AT_ONCE, cpu=dropout.ELEMENTS_AT_ONCE["cuda"]))
        stack.enter_context(patch.object(kernels, "select", partial(simulated_kernel, recorder, machine)))
        stack.enter_context(patch.object(chunked_loss, "_adds_wide", lambda *_: True))
        yield


def _rotate(x: Tensor, angles: Tensor, how: rope.Rope, sign: int) -> Tensor:
    """Triton's kernel (context_parallel/positions/rope_kernel.py)."""
    return torch.empty_like(x)


def _as_one(recorder: Recorder, function: Callable) -> Callable:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return recorder.fused(function, args, kwargs)

    return run


def _adam(recorder: Recorder, function: Callable) -> Callable:
    """Transformer Engine's Adam, which core takes on a GPU, updates all tensors in one kernel."""

    def fused_adam(*args: Any, **kwargs: Any) -> tuple:
        function(*args, **kwargs)
        return args[0], args[2], args[3]  # what it writes: parameters and moments

    def run(*args: Any, **kwargs: Any) -> None:
        recorder.fused(fused_adam, args, kwargs)

    return run


def _rms_norm(recorder: Recorder, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None):
    """CUDA's: saves its input and one number a row."""
    return _RmsNorm.apply(recorder, x, weight)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: Recorder, x: Tensor, weight: Tensor) -> Tensor:
        ctx.recorder = recorder
        rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)

        def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
            return torch.empty_like(x)

        return recorder.fused(rms_norm, (x, weight), {})

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, Tensor]:
        x, weight, rstd = ctx.saved_tensors

        def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return torch.empty_like(x), torch.empty_like(weight)

        return None, *ctx.recorder.fused(rms_norm_backward, (dy, x, weight), {})
