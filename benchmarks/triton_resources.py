#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the GPU resources that the Triton kernels need, as a Markdown table. They are compiled; no GPU is needed.

    python benchmarks/triton_resources.py --capability 80 90 100 --head 64 128 256
    python benchmarks/triton_resources.py --features plain mask alibi softcap dropout all
    python benchmarks/triton_resources.py --capability 90 --head 128 --candidates  # other block sizes, the best first

Registers, spills and shared memory are the assembler's figures. A step is a program's work on one block of keys (of
queries for dk and dv) without a mask. Its instructions are counted in the machine code (benchmarks/machine_code.py):

- ideal: cycles of the tensor cores for the products that the definition needs, at the data sheet's rate;
- tensor: cycles for the products that the kernel does. On Hopper a product also takes at least the time to read its
  operands from shared memory, 128 bytes a cycle. On Blackwell, blocks of 64 rows take as long as blocks of 128;
- repeated: products that the kernel does, over those of its design: 2 of [block, head] x [head, step] forward, 3 for
  dq, 4 for dk and dv, 5 for all three in one pass. Where dk and dv have separate programs, these need 3 and 2, and the
  ideal is 2 and 2;
- issue: cycles for issuing the instructions of all warps, or of the busiest unit if that is more;
- spills: bytes of a thread, and instructions in loops that read or write them;
- share: ideal over the step's cycles, if products and instructions never overlapped;
- expected: the share of the data sheet's rate that such a loop should reach. It is the share times a factor of an H200
  on which 25 sizes were measured (heads of 128, 16K tokens): three stages of loads reach 0.82 of the share, two reach
  0.68, and loops that spill 0.43. Half of the sizes are within 8 % of that. On other GPUs nothing was measured.
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
from triton.errors import TritonError

from benchmarks.machine_code import TENSOR_RATE
from benchmarks.triton_compile import Resources, example, resources
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Launch
from megatron.decisions.block_sizes import FEATURES
from megatron.simulator.machines.measure_blocks import CANDIDATES

NAMES = {80: "A100", 86: "RTX 3090", 89: "L40S", 90: "H100", 100: "B200", 120: "RTX 5090"}
PRODUCTS = {"forward": 2, "queries": 3, "keys": 4, "dk": 3, "dv": 2, "backward": 5}  # of [block, head] x [head, step]
NEEDED = PRODUCTS | {"dk": 2}  # without the product that the program of dv computes as well
REACHED = {"three stages": 0.82, "two stages": 0.68, "spills": 0.43}  # of the share, as measured on an H200


class Count:
    """The figures of a step of one kernel."""

    def __init__(self, which: str, launch: Launch, taken: Resources) -> None:
        sizes, step = launch.arguments, taken.loops[0]
        one = sizes["BLOCK"] * sizes["STEP"] * sizes["HEAD"]
        self.ideal = NEEDED[which] * one / TENSOR_RATE[taken.capability]
        made = PRODUCTS[which] * one if step.products is None else step.products
        self.repeated, self.issue = made / (PRODUCTS[which] * one), step.instructions
        self.tensor = step.tensor
        if self.tensor is None:
            self.tensor = PRODUCTS[which] * one / TENSOR_RATE[taken.capability] * (1 + taken.half)
        self.share = self.ideal / (self.tensor + self.issue)
        kind = "three stages" if launch.sizes.stages > 2 else "two stages"
        self.expected = self.share * REACHED["spills" if step.spills or launch.sizes.stages < 2 else kind]

    def cells(self) -> str:
        figures = f"{self.ideal:.0f} | {self.tensor:.0f} | {self.issue:.0f} | {self.repeated:.2f}"
        return f"{figures} | {self.share:.0%} | {self.expected:.0%}"


def row(capability: int, head: int, which: str, launch: Launch, features: tuple[str, ...] = ()) -> tuple[float, str]:
    """The expected share of a kernel, and its row of the table."""
    taken, sizes = resources(launch, capability), launch.sizes
    known = capability in TENSOR_RATE and taken.loops and which in PRODUCTS and not taken.specialised
    count = Count(which, launch, taken) if known else None
    spills = f"{taken.spills} ({sum(loop.spills for loop in taken.loops)})"
    return count.expected if count and taken.programs else 0.0, (
        f"| {NAMES.get(capability, capability)} | {head} | {which} | {', '.join(features) or 'plain'} "
        f"| {sizes.block} x {sizes.step}, {sizes.warps}, {sizes.stages} | {taken.registers} | {spills} "
        f"| {taken.shared / 1024:.0f} | {taken.programs} | {count.cells() if count else ' | ' * 5} |"
    )


def rows(capability: int, head: int, features: tuple[str, ...]) -> list[str]:
    """A row for each kernel."""
    launches = example(capability, head, features=features)
    return [row(capability, head, which, launch, features)[1] for which, launch in launches.items()]


def candidates(capability: int, head: int) -> list[str]:
    """A row for each of the sizes that a GPU would measure, the best of each kernel first."""
    result = []
    for which, sizes in CANDIDATES.items():
        found = []
        for each in sizes:
            launches = example(capability, head, fixed={which: each}, only=which)
            for name, launch in launches.items():
                try:
                    found.append(row(capability, head, name, launch))
                except TritonError as error:
                    found.append((-1.0, f"{name} {each}: {str(error).splitlines()[0]}"))
        result += [text for _, text in sorted(found, reverse=True)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90, 100], choices=NAMES)
    parser.add_argument("--head", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--features", nargs="*", default=["plain"], choices=["plain", "all", *FEATURES])
    parser.add_argument("--candidates", action="store_true", help="the block sizes of tools/measure_hardware.py")
    args = parser.parse_args()
    columns = ["GPU", "head", "kernel", "with", "block x step, warps, stages", "registers", "spills, bytes (in loops)"]
    columns += ["shared, KiB", "programs an SM", "ideal", "tensor", "issue", "repeated", "share", "expected"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    for capability in args.capability:
        for head in args.head:
            if args.candidates:
                print("\n".join(candidates(capability, head)), flush=True)
                continue
            for feature in args.features:
                names = {"plain": (), "all": FEATURES}.get(feature, (feature,))
                print("\n".join(rows(capability, head, names)), flush=True)


if __name__ == "__main__":
    main()
