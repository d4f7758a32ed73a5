# SPDX-License-Identifier: Apache-2.0
"""cuDNN's FlexAttention (nvidia-cudnn-frontend): all tiles in one call, as intervals of keys for each query.

The library plans a mask once for shapes and dtype; the plan is kept with the tiles. Its backward pass takes out and lse
as arguments, and so the final ones. Version 1.32 is the one whose source was read; nothing has measured it here.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import Capability, Final, Scores, gpu_reason
from megatron.context_parallel.attention.kernels.fused_kernel import compact
from megatron.context_parallel.attention.kernels.interval_kernels.intervals import Intervals, intervals
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.layout.tiles import Tiles
from megatron.platform.streams import to_device

WANTED = "nvidia-cudnn-frontend>=1.32,<1.33"
CAPABILITIES = ((9, 0), (10, 0), (10, 3))
LARGEST_HEAD = 128


class CudnnFlexKernel:
    """The kernel of the library, on [b, s, heads, d]."""

    name = "cudnn_flex"
    supports_mask = supports_value_dim = True
    supports_bias = supports_dropout = supports_softcap = False

    def why_not(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        reason = gpu_reason(device) or _lacks(torch.cuda.get_device_capability(device), dtype, head_dim)
        return reason or missing()

    def why_not_on(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        return _lacks(capability, dtype, head_dim) or "is not simulated, because nothing has measured it"

    def attend(self, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, scores: Scores, result: Accumulator) -> None:
        table = table_of(tiles, scores)
        if table is None:
            return
        q, k, v = _cut(table, q, k, v)
        out = library().forward(
            q, k, v, mask_plan=_plan(tiles, table, q, k, v), softmax_scale=scores.scale, return_lse=True
        )
        out, lse = out[0], out[1]
        if table.empty.any():  # a library may leave NaN there
            empty = to_device(torch.from_numpy(table.empty), q.device)
            out, lse = out.masked_fill(empty[:, None, None], 0.0), lse.masked_fill(empty, -torch.inf)
        result.add(table.q, out.transpose(1, 2), lse)

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
        table = table_of(tiles, scores)
        if table is None:
            return
        rows = slice(*table.q)
        q, k, v = _cut(table, q, k, v)
        out, dout = (compact(x[rows].transpose(0, 1).to(q.dtype)) for x in (final.out, final.dout))
        lse = final.lse[rows].permute(1, 2, 0).contiguous()
        grads = library().backward(
            q, k, v, out, dout, lse, mask_plan=_plan(tiles, table, q, k, v), softmax_scale=scores.scale,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        dq_part, dk_part, dv_part = (grad.transpose(0, 1) for grad in grads)
        dq.add(table.q, dq_part)
        dkv.add(table.k, dk_part, dv_part)

    def delta(self, out: Tensor, dout: Tensor) -> None:
        return None


def table_of(tiles: Tiles, scores: Scores) -> Intervals | None:
    """The tiles' intervals, which are made once; the mask of pairs belongs to the tiles' plan."""
    return tiles.derived("intervals", lambda: intervals(tiles, scores.mask))


def _cut(table: Intervals, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The rows that the table is about, [b, rows, heads, d], as the library can read them."""
    parts = (q, table.q), (k, table.k), (v, table.k)
    return [compact(x[slice(*rows)].transpose(0, 1)) for x, rows in parts]


def _plan(tiles: Tiles, table: Intervals, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The library's plan of a mask for tensors like these."""

    def made() -> Any:
        rows = torch.from_numpy(table.table).repeat(1, q.size(0))  # of all samples, one after the other
        return library().plan(to_device(rows.unsqueeze(0).contiguous(), q.device), q, k, v, build_backward=True)

    return tiles.derived(("cudnn flex", q.shape, k.shape, v.shape, q.dtype, q.device), made)


def _lacks(capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        return "needs bf16 or fp16"
    if capability not in CAPABILITIES:
        return "needs a GPU of compute capability 9.0, 10.0 or 10.3"
    if head_dim % 8 or head_dim > LARGEST_HEAD:
        return f"needs a head dimension that is a multiple of 8 and at most {LARGEST_HEAD}"
    return None


@cache
def missing() -> str | None:
    """Why the package cannot be used, or None."""
    try:
        version = metadata.version("nvidia-cudnn-frontend")
    except metadata.PackageNotFoundError:
        return f"needs the package {WANTED}: pip install '{WANTED}'"
    if tuple(version.split(".")[:2]) != ("1", "32"):
        return f"needs {WANTED}, and {version} is installed: pip install '{WANTED}'"
    try:
        library()
    except Exception as error:  # made for another CUDA or cutlass-dsl: ImportError, OSError or RuntimeError
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"nvidia-cudnn-frontend {version} cannot be imported: {why}"
    return None


@cache
def library() -> SimpleNamespace:
    """The three functions of the library. Those that its autograd function calls are private."""
    execution = import_module("cudnn.flex_attention.execution")
    return SimpleNamespace(
        plan=import_module("cudnn.flex_attention").create_mask_plan,
        forward=execution._flex_attention_forward,
        backward=execution._flex_attention_backward,
    )
