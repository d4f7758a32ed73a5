# SPDX-License-Identifier: Apache-2.0
"""The adapter of kernels that take all tiles in one call, as intervals of keys for each query."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import Capability, Final, Scores, gpu_reason
from megatron.context_parallel.attention.kernels.fused_kernel import compact
from megatron.context_parallel.attention.kernels.interval_kernels.intervals import Intervals
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.layout.tiles import Tiles
from megatron.platform.streams import to_device

LARGEST_HEAD = 128


class Call(Protocol):
    """One call of the library, for all rows of ``table``; q, k and v are [b, rows, heads, d]."""

    table: Intervals

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """out [b, s, heads, dv] and lse [b, heads, s]; a query without any key may have anything."""
        ...

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, ...]:
        """dq, dk and dv, from the final out and lse."""
        ...


class IntervalKernel:
    """Base of these kernels. A subclass has ``name``, ``capabilities`` and the three methods below.

    Attributes:
        capabilities: of the GPUs that the library runs on, for messages.
    """

    capabilities: str
    supports_value_dim = True
    supports_bias = supports_dropout = False

    def runs_on(self, capability: Capability) -> bool:
        raise NotImplementedError

    def missing(self) -> str | None:
        """Why the library cannot be used, or None."""
        raise NotImplementedError

    def calls(self, tiles: Tiles, scores: Scores, device: torch.device) -> list[Call]:
        """The calls for some tiles, which do not overlap; none without tiles."""
        raise NotImplementedError

    def why_not(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        reason = gpu_reason(device) or self.lacks(torch.cuda.get_device_capability(device), dtype, head_dim)
        return reason or self.missing()

    def why_not_on(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        return self.lacks(capability, dtype, head_dim) or "is not simulated, because nothing has measured it"

    def lacks(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why the library cannot compute on a GPU of this capability, or None."""
        if dtype not in (torch.bfloat16, torch.float16):
            return "needs bf16 or fp16"
        if not self.runs_on(capability):
            return f"needs a GPU of compute capability {self.capabilities}"
        if head_dim % 8 or head_dim > LARGEST_HEAD:
            return f"needs a head dimension that is a multiple of 8 and at most {LARGEST_HEAD}"
        return None

    def attend(self, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, scores: Scores, result: Accumulator) -> None:
        for call in self.calls(tiles, scores, q.device):
            out, lse = call.forward(*_cut(call.table, q, k, v), scores)
            if call.table.empty.any():  # a library may leave NaN there
                empty = to_device(torch.from_numpy(call.table.empty), q.device)
                out, lse = out.masked_fill(empty[:, None, None], 0.0), lse.masked_fill(empty, -torch.inf)
            result.add(call.table.q, out.transpose(1, 2), lse)

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
        for call in self.calls(tiles, scores, q.device):
            rows = slice(*call.table.q)
            out, dout = (compact(x[rows].transpose(0, 1).to(q.dtype)) for x in (final.out, final.dout))
            lse = final.lse[rows].permute(1, 2, 0).contiguous()
            grads = call.backward(*_cut(call.table, q, k, v), out, dout, lse, scores)
            dq_part, dk_part, dv_part = (grad.transpose(0, 1) for grad in grads)
            dq.add(call.table.q, dq_part)
            dkv.add(call.table.k, dk_part, dv_part)

    def delta(self, out: Tensor, dout: Tensor) -> None:
        return None


def _cut(table: Intervals, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The rows that the table is about, [b, rows, heads, d], as a library can read them."""
    parts = (q, table.q), (k, table.k), (v, table.k)
    return [compact(x[slice(*rows)].transpose(0, 1)) for x, rows in parts]
