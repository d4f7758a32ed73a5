# SPDX-License-Identifier: Apache-2.0
"""cuDNN's FlexAttention (nvidia-cudnn-frontend): all tiles in one call, as intervals of keys for each query.

The library plans a mask once for shapes and dtype; the plan is kept with the tiles. Its backward pass takes out and lse
as arguments, and so the final ones. Version 1.32 is the one whose source was read; nothing has measured it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import Capability, Scores, package_reason
from megatron.context_parallel.attention.kernels.interval_kernels.interval_kernel import IntervalKernel
from megatron.context_parallel.attention.kernels.interval_kernels.intervals import Intervals, table_of
from megatron.context_parallel.layout.tiles import Tiles
from megatron.platform.streams import to_device

WANTED = "nvidia-cudnn-frontend>=1.32,<1.33"


class CudnnFlexKernel(IntervalKernel):
    """The kernel of the library, on [b, s, heads, d]."""

    name = "cudnn_flex"
    capabilities = "9.0, 10.0 or 10.3"
    supports_mask = True
    supports_softcap = False

    def runs_on(self, capability: Capability) -> bool:
        return capability in ((9, 0), (10, 0), (10, 3))

    def missing(self) -> str | None:
        return missing()

    def calls(self, tiles: Tiles, scores: Scores, device: torch.device) -> list[_Call]:
        table = table_of(tiles, scores.mask)
        return [] if table is None else [_Call(tiles, table)]


@dataclass(frozen=True)
class _Call:
    tiles: Tiles
    table: Intervals

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        out, lse, *_ = library().forward(
            q, k, v, mask_plan=self._plan(q, k, v), softmax_scale=scores.scale, return_lse=True
        )
        return out, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, ...]:
        return library().backward(
            q, k, v, out, dout, lse, mask_plan=self._plan(q, k, v), softmax_scale=scores.scale,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip

    def _plan(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """The library's plan of the mask for tensors like these."""

        def made() -> Any:
            rows = torch.from_numpy(self.table.table).repeat(1, q.size(0))  # of all samples, one after the other
            return library().plan(to_device(rows.unsqueeze(0).contiguous(), q.device), q, k, v, build_backward=True)

        return self.tiles.derived(("cudnn flex", q.shape, k.shape, v.shape, q.dtype, q.device), made)


@cache
def missing() -> str | None:
    """Why the package cannot be used, or None."""

    def fits(version: str) -> bool:
        return version.split(".")[:2] == ["1", "32"]

    return package_reason("nvidia-cudnn-frontend", WANTED, fits, library)


@cache
def library() -> SimpleNamespace:
    """The three functions of the library. Those that its autograd function calls are private."""
    execution = import_module("cudnn.flex_attention.execution")
    return SimpleNamespace(
        plan=import_module("cudnn.flex_attention").create_mask_plan,
        forward=execution._flex_attention_forward,
        backward=execution._flex_attention_backward,
    )
