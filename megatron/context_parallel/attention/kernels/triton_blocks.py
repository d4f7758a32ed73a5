# SPDX-License-Identifier: Apache-2.0
"""How large the blocks of the Triton kernels are, by head size and GPU: one table, and nothing tried at run time.

Chosen without a GPU, by what the compiler makes of them (`benchmarks/triton_resources.py`): the largest of a few usual
sizes that spill no register with any mask, bias, cap or dropout. Measured times are to replace them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Pass = Literal["forward", "queries", "keys"]


@dataclass(frozen=True)
class Blocks:
    """Sizes of one kernel.

    Attributes:
        block: rows that one program owns: queries, or keys for dk and dv.
        step: rows of the other side that it takes at once.
        warps: of a program, 32 threads each.
        stages: steps whose loads are under way at once.
        registers: the most that a thread takes. Without a bound ptxas aims at more programs a multiprocessor, and
            spills what the loop does not need (pointers of the output) for it; None where it has no need to.
    """

    block: int
    step: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None


INTERPRETED = Blocks(32, 16)  # small, so that short sequences have several blocks

# (GPU, head up to) -> blocks, for elements of two bytes.
TABLE: dict[Pass, dict[tuple[int, int], Blocks]] = {
    "forward": {
        (80, 64): Blocks(128, 64, 8, 3),
        (80, 128): Blocks(128, 64, 8, 2),
        (80, 256): Blocks(64, 32, 8, 2),
        (90, 64): Blocks(128, 64, 8, 3),
        (90, 128): Blocks(128, 64, 8, 3),
        (90, 256): Blocks(64, 32, 8, 2),
        (100, 64): Blocks(128, 64, 8, 3),
        (100, 128): Blocks(128, 64, 8, 3),
        (100, 256): Blocks(64, 32, 8, 2),
    },
    "queries": {
        (80, 64): Blocks(128, 32, 8, 2),
        (80, 128): Blocks(64, 64, 8, 2),
        (80, 256): Blocks(32, 32, 8, 1),
        (90, 64): Blocks(128, 64, 8, 2),
        (90, 128): Blocks(128, 64, 8, 2),
        (90, 256): Blocks(64, 32, 8, 1),
        (100, 64): Blocks(64, 64, 8, 2),
        (100, 128): Blocks(64, 64, 8, 2),
        (100, 256): Blocks(64, 32, 8, 1),
    },
    "keys": {
        (80, 32): Blocks(128, 32, 8, 2),
        (80, 64): Blocks(128, 64, 8, 2),
        (80, 128): Blocks(64, 64, 8, 2),
        (80, 256): Blocks(32, 32, 8, 1),
        (90, 64): Blocks(64, 64, 8, 2),
        (90, 128): Blocks(64, 32, 8, 2),
        (90, 256): Blocks(64, 32, 8, 1),
        (100, 64): Blocks(64, 64, 8, 2),
        (100, 128): Blocks(64, 32, 8, 2),
        (100, 256): Blocks(64, 32, 8, 1),
    },
}

# The same for four bytes, of which no tensor core multiplies, on every GPU. 255 registers are the most there are.
FP32: dict[Pass, dict[int, Blocks]] = {
    "forward": {64: Blocks(16, 16, 8, 1), 128: Blocks(16, 16, 8, 1, 255), 256: Blocks(16, 16, 8, 1, 255)},
    "queries": {64: Blocks(32, 32, 8, 1), 128: Blocks(16, 16, 8, 1, 128), 256: Blocks(16, 16, 8, 1, 128)},
    "keys": {64: Blocks(16, 16, 4, 1), 128: Blocks(16, 16, 8, 1), 256: Blocks(16, 16, 8, 1)},
}


def blocks(which: Pass, dtype: torch.dtype, head: int, capability: int | None) -> Blocks:
    """Of a kernel; ``head`` the larger of q's and v's head sizes, ``capability`` 80, 90, .. or None: interpreted."""
    if capability is None:
        return INTERPRETED
    if dtype == torch.float32:
        known = FP32[which]
    else:  # GPUs for desks have the tensor cores, or at least the shared memory, of an A100 or less
        family = 100 if 100 <= capability < 120 else 90 if capability == 90 else 80
        known = {size: found for (of, size), found in TABLE[which].items() if of == family}
    return known[min(size for size in known if size >= head)]
