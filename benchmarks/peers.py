#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares sequence parallelism for Hugging Face models with DeepSpeed's Ulysses and PyTorch's context_parallel.

    python benchmarks/peers.py --processes 2 --json peers.json

All libraries train the same small model in the same run. The first table shows for several cases whether gradients
equal those of one process. The second shows the seconds of a step; the libraries alternate. A missing library is
reported as not installed. The other libraries are called as in their documentation: DeepSpeed by
``UlyssesSPAttentionHF.register_with_transformers`` around ``sdpa`` with contiguous shards and ``position_ids``, PyTorch
around the forward and backward pass with buffers for tokens, labels and positions, as in accelerate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import megatron.context_parallel as cp
from benchmarks.forked_ranks import on_ranks
from megatron.context_parallel.huggingface import parallelize

VOCABULARY, HEAD, STEPS, TOLERANCE = 512, 32, 3, 1e-4
Batch = dict[str, Tensor]
Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A model and a batch; ``documents`` end where positions restart."""

    heads: int = 8
    kv_heads: int = 2
    window: int | None = None
    documents: tuple[int, ...] = ()
    length: int = 256
    layers: int = 2

    @property
    def width(self) -> int:
        return self.heads * HEAD

    def model(self) -> PreTrainedModel:
        shape = {"vocab_size": VOCABULARY, "hidden_size": self.width, "intermediate_size": 2 * self.width}
        shape |= {"num_hidden_layers": self.layers, "max_position_embeddings": self.length}
        shape |= {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": HEAD}
        config = MistralConfig(**shape, sliding_window=self.window) if self.window else LlamaConfig(**shape)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        model.config.use_cache = False
        return model

    def batch(self) -> Batch:
        tokens = torch.randint(VOCABULARY, (1, self.length), generator=torch.Generator().manual_seed(1))
        ends = self.documents or (self.length,)
        starts = (0, *ends[:-1])
        positions = torch.cat([torch.arange(stop - start) for start, stop in zip(starts, ends)])[None]
        return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": positions}


CASES = {
    "causal, 8 heads, 2 key heads": Case(),
    "packed documents": Case(documents=(60, 100, 256)),
    "a window of 64 (Mistral)": Case(window=64),
    "6 heads, 3 key heads": Case(heads=6, kv_heads=3),
    "3 heads": Case(heads=3, kv_heads=3),
    "255 tokens": Case(length=255),
}


def shifted(batch: Batch) -> Tensor:
    """The label of each token is the next token; the last token has the label -100, which means none."""
    return functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)


def loss_of(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """A rank's share of the mean loss of ``count`` tokens."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count


@contextmanager
def alone(model: PreTrainedModel, batch: Batch) -> Iterator[Step]:
    """One process, with transformers only."""
    labels, count = shifted(batch), batch["labels"].size(1) - 1
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}

    def step() -> None:
        loss_of(model(**inputs).logits, labels, count).backward()

    yield step


def ours(ulysses: int, ring: int) -> Callable:
    @contextmanager
    def entered(model: PreTrainedModel, batch: Batch) -> Iterator[Step]:
        grid = cp.initialize_grid(ulysses=ulysses, ring=ring)
        with parallelize(model, grid, seq_length=batch["input_ids"].size(1), loss_chunks=1) as context:

            def step() -> None:
                (model(**context.shard(batch)).loss / dist.get_world_size()).backward()

            yield step

    return entered


@contextmanager
def deepspeed(model: PreTrainedModel, batch: Batch) -> Iterator[Step]:
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.comm.init_distributed("gloo", verbose=False)
    rank, world, before = dist.get_rank(), dist.get_world_size(), ALL_ATTENTION_FUNCTIONS["sdpa"]
    count = batch["labels"].size(1) - 1
    sizes = {"sequence_parallel_size": world, "micro_batch_size": 1, "seq_length": batch["input_ids"].size(1)}
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", seq_length_is_variable=True, **sizes
    )
    parts = [x.chunk(world, dim=1)[rank] for x in (batch["input_ids"], batch["position_ids"], shifted(batch))]

    def step() -> None:
        loss_of(model(input_ids=parts[0], position_ids=parts[1]).logits, parts[2], count).backward()

    try:
        yield step
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before


@contextmanager
def pytorch(model: PreTrainedModel, batch: Batch) -> Iterator[Step]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh, count = init_device_mesh("cpu", (dist.get_world_size(),)), batch["labels"].size(1) - 1

    def causal_only(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:  # as in accelerate
        return args, kwargs | {"attention_mask": None, "is_causal": True}

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(causal_only, with_kwargs=True)

    def step() -> None:
        buffers = [batch["input_ids"].clone(), batch["position_ids"].clone(), shifted(batch)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            logits = model(input_ids=buffers[0], position_ids=buffers[1]).logits
            loss_of(logits, buffers[2], count).backward()

    yield step


def libraries(world: int) -> dict[str, Callable]:
    result = {f"ours, Ulysses {world}": ours(world, 1), f"ours, Ring {world}": ours(1, world)}
    if world % 2 == 0 and world > 2:
        result[f"ours, Ulysses 2 x Ring {world // 2}"] = ours(2, world // 2)
    return result | {"DeepSpeed's Ulysses": deepspeed, "PyTorch's context_parallel": pytorch}


def gradients(library: Callable, case: Case) -> list[Tensor]:
    """This rank's gradients of one step."""
    model = case.model()
    with library(model, case.batch()) as step:
        step()
    return [parameter.grad for parameter in model.parameters()]


def error_of(library: Callable, case: Case) -> float:
    """Largest difference of summed gradients from those of one process, relative to each tensor's largest entry."""
    expected_gradients, worst = gradients(alone, case), 0.0
    for mine, expected in zip(gradients(library, case), expected_gradients):
        dist.all_reduce(mine)
        worst = max(worst, float((mine - expected).abs().max() / expected.abs().max()))
    return worst


def seconds_of(library: Callable, case: Case, steps: int) -> list[float]:
    """Seconds of ``steps`` steps, after one that does not count."""
    model, seconds = case.model(), []
    with library(model, case.batch()) as step:
        for _ in range(1 + steps):
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def race(result: dict[str, Callable], case: Case, world: int, repeats: int) -> dict[str, list[float] | str]:
    """Seconds of steps by library, whose runs alternate; for a library that cannot run, the reason."""
    times: dict[str, list[float] | str] = {name: [] for name in result}
    for _ in tqdm(range(repeats), desc="rounds", disable=not sys.stderr.isatty()):
        for name, library in result.items():
            if not isinstance(times[name], str):
                taken = on_ranks(world, seconds_of, library, case, STEPS)
                times[name] = taken if isinstance(taken, str) else times[name] + taken
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=2048, help="for the times; the cases have 256 tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    result, console = libraries(args.processes), Console(width=None if sys.stdout.isatty() else 200)
    verdicts: dict[str, dict[str, float | str]] = {}
    for name, case in tqdm(CASES.items(), desc="cases", disable=not sys.stderr.isatty()):
        verdicts[name] = {library: on_ranks(args.processes, error_of, enter, case) for library, enter in result.items()}
    table = Table("case", *result, title=f"gradients compared with one process, {args.processes} processes")
    for name, of_party in verdicts.items():
        table.add_row(name, *(escape(x) if isinstance(x, str) else verdict(x) for x in of_party.values()))
    console.print(table)
    first = next(iter(verdicts.values()))
    runnable = {name: enter for name, enter in result.items() if not isinstance(first[name], str)}
    case = Case(length=args.seq_length, layers=4)
    times = race(runnable, case, args.processes, args.repeats)
    table = Table("library", "step", title=f"{args.seq_length} tokens, {case.layers} layers of {case.width}, fp32")
    for name, taken in times.items():
        table.add_row(name, escape(taken) if isinstance(taken, str) else f"{statistics.median(taken):.3f} s")
    console.print(table)
    if args.json:
        Path(args.json).write_text(json.dumps({"cases": verdicts, "seconds": times}, indent=1))


def verdict(error: float) -> str:
    return f"right ({error:.0e})" if error < TOLERANCE else f"WRONG by {100 * error:.0f} %"


if __name__ == "__main__":
    main()
