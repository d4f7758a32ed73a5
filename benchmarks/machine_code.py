# SPDX-License-Identifier: Apache-2.0
"""Reads the machine code (SASS) of a kernel: its loops with tensor core instructions, and the cycles that they need.

The cycles are an estimate of what a multiprocessor must at least spend on one step of a program. They follow from
the number of instructions of each kind and from rates of NVIDIA's programming guide. Latencies, memory
traffic and conflicts in shared memory are not part of it, so that real kernels are slower.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Products and sums of bf16 that a multiprocessor's tensor cores do in a cycle: data sheets' rates without sparsity,
# over multiprocessors and boost clock (A100 312 TFLOP/s, 108, 1.41 GHz; H100 SXM 989, 132, 1.83; B200 2250, 148, 1.85).
TENSOR_RATE = {80: 1024, 90: 2048, 100: 4096}
SHARED_RATE = 128  # bytes of shared memory that a multiprocessor reads in a cycle
# Cycles for which an instruction of a warp occupies its unit, in one of a multiprocessor's four parts.
SPECIAL = {"MUFU": 8, "I2F": 8, "F2I": 8, "F2F": 8, "POPC": 8}  # 16 results a cycle and multiprocessor
INTEGER = {
    "LOP3", "ISETP", "SEL", "FMNMX", "FSETP", "IADD3", "SHF", "PRMT", "IMNMX", "FSEL", "VIMNMX", "LEA", "PLOP3", "P2R",
    "R2P", "IABS", "MOV", "LOP", "VIADD", "F2FP", "FMNMX3", "I2FP",
}  # fmt: skip
FLOAT = {80: 2, 90: 1, 100: 1}  # FFMA, FMUL, FADD: 64 or 128 results a cycle and multiprocessor

TENSOR = re.compile(r"\b(HMMA|HGMMA|UTC\w*MMA)\b")
SPILL = {"STL", "LDL"}


@dataclass(frozen=True)
class Loop:
    """An innermost loop with tensor core instructions, which is one step of a program.

    Attributes:
        body: its instructions.
        warps: of the program.
        capability: 80, 90, ..
    """

    body: tuple[str, ...]
    warps: int
    capability: int

    @property
    def spills(self) -> int:
        """Instructions that write or read spilled registers."""
        return sum(name(text) in SPILL for text in self.body)

    @property
    def products(self) -> int | None:
        """Multiplications by all warps; None where the code does not show the sizes (Blackwell)."""
        if any("UTC" in text and "MMA" in text for text in self.body):
            return None
        return sum(m * n * k * issued for m, n, k, issued, _ in self._tensor())

    @property
    def tensor(self) -> float | None:
        """Cycles of the tensor cores. On Hopper, reading operands from shared memory may take longer than computing."""
        if self.products is None:
            return None
        cycles = 0.0
        for m, n, k, issued, bytes_read in self._tensor():
            cycles += issued * max(m * n * k / TENSOR_RATE[self.capability], bytes_read / SHARED_RATE)
        return cycles

    def _tensor(self) -> list[tuple[int, int, int, int, int]]:
        """(m, n, k, times that a program issues it, bytes that it reads from shared memory) of each tensor core
        instruction."""
        found = []
        for text in self.body:
            if match := re.search(r"\bHGMMA\.(\d+)x(\d+)x(\d+)\S*\s+R\d+,\s*(\S+),", text):
                m, n, k = map(int, match.groups()[:3])
                both = match[4].startswith(("gdesc", "UR"))  # otherwise the first operand is in registers
                found.append((m, n, k, self.warps // 4, 2 * k * (n + m * both)))
            elif match := re.search(r"\bHMMA\.(\d+?)(8)(\d+)\.", text):
                found.append((*map(int, match.groups()), self.warps, 0))
        return found

    @property
    def instructions(self) -> float:
        """Cycles of issuing all instructions, and of the busiest unit."""
        return cycles(self.body, self.warps, self.capability)

    def share(self, ideal: float) -> float | None:
        """``ideal`` cycles over those of this step, if products and instructions did not overlap."""
        return None if self.tensor is None else ideal / (self.tensor + self.instructions)


def name(text: str) -> str:
    """The name of an instruction, without predicate and modifiers."""
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0]


def cycles(texts: list[str] | tuple[str, ...], warps: int, capability: int) -> float:
    """Cycles in which a multiprocessor issues these instructions for all warps, or its busiest unit does them."""
    special = integer = floating = 0
    for text in texts:
        what = name(text)
        special += SPECIAL.get(what, 0)
        integer += 2 * (what in INTEGER)
        floating += FLOAT[capability] * (what in ("FFMA", "FMUL", "FADD")) + 2 * (what == "IMAD")
    return max(len(texts), special, integer, floating) * warps / 4


def loops(sass: str, warps: int, capability: int) -> list[Loop]:
    """The innermost loops with tensor core instructions, the shortest first: that of ranges without a mask."""
    code = [(int(at, 16), text.strip()) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    jumps = ((at, re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)) for at, text in code)
    spans = {(int(jump[1], 16), at) for at, jump in jumps if jump and int(jump[1], 16) < at}
    result = []
    for first, last in spans:
        if any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans):
            continue
        body = tuple(text for at, text in code if first <= at <= last)
        if any(TENSOR.search(text) for text in body):
            result.append(Loop(body, warps, capability))
    return sorted(result, key=lambda loop: len(loop.body))
