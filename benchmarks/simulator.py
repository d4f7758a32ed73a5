#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of the simulator on large problems.

    python benchmarks/simulator.py [--only NAME ...]

Dry runs of Llama-3-8B at 2M tokens on 4 GPUs, of 70B at 4M on 32, of 16,384 ranks, and a plan for 1,024 GPUs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FPDT = (
    "--bf16 --zero-stage 3 --fpdt --fpdt-chunk-size 65536 --fpdt-stream-hidden --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --global-batch-size 1 --gpu A100-80G --dry-run"
)
RUNS = {
    "8b-2m": "pretrain_llama.py --model llama3-8b --seq-length 2097152 --ulysses-parallel-size 4 "
    f"{FPDT} --world-size 4",
    "70b-4m": "pretrain_llama.py --model llama3-70b --seq-length 4194304 --ulysses-parallel-size 32 "
    f"{FPDT} --world-size 32",
    "16384-ranks": "pretrain_llama.py --model llama3-70b --seq-length 131072 --tensor-model-parallel-size 8 "
    "--sequence-parallel --ulysses-parallel-size 8 --ring-parallel-size 4 --pipeline-model-parallel-size 4 --bf16 "
    "--zero-stage 1 --global-batch-size 64 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --gpu H100-80G --dry-run --world-size 16384",
    "plan-1024": "tools/plan.py --model llama3-70b --gpus 1024 --gpu H100-80G --seq-length 1M --global-batch 16",
}
WITHIN = {"8b-2m": 300, "70b-4m": 60, "plan-1024": 3}  # seconds, on two idle cores


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="run only these")
    failed = 0
    rows = []
    for name in parser.parse_args().only:
        print(f"$ python {RUNS[name]}", flush=True)
        begin = time.perf_counter()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *RUNS[name].split()], cwd=ROOT, env=environment)
        seconds = time.perf_counter() - begin
        failed += done.returncode != 0
        goal = f", goal {WITHIN[name]}" if name in WITHIN else ""
        rows.append(f"{name:12} {seconds:7.1f} s{goal}{'' if done.returncode == 0 else ', FAILED'}")
    print("\nwall-clock time, including imports and pictures:", *rows, sep="\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
