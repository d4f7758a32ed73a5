# SPDX-License-Identifier: Apache-2.0
"""Masks and position schemes in whole training runs: losses and all gradients do not depend on the grid.

The reference of each is the same run on one process, in one piece; that this is right is what
`test_mask_attention.py` shows against dense attention.
"""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.test_training import FULL, GPT, GQA, P2, SELECTIVE, SP, T2, V2, ZERO1, ZERO3, check, cp
from tests.pairs import by_pairs, seconds, settings

STEPS = 2
DATA = Path(__file__).with_name("data")
MASK_FUNCTION = f"--attention-mask function --mask-function {DATA / 'mask_function.py'}:every_third"
BLOCKS = f"--attention-mask block-sparse --sparse-block-size 8 --sparse-pattern {DATA / 'blocks.json'}"
DOCUMENTS = "--attention-mask document"
RESET = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
WINDOW = "--window-size 15,0"
WIDE = "--window-size 39,0"
GLOBAL = "--attention-mask window --window-size 11,0 --window-global-tokens 4"
LONGFORMER = "--attention-mask block-sparse --sparse-block-size 8 --sparse-window-blocks 1"
BIGBIRD = f"{LONGFORMER} --sparse-pattern bigbird --sparse-random-blocks 2"
STRIDED = "--attention-mask block-sparse --sparse-block-size 4 --sparse-pattern strided --sparse-stride 3"
ALIBI = "--position-embedding-type alibi"
ONE = "--micro-batch-size 1 --global-batch-size 2"  # dealt by documents
FPDT = "--fpdt --fpdt-chunk-size 16"
FPDT_ALL = f"{FPDT} --fpdt-stream-hidden"

# (what is computed, [(processes, grid), ...])
LLAMA = [
    (WINDOW, [(2, cp(2, 1)), (2, "--ring-parallel-size 2"), (4, cp(2, 2)), (4, f"{FPDT} {cp(1, 2)} {ZERO1}")]),
    (WIDE, [(2, cp(1, 2)), (4, f"{T2} {SP} --ring-parallel-size 2"), (2, f"{FPDT_ALL} {cp(2, 1)}")]),
    (f"{WINDOW} --reset-attention-mask", [(2, cp(1, 2)), (4, f"{FPDT} {cp(2, 2)}"), (4, f"{P2} {cp(2, 1)}")]),
    (GLOBAL, [(2, cp(1, 2)), (4, cp(1, 4, "contiguous")), (4, f"{T2} {SP} {FPDT} {cp(2, 1)}")]),
    (LONGFORMER, [(2, cp(1, 2)), (4, cp(2, 2)), (4, f"{FPDT} {cp(1, 4)} {FULL}")]),
    (BIGBIRD, [(2, cp(2, 1)), (4, f"{cp(1, 4)} {ZERO1}"), (4, f"{P2} {cp(1, 2)} {FULL}")]),
    (STRIDED, [(2, cp(1, 2, "contiguous")), (4, f"{FPDT} {cp(2, 2)}"), (8, f"{T2} {SP} {cp(2, 2)}")]),
    (BLOCKS, [(2, cp(1, 2)), (2, f"{FPDT} {cp(2, 1)}"), (4, f"{cp(2, 2)} {SELECTIVE}")]),
    (MASK_FUNCTION, [(2, cp(1, 2)), (4, f"{cp(2, 2)} --mask-cpu-threshold 8"), (4, f"{FPDT} {T2} {SP} {cp(1, 2)}")]),
    (
        DOCUMENTS,
        [
            (2, cp(2, 1)),
            (2, cp(1, 2)),
            (4, f"{cp(2, 2)} {SELECTIVE}"),
            (4, f"{P2} {V2} {cp(1, 2)} {FULL}"),
            (2, f"{FPDT} {cp(2, 1)}"),
            (4, f"{FPDT} {cp(2, 2)} {FULL}"),
        ],
    ),
    (
        f"{DOCUMENTS} {ONE}",
        [
            (2, "--ring-parallel-size 2"),
            (4, "--ring-parallel-size 4"),
            (8, f"{T2} {SP} --ulysses-parallel-size 2 --ring-parallel-size 2"),
            (4, f"{FPDT} {T2} {SP} --ring-parallel-size 2"),
            (4, f"{FPDT_ALL} --ulysses-parallel-size 2 --ring-parallel-size 2"),
            (4, f"{P2} --ring-parallel-size 2 {FULL}"),
        ],
    ),
    (
        RESET,
        [(2, cp(1, 2)), (4, f"{cp(2, 2)} {ZERO1}"), (2, f"{FPDT} {cp(2, 1)}"), (4, f"{P2} {cp(2, 1)}")],
    ),
    (
        f"{RESET} {ONE}",
        [(2, "--ring-parallel-size 2"), (4, f"{FPDT} --ring-parallel-size 4"), (2, f"{P2} {SELECTIVE}")],
    ),
    (f"{RESET} --attention-mask full {ONE}", [(4, "--ring-parallel-size 4"), (2, f"{FPDT} {cp(2, 1)}")]),
    ("--reset-position-ids", [(2, cp(1, 2)), (4, f"{FPDT} {cp(2, 2)}")]),
    (
        ALIBI,
        [
            (2, T2),
            (2, cp(1, 2)),
            (4, f"{T2} {SP} {cp(2, 1)}"),
            (4, f"{FPDT} {cp(2, 2)}"),
            (8, f"{T2} {SP} {cp(2, 2)} {ZERO1}"),
            (4, f"{P2} {cp(2, 1)}"),
        ],
    ),
    (f"{ALIBI} --attention-mask full", [(2, cp(1, 2)), (2, f"{FPDT} {cp(2, 1)}")]),
    (f"{ALIBI} {WINDOW} --reset-attention-mask", [(2, cp(1, 2)), (4, f"{cp(2, 2)} {ZERO1}")]),
    (
        "--softmax-type learnable",
        [
            (2, cp(1, 2)),
            (4, f"{T2} {SP} {cp(2, 1)}"),
            (4, f"{FPDT} {cp(2, 2)} {FULL}"),
            (4, f"{P2} {cp(1, 2)} {SELECTIVE}"),
            (4, f"{ZERO3} {cp(2, 2)}"),
            (2, f"{FPDT_ALL} {cp(2, 1)}"),
        ],
    ),
    ("--softmax-type off-by-one", [(2, cp(1, 2)), (2, f"{FPDT} {cp(2, 1)}")]),
]
LEARNED = [
    (RESET, [(2, cp(1, 2)), (4, f"{T2} {SP} {cp(2, 1)}"), (2, f"{FPDT_ALL} {cp(2, 1)} --micro-batch-size 1")]),
    (f"{RESET} {ONE}", [(4, f"{T2} {SP} --ring-parallel-size 2"), (2, "--ring-parallel-size 2")]),
    (f"{WINDOW} {DOCUMENTS}", [(2, f"{ZERO3} {cp(1, 2)}"), (4, cp(2, 2))]),
]


def cases(groups):
    return [(world, what, grid) for what, runs in groups for world, grid in runs]


def covered(groups):
    """Each mask with Ring, which cuts it, and every setting once.

    How axes act on each other is tested without masks, and each mask on each axis in test_mask_attention.py.
    """

    def held(world, what, grid):
        return {what, *((what, level) if level.startswith("--ring") else level for level in settings(grid))}

    return by_pairs(cases(groups), held, seconds)


@pytest.fixture(scope="module")
def on_one_process(on_one_process):
    """The run that others must equal: of each mask a few steps."""
    return partial(on_one_process, steps=STEPS)


@pytest.mark.parametrize("world, what, grid", covered(LLAMA))
def test_llama_does_not_depend_on_the_grid(pool, on_one_process, world, what, grid):
    check(pool, on_one_process, world, f"{GQA} {what}", grid, llama=True, steps=STEPS)


@pytest.mark.parametrize("world, what, grid", by_pairs(cases(LEARNED), lambda world, what, grid: {what}, seconds))
def test_learned_positions_do_not_depend_on_the_grid(pool, on_one_process, world, what, grid):
    check(pool, on_one_process, world, f"{GPT} {what}", grid, llama=False, steps=STEPS)


def test_there_are_enough_cases():
    assert len(cases(LLAMA) + cases(LEARNED)) >= 60
    assert len(json.loads((DATA / "blocks.json").read_text())) == 8


def test_each_mask_changes_the_loss(on_one_process):
    """A mask that did nothing would pass every comparison above."""
    found = {what: on_one_process(f"{GQA} {what} --num-layers 2", True)[0][0] for what, _ in LLAMA}
    found["causal"] = on_one_process(f"{GQA} --num-layers 2", True)[0][0]
    assert len({round(loss, 7) for loss in found.values()}) == len(found), found
