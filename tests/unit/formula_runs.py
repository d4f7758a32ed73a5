# SPDX-License-Identifier: Apache-2.0
"""Steps of the real program on one rank of a simulated world, for comparison with formulas: real tensors, collectives
that move nothing, every storage and every sent byte counted."""

from __future__ import annotations

import gc
import pickle
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from megatron.simulator.strategy import Strategy, Workload
from megatron.training.memory import TensorMeter

LLAMA: dict[str, Any] = {
    "model.normalization": "RMSNorm",
    "model.swiglu": True,
    "model.position_embedding_type": "rope",
    "model.add_bias_linear": False,
    "model.untie_embeddings_and_output_weights": True,
}
GPT: dict[str, Any] = {"model.position_embedding_type": "learned_absolute"}


@dataclass(frozen=True)
class Case:
    """A configuration, and the rank whose step is counted."""

    name: str
    workload: Workload
    strategy: Strategy
    itemsize: int = 4
    rank: int = 0
    stage: int = 0


@dataclass(frozen=True)
class Measured:
    """Bytes: the device's peak, model states by kind, host memory, sent by axis."""

    peak: int
    states: dict[str, int]
    host: int
    sent: dict[str, int]


def flags(case: Case) -> list[str]:
    """The command line of a case."""
    shape, strategy, workload = case.workload.shape, case.strategy, case.workload
    given = {
        "--num-layers": shape.layers,
        "--hidden-size": shape.hidden,
        "--ffn-hidden-size": shape.ffn,
        "--num-attention-heads": shape.heads,
        "--num-query-groups": shape.kv_heads,
        "--vocab-size": shape.vocab - 1,  # the mock tokenizer adds an end-of-document token
        "--max-position-embeddings": shape.positions or workload.seq_length,
        "--seq-length": workload.seq_length,
        "--micro-batch-size": strategy.micro_batch,
        "--global-batch-size": workload.global_batch,
        "--tensor-model-parallel-size": strategy.tensor,
        "--ulysses-parallel-size": strategy.ulysses,
        "--ring-parallel-size": strategy.ring,
        "--pipeline-model-parallel-size": strategy.pipeline,
        "--zero-stage": strategy.zero,
        "--train-iters": 2,
        "--eval-iters": 0,
        "--lr": 1e-3,
        "--device": "cpu",
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
    }
    words = [str(word) for pair in given.items() for word in pair]
    words += ["--group-query-attention", "--mock-data", "--no-check-for-nan-in-loss-and-grad"]
    options = {
        "--sequence-parallel": strategy.tensor > 1 and strategy.sequence_parallel,
        "--bf16": case.itemsize == 2,
        "--overlap-grad-reduce": strategy.zero < 2,
        "--overlap-param-gather": strategy.zero == 1,
        "--recompute-granularity selective": strategy.recompute == "selective",
        f"--recompute-granularity full --recompute-method uniform --recompute-num-layers {strategy.recompute_layers}": (
            strategy.recompute == "full"
        ),
        "--offload-checkpoints": strategy.offload_checkpoints,
        f"--fpdt --fpdt-chunk-size {strategy.fpdt_chunk}": strategy.fpdt_chunk,
        "--no-fpdt-offload": strategy.fpdt_chunk and not strategy.fpdt_offload,
        f"--ffn-chunks {strategy.ffn_chunks}": strategy.ffn_chunks,
        f"--loss-chunks {strategy.loss_chunks}": strategy.loss_chunks,
        f"--num-virtual-stages-per-pipeline-rank {strategy.virtual}": strategy.virtual > 1,
    }
    return words + " ".join(text for text, wanted in options.items() if wanted).split()


class Counting(TensorMeter):
    """Also counts bytes sent, by the group's (size, stride); looks at peaks inside an operation under FSDP too."""

    def __init__(self, rank: int, resized: bool) -> None:
        super().__init__("cpu", resized=resized)
        self.rank, self.most = rank, 0
        self.sent: Counter[tuple[int, int, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            self._count_sent(func.__name__, args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.resized and self._levels["device"].now > self.most:
            self._look_again()
        self.most = max(self.most, self._levels["device"].now)
        return out

    def _count_sent(self, name: str, args: tuple) -> None:
        group = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
        ranks, sizes = dist.get_process_group_ranks(group), [x.nbytes for x in tree_leaves(args) if torch.is_tensor(x)]
        n, kind = len(ranks), "sum"
        if "allreduce" in name:
            sent = 2 * (n - 1) * sum(sizes) // n
        elif "allgather" in name or "reduce_scatter" in name:
            coalesced = "coalesced" in name  # many at once: outputs come first
            whole = sum(x.nbytes for x in tree_leaves(args["allgather" not in name])) if coalesced else max(sizes)
            sent = (n - 1) * whole // n
        elif "alltoall" in name:
            splits = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], int)]
            shares = splits[-1] if splits else [1] * n
            sent = sizes[1] - sizes[1] * shares[ranks.index(self.rank)] // sum(shares)
        elif name.startswith("send"):
            sent, kind = sum(sizes), "send"
        else:
            return
        if sent > 64 and n > 1:
            self.sent[n, ranks[1] - ranks[0], kind] += sent


def measure(case: Case) -> Measured:
    """A step of a case. In a process that does nothing else: what else is on its way would count."""
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    from megatron.platform.simulation import simulated_world
    from megatron.training import job as jobs
    from megatron.training import setup
    from megatron.training.arguments import parse
    from megatron.training.step import train_step

    shape, strategy = case.workload.shape, case.strategy
    settings = dict(GPT if shape.positions else LLAMA)
    config = parse(flags(case), settings, strategy.ranks)
    destroy_rerun_state_machine()
    destroy_num_microbatches_calculator()
    jobs.together = setup.together = lambda action: action()  # nobody answers here
    with simulated_world(strategy.ranks, case.rank):
        runtime = setup.start(config)
        job = jobs.prepare(config, runtime)
        batches = jobs.batches_for(job, job.datasets[0], 0, 0)

        job.batch_sizes.update(0, False)
        with Counting(case.rank, strategy.zero > 1) as meter:
            start = states_of(meter, job)
            before = meter.now - sum(start.values())
            count = job.batch_sizes.get()
            train_step(runtime, job.chunks, job.optimizer, job.schedule, batches, config, count)
            states, most = states_of(meter, job), meter.most - before
        host = runtime.offload.pool.peak if runtime.offload else 0
        sent = by_axis(meter.sent, strategy)
        del job, batches
    gc.collect()
    return Measured(most, dict(states), host, sent)


def states_of(meter: TensorMeter, job: Any) -> Counter[str]:
    """Bytes by kind, each storage once; without Adam's step counters, of one element each."""
    from megatron.training.memory_profile import owned

    states: Counter[str] = Counter()
    seen = set()
    for kind, tensor in owned(job.chunks, job.optimizer):
        block = meter.see(tensor)
        if block is not None and block.number not in seen and tensor.numel() > 1:
            seen.add(block.number)
            states[kind] += block.size
    return states


def by_axis(sent: Counter[tuple[int, int, str]], strategy: Strategy) -> dict[str, int]:
    """By axis; where DP x CP is one axis of CP alone, the test must not ask."""
    found: Counter[str] = Counter()
    for (size, stride, kind), count in sent.items():
        axes = ("ring", "pp") if kind == "send" else ("tp", "dp", "ulysses", "pp")
        groups = {axis: strategy.group(axis) for axis in axes}
        found[next(axis for axis in axes if (groups[axis].size, groups[axis].stride) == (size, stride))] += count
    return dict(found)


def measure_all(cases: list[Case], file: Path) -> None:
    """Measure all cases, in this process, and write what was found."""
    torch.set_num_threads(1)
    file.write_bytes(pickle.dumps([measure(case) for case in cases]))
