# SPDX-License-Identifier: Apache-2.0
"""Layers whose queries choose their keys (DSA): losses, the indexer's too, and all gradients on any grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.flags import DEVICE, FULL, P2, RUN, SELECTIVE, SHAPE, SP, STREAM, T2, cp, fpdt
from tests.distributed.training_runs import (
    compare_gradients,
    compare_runs,
    make_job,
    train_and_save,
    train_job,
    wrong_by,
)
from tests.pairs import also_in_full
from tests.program import ENVIRONMENT, run_forked

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_llama.py"
SIZES = "--kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --q-lora-rank 24 --qk-layernorm"
INDEXER = "--dsa-indexer-n-heads 3 --dsa-indexer-head-dim 16 --dsa-indexer-topk 12 --dsa-indexer-loss-coeff 0.5"
DSA = (
    f"--num-layers 2 --multi-latent-attention --norm-epsilon 1e-6 --init-method-std 0.1 {SIZES} "
    f"--experimental-attention-variant dsa {INDEXER}"
)
SPARSE = f"{DSA} --dsa-indexer-use-sparse-loss"
WARM_UP = f"{DSA} --dsa-warm-up"
DOCUMENTS = "--attention-mask document --reset-position-ids --micro-batch-size 1 --global-batch-size 2"
PACKED = "--attention-mask document --reset-position-ids"  # two samples of a batch with documents of their own
SHARED = f"{SPARSE} --num-layers 4 --dsa-indexer-topk-freq 2"
UNEVEN = "--eod-mask-loss"  # mock data have ends of documents, so ranks count different numbers of tokens
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48 --moe-router-topk 2 --moe-router-score-function sigmoid"

# (processes, model, grid)
CASES = [
    (4, f"{SPARSE} {UNEVEN}", f"{SP} {cp(1, 2)}"),
    (4, f"{DSA} {UNEVEN}", f"{T2} {cp(2, 1)}"),
    (2, f"{WARM_UP} {UNEVEN}", cp(1, 2)),
    (4, SHARED, f"{P2} {cp(1, 2)}"),
    (4, f"{SPARSE} {UNEVEN}", f"{SP} {cp(1, 2)} {fpdt(24)}"),
]
MORE = [
    *((ulysses * ring, f"{model} {UNEVEN}", cp(ulysses, ring))
      for model in (SPARSE, DSA, WARM_UP) for ulysses, ring in ((2, 1), (1, 4), (2, 2))),
    *((2, f"{model} {UNEVEN}", grid) for model in (SPARSE, DSA, WARM_UP) for grid in (P2, SP, "--zero-stage 1")),
    (2, f"{SPARSE} {UNEVEN}", f"{cp(1, 2)} {FULL}"),
    (2, f"{DSA} {UNEVEN}", f"{cp(1, 2)} {SELECTIVE}"),
    (2, SHARED, f"{cp(1, 2)} {FULL}"),
    (4, SHARED, f"{SP} {cp(2, 1)}"),
    (4, f"{SPARSE} {EXPERTS}", f"{cp(2, 2)} --expert-model-parallel-size 2"),
    (2, f"{SPARSE} {DOCUMENTS}", cp(1, 2)),
    (4, f"{DSA} {DOCUMENTS}", cp(2, 2)),
    (4, f"{WARM_UP} {DOCUMENTS}", f"{SP} {cp(1, 2)}"),
    (2, f"{SPARSE} --attention-mask window --window-size 20 0", cp(1, 2)),
    *((ulysses * ring, f"{SPARSE} {UNEVEN}", f"{cp(ulysses, ring)} {fpdt(24, *how)}")
      for ulysses, ring, how in ((2, 1, ()), (1, 2, (FULL,)), (2, 2, (STREAM, FULL)), (1, 2, (DEVICE,)))),
    (2, f"{SPARSE} {UNEVEN}", f"{T2} {fpdt(16)}"),
    (2, f"{SPARSE} {DOCUMENTS}", f"{cp(1, 2)} {fpdt(16)}"),
    (4, f"{SPARSE} {PACKED} {UNEVEN}", f"{SP} {cp(2, 1)} {fpdt(24)}"),
    (2, SHARED, f"{cp(1, 2)} {fpdt(24)}"),
    (4, SHARED, f"{P2} {cp(1, 2)} {fpdt(24, FULL)}"),
    (4, f"{SPARSE} {EXPERTS}", f"{cp(2, 2)} --expert-model-parallel-size 2 {fpdt(16)}"),
]  # fmt: skip


def run(flags: str, wrong: str = "") -> tuple[list[float], list[float], dict[str, torch.Tensor], list[float]]:
    """Losses, gradient norms of two steps, gradients of the first, and the indexer's losses."""
    from megatron.context_parallel.core.mixers import sparse_attention
    from megatron.training import step

    losses, log = [], step.layer_loss

    def keep(*args: Any) -> dict[str, float]:
        losses.append(log(*args)["indexer loss"])
        return {"indexer loss": losses[-1]}

    right = sparse_attention.SparseLatentAttention._counted

    def mean_of_rank(self: Any, batch: Any, like: torch.Tensor) -> torch.Tensor:
        counted = right(self, batch, like)
        return counted * (like.numel() / counted.sum())  # as if each rank counted equally many tokens

    planted = mean_of_rank if wrong == "mean" else right
    with (
        mock.patch.object(step, "layer_loss", keep),
        mock.patch.object(sparse_attention.SparseLatentAttention, "_counted", planted),
    ):
        job = make_job(flags)
        return *train_job(job, 2), losses


@pytest.mark.parametrize("world, model, grid", [*CASES, *also_in_full(*MORE)])
@pytest.mark.usual(0, 2, 3, 4)
def test_choices_and_their_loss_do_not_depend_on_the_grid(pool, reference, world, model, grid):
    results, expected = pool.run(run, world, f"{model} {grid}", timeout=180), reference(run, model)
    compare_runs([result[:3] for result in results], expected[:3])
    for result in results:
        assert result[3] == pytest.approx(expected[3], rel=1e-5) and min(result[3]) > 0
    trained = {name for result in results for name in result[2]}
    assert any("indexer" in name for name in trained)
    assert ("--dsa-warm-up" in model) == all("indexer" in name for name in trained)


def test_a_mean_over_each_rank_is_another_loss(pool, reference):
    """A control: the loss of the indexer averaged over the tokens of a rank."""
    model = f"{SPARSE} {UNEVEN}"
    results, right = pool.run(run, 2, f"{model} {cp(1, 2)}", "mean", timeout=180), reference(run, model)
    name = next(name for name in right[2] if "linear_wq_b" in name)
    assert wrong_by(results[0][2], right[2], name) > 1e-3


def test_all_keys_are_dense_attention(pool, reference):
    """With as many chosen keys as tokens, both losses are the same, and attention is that of latents."""
    everything = INDEXER.replace("topk 12", "topk 64")
    sparse, dense = (pool.run(run, 1, model.replace(INDEXER, everything))[0] for model in (SPARSE, DSA))
    compare_gradients([sparse[2]], dense[2])
    assert sparse[3] == pytest.approx(dense[3], rel=1e-5)
    plain = pool.run(latents, 1, DSA.split(" --experimental")[0])[0]
    assert sparse[0] == pytest.approx(plain[0], rel=1e-5)
    compare_gradients([{name: sparse[2][name] for name in plain[2]}], plain[2])


def go_on(flags: str, folder: str) -> tuple[int, list[float], list[float], list[str]]:
    """What a run does that loads the checkpoint in ``folder``: its first iteration, losses, the indexer's, notes."""
    from megatron.training import step

    job, found, log = make_job(f"{flags} --load {folder}"), [], step.layer_loss
    with mock.patch.object(step, "layer_loss", lambda *args: found.append(log(*args)) or found[-1]):
        start = job.progress.iteration
        losses = train_job(job, 2)[0]
    return start, losses, [one["indexer loss"] for one in found], job.config.notes


@pytest.mark.parametrize("keys, error", [(64, 1e-6), (12, 0.01)])
@pytest.mark.usual(0)
def test_a_warmed_up_run_goes_on_sparse(pool, tmp_path, keys, error):
    """A second run without the flag takes the checkpoint, on another grid; with all keys its loss is the same."""
    choice = f"--dsa-indexer-topk {keys}"
    pool.run(train_and_save, 2, f"{WARM_UP} {choice} {cp(1, 2)}", str(tmp_path))
    again, dense, taught, _ = pool.run(go_on, 1, f"{WARM_UP} {choice}", str(tmp_path))[0]
    sparse = f"{DSA} {choice} --use-checkpoint-args {cp(2, 1)}"
    start, losses, ours, notes = pool.run(go_on, 2, sparse, str(tmp_path))[0]
    assert again == start == 2 and any("the optimizer begins anew" in note for note in notes)
    assert losses[0] == pytest.approx(dense[0], rel=error) and ours[0] == pytest.approx(taught[0], rel=10 * error)
    assert losses[1] < dense[1] - 0.05  # all weights learn, not only the indexers


@pytest.mark.lab
def test_a_warm_up_is_a_stage_of_a_run(tmp_path):
    words = f"{SHAPE} {RUN} {DSA} --save {tmp_path}/c --load {tmp_path}/c --log-jsonl {tmp_path}/log.jsonl"
    words = words.replace("--seq-length 64 ", "").replace("--train-iters 20", "--train-iters 4").split()
    schedule = ["--seq-length-schedule", "0:64 --dsa-warm-up 2:64"]
    done = run_forked(PROGRAM, [*words, *schedule], ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trains all weights: the optimizer begins anew" in done.stdout
    first, second, third, fourth = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert [row["stage"] for row in (first, second, third, fourth)] == [1, 1, 2, 2]
    assert third["lm_loss"] == pytest.approx(first["lm_loss"], rel=0.01) and third["lm_loss"] > fourth["lm_loss"] + 0.05
    assert 0 < second["indexer loss"] < first["indexer loss"]


def latents(flags: str) -> tuple:
    return train_job(make_job(flags), 2)
