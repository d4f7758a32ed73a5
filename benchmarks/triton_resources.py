#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""GPU resources that the Triton kernels need, from compiling them without a GPU: a Markdown table.

    python benchmarks/triton_resources.py --capability 80 90 100 --head 64 128

Registers, spills and shared memory are the assembler's figures. A program loops over blocks of keys; in the kernel
"keys" it loops over blocks of queries. A step is one iteration of this loop without a mask, and its instructions are
counted in the machine code. The share of the GEMM rate is estimated from the cycles that a step occupies the tensor
cores and the cycles that issuing its instructions takes, without and with full overlap of the two. This arithmetic
ignores memory traffic.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Launch
from megatron.context_parallel.attention.kernels.triton_kernels.triton_compile import (
    FEATURES,
    Resources,
    example,
    resources,
)

NAMES = {80: "A100", 86: "RTX 3090", 89: "L40S", 90: "H100", 100: "B200", 120: "RTX 5090"}
# Products and sums of bf16 that a multiprocessor's tensor cores do in a cycle: data sheets' rates without sparsity,
# over multiprocessors and boost clock (A100 312 TFLOP/s, 108, 1.41 GHz; H100 SXM 989, 132, 1.83; B200 2250, 148, 1.85).
TENSOR_RATE = {80: 1024, 90: 2048, 100: 4096}
ISSUE_RATE = 4  # instructions of a warp that a multiprocessor issues in a cycle
PRODUCTS = {"forward": 2, "queries": 3, "keys": 4}  # matrix products [block, head] x [head, step] in a step


def bound(which: str, launch: Launch, taken: Resources) -> str:
    """Table cells: a step's cycles of the tensor cores, of instruction issue, and the share of the GEMM rate."""
    rate = TENSOR_RATE.get(taken.capability)
    if rate is None or not taken.step:
        return "| | | "
    sizes = launch.arguments
    tensor = PRODUCTS[which] * sizes["BLOCK"] * sizes["STEP"] * sizes["HEAD"] / rate
    issue = taken.step * taken.warps / ISSUE_RATE
    return f"| {tensor:.0f} | {issue:.0f} | {tensor / (tensor + issue):.0%} to {tensor / max(tensor, issue):.0%} "


def row(capability: int, head: int, which: str, features: tuple[str, ...]) -> str:
    launch = example(capability, head, features=features)[which]
    taken = resources(launch, capability)
    sizes = launch.arguments
    products = ", ".join(f"{count} {name}" for name, count in taken.products.items())
    return (
        f"| {NAMES.get(capability, capability)} | {head} | {which} | {', '.join(features) or 'plain'} "
        f"| {sizes['BLOCK']} x {sizes['STEP']} | {launch.sizes.warps} | {launch.sizes.stages} "
        f"| {taken.registers} | {taken.spills} | {taken.shared / 1024:.0f} | {taken.programs} | {taken.occupancy:.1%} "
        f"| {products} {bound(which, launch, taken)}|"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90, 100], choices=NAMES)
    parser.add_argument("--head", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--features", nargs="*", default=["plain"], choices=["plain", *FEATURES])
    args = parser.parse_args()
    columns = ["GPU", "head", "kernel", "with", "block x step", "warps", "stages", "registers", "spills, bytes"]
    columns += ["shared, KiB", "programs an SM", "warps an SM", "in the PTX", "tensor cycles", "issue cycles"]
    columns += ["of the GEMM rate"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    for capability in args.capability:
        for head in args.head:
            for which in ("forward", "queries", "keys"):
                for feature in args.features:
                    print(row(capability, head, which, () if feature == "plain" else (feature,)), flush=True)


if __name__ == "__main__":
    main()
