#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Section 3.2 of the DeepSpeed-Ulysses paper: numbers sent per rank and layer over the number of ranks, by method.

    python examples/reproduce/ulysses/section_3_2.py [OUT_DIR]

One rank of a simulated world of P runs the forward pass of a real model, and all collectives and messages are counted.
A layer is the difference between models of two layers and one. The unit is N h, sequence length times width.
The rows are without and with GQA; for Ring, the rank that sends most is counted.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import Row, run_figure  # noqa: E402
from megatron.simulator.dry_run.recording.recorder import sent, transfer  # noqa: E402

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 512, 64, 8, 4
RANKS = (2, 4, 8, 16, 32, 64)
METHODS = {
    "Ulysses": "--ulysses-parallel-size {0}",
    "Ring": "--ring-parallel-size {0}",
    "Megatron-SP": "--tensor-model-parallel-size {0} --sequence-parallel",
}


class Traffic(TorchDispatchMode):
    """Counts, while it is active, the numbers (not bytes) that this rank sends to other ranks, by kind of message.

    A collective over n ranks on a message of M numbers counts as in a ring or pairwise algorithm:
    all-gather, reduce-scatter and all-to-all send ``M (n - 1) / n`` over every link; M is the complete message for the
    first two and this rank's part of it for the third; all-reduce is a reduce-scatter and an all-gather.

    Attributes:
        sent: numbers, by "all-to-all", "all-gather", "reduce-scatter", "all-reduce" and "send".
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        result = transfer(func, args, out) if func.namespace == "c10d" else None
        if result is not None and result[0] != "broadcast":
            kind, group, size = result
            itemsize = next(x.element_size() for x in tree_leaves(args) if isinstance(x, torch.Tensor))
            name = "send" if kind == "p2p" else kind.replace("_", "-")
            self.sent[name] += sent(kind, size, group.size()) // itemsize
        return out


def closed_form(method: str, ranks: int, group: int) -> float | None:
    """Published numbers in N h per layer: 4/P for Ulysses, 4 for Megatron; under GQA (USP paper, section on SP against
    TP-sp) the keys and values, half of Ulysses' four, shrink by the group of query heads that share them.
    """
    return {"Ulysses": (2 + 2 / group) / ranks, "Megatron-SP": 4.0}.get(method)


def exact_form(method: str, ranks: int, group: int) -> float | None:
    """Numbers in N h per layer that are exact for any P: a P-th part of a message stays on its rank, in all-to-all,
    all-gather and reduce-scatter. With more ranks than KV heads, each Ulysses rank gets a complete head, and
    megatron-core's TP ranks gather the queries, keys and values of all heads first.
    """
    others = (ranks - 1) / ranks
    if method == "Ulysses":
        kv_heads = max(HEADS // group, ranks)
        return others * (2 + 2 * kv_heads / HEADS) / ranks
    gathered = 1 + 2 / group if ranks > HEADS // group else 0
    return (4 + gathered) * others if method == "Megatron-SP" else None


def sent_by_a_layer(method: str, ranks: int, kv_heads: int, rank: int | None = None) -> float:
    """Numbers that one rank sends in a layer's forward pass, in N h.

    Args:
        rank: default the middle one; on a ring the one that sends most.
    """
    rank = busiest(ranks) if rank is None and method == "Ring" else ranks // 2 if rank is None else rank
    one, two = (forward(METHODS[method].format(ranks), ranks, rank, kv_heads, layers) for layers in (1, 2))
    return (sum(two.values()) - sum(one.values())) / (LENGTH * HEADS * HEAD_DIM)


def busiest(ranks: int) -> int:
    """The ring rank that sends most keys."""
    import megatron.context_parallel as cp
    from megatron.context_parallel.attention.ring_plan import attention_plan
    from megatron.context_parallel.layout.spans import count

    layout = cp.SequenceLayout(LENGTH, cp.abstract_grid(ring=ranks))
    plans = [attention_plan(layout, cp.Causal()).ring(rank=rank) for rank in range(ranks)]
    return max(plans, key=lambda plan: sum(count(hop.keys_out.rows) for hop in plan.hops)).rank


def forward(flags: str, ranks: int, rank: int, kv_heads: int, layers: int) -> Counter[str]:
    """Numbers sent, by kind of message, in the forward pass of a model."""
    from megatron import platform
    from megatron.context_parallel.core.groups import initialize_grid
    from megatron.context_parallel.layout.sequence_layout import SequenceLayout
    from megatron.platform.simulated_cluster import simulated_world
    from megatron.training.arguments.parser import parse
    from megatron.training.model.build import build_model
    from megatron.training.setup import seed_everything

    words = (
        f"--num-layers {layers} --hidden-size {HEADS * HEAD_DIM} --num-attention-heads {HEADS} --group-query-attention "
        f"--num-query-groups {kv_heads} --seq-length {LENGTH} --max-position-embeddings {LENGTH} "
        "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 "
        f"--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --attention-dropout 0 --hidden-dropout 0 {flags}"
    )
    config = parse(words.split(), None, ranks)
    parallel, device = config.parallel, platform.select("cpu", 0, None).device
    with simulated_world(ranks, rank), torch.no_grad():
        grid = initialize_grid(
            ulysses=parallel.ulysses_parallel_size,
            ring=parallel.ring_parallel_size,
            tensor=parallel.tensor_model_parallel_size,
        )
        layout = SequenceLayout(LENGTH, grid, parallel.context_parallel_balance)
        seed_everything(1, grid)
        (model,) = build_model(config, grid, layout, 128, device)
        tokens = torch.zeros(1, layout.local_length, dtype=torch.long)
        with Traffic() as traffic:
            model(tokens, layout.positions[None], None, labels=tokens, loss_mask=torch.ones(tokens.shape))
    return traffic.sent


def rows_of(ranks: tuple[int, ...] = RANKS) -> list[Row]:
    rows = []
    for kv_heads in (HEADS, KV_HEADS):
        group = HEADS // kv_heads
        heads = f"{HEADS} heads" + (f", {kv_heads} of keys and values" if group > 1 else "")
        for method in METHODS:
            for size in ranks:
                ours, exact = sent_by_a_layer(method, size, kv_heads), exact_form(method, size, group)
                note = "for any P: " + ("as ours" if exact and abs(ours / exact - 1) < 1e-9 else f"{exact}, NOT ours")
                if exact is None:
                    note = "keys and values travel around the ring; masked ones are not sent"
                elif size > kv_heads:
                    note += "; a complete KV head per rank" if method == "Ulysses" else "; core gathers all of q, k, v"
                label = {"heads": heads, "method": method, "ranks": size}
                rows.append(Row(label, closed_form(method, size, group), ours, "simulated", "N h per layer", note))
    return rows


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    title = "Ulysses, section 3.2: numbers that a rank sends in a layer's forward pass"
    run_figure(__file__, __doc__, title, rows_of, over="ranks", panel="heads", log=True)
