# SPDX-License-Identifier: Apache-2.0
"""One call of a Triton kernel, that a GPU runs and the compiler can be asked about."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megatron.context_parallel.attention.kernels.triton_blocks import Blocks

OPTIONS = {"enable_fp_fusion": True}  # a product and a sum in one instruction; Triton is about to change its default


@dataclass(frozen=True)
class Launch:
    """A kernel with all it is called with, by name."""

    kernel: Any
    grid: tuple[int, int]
    arguments: dict[str, Any]
    sizes: Blocks

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told besides."""
        sizes = self.sizes
        return {"num_warps": sizes.warps, "num_stages": sizes.stages, "maxnreg": sizes.registers, **OPTIONS}

    def run(self) -> None:
        """Enqueues it on the current stream of the tensors' GPU."""
        device = self.arguments["out" if "out" in self.arguments else "q"].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**self.arguments, **self.options)
