# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels for a GPU that this machine need not have, into Triton's cache on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel


@dataclass(frozen=True)
class NoGpu:
    """What Triton asks its driver when it compiles, for a GPU that this machine does not have."""

    capability: int

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps the compiled kernels of each device apart

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compiled(
    kernel: triton.JITFunction, grid: Sequence[int], given: Sequence[Any], named: Mapping[str, Any], capability: int
) -> CompiledKernel:
    """The kernel as its first call with these arguments on such a GPU would compile it (80, 90, ..).

    Tensors have the device ``meta``. Triton must not be in interpreter mode, and this process cannot run kernels
    afterwards.
    """
    triton.runtime.driver.set_active(NoGpu(capability))
    return kernel.warmup(*given, grid=grid, **named)
