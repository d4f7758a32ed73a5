# SPDX-License-Identifier: Apache-2.0
"""Hybrid models with Mamba2 layers: losses and all gradients do not depend on the grid."""

from __future__ import annotations

import pytest

from tests.distributed.flags import P2, SELECTIVE, SP, cp
from tests.distributed.test_gated_delta_net import FPDT, run
from tests.distributed.training_runs import compare_runs

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


@pytest.mark.parametrize("world, model, grid", CASES)
@pytest.mark.usual(0, 4, 7)
def test_hybrids_do_not_depend_on_the_grid(pool, reference, world, model, grid):
    compare_runs(pool.run(run, world, f"{model} {grid}", timeout=180), reference(run, model))
