#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each --packing costs on distributions of document lengths, and what groups by length could save at most.

    python benchmarks/packing.py                 # fill, truncations, imbalance, beside the optimum's bound
    python benchmarks/packing.py --groups        # the time of a step without groups over an ideal step with groups
    python benchmarks/packing.py --measure       # attention's CPU seconds on two ranks, beside the counted imbalance

Distributions are log-normal with figures from publications; the parameters that these do not give are named as assumed:

- "log-normal": 1,000 documents, median 8,192 tokens, sigma 1.5
- "RefinedWeb": 600 billion tokens in 960 million documents, a mean of 625 (arXiv 2306.01116); sigma 1.2 is assumed
- "ByteDance": 80 % of the documents have at most 4K tokens, 0.05 % at least 2M (ByteScale, arXiv 2502.21231); both
  quantiles give median and sigma
- "Llama 3 SFT": 99.89 % with a mean of 1K, 0.11 % with a mean of 37K tokens (arXiv 2407.21783); sigma 0.8 is assumed

Groups by length compute each document on as few ranks as hold its tokens, and all ranks finish together. The ideal
step counted here has perfectly even work over all ranks of DP and CP, no transfer for documents that fit in a rank's
share of a sample, and the rings' hidden transfers for the others. So the ratio is an upper limit of what groups save.

``--measure`` takes the log-normal documents and samples at an eighth of their lengths, which two cores can compute. Two
processes are the ranks of DP 2, each with every second sample. Only their own CPU time counts, not that of others.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron.context_parallel.layout.documents import balance_documents
from megatron.training.data.packing.packing_plans import Packing, PackingPlan, cost_of, greedy_plan, make_plan

LENGTH, BATCH = 131072, 8


def distributions(seed: int = 0) -> dict[str, np.ndarray]:
    """Tokens of each document of each distribution."""
    random = np.random.default_rng(seed)

    def log_normal(median: float, sigma: float, count: int) -> np.ndarray:
        return np.maximum(random.lognormal(np.log(median), sigma, count), 2).astype(np.int64)

    z_80, z_9995 = 0.8416, 3.2905  # quantiles of the normal distribution
    sigma = np.log(2**21 / 4096) / (z_9995 - z_80)
    result = {
        "log-normal": log_normal(8192, 1.5, 1000),
        "RefinedWeb": log_normal(625 / np.exp(1.2**2 / 2), 1.2, 60_000),
        "ByteDance": log_normal(4096 / np.exp(z_80 * sigma), sigma, 20_000),
        "Llama 3 SFT": np.concatenate([log_normal(1024 / np.exp(0.32), 0.8, 49_945),
                                       log_normal(37_000 / np.exp(0.32), 0.8, 55)]),
    }  # fmt: skip
    return {name: np.minimum(lengths, 1 << 22) for name, lengths in result.items()}


def plans(lengths: np.ndarray, batch: int, length: int = LENGTH) -> dict[str, PackingPlan]:
    """A plan of one epoch for each packing."""
    order = np.random.default_rng(1).permutation(len(lengths))
    result = {"greedy": greedy_plan(order, lengths[order], length)}
    for kind in ("best-fit", "by-work"):
        result[kind] = make_plan(np.arange(len(lengths)), lengths, length, None, Packing(kind, 1024, batch), 1)
    return result


def packings() -> None:
    print(f"samples of {LENGTH:,} tokens, one on each of {BATCH} DP ranks; imbalance: slowest over mean, by FLOPs\n")
    print("| documents | packing | samples | optimum's bound | fill | cut though they fit | imbalance of attention "
          "| imbalance of a step of Llama 3 8B |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name, lengths in distributions().items():
        for kind, plan in plans(lengths, BATCH).items():
            cost, step = (cost_of(plan, lengths, LENGTH, BATCH, linear) for linear in (0.0, LINEAR_PAIRS))
            bound = -(-int(plan.pieces[:, 2].sum()) // (LENGTH + 1))
            cells = [f"{len(plan.first) - 1:,}", f"{bound:,}", f"{100 * cost.fill:.2f} %",
                     f"{100 * cost.cut_short:.2f} %", f"{cost.imbalance:.3f}", f"{step.imbalance:.3f}"]  # fmt: skip
            print(f"| {name} | {kind} | {' | '.join(cells)} |", flush=True)


# A layer of Llama 3 8B on H100 GPUs of one node; bf16.
HIDDEN, FFN, HEADS, KV_HEADS, DIM = 4096, 14336, 32, 8, 128
LINEAR_FLOPS = 2 * (HIDDEN * (HEADS + 2 * KV_HEADS) * DIM + HEADS * DIM * HIDDEN + 3 * HIDDEN * FFN)  # per token
PAIR_FLOPS = 4 * HEADS * DIM  # per (query, key) pair
LINEAR_PAIRS = 3 * LINEAR_FLOPS / (3.5 * PAIR_FLOPS)  # a token's linear layers, forward and backward, in pairs
SPEED, LINK = 989e12 * 0.5, 450e9 * 0.8  # FLOP/s, bytes/s


@dataclass(frozen=True)
class Layout:
    """A grid: DP replicas of Ulysses x Ring ranks, and pipeline stages."""

    name: str
    ulysses: int = 1
    ring: int = 1
    data: int = 1
    pipeline: int = 1


def pairs(begin: int, stop: int) -> float:
    return stop * (stop + 1) / 2 - begin * (begin + 1) / 2


def sample_time(sizes: np.ndarray, layout: Layout, padding: int) -> float:
    """Seconds of a layer, forward and backward, on the slowest rank of Ulysses x Ring."""
    ends = np.cumsum(np.append(sizes, padding) if padding else sizes)
    ranks = layout.ulysses * layout.ring
    shares = balance_documents(tuple(ends.tolist()), layout.ring)
    starts = np.append(0, ends[:-1])
    slowest = 0.0
    for spans in shares:
        work, received = 0.0, 0.0
        own: dict[int, int] = {}
        for begin, stop in spans:
            while begin < stop:
                at = int(np.searchsorted(ends, begin, side="right"))
                until = min(stop, int(ends[at]))
                work += pairs(begin - starts[at], until - starts[at])
                own[at] = own.get(at, 0) + until - begin
                begin = until
        for at, tokens in own.items():
            received += int(ends[at] - starts[at]) - tokens
        attention = 3.5 * PAIR_FLOPS * work / layout.ulysses / SPEED
        ring = 3 * received * 2 * 2 * KV_HEADS * DIM / layout.ulysses / LINK  # keys, values; their gradients
        slowest = max(slowest, max(attention, ring))
    tokens = LENGTH / ranks
    exchanged = 0.0
    if layout.ulysses > 1:  # queries, keys, values and outputs, forward and backward, not hidden
        exchanged = 2 * tokens * 2 * 2 * (HEADS + KV_HEADS) * DIM * (layout.ulysses - 1) / layout.ulysses / LINK
    return slowest + 3 * LINEAR_FLOPS * tokens / SPEED + exchanged


def ideal_time(sizes: list[np.ndarray], layout: Layout) -> float:
    """Seconds of a layer, if all tokens and all work of a global batch are even over all ranks of DP and CP."""
    ranks = layout.ulysses * layout.ring
    work = sum(float((one.astype(float) * (one + 1) / 2).sum()) for one in sizes)
    tokens = sum(int(one.sum()) for one in sizes)
    return (3.5 * PAIR_FLOPS * work + 3 * LINEAR_FLOPS * tokens) / SPEED / (ranks * layout.data)


LAYOUTS = [
    Layout("Ring 8", ring=8), Layout("Ulysses 8", ulysses=8), Layout("Ulysses 4 x Ring 2", ulysses=4, ring=2),
    Layout("DP 8 x Ring 8", ring=8, data=8), Layout("DP 8 x Ulysses 8", ulysses=8, data=8),
    Layout("PP 4 x Ring 8, 8 micro-batches", ring=8, pipeline=4),
]  # fmt: skip


def step_time(samples: list[tuple[np.ndarray, int]], layout: Layout) -> tuple[float, float]:
    """Seconds of a layer's part of a step: today's, and the ideal one. Each replica has BATCH / DP micro-batches."""
    times = np.array([sample_time(sizes, layout, padding) for sizes, padding in samples])
    of_rank = times.reshape(-1, layout.data)
    stages = layout.pipeline
    today = max(column.sum() + (stages - 1) * column.max() for column in of_rank.T)
    ideal = ideal_time([sizes for sizes, _ in samples], layout)
    return today, ideal * (1 + (stages - 1) / len(of_rank))


def groups(batches: int) -> None:
    print(f"global batches of {BATCH} samples of {LENGTH:,} tokens; today's step over the ideal one\n")
    print("| documents | packing | " + " | ".join(layout.name for layout in LAYOUTS) + " |")
    print("|---|---|" + "---|" * len(LAYOUTS))
    for name, lengths in distributions().items():
        for kind, plan in plans(lengths, BATCH).items():
            sizes = np.split(plan.pieces[:, 2], plan.first[1:-1])
            samples = []
            for one in sizes[: batches * BATCH]:
                one = one.copy()
                one[one.argmax()] -= max(int(one.sum()) - LENGTH, 0)  # the last token of a sample is only predicted
                samples.append((one[one > 0], LENGTH - int(one.sum())))
            cells = []
            for layout in LAYOUTS:
                both = [step_time(samples[i : i + BATCH], layout) for i in range(0, len(samples) - BATCH + 1, BATCH)]
                today, ideal = np.sum(both, 0)
                cells.append(f"{today / ideal:.3f}")
            print(f"| {name} | {kind} | " + " | ".join(cells) + " |", flush=True)


# Attention on two ranks of this machine.
SHORT, RANKS, DIM_HERE = LENGTH // 8, 2, 64


def attention_seconds(samples: list[tuple[int, ...]]) -> list[float]:
    """CPU seconds of one head's attention over each sample, forward and backward.

    Args:
        samples: ends of the documents of each, the last of which is SHORT.
    """
    import torch

    import megatron.context_parallel as cp

    torch.set_num_threads(1)
    layout, seconds = cp.SequenceLayout(SHORT, cp.abstract_grid()), []
    q, k, v = torch.randn(3, SHORT, 1, 1, DIM_HERE, requires_grad=True).unbind()
    for ends in [samples[0], *samples]:  # the first one warms up
        begin = time.process_time()
        cp.attention(q, k, v, layout=layout, mask=cp.Documents(ends)).sum().backward()
        seconds.append(time.process_time() - begin)
    return seconds[1:]


def measure(batches: int) -> None:
    lengths = np.maximum(distributions()["log-normal"] // 8, 2)
    print(f"samples of {SHORT:,} tokens, one head of {DIM_HERE}, {batches} global batches of {RANKS}\n\n"
          "| packing | attention, CPU s of a batch's mean rank | imbalance, measured | imbalance, counted |\n"
          "|---|---|---|---|")  # fmt: skip
    for kind, plan in plans(lengths, RANKS, SHORT).items():
        sizes = np.split(plan.pieces[:, 2], plan.first[1:-1])[: batches * RANKS]
        ends = [tuple(dict.fromkeys(np.minimum(np.append(np.cumsum(one), SHORT), SHORT).tolist())) for one in sizes]
        with multiprocessing.get_context("spawn").Pool(RANKS) as pool:
            seconds = np.array(pool.map(attention_seconds, [ends[rank::RANKS] for rank in range(RANKS)], 1)).T
        first = PackingPlan(plan.pieces[: plan.first[len(sizes)]], plan.first[: len(sizes) + 1])
        counted = cost_of(first, lengths, SHORT, RANKS).imbalance
        measured = (seconds.max(1) / seconds.mean(1)).mean()
        print(f"| {kind} | {seconds.mean():.2f} | {measured:.3f} | {counted:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", action="store_true", help="count what groups by length could save")
    parser.add_argument("--measure", action="store_true", help="measure attention on two ranks of this machine")
    parser.add_argument("--batches", type=int, default=4, help="global batches that --groups and --measure take")
    options = parser.parse_args()
    if options.measure:
        measure(options.batches)
        return
    if options.groups:
        groups(options.batches)
    else:
        packings()


if __name__ == "__main__":
    main()
