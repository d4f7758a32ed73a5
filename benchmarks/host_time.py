# SPDX-License-Identifier: Apache-2.0
"""The work of attention on the host: milliseconds of our Python per layer and per distribution of documents over a
ring, and the bytes that FPDT copies.

    python benchmarks/host_time.py

Kernels are not launched and tensors have no memory, so that only Python is timed, in CPU time of one core.
"""

from __future__ import annotations

import gc
import pickle
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

import megatron.context_parallel as cp
from benchmarks.parallel_attention import log_normal
from megatron.context_parallel.attention.kernels.triton_kernels import triton_call, triton_kernel
from megatron.context_parallel.attention.ring_plan import AttentionPlan
from megatron.context_parallel.attention.rule import AttentionRule
from megatron.context_parallel.attention.usp import attention_by_rule
from megatron.context_parallel.fpdt import by_keys, by_queries, chunked_layer
from megatron.context_parallel.fpdt.host_store import Offload
from megatron.context_parallel.layout.documents import balance_documents
from megatron.context_parallel.layout.masks import Mask
from megatron.training.model.batch_plans import BatchPlans, PlanTables, TritonCalls

LENGTH, DEALT, RING = 2**17, 2**20, 16
RECEIVED = "1,000 documents, prepared"
CALLS = TritonCalls(2, 128, None)  # bytes of a number, size of a head, no GPU


def milliseconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)


def layers() -> None:
    """Print the time of the first call, which makes the plan, and the median of ten later calls, by mask."""
    triton_call.Launch.run = lambda launch: None
    triton_kernel.TritonKernel.why_not = lambda *_, **__: None
    triton_call.interpreted = lambda: True
    draw = random.Random(0)
    ends = (*sorted(draw.sample(range(1, LENGTH), 999)), LENGTH)
    masks = {
        "(imports)": cp.Window(1022),
        "causal": cp.Causal(),
        "1,000 documents": cp.Documents(ends),
        RECEIVED: cp.Documents(ends),
        "Longformer, blocks of 128": cp.BlockSparse(128, cp.LongformerBlocks(2, 1), LENGTH),
        "BigBird, blocks of 64": cp.BlockSparse(64, cp.BigBirdBlocks(1, 1, 3), LENGTH),
    }
    layout, rule = cp.SequenceLayout(LENGTH, cp.abstract_grid()), AttentionRule(kernel="triton")
    print(f"{LENGTH} tokens, 32 heads, ms: forward and backward of the first call; of later calls")
    for name, mask in masks.items():
        qkv = [torch.empty(LENGTH, 1, 32, 128, device="meta", requires_grad=True) for _ in range(3)]
        times: list[tuple[float, float]] = []
        received: dict[Mask, AttentionPlan] = {}
        if name == RECEIVED:
            plans = BatchPlans(layout, (cp.Causal(),), torch.device("meta"), triton=CALLS)
            made: list[list[PlanTables]] = []
            work = milliseconds(lambda plans=plans, made=made: made.append(plans.make(torch.tensor([ends]))))
            receive = partial(plans.receive, torch.tensor([ends]), made[0])
            took = milliseconds(lambda receive=receive, received=received: received.update(receive()))
            sent = len(pickle.dumps(made[0])) / 2**20
            print(f"(a loader's process makes the plan's numbers, {sent:.2f} MiB, in {work:.1f} ms;")
            print(f" the trainer receives them, before the step, in {took:.1f} ms)")
        gc.collect()  # otherwise the garbage of earlier masks may be collected in this mask's time
        for _ in range(11):
            outs: list[torch.Tensor] = []
            run = partial(attention_by_rule, *qkv, layout=layout, rule=rule, masks=[mask], plans=received)
            forward = milliseconds(lambda outs=outs, run=run: outs.append(run()))
            grad = torch.empty_like(outs[0])
            times.append((forward, milliseconds(lambda outs=outs, grad=grad: outs.pop().backward(grad))))
        later = [statistics.median(column) for column in zip(*times[1:])]
        print(f"{name:26}{times[0][0]:7.1f}{times[0][1]:7.1f} {later[0]:10.2f}{later[1]:7.2f}")


def deals(draws: int = 100) -> None:
    """Print the median and the slowest time to distribute 1,000 documents, for several kinds of lengths."""

    def scaled(size: Callable[[random.Random], float], seed: int) -> tuple[int, ...]:
        draw = random.Random(seed)
        sizes = [size(draw) for _ in range(1000)]
        ends = {max(1, round(sum(sizes[: index + 1]) / sum(sizes) * DEALT)) for index in range(1000)}
        return (*sorted(ends - {DEALT}), DEALT)

    kinds: dict[str, Callable[[int], tuple[int, ...]]] = {
        "uniform": partial(scaled, lambda draw: draw.random()),
        "log-normal": partial(log_normal, 1000, DEALT),
        "log-normal, sigma 3": partial(scaled, lambda draw: draw.lognormvariate(0, 3)),
        "Pareto 0.5": partial(scaled, lambda draw: draw.paretovariate(0.5)),
        "Pareto 1.05": partial(scaled, lambda draw: draw.paretovariate(1.05)),
        "20 of 1,000 are long": partial(scaled, lambda draw: 500 if draw.random() < 0.02 else draw.random()),
    }
    print(f"\n1,000 documents in {DEALT} tokens distributed over {RING} ranks, ms: median and slowest of {draws}")
    for name, make in kinds.items():
        all_ends = [make(seed) for seed in range(draws)]
        gc.collect()
        times = [milliseconds(partial(balance_documents, ends, RING)) for ends in all_ends]
        print(f"{name:26}{statistics.median(times):7.1f}{max(times):7.1f}")


def copies(tokens: int = 1024, chunks: int = 16, heads: int = 8, size: int = 16) -> None:
    """Print the bytes that one layer copies to and from the host, by the order of FPDT's loops."""
    layout, width = cp.SequenceLayout(tokens, cp.abstract_grid(), chunks=chunks), heads * size
    print(f"\nFPDT, {chunks} chunks, bf16: MiB copied forward and backward by queries; by keys")
    for kv_heads in (8, 4, 2, 1):
        line = []
        for order in (by_queries, by_keys):
            chunked_layer._forward, chunked_layer._backward = order.forward, order.backward
            sizes = (width, kv_heads * size, kv_heads * size)
            weights = [torch.randn(width, n, dtype=torch.bfloat16, requires_grad=True) for n in sizes]

            def project(x: torch.Tensor, _: int, weights: list = weights) -> tuple[torch.Tensor, ...]:
                return tuple((x @ weight).unflatten(2, (-1, size)) for weight in weights)

            offload = Offload(torch.device("cpu"))
            layer = chunked_layer.ChunkedLayer(
                project, lambda out, x, _: x + out.flatten(2), weights, layout, offload=offload
            )
            y = layer(torch.randn(tokens, 1, width, dtype=torch.bfloat16, requires_grad=True))
            forward = offload.copies.to_host + offload.copies.to_device
            y.sum().backward()
            line += [forward, offload.copies.to_host + offload.copies.to_device - forward]
        print(f"{heads} heads, {kv_heads} of keys" + "".join(f"{count / 2**20:8.1f}" for count in line))


if __name__ == "__main__":
    torch.set_num_threads(1)
    layers()
    deals()
    copies()
