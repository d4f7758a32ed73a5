# SPDX-License-Identifier: Apache-2.0
"""``--deterministic-mode``: a run repeats to the last bit."""

import os

import pytest
import torch

from megatron.training.refusal import Refusal
from megatron.training.setup import VARIABLES, make_deterministic
from tests.distributed.test_training import GQA, SP, T2, ZERO1, ZERO3, cp
from tests.distributed.training_runs import run_training
from tests.pairs import also_in_full

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


def run_and_look(flags: str, llama: bool) -> tuple:
    found = run_training(flags, llama, 3)
    return *found, torch.are_deterministic_algorithms_enabled(), {name: os.environ.get(name) for name in VARIABLES}


@pytest.mark.parametrize(
    "world, llama, flags",
    [
        (2, True, f"{GQA} {DROPOUT} {cp(2, 1)}"),
        (2, True, f"{GQA} --bf16 {T2} {SP} --loss-chunks 3"),
        *also_in_full(
            (4, True, f"{GQA} {DROPOUT} {cp(2, 2)}"),
            (2, False, f"{DROPOUT} {cp(1, 2)} {ZERO1} --fpdt --fpdt-chunk-size 13"),
            (2, False, f"{DROPOUT} {ZERO3} --micro-batch-size 1"),
        ),
    ],
)
def test_a_run_repeats(pool, world, llama, flags):
    flags = f"--num-layers 2 --deterministic-mode {flags}"
    first, second = (pool.run(run_and_look, world, flags, llama) for _ in range(2))
    for (losses, norms, grads, switched, variables), (again, norms_again, grads_again, _, _) in zip(first, second):
        assert losses == again and norms == norms_again
        assert all(torch.equal(grads_again[name], grad) for name, grad in grads.items())
        assert switched and variables == {name: value for name, (value, _) in VARIABLES.items()}
    plain = pool.run(run_training, world, flags.replace("--deterministic-mode", ""), llama, 3)[0][0]
    # The same run, not another one; in bf16 core's other lookup of embeddings adds its gradients up in another order.
    assert first[0][0] == pytest.approx(plain, rel=2e-4 if "bf16" in flags else 1e-6)


def test_the_user_may_choose_what_repeats(monkeypatch):
    chosen = {"NCCL_ALGO": "Ring"}
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)
    make_deterministic(chosen)
    assert chosen["NCCL_ALGO"] == "Ring" and chosen["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(Refusal, match="--deterministic-mode and the environment variable NCCL_ALGO=NVLS: .* unset it"):
        make_deterministic({"NCCL_ALGO": "NVLS"})
