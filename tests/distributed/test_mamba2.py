# SPDX-License-Identifier: Apache-2.0
"""Hybrid models with Mamba2 layers: losses and all gradients do not depend on the grid."""

from __future__ import annotations

import pytest

from tests.distributed.test_experts import held_here, resume, save
from tests.distributed.test_gated_delta_net import FPDT, run, without_states
from tests.distributed.training_runs import P2, SELECTIVE, SP, compare_runs, cp, layer_in_fp64, wrong_by

SIZES = (
    "--is-hybrid-model --mamba-num-heads 8 --mamba-head-dim 12 --mamba-state-dim 6 --mamba-num-groups 4 "
    "--init-method-std 0.1 --mamba-dt-min 0.01"
)
# All kinds of layers without experts, one of them with a window; positions, as Nemotron H has none, from RoPE.
HYBRID = (
    f"{SIZES} --num-layers 6 --hybrid-override-pattern M-M*-* --window-size 11,0 --window-attn-skip-freq [0,0,0,0,0,1]"
)
SHORT = f"{SIZES} --num-layers 4 --hybrid-override-pattern MM*-"
DROPOUT = f"{SHORT} --hidden-dropout 0.1 --attention-dropout 0.1"
DOCUMENTS = f"{SHORT} --reset-attention-mask --reset-position-ids"
EXPERTS = (
    f"{SIZES} --num-layers 4 --hybrid-override-pattern MEM- --num-experts 4 --moe-ffn-hidden-size 48 "
    "--moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-shared-expert-intermediate-size 48"
)

# (processes, model, grid)
CASES = [
    (4, HYBRID, f"{cp(1, 4, 'contiguous')} --linear-attention-exchange relay"),
    (4, HYBRID, f"{cp(2, 2)} --linear-attention-exchange heads --zero-stage 1"),
    (2, HYBRID, P2),
    (4, HYBRID, f"{SP} --zero-stage 3"),
    (2, DOCUMENTS, f"{cp(1, 2)} {FPDT}"),
    (4, DROPOUT, f"{SP} {cp(2, 1)}"),
    (4, SHORT, f"{SP} {cp(1, 2)} {SELECTIVE} --zero-stage 2 --ffn-chunks 3 --linear-attention-exchange gather"),
    (4, EXPERTS, f"{cp(2, 1)} --expert-model-parallel-size 4 {FPDT} --fpdt-stream-hidden"),
]


@pytest.fixture(scope="module")
def reference(pool, shared):
    """The same model on one process."""
    return lambda flags: shared(("mamba2", flags), lambda: pool.run(run, 1, flags, timeout=120)[0])


@pytest.mark.parametrize("world, model, grid", CASES)
@pytest.mark.usual(0, 4, 7)
def test_hybrids_do_not_depend_on_the_grid(pool, reference, world, model, grid):
    compare_runs(pool.run(run, world, f"{model} {grid}", timeout=180), reference(model))


@pytest.mark.parametrize("world, grid", [(2, cp(2, 1)), (4, f"{SP} {cp(1, 2)}"), (4, cp(2, 2))])
def test_a_layer_in_fp64(pool, shared, world, grid):
    expected = shared("mamba2 in fp64", lambda: pool.run(layer_in_fp64, 1, SHORT, timeout=120)[0])
    assert len(expected) == 10
    for mine in pool.run(layer_in_fp64, world, f"{SHORT} {grid}", timeout=120):
        for name in expected:
            assert wrong_by(mine, expected, name) < 1e-10, name


def test_a_layer_without_states_is_wrong(pool, shared):
    expected = shared("mamba2 in fp64", lambda: pool.run(layer_in_fp64, 1, SHORT, timeout=120)[0])
    wrong = pool.run(layer_in_fp64, 2, f"{SHORT} {cp(1, 2)}", without_states, timeout=120)[0]
    for name in ("out", "dx", "in_proj.weight"):
        assert wrong_by(wrong, expected, name) > 1e-2, name


@pytest.mark.parametrize(
    "world, flags",
    [(2, f"{HYBRID} {SP}"), (2, f"{EXPERTS} {P2}"), pytest.param(2, f"{HYBRID} {P2}", marks=pytest.mark.full)],
)
def test_bytes_of_weights_and_states_are_those_of_the_formula(pool, world, flags):
    for real, formula in pool.run(held_here, world, flags, timeout=120):
        assert real == formula


@pytest.mark.parametrize("saved, loaded", [((4, f"{SP} {cp(1, 2)} --zero-stage 1"), (2, P2))])
@pytest.mark.lab
def test_a_checkpoint_is_read_on_another_grid(pool, tmp_path, saved, loaded):
    after = pool.run(save, saved[0], f"{HYBRID} {saved[1]}", str(tmp_path), timeout=120)[0]
    for losses in pool.run(resume, loaded[0], f"{HYBRID} {loaded[1]}", str(tmp_path), timeout=120):
        assert losses == pytest.approx(after, rel=1e-5)
