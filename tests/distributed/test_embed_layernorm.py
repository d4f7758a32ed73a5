# SPDX-License-Identifier: Apache-2.0
"""--embed-layernorm: losses and all gradients, the norm's among them, do not depend on the grid. That it is BLOOM's is
test_hugging_face_load.py's to show."""

from __future__ import annotations

import pytest

from tests.distributed.test_checkpoint import resume, train_and_save
from tests.distributed.test_fpdt import STREAM, fpdt
from tests.distributed.test_training import P2, SP, T2, ZERO1, check, cp
from tests.pairs import also_in_full

SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0"
BLOOM = f"{SMALL} --embed-layernorm --position-embedding-type alibi"
LEARNED = f"{SMALL} --embed-layernorm"
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.mark.parametrize(
    "world, model, grid",
    [
        (4, BLOOM, f"{T2} {SP} {cp(2, 1)} {ZERO1}"),
        (2, LEARNED, f"{T2} {SP}"),  # words are not scattered before the norm
        (2, BLOOM, f"{T2} {SP} {fpdt(22, STREAM)}"),
        *also_in_full(
            (4, BLOOM, f"{P2} {cp(1, 2)}"),
            (2, f"{BLOOM} {UNTIED}", "--zero-stage 3 --micro-batch-size 1"),
            (2, LEARNED, T2),
            (4, LEARNED, f"{T2} {SP} {cp(1, 2)} --partition-position-embedding"),
            (2, BLOOM, "--zero-stage 2 --micro-batch-size 1"),
            (2, f"{BLOOM} {UNTIED}", f"{P2} --recompute-granularity full --recompute-method uniform "
             "--recompute-num-layers 1"),
        ),
    ],
)  # fmt: skip
def test_losses_and_gradients(pool, on_one_process, world, model, grid):
    check(pool, on_one_process, world, model, grid, llama=False, steps=2)


def test_saved_and_loaded_on_another_grid(pool, tmp_path):
    flags = f"{SMALL} --embed-layernorm --micro-batch-size 1"
    _, after = pool.run(train_and_save, 2, f"{flags} --zero-stage 3", str(tmp_path), 1, 2, timeout=120)[0]
    first, resumed = pool.run(resume, 2, f"{flags} {T2} {SP} {ZERO1}", str(tmp_path), 2, timeout=120)[0]
    assert first == 1 and resumed == pytest.approx(after, rel=1e-5)
