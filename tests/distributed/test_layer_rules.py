# SPDX-License-Identifier: Apache-2.0
"""Layers with different masks and RoPE: losses and all gradients do not depend on the grid."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.flags import FULL, P2, SP, cp, fpdt
from tests.distributed.training_runs import compare_gradients, make_job, run_training
from tests.pairs import also_in_full

GEMMA = (
    "--num-layers 6 --window-size 11,0 --window-attn-skip-freq 3 --rotary-base 1000000 --rotary-base-local 500 "
    "--softmax-type learnable --qk-layernorm"
)
LLAMA4 = "--num-layers 4 --window-size 15,0 --window-attn-skip-freq [1,1,0,1] --no-rope-freq [0,0,1,0]"
# Options of attention and of the layer around it, in one model.
INSIDE = (
    "--num-layers 4 --group-query-attention --num-query-groups 4 --window-size 11,0 --window-attn-skip-freq 2 "
    "--attn-logit-softcapping 0.5 --add-qkv-bias --rotary-percent 0.5 --qk-layernorm --softmax-type off-by-one "
    "--attention-output-gate --softmax-scale 0.7 --sandwich-norm --scale-embeddings --final-logit-softcapping 2 "
    "--init-method-std 0.1"
)
DOCUMENTS = f"{GEMMA} --reset-attention-mask --reset-position-ids"
ONE = "--micro-batch-size 1"

V3 = "--num-virtual-stages-per-pipeline-rank 3"
UNEVEN = "--decoder-first-pipeline-num-layers 2"  # the stages' layers have different rules
FPDT, CHUNKS = fpdt(16), fpdt(32)

# (processes, model, grid)
CASES = [
    (2, GEMMA, cp(2, 1)),
    (2, LLAMA4, f"{SP} --zero-stage 1"),
    (2, f"{DOCUMENTS} {ONE}", cp(1, 2, "documents")),
    (4, DOCUMENTS, f"{P2} {UNEVEN} {cp(2, 1)}"),
    (2, INSIDE, f"{cp(1, 2)} {CHUNKS} --fpdt-stream-hidden {FULL}"),
    (2, LLAMA4, f"{cp(1, 2)} --cp-comm-type all_gather --loss-chunks 3 --zero-stage 2"),
]


def run(flags: str) -> tuple[list[float], list[float], dict]:
    return run_training(flags, steps=2)


def compare(results: list[tuple], expected: tuple) -> None:
    for rank, (losses, norms, _) in enumerate(results):
        assert losses == pytest.approx(expected[0], rel=1e-5), f"losses of rank {rank}"
        assert norms[0] == pytest.approx(expected[1][0], rel=1e-5), f"gradient norm of rank {rank}"
    compare_gradients([grads for *_, grads in results], expected[2], smallest=1e-12)


@pytest.mark.parametrize("world, model, grid", CASES)
@pytest.mark.usual(0, 1, 5)
def test_rules_of_layers_do_not_depend_on_the_grid(pool, reference, world, model, grid):
    compare(pool.run(run, world, f"{model} {grid}", timeout=180), reference(run, model))


# What each model would compute without one of its rules.
CONTROLS = {
    "all layers full": (GEMMA, GEMMA.replace("--window-size 11,0 --window-attn-skip-freq 3", "").replace(
        "--rotary-base-local 500", "")),
    "all layers with the window": (GEMMA, GEMMA.replace("--window-attn-skip-freq 3", "").replace(
        "--rotary-base-local 500", "")),
    "one base": (GEMMA, GEMMA.replace("--rotary-base-local 500", "")),
    "RoPE everywhere": (LLAMA4, LLAMA4.replace("--no-rope-freq [0,0,1,0]", "")),
    **{
        flags: (INSIDE, INSIDE.replace(flags, ""))
        for flags in ("--attn-logit-softcapping 0.5", "--rotary-percent 0.5", "--qk-layernorm", "--sandwich-norm",
                      "--softmax-type off-by-one", "--attention-output-gate", "--softmax-scale 0.7",
                      "--scale-embeddings", "--final-logit-softcapping 2")
    },
    "other layers": (LLAMA4, LLAMA4.replace("[1,1,0,1]", "[1,0,1,1]")),
}  # fmt: skip


USUAL = ("all layers full", "one base", "RoPE everywhere", "--attn-logit-softcapping 0.5", "--attention-output-gate")


@pytest.mark.parametrize("what", [*USUAL, *also_in_full(*(name for name in CONTROLS if name not in USUAL))])
@pytest.mark.usual(2, 4)
def test_the_rules_matter(pool, reference, what):
    model, without = CONTROLS[what]
    with pytest.raises(AssertionError, match="gradient norm|losses"):
        compare(pool.run(run, 2, f"{without} {cp(1, 2)}", timeout=120), reference(run, model))


def rules(flags: str) -> list[tuple[int, str, Any]]:
    """(number, mask, base of RoPE) of this rank's layers."""
    job, found = make_job(flags), []
    for chunk in job.model_chunks:
        for layer in chunk.module.decoder.layers:
            core = layer.self_attention.core_attention
            rotary = core.settings.rotary
            found.append((layer.layer_number, type(core.rule.mask).__name__, rotary and rotary.rope.base))
    return found


@pytest.mark.parametrize("grid", [f"{P2} {UNEVEN}", f"{P2} {V3}"])
def test_numbers_of_layers_are_those_of_the_complete_model(pool, grid):
    found = sorted(one for rank in pool.run(rules, 2, f"{GEMMA} {grid}") for one in rank)
    local, whole = ("Window", 500), ("Causal", 1000000)
    assert found == [(n, *(local if n % 3 else whole)) for n in range(1, 7)]
