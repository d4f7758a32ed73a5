# SPDX-License-Identifier: Apache-2.0
"""The experts that the router chooses for each token, and settings of experts that are refused."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

from megatron.context_parallel.core import experts
from megatron.context_parallel.core.expert_choice import (
    RouterRule,
    balance,
    balancing_loss,
    best,
    capacity,
    choose,
    even_choice,
    probability_sums,
    within_capacity,
    z_loss,
)
from megatron.context_parallel.core.experts import SUMS, ExpertRouter
from megatron.formulas.device_memory import device_memory
from megatron.formulas.flops import forward_flops
from megatron.formulas.parameters import stage_parameters
from megatron.formulas.strategy import Strategy, Workload
from megatron.inference.load import check_experts
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config
from megatron.training.settings.model_settings import layer_pattern
from megatron.training.settings.models import LLAMA_DEFAULTS, model_shape

RULES = [
    RouterRule(topk=topk, score_function=score, pre_softmax=pre, num_groups=groups, group_topk=chosen, **more)
    for (score, pre), (topk, groups, chosen), more in product(
        [("softmax", False), ("softmax", True), ("sigmoid", False)],
        [(1, None, None), (2, None, None), (4, 4, 2), (2, 2, 1)],
        [{}, {"topk_scaling_factor": 2.5}],
    )
]
RULES += [RouterRule(topk=3, score_function="sigmoid", expert_bias=True)]


def test_sqrtsoftplus_is_written_out():
    """DeepSeek V4's scores, with its bias: core 0.16 does not have them."""
    logits, bias = logits_of(5), torch.linspace(0.5, -0.5, 8)
    rule = RouterRule(topk=3, score_function="sqrtsoftplus", expert_bias=True, topk_scaling_factor=2.0)
    weights, chosen = choose(logits, rule, bias)
    for row, one, mine in zip(logits.tolist(), weights, chosen):
        scores = [math.sqrt(math.log1p(math.exp(x))) for x in row]
        best = sorted(range(8), key=lambda expert: -scores[expert] - float(bias[expert]))[:3]
        total = sum(scores[expert] for expert in best)
        expected = [2 * scores[expert] / total if expert in best else 0.0 for expert in range(8)]
        assert one.tolist() == pytest.approx(expected, rel=1e-5) and mine.nonzero()[:, 0].tolist() == sorted(best)
    sums = probability_sums(logits, rule, torch.ones(5))
    scores = torch.log1p(logits.double().exp()).sqrt()
    torch.testing.assert_close(sums[0].double(), (scores / scores.sum(1, keepdim=True)).sum(0), rtol=1e-5, atol=1e-6)


def logits_of(tokens: int = 40, experts: int = 8) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_choice_is_that_of_core(rule: RouterRule):
    logits, bias = logits_of(), torch.linspace(0.5, -0.5, 8) if rule.expert_bias else None
    weights, chosen = choose(logits.clone().requires_grad_(), rule, bias)
    theirs, their_choice = moe_utils.topk_routing_with_score_function(
        logits,
        rule.topk,
        use_pre_softmax=rule.pre_softmax,
        num_groups=rule.num_groups,
        group_topk=rule.group_topk,
        scaling_factor=rule.topk_scaling_factor,
        score_function=rule.score_function,
        expert_bias=bias,
    )
    assert torch.equal(chosen, their_choice)
    torch.testing.assert_close(weights.detach(), theirs)
    assert weights.requires_grad and (chosen.sum(dim=1) == rule.topk).all()


@pytest.mark.parametrize("topk, shift", [(1, 0), (2, 0), (2, -19), pytest.param(1, -19, marks=pytest.mark.full)])
def test_sinkhorn_is_that_of_core(topk: int, shift: int):
    """In training and in evaluation. Very low logits have exponentials that are small beside what is added to sums."""
    logits, rule = 3 * logits_of() + torch.linspace(1, -1, 8) + shift, RouterRule(topk=topk, sinkhorn=True)
    router = SimpleNamespace(topk=topk, config=SimpleNamespace(moe_aux_loss_coeff=0), training=True)
    theirs, their_choice = TopKRouter.sinkhorn_load_balancing(router, logits)
    bias = even_choice(logits, torch.ones(40), lambda sums: sums)
    weights, chosen = choose(logits.clone().requires_grad_(), rule, bias)
    assert torch.equal(chosen, their_choice) and weights.requires_grad
    torch.testing.assert_close(weights.detach(), theirs)
    router.training = False
    theirs, without = TopKRouter.sinkhorn_load_balancing(router, logits)
    weights, chosen = choose(logits, rule)
    assert torch.equal(chosen, without) and not torch.equal(without, their_choice)
    torch.testing.assert_close(weights, theirs)
    assert chosen.sum(dim=0).max() > their_choice.sum(dim=0).max()  # it evens the choice
    # Tokens that do not count have no influence.
    more = torch.cat([logits, logits_of(9) + 5])
    torch.testing.assert_close(even_choice(more, (torch.arange(49) < 40).float(), lambda sums: sums), bias)
    assert not torch.allclose(even_choice(more, torch.ones(49), lambda sums: sums), bias)


def test_sinkhorn_of_bf16_logits_is_in_fp32():
    logits = (3 * torch.randn(64, 8)).bfloat16()
    scale, wide = (even_choice(x, torch.ones(64), lambda x: x) for x in (logits, logits.float()))
    assert scale.dtype == torch.float32 and torch.equal(scale, wide)


def test_tokens_of_experts_are_counted_exactly():
    many = 2**24 + 3  # the next number after 2**24 in fp32 is 2**24 + 2
    router, sums = SimpleNamespace(seen=None), {name: torch.zeros(()) for name in SUMS}
    chosen, counted = torch.ones(1, dtype=torch.bool).expand(many, 1), torch.ones(1).expand(many)
    for times in (1, 2):
        ExpertRouter._add(router, chosen, counted, sums)
        assert router.seen.dtype == torch.float64 and router.seen.tolist()[0] == times * many
        assert router.seen[1 + SUMS.index("tokens")] == times * many


def test_equal_scores_go_to_the_first_expert():
    weights, chosen = choose(torch.zeros(5, 8), RouterRule(topk=3))
    assert chosen[:, :3].all() and not chosen[:, 3:].any() and torch.allclose(weights[:, :3], torch.tensor(1 / 3))
    assert best(torch.tensor([[1.0, 2.0, 2.0, 1.0]]), 3).tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balancing_loss_is_that_of_core_times_the_tokens(score: str):
    logits, counted = logits_of(), torch.arange(40) % 5 > 0
    rule = RouterRule(topk=2, score_function=score)
    choice, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, score, padding_mask=~counted)
    theirs = moe_utils.switch_load_balancing_loss_func(scores, choice.sum(dim=0), int(counted.sum()), 2, 8, 1.0)
    ours = balancing_loss(*balance(logits, rule, counted), rule.topk)
    torch.testing.assert_close(ours, theirs * counted.sum())
    # Two ranks: each has its own probabilities, and the choices and tokens of both.
    parts = [balance(logits[rows], rule, counted[rows]) for rows in (slice(0, 10), slice(10, 40))]
    choices, tokens = (parts[0][at] + parts[1][at] for at in (1, 2))
    torch.testing.assert_close(sum(balancing_loss(part[0], choices, tokens, 2) for part in parts), ours)
    theirs = moe_utils.z_loss_func(logits, 1.0, padding_mask=~counted)
    torch.testing.assert_close(z_loss(logits, counted), theirs * counted.sum())


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_statistics_of_bf16_logits_are_summed_in_fp32(score: str):
    half, counted, rule = logits_of(400).bfloat16(), torch.ones(400), RouterRule(topk=2, score_function=score)
    for got, want in zip(balance(half, rule, counted), balance(half.float(), rule, counted)):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(z_loss(half, counted), z_loss(half.float(), counted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [{}, {"pre_softmax": True}, {"sinkhorn": True}], ids=str)
def test_weights_of_half_precision_logits_are_rounded_once(rule: dict, dtype: torch.dtype):
    logits = 3 * logits_of(400).to(dtype)
    weights, _ = choose(logits, RouterRule(topk=8, **rule))
    assert weights.dtype == dtype and torch.equal(weights, torch.softmax(logits.float(), dim=-1).to(dtype))
    evened = [even_choice(x, torch.ones(400), lambda sums: sums) for x in (logits, logits.double())]
    assert [one.dtype for one in evened] == [torch.float32, torch.float64]
    torch.testing.assert_close(evened[0].double(), evened[1], rtol=1e-4, atol=1e-4)


def test_the_loss_of_samples_is_the_sum_of_their_losses():
    logits, rule = logits_of(), RouterRule(topk=2)
    counted = (torch.arange(40) < 30).float()
    apart = sum(balancing_loss(*balance(logits[row::2], rule, counted[row::2]), 2) for row in range(2))
    torch.testing.assert_close(balancing_loss(*balance(logits, rule, counted, samples=2), 2), apart)
    nothing = balancing_loss(*balance(logits, rule, torch.zeros(40)), 2)
    assert float(nothing) == 0.0


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_what_an_expert_drops(policy: str):
    rule = RouterRule(topk=2, capacity_factor=0.5, drop_policy=policy)
    weights, chosen = choose(logits_of(), rule)
    most, places = capacity(40, 8, rule), torch.arange(40)
    kept = within_capacity(weights, chosen, places, most, policy)
    assert most == 5 and (kept.sum(dim=0) == chosen.sum(dim=0).clamp(max=5)).all() and not (kept & ~chosen).any()
    _, theirs = moe_utils.apply_router_token_dropping(weights, chosen, 2, 0.5, "probs")
    if policy == "probs":
        assert torch.equal(kept, theirs)
    for expert in range(8):
        lost = (chosen & ~kept)[:, expert]
        if lost.any() and policy == "position":
            assert places[kept[:, expert]].max() < places[lost].min()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))  # ranks hold tokens in other orders
    assert torch.equal(within_capacity(weights[order], chosen[order], order, most, policy), kept[order])
    equal = torch.full_like(weights, 0.5)  # of equal weights the first places are kept
    first = within_capacity(equal[order], chosen[order], order, most, "probs")
    assert torch.equal(first, within_capacity(equal, chosen, places, most, "position")[order])


@pytest.mark.parametrize("ranks, kept", [(1, [0, 1, 2, 3]), (2, [0, 1])])
def test_what_is_dropped_is_decided_by_places_and_samples(monkeypatch, ranks: int, kept: list[int]):
    """Places 2, 0 and 1 of two samples, after those of the other rank; the expert takes 4 of 6 or 8 of 12 tokens."""
    group, later = SimpleNamespace(size=lambda: ranks, rank=lambda: ranks - 1), {torch.int64: 99}
    monkeypatch.setattr(experts, "gather_rows", lambda part, *_: torch.cat([part, part + later.get(part.dtype, 0)]))
    rule = RouterRule(topk=1, capacity_factor=0.6, drop_policy="position")
    router = SimpleNamespace(tp_cp_group=group, num_experts=1, rule=rule)
    places = torch.tensor([2, 2, 0, 0, ~1, ~1])
    result = ExpertRouter._within_capacity(router, torch.ones(6, 1), torch.ones(6, 1, dtype=torch.bool), places, 2)
    order = [2, 3, 4, 5, 0, 1]  # rows by place, then by sample
    assert [row for row in order if result[row, 0]] == [order[n] for n in kept]


@pytest.mark.parametrize("training, graph", [(True, False), (False, True), (False, False)])
def test_only_a_step_of_training_is_counted(training: bool, graph: bool):
    router = SimpleNamespace(training=training, rule=RouterRule(topk=1), expert_bias=None)
    with torch.set_grad_enabled(graph):
        assert not ExpertRouter.count(router, torch.randn(4, 1, 8), None).learns


@pytest.mark.parametrize("learns, factor, applied", [(True, 0.1, True), (True, None, False), (False, 0.1, False)])
def test_the_z_loss_is_added_in_training(monkeypatch, learns: bool, factor: float | None, applied: bool):
    added = []
    monkeypatch.setattr(experts.MoEAuxLossAutoScaler, "apply", lambda x, loss: added.append(float(loss)) or x)
    logits, counted = logits_of(4).view(4, 1, 8), torch.ones(4, 1)
    router = SimpleNamespace(rule=RouterRule(topk=2, z_loss=factor), _balancing=lambda _: {})
    statistics = SimpleNamespace(learns=learns, counted=counted, bias=None, kept=None, totals={}, indices=None)
    ExpertRouter.routing(router, logits, statistics)
    expected = [0.1 * float(logits.flatten(0, 1).logsumexp(-1).square().sum())] if applied else []
    assert added == pytest.approx(expected, rel=1e-6)


def test_patterns_of_layers():
    patterns = {"1": 1, " 2 ": 2, "[0]*3+[1]*2": [0, 0, 0, 1, 1], "([0]+[1])*2": [0, 1, 0, 1], "[1, 0]": [1, 0]}
    assert {text: layer_pattern(text) for text in patterns} == patterns
    wrong = "[2] [a x() 1.5 [1]*10**9 [1]*999999 [[1]] __import__('os') 2*[1,0]*[1] (".split()
    for text in [*wrong, "(" * 3000, ""]:
        with pytest.raises(ValueError):
            layer_pattern(text)


BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --lr 1e-3 --train-iters 4 "
    "--micro-batch-size 1 --global-batch-size 4 --mock-data --vocab-size 301"
)


def read(flags: str, world_size: int = 4) -> Config:
    return parse(f"{BASE} {flags}".split(), LLAMA_DEFAULTS, world_size)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--lora-rank 4 --lora-targets linear_fc1", "use --lora-targets linear_qkv linear_proj"),
        ("--max-position-embeddings 64 --position-embedding-type learned_absolute --partition-position-embedding",
         "--partition-position-embedding"),
        ("--dry-run --dry-run-expert-imbalance 2", "needs ranks with different experts"),
        ("--dry-run --expert-model-parallel-size 2 --dry-run-expert-imbalance 2.5", "give a factor from 1 to 2"),
        ("--dry-run-expert-imbalance 2", "does nothing without --dry-run"),
        ("--elastic --save a --load a", "--elastic"),
        ("--tensor-model-parallel-size 2", "add --sequence-parallel"),
        ("--expert-model-parallel-size 3", "does not divide --num-experts 8"),
        ("--expert-model-parallel-size 8", "does not divide the 4 ranks"),
        ("--moe-ffn-hidden-size 33 --tensor-model-parallel-size 2 --sequence-parallel", "--moe-ffn-hidden-size 33"),
        ("--moe-shared-expert-intermediate-size 33 --tensor-model-parallel-size 2 --sequence-parallel",
         "--moe-shared-expert-intermediate-size 33"),
        ("--moe-router-topk 9", "--moe-router-topk 9"),
        ("--moe-router-topk 1", "add --moe-router-pre-softmax"),
        ("--moe-router-enable-expert-bias", "add --moe-router-score-function sigmoid"),
        ("--moe-router-num-groups 4", "--moe-router-group-topk"),
        ("--moe-router-num-groups 3 --moe-router-group-topk 1", "--moe-router-num-groups 3"),
        ("--moe-router-num-groups 4 --moe-router-group-topk 3", "--moe-router-topk 2"),
        ("--moe-router-topk 6 --moe-router-num-groups 4 --moe-router-group-topk 2", "--moe-router-topk 6"),
        ("--moe-router-load-balancing-type global_aux_loss", "use aux_loss or seq_aux_loss"),
        ("--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1",
         "sinkhorn cannot be combined with a coeff"),
        ("--moe-router-load-balancing-type sinkhorn aux_loss --moe-aux-loss-coeff 0 0", "or another loss"),
        ("--moe-router-load-balancing-type sinkhorn --moe-router-pre-softmax", "--moe-router-pre-softmax"),
        ("--moe-router-load-balancing-type sinkhorn --moe-expert-capacity-factor 1", "--moe-expert-capacity-factor"),
        ("--moe-router-load-balancing-type sinkhorn --moe-router-score-function sigmoid",
         "--moe-router-score-function sigmoid"),
        ("--moe-router-load-balancing-type other", "choose from aux_loss, seq_aux_loss, none"),
        ("--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1", "--moe-aux-loss-coeff 1"),
        ("--moe-router-load-balancing-type none aux_loss --moe-aux-loss-coeff 0 1", "none cannot be combined with"),
        ("--moe-router-bias-update-rate 0.1", "--moe-router-enable-expert-bias"),
        ("--moe-token-drop-policy position", "--moe-expert-capacity-factor"),
        ("--moe-layer-freq 0", "--moe-layer-freq 0"),
        ("--moe-layer-freq [1]*3", "--num-layers 4"),
        ("--moe-layer-freq [0]*4", "leaves no layer with experts"),
        ("--moe-layer-freq [3]", "--moe-layer-freq"),
        ("--moe-z-loss-coeff -1", "--moe-z-loss-coeff -1"),
        ("--moe-expert-capacity-factor 0", "--moe-expert-capacity-factor 0"),
        ("--topk 2", "use Megatron-LM's --moe-... flags"),
        ("--moe-token-dispatcher-type other", "choose from allgather, alltoall"),
        ("--moe-input-jitter-eps 0.1", "--moe-input-jitter-eps"),
        ("--norm-topk-prob --moe-router-pre-softmax", "--norm-topk-prob and --moe-router-pre-softmax"),
        ("--norm-topk-prob --moe-router-topk-scaling-factor 2", "--norm-topk-prob and --moe-router-topk-scaling"),
        ("--first-k-dense-replace 1", "set by --moe-layer-freq"),
        ("--n-shared-experts 2", "use --moe-shared-expert-intermediate-size"),
        ("--moe-model-type deepspeed_moe", "only Megatron-LM's mixtures of experts"),
    ],
)  # fmt: skip
def test_settings_that_experts_do_not_support_are_refused(flags: str, expected: str):
    with pytest.raises(Refusal) as caught:
        read(f"--num-experts 8 {flags}")
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags, note, same",
    [
        ("--moe-token-dispatcher-type flex --moe-enable-deepep", "sent as with alltoall",
         "--moe-token-dispatcher-type alltoall"),
        ("--moe-token-dispatcher-type alltoall_seq", "sent as with alltoall", "--moe-token-dispatcher-type alltoall"),
        ("--moe-router-score-function sigmoid --moe-router-pre-softmax", "no effect here: --moe-router-pre-softmax",
         "--moe-router-score-function sigmoid"),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", "no effect here: --moe-aux-loss-coeff",
         "--moe-router-load-balancing-type none"),
        ("--norm-topk-prob --moe-permutation-async-comm", "no effect here: --norm-topk-prob", "--moe-layer-freq -1"),
        ("--multi-latent-attention --rotary-scaling-factor 1 --mscale-all-dim 1.5",
         "no effect here: the settings of YaRN", "--multi-latent-attention --rotary-scaling-factor 1"),
    ],
)  # fmt: skip
def test_flags_that_megatron_lm_does_not_read_have_a_note(flags: str, note: str, same: str):
    config, other = read(f"--num-experts 8 {flags}"), read(f"--num-experts 8 {same}")
    assert any(note in line for line in config.notes) and not any(note in line for line in other.notes)
    assert (config.model, config.parallel) == (other.model, other.parallel)


def test_shared_experts_need_linear_layers_without_a_bias():
    flags = "--num-experts 8 --max-position-embeddings 64 --moe-shared-expert-intermediate-size 32"
    with pytest.raises(Refusal, match="--disable-bias-linear") as caught:
        parse(f"{BASE} {flags}".split(), None, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--moe-expert-capacity-factor 1", "an answer would depend on the other prompts"),
        ("--expert-model-parallel-size 4 --ulysses-parallel-size 2", "must divide the 2 ranks of TP x CP"),
    ],
)
def test_experts_that_generation_refuses(flags: str, message: str):
    with pytest.raises(Refusal, match=message):
        check_experts(read(f"--num-experts 8 {flags}"), "dir")


def test_zero_3_of_experts_needs_a_mesh_for_each_parameter(monkeypatch):
    from megatron.training.model import fsdp

    monkeypatch.setattr(fsdp, "ShardPlacementResult", None)  # as in older releases of PyTorch
    with pytest.raises(Refusal, match="--num-experts with --zero-stage 2 or 3 needs a PyTorch .*: use --zero-stage 1"):
        fsdp._place_of_experts(None, torch.device("cpu"))


def test_a_dense_model_has_no_experts():
    config = read("--num-experts 1 --moe-router-topk 4 --topk 1")
    assert config.model.num_experts is None
    assert any("--num-experts 1: a dense model" in note for note in config.notes)
    assert any("--moe-router-topk" in note and "no effect" in note for note in config.notes)


def test_defaults_of_experts():
    config = read("--num-experts 8 --tensor-model-parallel-size 2 --sequence-parallel")
    assert config.model.moe_ffn_hidden_size == config.model.ffn_hidden_size
    assert config.parallel.expert_tensor_parallel_size == 2


def test_formulas_of_experts():
    """Parameters and FLOPs of Mixtral 8x7B as published: 46.7 billion, 12.9 of them used by a token."""
    mixtral = parse(
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-experts 8 "
        "--group-query-attention --num-query-groups 8".split(),
        LLAMA_DEFAULTS,
    ).model
    shape = model_shape(mixtral, 32000)
    assert stage_parameters(shape, 1, 1, 0, padded=False).numel == 46_702_792_704
    embedding, router = 32000 * 4096, 32 * 8 * 4096
    used = (forward_flops(shape, 1).gemm) / 2 + embedding  # a product for each parameter that a token uses
    assert used == pytest.approx(12.88e9, rel=1e-3) and used > router
    half = parse("--num-experts 8 --moe-layer-freq 2 --moe-expert-capacity-factor 0.5".split()).model
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "swiglu", "add_bias_linear"):
        setattr(half, name, getattr(mixtral, name))
    dense, every = 3 * 14336, 8 + 2 * 3 * 14336
    flops = forward_flops(model_shape(half, 32000), 1).mlp
    assert flops == 2 * 4096 * 16 * (dense + 8 + (every - 8) / 2)
    with pytest.raises(ValueError, match="experts have no formula with FPDT"):
        device_memory(Workload(shape, 64), Strategy(fpdt_chunk=32))
