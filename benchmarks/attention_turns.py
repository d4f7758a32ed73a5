#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares parallel attention on a CPU, forward and backward, with an earlier commit and with the public USP code.

    git worktree add /tmp/before COMMIT
    pip install --no-deps --target /tmp/public yunchang
    python benchmarks/attention_turns.py --before /tmp/before --public /tmp/public

Ulysses 2, Ring 2 and both together, with 1 and 2 threads a rank. The variants take turns within one run, so that other
programs affect all of them; the processes of the others wait meanwhile. Times are medians: wall clock, and the CPU time
of the busiest rank, which says more on a shared machine. Ratios are those of the same round.

The public code's causal attention needs the package flash-attn, which has no CPU kernels: its functions are replaced by
those of PyTorch's CPU kernel, which our attention uses too. So kernels are the same, and all else is compared: the
last number of a variant is the kernel's share of the CPU time, which nothing around it can shorten. In fp32 its ring
computes in the memory of its sums, so that it is compared in bf16 only. On gloo it needs at least two ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SCHEMES = {"Ulysses 2": (2, 1), "Ring 2": (1, 2), "Ulysses 2 x Ring 2": (2, 2)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOLERANCE = {"bf16": 2e-2, "fp32": 1e-5}  # relative to the largest entry of a tensor

Attend = Callable[..., Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="FOLDER", help="a checkout of an earlier commit")
    parser.add_argument("--public", metavar="FOLDER", help="a folder with the package yunchang")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=[*DTYPES], default="bf16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of a rank")
    parser.add_argument("--worker", nargs=7, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args, *args.worker)
        return
    here = str(Path(__file__).resolve().parent.parent)
    variants = {"ours": here, "before": args.before, "public": args.public}
    variants = {name: folder for name, folder in variants.items() if folder}
    sizes = f"{args.seq_length} tokens, {args.heads} heads of {args.head_dim}, {args.dtype}"
    print(f"{sizes}; seconds, wall and CPU of a rank, and the kernel's share")
    for scheme in SCHEMES:
        for threads in args.threads:
            left_out = {"public"} if args.dtype == "fp32" and scheme != "Ulysses 2" else set()
            compare(args, scheme, threads, {name: variants[name] for name in variants if name not in left_out})


def compare(args: argparse.Namespace, scheme: str, threads: int, variants: dict[str, str]) -> None:
    """Print a line for one scheme."""
    with tempfile.TemporaryDirectory() as folder:
        teams = {name: Team(args, name, root, scheme, threads, folder) for name, root in variants.items()}
        try:
            expected = teams["ours"].results()
            for name, team in teams.items():
                error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(team.results(), expected))
                if not error <= TOLERANCE[args.dtype]:
                    raise SystemExit(f"error: {name}, {scheme}: results differ by {error:.1e}: not compared")
            rounds = []
            for turn in range(args.repeats):
                order = [*teams][turn % len(teams) :] + [*teams][: turn % len(teams)]
                taken = {name: teams[name].time() for name in order}
                rounds.append([taken[name] for name in teams])
            shares = [[statistics.mean(map(float, team.call("share"))) for _ in range(4)] for team in teams.values()]
        finally:
            for team in teams.values():
                team.close()
    line = f"{scheme:19} {threads} thread{'s' * (threads > 1):1}"
    for name, samples, (_, *more) in zip(teams, zip(*rounds), shares):  # the first one loads modules of PyTorch
        wall, cpu = (statistics.median(column) for column in zip(*samples))
        share = statistics.median(more)
        line += f" | {name} {wall:.3f} {cpu:.3f} {share:.1%}"
        if name != "ours":
            ratios = zip(*([b / a for a, b in zip(row[0], sample)] for row, sample in zip(rounds, samples)))
            line += " (x {:.2f}, {:.2f} of ours)".format(*map(statistics.median, ratios))
    print(line, flush=True)


class Team:
    """The processes of one variant."""

    def __init__(
        self, args: argparse.Namespace, variant: str, root: str, scheme: str, threads: int, folder: str
    ) -> None:
        self.ranks, self.folder = SCHEMES[scheme][0] * SCHEMES[scheme][1], Path(folder) / variant
        self.folder.mkdir()
        same = ("--seq-length", str(args.seq_length), "--heads", str(args.heads), "--head-dim", str(args.head_dim))
        same += ("--dtype", args.dtype)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": root}
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, *same, "--worker", variant, root, scheme, str(threads), str(rank)]
                + [str(self.ranks), str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(self.ranks)
        ]

    def call(self, request: str) -> list[str]:
        """Send a request to all processes; returns their answers by rank."""
        for process in self.processes:
            process.stdin.write(request + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline().strip() for process in self.processes]
        if not all(answers):
            raise SystemExit(f"error: a process of {self.folder.name} has ended")
        return answers

    def results(self) -> list[Tensor]:
        """out, dq, dk and dv of the complete sequence."""
        self.call("results")
        parts = [torch.load(self.folder / f"{rank}.pt") for rank in range(self.ranks)]
        order = torch.cat([positions for positions, _ in parts])
        complete = [torch.cat(pieces) for pieces in zip(*(tensors for _, tensors in parts))]
        return [torch.empty_like(x).index_copy_(0, order, x) for x in complete]

    def time(self) -> tuple[float, float]:
        """Seconds of one run: from the first rank's start to the last one's end; CPU time of the busiest rank."""
        starts, stops, cpu = zip(*(map(float, answer.split()) for answer in self.call("time")))
        return max(stops) - min(starts), max(cpu)

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
            process.wait(60)


def work(
    args: argparse.Namespace, variant: str, root: str, scheme: str, threads: str, rank: str, ranks: str, folder: str
) -> None:
    """The main function of a rank."""
    sys.path.insert(0, root)
    torch.set_num_threads(int(threads))
    store = dist.FileStore(f"{folder}/store", int(ranks))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(ranks), timeout=timedelta(minutes=10))
    make = public_attention if variant == "public" else our_attention
    attend, positions, tokens_dim = make(args.seq_length, *SCHEMES[scheme])
    how = {"generator": torch.Generator().manual_seed(7)}
    complete = [torch.randn(args.seq_length, 1, args.heads, args.head_dim, **how) for _ in range(4)]
    q, k, v, dout = (x[positions].transpose(0, tokens_dim).contiguous().to(DTYPES[args.dtype]) for x in complete)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for request in map(str.strip, sys.stdin):
        dist.barrier()
        with KernelTime() if request == "share" else nullcontext() as kernel:
            start, own = time.perf_counter(), time.process_time()
            out = attend(*leaves)
            results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
            stop, own = time.perf_counter(), time.process_time() - own
        if request == "results":
            torch.save((positions, [x.transpose(0, tokens_dim).float() for x in results]), f"{folder}/{rank}.pt")
        print(*([start, stop, own] if kernel is None else [kernel.seconds / own]), flush=True)
    dist.destroy_process_group()


class KernelTime(TorchDispatchMode):
    """Adds up the CPU time of PyTorch's attention kernel, forward and backward, in all threads of this process."""

    seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        start = time.process_time()
        result = func(*args, **(kwargs or {}))
        if "flash_attention_for_cpu" in func.name():
            self.seconds += time.process_time() - start
        return result


def our_attention(seq_length: int, ulysses: int, ring: int) -> tuple[Attend, Tensor, int]:
    """(attention, positions of this rank's tokens, dim of tokens)."""
    import megatron.context_parallel as cp
    from megatron.context_parallel.layout.grid import make_grid

    layout = cp.SequenceLayout(seq_length, make_grid(ulysses=ulysses, ring=ring))
    return lambda q, k, v: cp.attention(q, k, v, layout=layout), layout.positions, 0


def public_attention(seq_length: int, ulysses: int, ring: int) -> tuple[Attend, Tensor, int]:
    """The same of yunchang, with its zigzag ring."""
    stand_in_for_flash_attn()
    from yunchang import LongContextAttention, UlyssesAttention, set_seq_parallel_pg, zigzag_extract_local
    from yunchang.globals import PROCESS_GROUP

    rank, ranks = dist.get_rank(), dist.get_world_size()
    set_seq_parallel_pg(ulysses, ring, rank, ranks)
    ring_attention = LongContextAttention(ring_impl_type="zigzag")
    attention = UlyssesAttention(PROCESS_GROUP.ULYSSES_PG) if ring == 1 else ring_attention
    positions = zigzag_extract_local(torch.arange(seq_length)[None], rank, ranks, rd=ring, ud=ulysses)[0]
    return lambda q, k, v: attention(q, k, v, causal=True), positions, 1


def stand_in_for_flash_attn() -> None:
    """A module flash_attn whose functions call PyTorch's CPU kernel."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def turned(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x.transpose(1, 2) for x in tensors]

    def flash_forward(
        q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, softmax_scale: float, causal: bool, **_: object
    ) -> tuple[Tensor, Tensor, None, None]:
        out, lse = forward(*turned((q, k, v)), dropout_p, causal, scale=softmax_scale)
        return out.transpose(1, 2), lse, None, None

    def flash_backward(*arguments: Tensor | float | bool | None, **_: object) -> None:
        dout, q, k, v, out, lse, dq, dk, dv, dropout_p, softmax_scale, causal = arguments[:12]
        tensors = turned((dout, q, k, v, out))
        grads = backward(*tensors, lse.contiguous(), dropout_p, causal, scale=softmax_scale)
        for place, grad in zip((dq, dk, dv), turned(grads)):
            place.copy_(grad)

    def flash(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, **_: object) -> Tensor:
        how = {"is_causal": causal, "scale": softmax_scale}
        return torch.nn.functional.scaled_dot_product_attention(*turned((q, k, v)), **how).transpose(1, 2)

    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    package.__version__, package.flash_attn_func = "2.8.0", flash
    interface._flash_attn_forward, interface._flash_attn_backward = flash_forward, flash_backward
    interface._flash_attn_varlen_forward = interface._flash_attn_varlen_backward = None  # imported, but not called
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}


if __name__ == "__main__":
    main()
