#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the GPU resources that the Triton kernels need, as a Markdown table. They are compiled; no GPU is needed.

    python benchmarks/triton_resources.py --capability 80 90 100 --head 64 128 256
    python benchmarks/triton_resources.py --features plain mask alibi softcap dropout all

Registers, spills and shared memory are the assembler's figures. A step is a program's work on one block of keys (of
queries for dk and dv) without a mask. Its instructions are counted in the machine code (benchmarks/machine_code.py):

- ideal: cycles of the tensor cores for the products that the definition needs, at the data sheet's rate;
- tensor: cycles for the products that the kernel does. On Hopper a product also takes at least the time to read its
  operands from shared memory, 128 bytes a cycle. On Blackwell, blocks of 64 rows take as long as blocks of 128;
- repeated: products that the kernel does, over those of its design: 2 of [block, head] x [head, step] forward, 3 for
  dq, 4 for dk and dv. Where dk and dv have separate programs, these need 3 and 2, and the ideal is 2 and 2;
- issue: cycles for issuing the instructions of all warps, or of the busiest unit if that is more;
- exposed: instructions during which no product is in flight (Hopper only);
- spills: bytes of a thread, and instructions in loops that read or write them;
- share: ideal over the step's cycles. The first figure assumes that products and instructions never overlap, the second
  that they do: on Hopper all but the exposed ones, elsewhere all.

Latencies, barriers, memory traffic, bank conflicts and work outside of the loops are not counted. The warps of a
program are assumed to run in phase. The rate of shared memory and the cost of 64 rows come from documentation and were
not measured. Expect less than the share, and rely on comparisons more than on figures.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

if importlib.util.find_spec("triton") is None:
    sys.exit("error: Triton compiles the kernels: pip install '.[triton]'")
os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from benchmarks.machine_code import TENSOR_RATE
from benchmarks.triton_compile import Resources, example, resources
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Launch
from megatron.decisions.block_sizes import FEATURES

NAMES = {80: "A100", 86: "RTX 3090", 89: "L40S", 90: "H100", 100: "B200", 120: "RTX 5090"}
PASSES = ("forward", "queries", "keys", "dk", "dv")
PRODUCTS = {"forward": 2, "queries": 3, "keys": 4, "dk": 3, "dv": 2}  # of [block, head] x [head, step]
NEEDED = PRODUCTS | {"dk": 2}  # without the product that the program of dv computes as well


class Count:
    """The figures of a step of one kernel."""

    def __init__(self, which: str, launch: Launch, taken: Resources) -> None:
        sizes, step = launch.arguments, taken.loops[0]
        one = sizes["BLOCK"] * sizes["STEP"] * sizes["HEAD"]
        self.ideal = NEEDED[which] * one / TENSOR_RATE[taken.capability]
        made = PRODUCTS[which] * one if step.products is None else step.products
        self.repeated = made / (PRODUCTS[which] * one)
        self.issue, self.exposed = step.instructions, len(step.exposed())
        if step.products is None:
            self.tensor = PRODUCTS[which] * one / TENSOR_RATE[taken.capability] * (1 + taken.half)
            self.share = self.ideal / (self.tensor + self.issue), self.ideal / max(self.tensor, self.issue)
        else:
            self.tensor, self.share = step.tensor, step.share(self.ideal)

    def cells(self) -> str:
        low, high = self.share
        figures = f"{self.ideal:.0f} | {self.tensor:.0f} | {self.issue:.0f} | {self.exposed} | {self.repeated:.2f}"
        return f"{figures} | {low:.0%} to {high:.0%}"


def rows(capability: int, head: int, features: tuple[str, ...]) -> list[str]:
    """A row for each kernel."""
    result = []
    for which, launch in example(capability, head, features=features).items():
        taken, sizes = resources(launch, capability), launch.sizes
        count = Count(which, launch, taken).cells() if capability in TENSOR_RATE and taken.loops else " | " * 5
        spills = f"{taken.spills} ({sum(loop.spills for loop in taken.loops)})"
        result.append(
            f"| {NAMES.get(capability, capability)} | {head} | {which} | {', '.join(features) or 'plain'} "
            f"| {sizes.block} x {sizes.step}, {sizes.warps}, {sizes.stages} | {taken.registers} | {spills} "
            f"| {taken.shared / 1024:.0f} | {taken.programs} | {count} |"
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90, 100], choices=NAMES)
    parser.add_argument("--head", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--features", nargs="*", default=["plain"], choices=["plain", "all", *FEATURES])
    args = parser.parse_args()
    columns = ["GPU", "head", "kernel", "with", "block x step, warps, stages", "registers", "spills, bytes (in loops)"]
    columns += ["shared, KiB", "programs an SM", "ideal", "tensor", "issue", "exposed", "repeated", "share"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    for capability in args.capability:
        for head in args.head:
            for feature in args.features:
                names = {"plain": (), "all": FEATURES}.get(feature, (feature,))
                print("\n".join(rows(capability, head, names)), flush=True)


if __name__ == "__main__":
    main()
