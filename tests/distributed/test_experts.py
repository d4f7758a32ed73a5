# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: losses, auxiliary losses, counts of tokens and all gradients do not depend on the grid."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.flags import (
    A2A,
    DEVICE,
    ETP1,
    FULL,
    P2,
    SELECTIVE,
    SP,
    STREAM,
    ZERO1,
    ZERO2,
    ZERO3,
    cp,
    ep,
    fpdt,
)
from tests.distributed.training_runs import (
    compare_gradients,
    data_of,
    evaluated_loss,
    first_gradients,
    make_job,
    take_steps,
)

EXPERTS = "--num-layers 2 --num-experts 8 --moe-ffn-hidden-size 48"
BOTH = "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.02 0.01"
MIXTRAL = f"{EXPERTS} --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.002 --eod-mask-loss"
PRE = f"{EXPERTS} {BOTH} --moe-router-pre-softmax --moe-shared-expert-intermediate-size 32 --eod-mask-loss"
DEEPSEEK = (
    f"{EXPERTS} --moe-layer-freq [0]+[1] --moe-router-score-function sigmoid --moe-router-topk 2 "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --moe-shared-expert-intermediate-size 32 "
    "--eod-mask-loss"
)
DROPPED = f"{EXPERTS} --moe-aux-loss-coeff 0.02 --moe-expert-capacity-factor 0.75 --eod-mask-loss"
FIRST = f"{DROPPED} --moe-token-drop-policy position"
SINKHORN = f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-router-topk 1 --eod-mask-loss"
SINKHORN2 = f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-z-loss-coeff 0.002 --eod-mask-loss"
DROPOUT = f"{MIXTRAL} --hidden-dropout 0.1 --attention-dropout 0.1"
DOCUMENTS = f"{MIXTRAL} --attention-mask document --micro-batch-size 1 --global-batch-size 2"

ADAPTED = f"{MIXTRAL} --lora-rank 4 --lora-targets linear_qkv linear_proj --lr 1e-2"
PACKED = f"{MIXTRAL} --attention-mask document"

REPLAY = f"{FULL} --moe-enable-routing-replay"
ONE = "--micro-batch-size 1"
NORMS = f"{MIXTRAL} --sandwich-norm"

# (processes, model, grid)
CASES = [
    (2, MIXTRAL, f"{SP} {ETP1} {ep(2)} {A2A}"),
    (4, DROPOUT, f"{cp(2, 2)} {ep(2)} {FULL} --keep-attention"),
    (2, DOCUMENTS, f"--ring-parallel-size 2 {ep(2)}"),
    (2, f"{DOCUMENTS} --moe-expert-capacity-factor 1", f"--ring-parallel-size 2 {ep(2)} {A2A}"),
    (2, SINKHORN, f"{cp(1, 2)} {ep(2)} {A2A} {FULL}"),
    (2, SINKHORN2, f"{cp(2, 1)} {ep(2)} {ZERO3}"),
    (2, DROPPED, f"{cp(2, 1)} {ep(2)} --ffn-chunks 3 --loss-chunks 3 {SELECTIVE} {ZERO2}"),
    (2, FIRST, f"{SP} {ep(1)} {fpdt(32, DEVICE)}"),
    (2, NORMS, f"{cp(1, 2)} {ep(2)} {fpdt(32, '--fpdt-offload', FULL)}"),
    (2, PACKED, f"{ep(2)} {A2A} {fpdt(32)} {ZERO1}"),
    (4, PRE, f"{SP} {cp(1, 2)} {ETP1} {ep(4)} {fpdt(64, STREAM)} {ZERO1}"),
    (2, DEEPSEEK, f"{P2} {ONE} {REPLAY}"),
]
CHANGES = (ONE,)  # these change the reference: a micro-batch is the unit of the load-balancing loss


def alone(router: Any) -> None:
    """A mistake: each rank has statistics of its own tokens."""
    router.tp_cp_group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def as_core_does(router: Any) -> None:
    """A mistake: the auxiliary losses times the tokens of this rank, not of all ranks (core's moe/router.py:466)."""
    from dataclasses import replace

    size, rule = router.tp_cp_group.size(), router.rule
    router.rule = replace(rule, aux_loss=rule.aux_loss / size, z_loss=rule.z_loss / size)


def all_tokens(router: Any) -> None:
    """A mistake: masked tokens count too."""
    route = router.forward
    router.forward = lambda x, positions, _: route(x, torch.where(positions < 0, ~positions, positions))


def run(flags: str, steps: int = 2, mistake: Any = None) -> dict[str, Any]:
    """Losses, norms, auxiliary losses and counts of each step, and the gradients of the first."""
    from megatron.training.model.expert_load import routers

    job = make_job(flags)
    for router in routers(job.model_chunks):
        if mistake is not None:
            mistake(router)
    batches = data_of(job)
    with first_gradients(job) as grads:
        results = take_steps(job, steps, batches)
    biases = {
        router.layer_number: router.expert_bias.tolist()
        for router in routers(job.model_chunks)
        if router.expert_bias is not None
    }
    return {
        "losses": [one.lm_loss for one in results],
        "norms": [one.grad_norm for one in results],
        "auxiliary": [one.experts.losses for one in results],
        "tokens": [one.experts.tokens_per_expert for one in results],
        "counted": [one.tokens for one in results],
        "grads": grads,
        "evaluated": evaluated_loss(job, batches),
        "biases": biases,
    }


def compare(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for rank, mine in enumerate(results):
        assert mine["losses"] == pytest.approx(expected["losses"], rel=1e-5), f"losses of rank {rank}"
        assert mine["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-5), f"gradient norm of rank {rank}"
        for one, other in zip(mine["auxiliary"], expected["auxiliary"], strict=True):
            assert one == pytest.approx(other, rel=1e-5), f"auxiliary losses of rank {rank}"
        assert mine["tokens"] == expected["tokens"], f"tokens of the experts on rank {rank}"
        assert mine["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
        for layer, bias in mine["biases"].items():
            assert bias == pytest.approx(expected["biases"][layer], abs=1e-7)
    compare_gradients([mine["grads"] for mine in results], expected["grads"], smallest=1e-12)


@pytest.mark.parametrize("world, model, grid", CASES)
@pytest.mark.usual(0, 1, 4, 8)
def test_experts_do_not_depend_on_the_grid(pool, reference, world, model, grid):
    changes = " ".join(flags for flags in CHANGES if flags in grid and flags not in model)
    compare(pool.run(run, world, f"{model} {grid}", timeout=180), reference(run, f"{model} {changes}".strip()))


def chunk_by_chunk(router: Any) -> None:
    """A mistake: each chunk has its own statistics."""
    route = router.forward
    router.forward = lambda x, positions=None, statistics=None: route(x)


def other_logits_in_the_second_pass(router: Any) -> None:
    from megatron.core.tensor_parallel.random import is_checkpointing

    gating = router.gating
    router.gating = lambda x: gating(x).roll(1, -1) if is_checkpointing() and torch.is_grad_enabled() else gating(x)


@pytest.mark.parametrize("model", [DEEPSEEK, SINKHORN, FIRST])
@pytest.mark.usual(0)
def test_a_recomputed_layer_takes_the_experts_of_its_first_pass(pool, reference, model):
    again, replayed = (
        pool.run(run, 1, f"{model} {recompute}", 1, other_logits_in_the_second_pass, timeout=120)[0]["tokens"]
        for recompute in (FULL, REPLAY)
    )
    assert replayed[0] == reference(run, model)["tokens"][0] != again[0]


def test_sinkhorn_of_each_rank_alone_is_noticed(pool, reference):
    wrong = pool.run(run, 2, f"{SINKHORN} {cp(1, 2)}", 1, alone, timeout=120)
    assert wrong[0]["tokens"][0] != reference(run, SINKHORN)["tokens"][0]


def with_one_mesh(flags: str) -> dict[str, Any]:
    """A mistake: ZeRO 2 and 3 split experts over ranks that hold different ones."""
    from unittest.mock import patch

    import torch.distributed as dist

    from megatron.training.model import fsdp

    every = dist.new_group()
    with patch.object(fsdp, "get_expert_data_parallel_group", lambda: every):
        return run(flags)


def test_a_wrong_mesh_is_noticed(pool, reference):
    wrong = pool.run(with_one_mesh, 2, f"{MIXTRAL} {cp(1, 2)} {ep(2)} {ZERO3}", timeout=120)
    with pytest.raises(AssertionError):
        compare(wrong, reference(run, MIXTRAL))


def collapsed(router: Any) -> None:
    """All tokens go to the first two experts: equal scores are decided by the number."""
    torch.nn.init.zeros_(router.weight)


@pytest.mark.parametrize(
    "world, grid",
    [(4, f"{cp(1, 2)} {ep(4)} {A2A}"), (4, f"{SP} {ep(2)} {A2A}"), (2, ep(2))],
)
@pytest.mark.usual(0)
def test_a_rank_whose_experts_have_no_tokens(pool, world, grid):
    expected = pool.run(run, 1, MIXTRAL, 1, collapsed, timeout=120)[0]
    assert all(sum(layer[2:]) == 0 < min(layer[:2]) for layer in expected["tokens"][0])
    compare(pool.run(run, world, f"{MIXTRAL} {grid}", 1, collapsed, timeout=120), expected)


def test_masked_tokens_are_left_out(reference):
    one = reference(run, MIXTRAL)
    for tokens, counted in zip(one["tokens"], one["counted"], strict=True):
        assert [sum(layer) for layer in tokens] == [2 * counted] * 2
    assert one["counted"][0] < 4 * 64  # the end of a document is masked


def test_experts_drop_the_tokens_beyond_their_capacity(reference):
    for model in (DROPPED, FIRST):
        dropped = reference(run, model)
        most = 0.75 * 2 * 2 * 64 / 8 * 2  # two micro-batches
        assert max(max(layer) for layer in dropped["tokens"][0]) <= most
        assert sum(dropped["tokens"][0][0]) < 2 * dropped["counted"][0]


def routed(flags: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and choices of 128 tokens in a layer's router."""
    from megatron.training.model.expert_load import routers

    router = next(routers(make_job(flags).model_chunks))
    weights, chosen = router(torch.randn(64, 2, router.weight.size(1), generator=torch.Generator().manual_seed(1)))
    return weights.detach(), chosen


@pytest.mark.parametrize("model", [DROPPED, FIRST])
def test_a_choice_beyond_the_capacity_has_no_weight(pool, model):
    weights, chosen = pool.run(routed, 1, model)[0]
    assert torch.equal(weights != 0, chosen)
    assert chosen.sum(dim=0).max() == 0.75 * 2 * 128 / 8 and chosen.sum() < 2 * 128


def test_biases_follow_the_load(reference):
    one = reference(run, DEEPSEEK)  # two steps of 0.01, up or down
    ((layer, biases),) = one["biases"].items()
    assert layer == 2 and len({round(abs(bias), 6) for bias in biases} - {0.0, 0.01, 0.02}) == 0
    first = one["tokens"][0][0]
    assert any(biases) and biases[first.index(min(first))] >= 0 >= biases[first.index(max(first))]


@pytest.mark.parametrize(
    "half", ["--bf16", "--fp16 --loss-scale 256", pytest.param(f"--bf16 {ZERO3}", marks=pytest.mark.full)]
)
def test_half_precision(pool, reference, half):
    """Near-ties may be ordered differently, so this is no comparison to the last bit; a lost factor would show."""
    model = f"{DEEPSEEK} --moe-aux-loss-coeff 1.0"  # the auxiliary loss is most of the router's gradient
    (right, *_), scale = pool.run(run, 1, model, 1, timeout=120), 256 if "fp16" in half else 1
    wrong = pool.run(run, 2, f"{model} {cp(1, 2)} {ep(2)} {A2A} {half}", 1, timeout=120)
    name = "decoder.layers.1.mlp.router.weight"
    for mine in wrong:
        assert mine["losses"] == pytest.approx(right["losses"], rel=1e-3)
        assert mine["auxiliary"][0] == pytest.approx(right["auxiliary"][0], rel=1e-2)
        grad = mine["grads"][name] / scale
        assert float((grad - right["grads"][name]).norm() / right["grads"][name].norm()) < 0.1
        assert all(round(bias, 8) in (-0.01, 0.0, 0.01) for bias in mine["biases"][2])  # not rounded to half precision
