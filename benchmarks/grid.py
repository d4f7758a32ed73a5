#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures how long a rank of a very large job needs to make its process groups, in a simulated world.

    python benchmarks/grid.py --json grid.json

Default: 16,384 ranks as TP 8 x Ulysses 8 x Ring 4 x DP 16 x PP 4. Imports do not count. megatron-core lists the ranks
of all groups of the job on every rank; the second figure is the time of these lists.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
with warnings.catch_warnings():  # core warns about packages that are not installed
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state

import torch.testing._internal.distributed.fake_pg  # noqa: F401  (an import that must not count)

import megatron.context_parallel as cp
from megatron.platform.simulated_cluster import simulated_world

GOAL = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=16384)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--tensor", type=int, default=8)
    parser.add_argument("--ulysses", type=int, default=8)
    parser.add_argument("--ring", type=int, default=4)
    parser.add_argument("--pipeline", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    sizes = {"tensor": args.tensor, "ulysses": args.ulysses, "ring": args.ring, "pipeline": args.pipeline}
    seconds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        with simulated_world(args.world_size, args.rank):
            grid = cp.initialize_grid(**sizes)
            seconds.append(time.perf_counter() - start)
            groups = len(parallel_state._global_process_group_list) - 1
    listing = seconds_of_listing(args.world_size, **sizes)
    print(f"{grid}: {grid.world_size:,} ranks, seen from rank {args.rank}; {groups} groups of this rank made")
    print(
        f"groups made in {min(seconds):.2f} s, best of {args.repeats} (all: {', '.join(f'{x:.2f}' for x in seconds)}; "
        f"goal {GOAL:.0f} s; load {os.getloadavg()[0]:.1f})"
    )
    print(f"in this time megatron-core lists the ranks of all groups, which takes {listing:.2f} s")
    if args.json:
        report = {"grid": str(grid), "world_size": grid.world_size, "rank": args.rank, "groups": groups}
        report |= {"seconds": seconds, "best_seconds": min(seconds), "listing_seconds": listing, "goal": GOAL}
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")


def seconds_of_listing(world_size: int, *, tensor: int, ulysses: int, ring: int, pipeline: int) -> float:
    """Time of core's RankGenerator for the lists of one `initialize_model_parallel`."""
    context = ulysses * ring
    dense = {"tp": tensor, "ep": 1, "dp": world_size // (tensor * context * pipeline), "pp": pipeline, "cp": context}
    expert = dense | {"dp": dense["dp"] * context, "cp": 1}
    asked = {
        "dense": ("pp", "dp-cp", "dp", "cp", "tp-pp", "tp", "pp", "tp-dp-cp", "tp-dp", "tp-cp"),
        "expert": ("pp", "ep", "tp", "tp-ep", "tp-ep-pp", "dp"),
    }
    start = time.perf_counter()
    for sizes, name in ((dense, "dense"), (expert, "expert")):
        generator = parallel_state.RankGenerator(**sizes, order="tp-cp-ep-dp-pp")
        for token in asked[name]:
            generator.get_ranks(token)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
