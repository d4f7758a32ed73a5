#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Find the best --mask-cpu-threshold for this machine: compare masks built on the device with masks in host memory.

    python tools/measure_mask_threshold.py --head-dim 128 --heads 8

For each length, forward and backward of one attention with a mask function are timed, with the complete mask built on
the device, and with blocks of rows that are built in host memory and copied to the device. The threshold is the longest
length at which the device is still faster and the mask is not too large (DeepSpeed4Science, figure 4).
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tools.option_parser import OptionParser

if TYPE_CHECKING:
    import torch

THRESHOLDS = {"device": 2**62, "host": 0}  # --mask-cpu-threshold for all masks in that place


def main() -> int:
    parser = OptionParser(__doc__)
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--heads", type=int, default=4, help="heads per rank")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--mask-mib", type=int, default=1024, help="largest mask permitted on the device")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if min(*args.seq_lengths, args.heads, args.head_dim, args.repeats) < 1:
        parser.error("--seq-lengths, --heads, --head-dim and --repeats must be at least 1")
    import torch  # late, so that --help is fast

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU")
    device = torch.device(args.device)
    table = Table("tokens", "complete mask, MiB", "on the device, ms", "in host memory, ms")
    best = 0
    for length in sorted(args.seq_lengths):
        took = measure(length, args, device)
        size = length * length / 2**20
        table.add_row(f"{length:,}", f"{size:,.0f}", f"{took['device']:.1f}", f"{took['host']:.1f}")
        if took["device"] <= took["host"] * 1.05 and size <= args.mask_mib:
            best = length
    Console().print(table)
    print(f"--mask-cpu-threshold {best}")
    return 0


def measure(length: int, args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """{"device": ms, "host": ms}, the best of several alternating rounds."""
    import torch

    import megatron.context_parallel as cp
    from megatron.context_parallel.layout.grid import abstract_grid

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layout = cp.SequenceLayout(length, abstract_grid())
    mask = cp.MaskFunction(lambda q, k: (q - k) % 3 == 0, cp.Causal())
    qkv = [torch.randn(length, 1, args.heads, args.head_dim, device=device, dtype=dtype) for _ in range(3)]
    leaves = [x.requires_grad_() for x in qkv]
    took = dict.fromkeys(THRESHOLDS, float("inf"))
    for _ in range(args.repeats):
        for place, threshold in THRESHOLDS.items():
            synchronize(device)
            start = time.perf_counter()
            out = cp.attention(*leaves, layout=layout, mask=mask, mask_cpu_threshold=threshold)
            torch.autograd.grad(out, leaves, out.detach())
            synchronize(device)
            took[place] = min(took[place], 1e3 * (time.perf_counter() - start))
    return took


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
