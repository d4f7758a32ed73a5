# SPDX-License-Identifier: Apache-2.0
"""The Triton backend: all tiles of a key block in one launch, with any mask, ALiBi, soft-cap, dropout and strides."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import Capability, Final, Scores, gpu_reason
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Call, delta, interpreted
from megatron.context_parallel.attention.kernels.triton_kernels.triton_tiles import groups
from megatron.context_parallel.layout.tiles import Tiles
from megatron.decisions.kernel_order import LARGEST_HEAD, too_old

OLDEST = (3, 4)


class TritonKernel:
    """fp32, bf16 and fp16 on NVIDIA GPUs of compute capability 8.0 or newer; head sizes up to 256."""

    name = "triton"
    supports_mask = supports_bias = True
    supports_dropout = True
    supports_softcap = True
    supports_value_dim = True

    def why_not(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        missing = missing_triton()
        if missing is not None:
            return missing
        reason = _tensor_reason(dtype, head_dim)
        if reason is not None:
            return reason
        if device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
            return "needs a GPU"  # without importing Triton, which takes a second
        if interpreted():
            return None if device.type == "cpu" else "is interpreted (TRITON_INTERPRET), which needs tensors on the CPU"
        return gpu_reason(device) or too_old(torch.cuda.get_device_capability(device))

    def why_not_on(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        return _tensor_reason(dtype, head_dim) or too_old(capability)

    def attend(self, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, scores: Scores, result: Accumulator) -> None:
        call, each = Call(q, k, v, **_options(scores)), groups(tiles)
        for group in each:
            whole = len(each) == 1 and not call.specialised(group)
            fresh = result.unset(whole=whole) if "q" in call.written(group) else None
            for launch in call.forward_launches(group, *(fresh or result.sums()), first=fresh is not None):
                launch.run()

    def attend_grad(
        self,
        tiles: Tiles,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Scores,
        final: Final,
        dq: GradientSum,
        dkv: KeyGradients,
    ) -> None:
        call, each = Call(q, k, v, **_options(scores)), groups(tiles)
        for group in each:
            written = call.written(group, backward=True)
            of_q = dq.unset(whole=len(each) == 1) if "q" in written else None
            of_k = dkv.unset(whole=len(each) == 1) if "k" in written else None
            first = {side for side, fresh in (("q", of_q), ("k", of_k)) if fresh is not None}
            sums = dq.sum() if of_q is None else of_q, *(of_k or dkv.sums())
            for launch in call.backward(group, final.dout, final.lse, final.delta, *sums, first=first):
                launch.run()

    delta = staticmethod(delta)


def _options(scores: Scores) -> dict[str, Any]:
    return {name: getattr(scores, name) for name in ("scale", "mask", "slopes", "softcap", "dropout", "measured")}


def _tensor_reason(dtype: torch.dtype, head_dim: int) -> str | None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "needs fp32, bf16 or fp16"
    return f"needs a head dimension of at most {LARGEST_HEAD}" if head_dim > LARGEST_HEAD else None


@functools.cache
def missing_triton() -> str | None:
    """Why there is no Triton that can compile these kernels, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    version = importlib.metadata.version("triton")
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        return f"needs triton {'.'.join(map(str, OLDEST))} or newer, not {version}"
    return None
