#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure this machine and write a machine file for --gpu (docs/use/machine-files.md).

    python tools/measure_hardware.py --output mine.json --quick
    torchrun --nnodes 2 --nproc-per-node 8 ... tools/measure_hardware.py --output mine.json

It measures matrix products and attention by size, memory, copies to the host, and transfers between the processes of
a node: by default one process per GPU, or two on a CPU. Under torchrun on several nodes, the network is measured too.

    python tools/measure_hardware.py --output mine.json --extends H100-80G --nccl-tests all_reduce.log all_gather.log

This measures nothing: links, network and NCCL's algorithms come from these outputs of nccl-tests, all else from
H100-80G. With --extends mine.json --overwrite, figures from more outputs are added to that file.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
import json
from datetime import timedelta

from megatron.system.srun import check_ranks
from megatron.training.ownership.atomic import atomic_files
from megatron.training.refusal import Refusal
from tools.option_parser import OptionParser, in_one_line

RESERVED = 64 * 1024  # bytes written at the start, so that a full disk is noticed before measuring


@in_one_line(Refusal)
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.nccl_tests:
        from tools.nccl_figures import import_logs

        return import_logs(args)
    import torch.distributed as dist  # late, so that --help is fast

    from megatron.platform.network import Unusable, meet
    from tools import hardware_figures as hardware

    try:
        check_ranks(os.environ)
    except ValueError as error:
        raise Refusal(str(error)) from None
    rank = int(os.environ.get("RANK", "0"))
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    try:
        device = hardware.chosen_device(args.device)
        plan = hardware.chosen_effort(args, device.type)
        if args.attention and device.type != "cuda":
            raise Refusal("--attention: measures kernels of Triton, which need a GPU: leave it out")
        if "RANK" in os.environ:
            backend = "nccl" if device.type == "cuda" else "gloo"
            try:
                meet(backend, timedelta(seconds=args.timeout), args.network_interface)
            except Unusable as error:
                raise Refusal(str(error)) from None
        if rank:
            return hardware.follow(device, plan)
        with atomic_files([args.output], args.overwrite) as (name,), open(name, "w+", encoding="utf-8") as file:
            file.write(" " * RESERVED)
            file.flush()
            os.fsync(file.fileno())
            raw = hardware.measured(device, plan, args)
            file.seek(0)
            file.write(json.dumps(raw, indent=2) + "\n")
            file.truncate()
        hardware.print_result(args.output, busy)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OptionParser(__doc__)
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes; takes seconds")
    parser.add_argument("--processes", type=int, metavar="N", help="per node (default: one per GPU, or two on a CPU)")
    parser.add_argument("--timeout", type=float, default=100, metavar="SECONDS", help="of the collectives (100)")
    parser.add_argument("--network-interface", metavar="NAME", help="on every node (default: the route to the master)")
    parser.add_argument("--gemm-sizes", type=int, nargs="+", metavar="N", help="sizes of square matrix products")
    parser.add_argument("--attention-lengths", type=int, nargs="+", metavar="N", help="sequence lengths")
    parser.add_argument("--message-mib", type=float, metavar="MIB", help="size of the large messages of collectives")
    parser.add_argument(
        "--attention", action="store_true", help="block sizes of the Triton attention kernels too (minutes; a GPU)"
    )
    parser.add_argument(
        "--nccl-tests", nargs="+", metavar="[KIND=]FILE", help="outputs of nccl-tests to read; nothing is measured"
    )
    parser.add_argument("--extends", metavar="NAME", help="with --nccl-tests: the machine with all other figures")
    args = parser.parse_args(argv)
    if bool(args.nccl_tests) != bool(args.extends):
        parser.error("--nccl-tests and --extends go together: give both, or neither")
    measuring = ("device", "quick", "attention", "processes", "timeout", "gemm_sizes", "attention_lengths")
    measuring += ("message_mib",)
    if args.nccl_tests and (given := [name for name in measuring if getattr(args, name) != parser.get_default(name)]):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        parser.error(f"--nccl-tests measures nothing: leave out {flags}")
    for name in ("processes", "timeout", "message_mib"):
        if (value := getattr(args, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value}: give a number above 0")
    for name in ("gemm_sizes", "attention_lengths"):
        values = getattr(args, name)
        if values and (min(values) < 1 or sorted(set(values)) != values):
            parser.error(f"--{name.replace('_', '-')}: give sizes above 0 in increasing order")
    return args


if __name__ == "__main__":
    sys.exit(main())
