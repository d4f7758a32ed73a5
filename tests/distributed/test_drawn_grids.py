# SPDX-License-Identifier: Apache-2.0
"""Grids drawn from all settings, for every kind of model: losses and gradients are those of one process (--full).

The files of the kinds have the few cases that every run needs. ``python -m tests.distributed.test_drawn_grids`` prints
the drawn ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from math import prod

import pytest

from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from tests.distributed import test_dropout as dropout
from tests.distributed import test_experts as experts
from tests.distributed import test_gated_delta_net as states
from tests.distributed import test_latent_attention as latents
from tests.distributed import test_later_tokens as later
from tests.distributed import test_layer_rules as rules
from tests.distributed import test_mamba2 as mamba2
from tests.distributed import test_rope as rope
from tests.distributed import test_state_adapters as adapters
from tests.distributed import test_training as training
from tests.distributed.flags import (
    A2A,
    DEVICE,
    ETP1,
    FULL,
    HOST,
    LLAMA,
    P2,
    R2,
    RUN,
    SELECTIVE,
    SHAPE,
    SP,
    STREAM,
    T2,
    U2,
    V2,
    ZERO1,
    ZERO2,
    ZERO3,
    ep,
    fpdt,
)
from tests.distributed.test_fpdt import TWO
from tests.distributed.test_gated_delta_net import UNEVEN
from tests.distributed.training_runs import compare_runs

# Of each list one is drawn; "" stands for the default and is drawn more often where other lists need room.
AXES = [
    ["", "", T2, SP],
    [
        "",
        U2,
        R2,
        f"{U2} {R2}",
        "--ring-parallel-size 4",
        f"{R2} --context-parallel-balance contiguous",
        f"{R2} --cp-comm-type all_gather",
    ],
    ["", "", "", P2, f"{P2} {UNEVEN}", f"{P2} {V2}"],
    ["", "", ZERO1, ZERO2, ZERO3, f"{ZERO1} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"],
    ["", "", FULL, SELECTIVE, TWO, f"{FULL} --keep-attention", f"{FULL} {HOST}", training.BLOCK],
    ["", "", fpdt(16), fpdt(13, STREAM), fpdt(22, DEVICE), fpdt(32), "--ffn-chunks 3"],
    ["", "--loss-chunks 3"],
]
EP = [*map(ep, (1, 2, 4)), f"{ep(2)} {A2A}", f"{ep(2)} {ETP1}"]
EXCHANGES = ["", *(f"--linear-attention-exchange {how}" for how in ("relay", "gather", "heads"))]
CHUNKED = [f"{training.GQA} {what}" for what in ("", "--qk-layernorm", *training.MASKS)]
# By kind: its models, and further settings.
KINDS = {
    "llama": ([*CHUNKED, training.MQA, training.MHA, *(f"{training.GQA} {flags}" for flags in (
        rope.YARN, rope.LLAMA3, rope.PART, rope.LINEAR, dropout.BOTH, dropout.HIDDEN, dropout.WEIGHTS))], []),
    "gpt": ([f"{training.GPT} {what}" for what in ("", training.GQA, training.RESET, "--attention-mask full",
                                                   dropout.BOTH)], ["", "--partition-position-embedding"]),
    "experts": ([experts.MIXTRAL, experts.PRE, experts.DEEPSEEK, experts.DROPPED, experts.FIRST, experts.SINKHORN,
                 experts.SINKHORN2, experts.DROPOUT, experts.DOCUMENTS, experts.PACKED, experts.NORMS], EP),
    "states": ([states.HYBRID, states.SHORT, states.DROPOUT, states.DOCUMENTS, states.ONE], EXCHANGES),
    "mamba2": ([mamba2.HYBRID, mamba2.SHORT, mamba2.DROPOUT, mamba2.DOCUMENTS], EXCHANGES),
    "states and experts": ([states.EXPERTS, mamba2.EXPERTS], EP),
    "latents": ([latents.MLA, latents.YARN, latents.PLAIN, latents.DROPOUT, latents.DOCUMENTS, latents.WINDOW],
                ["", latents.SENT]),
    "latents and experts": ([latents.EXPERTS], EP),
    "rules": ([rules.GEMMA, rules.LLAMA4, rules.INSIDE, rules.DOCUMENTS, f"{rules.DOCUMENTS} {rules.ONE}"], []),
    "later tokens": ([later.MTP, later.TIED, later.DOCUMENTS, later.LATENT, later.LAYERS, later.ONE], []),
    "later tokens and experts": ([later.EXPERTS, later.DEEPSEEK], EP),
    "adapters": ([adapters.DELTA, adapters.FEW, adapters.MAMBA, adapters.ALONE, adapters.LAST], EXCHANGES),
}  # fmt: skip
NUMBERED = [(kind, number) for kind, (models, _) in KINDS.items() for number in range(max(16, 2 * len(models)))]
MODULES = {"experts": experts, "states": states, "mamba2": states, "latents": latents, "rules": rules, "later": later,
           "adapters": adapters}  # fmt: skip


@cache
def drawn(kind: str, number: int) -> tuple[int, str, str]:
    """(processes, model, grid) of a case that the program accepts."""
    draw, (models, further) = random.Random(f"{kind} {number}"), KINDS[kind]
    while True:
        model, data = models[number % len(models)], draw.choice((1, 1, 2))
        grid = " ".join(filter(None, map(draw.choice, [*AXES, further or [""]])))
        words = f"{SHAPE} {RUN} {model} {grid}".split()
        sizes = [int(words[at + 1]) for at, word in enumerate(words) if word in SPLIT]
        world = data * prod(sizes)
        try:
            parse(words, LLAMA if is_llama(model) else None, world)
        except Refusal:
            continue
        if world <= 4 or (world == 8 and not number % 8):
            return world, model, grid


SPLIT = [f"--{axis}-parallel-size" for axis in ("tensor-model", "ulysses", "ring", "pipeline-model")]


def is_llama(model: str) -> bool:
    return later.OF_GPT not in model and not model.startswith(training.GPT)


def cases() -> Iterator[tuple[int, str, str]]:
    return (drawn(*one) for one in NUMBERED)


@pytest.mark.full
@pytest.mark.parametrize("kind, number", NUMBERED)
def test_a_drawn_grid_computes_what_one_process_computes(pool, reference, on_one_process, kind, number):
    world, model, grid = drawn(kind, number)
    print(world, model, grid)
    if kind in ("llama", "gpt"):
        training.check(pool, on_one_process, world, model, grid, llama=kind == "llama", steps=2)
        return
    module = MODULES[kind.split()[0]]
    compare, alone = getattr(module, "compare", compare_runs), reference(module.run, model)
    results = pool.run(module.run, world, f"{model} {grid}", timeout=180)
    # Gradients of A_log and dt_bias are sums over all tokens in fp32: the largest error measured is 1.6e-5.
    compare(results, alone, 3e-5) if module is states else compare(results, alone)


if __name__ == "__main__":
    for case in cases():
        print(*case)
