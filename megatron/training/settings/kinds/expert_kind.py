# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: some layers have experts in place of the MLP, of which a token goes to a few."""

from __future__ import annotations

from typing import Any

from megatron.formulas.kinds.expert_figures import Mixture
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal, refuse_combinations
from megatron.training.settings.flag import (
    ABOVE_ZERO,
    AT_LEAST_1,
    NOT_NEGATIVE,
    check_pattern,
    expert_pattern,
    flag,
    function,
    size,
    weights,
)
from megatron.training.settings.kinds.kind import Kind, Model, Run, settings_of
from megatron.training.settings.kinds.layer_patterns import expert_layers
from megatron.training.settings.read_with import of_kind

LOSSES = ("aux_loss", "seq_aux_loss", "none", "sinkhorn")
SINKHORN = "--moe-router-load-balancing-type sinkhorn"
OTHER_LOSSES = {"global_aux_loss": "depends on the order of micro-batches, which differs between grids"}
EXPERTS = of_kind("num_experts")


@settings_of(EXPERTS)
class ExpertSettings:
    """Settings of experts and of their router."""

    num_experts: int | None = weights(
        None, "experts of a layer (mixture of experts)", range=AT_LEAST_1, core="num_moe_experts"
    )
    moe_layer_freq: int | list[int] = weights(
        1,
        "layers with experts: every N-th, or 1 and 0 for each layer, as in [0]*3+[1]*29",
        type=expert_pattern,
        core=True,
    )
    moe_ffn_hidden_size: int | None = size(None, "width of an expert; default --ffn-hidden-size")
    moe_shared_expert_intermediate_size: int | None = size(
        None, "width of an expert that all tokens go to, in addition"
    )
    moe_shared_expert_gate: bool = weights(
        False, "multiply the output of that expert by a sigmoid, as in Qwen3-Next", core=True
    )
    moe_router_topk: int = function(2, "number of experts per token", range=AT_LEAST_1, core=True)
    moe_router_score_function: str = function(
        "softmax", "scores of experts", choices=["softmax", "sigmoid", "sqrtsoftplus"]
    )
    moe_router_pre_softmax: bool = function(
        False, "softmax over all experts before the choice, instead of over the chosen ones", core=True
    )
    moe_router_num_groups: int | None = function(
        None, "groups of experts, of which the best are chosen first", range=AT_LEAST_1
    )
    moe_router_group_topk: int | None = function(None, "how many of these groups a token may use", range=AT_LEAST_1)
    moe_router_topk_scaling_factor: float | None = function(
        None, "factor of the chosen experts' weights", range=ABOVE_ZERO
    )
    moe_router_dtype: str | None = flag(None, "dtype of the router", choices=["fp32", "fp64"], core=True)
    moe_router_enable_expert_bias: bool = weights(
        False, "balance experts by adding to their scores a bias that follows their load; it affects the choice alone"
    )
    moe_router_bias_update_rate: float = flag(0.001, "change of the bias of experts in a step", range=NOT_NEGATIVE)
    moe_router_load_balancing_type: list[str] = flag(
        ["aux_loss"],
        "load-balancing losses: aux_loss (over a micro-batch), seq_aux_loss (over a sample), both, or none; or "
        "sinkhorn, which evens the choice itself",
        nargs="+",
    )
    moe_aux_loss_coeff: list[float] = flag([0.0], "coefficient of each load-balancing loss", nargs="+")
    moe_z_loss_coeff: float | None = flag(None, "coefficient of the router's z-loss", range=NOT_NEGATIVE)
    moe_expert_capacity_factor: float | None = function(
        None,
        "largest number of tokens of an expert in a micro-batch, over the mean; default no limit",
        range=ABOVE_ZERO,
        core=True,
    )
    moe_enable_routing_replay: bool = flag(
        False, "layers of --recompute-granularity full keep the experts of their first pass, and choose them again"
    )
    moe_token_drop_policy: str = function(
        "probs",
        "which tokens an expert keeps: those with the largest weights, or the first ones",
        choices=["probs", "position"],
    )


def _complete(config: Run) -> None:
    """Complete the sizes of experts; refuse settings that contradict each other or are not supported."""
    model, parallel = config.model, config.parallel
    if parallel.moe_token_dispatcher_type not in ("allgather", "alltoall"):
        config.notes.append(
            f"--moe-token-dispatcher-type {parallel.moe_token_dispatcher_type}: tokens are sent as with alltoall, with "
            "the same result"
        )
        parallel.moe_token_dispatcher_type = "alltoall"
    if model.num_experts == 1:  # as Megatron-DeepSpeed writes a dense model
        model.num_experts = None
        config.notes.append("--num-experts 1: a dense model")
    if model.num_experts is None:
        return
    _combinations(config)
    if model.moe_ffn_hidden_size is None:
        model.moe_ffn_hidden_size = model.ffn_hidden_size
    if parallel.expert_tensor_parallel_size is None:
        parallel.expert_tensor_parallel_size = parallel.tensor_model_parallel_size
    _pattern(model)
    _without_reader(config)
    _router(model)
    _losses(model)
    if not model.moe_router_enable_expert_bias and model.moe_router_bias_update_rate != 0.001:
        raise Refusal(
            "--moe-router-bias-update-rate",
            "is read only with --moe-router-enable-expert-bias: add it, or leave the rate out",
            Fix("--moe-router-enable-expert-bias"),
            LEAVE_OUT,
        )
    if model.moe_expert_capacity_factor is None and model.moe_token_drop_policy != "probs":
        raise Refusal(
            "--moe-token-drop-policy",
            "is read only with --moe-expert-capacity-factor, without which no token is dropped: add it, or leave this "
            "out",
            LEAVE_OUT,
        )


def _combinations(config: Run) -> None:
    """Refuse features that do not work with experts yet."""
    model, parallel = config.model, config.parallel
    refused = {
        "--partition-position-embedding": (
            parallel.partition_position_embedding,
            "it uses the groups of experts for positions",
        ),
        "--fp8-format": (model.fp8_format, "it is not tested with experts"),
        "--elastic": (parallel.elastic, "it chooses grids without experts: give the grid by flags, or --elastic-grids"),
    }
    refuse_combinations(f"--num-experts {model.num_experts}", refused)
    if model.add_bias_linear and model.moe_shared_expert_intermediate_size:
        raise Refusal(
            "--moe-shared-expert-intermediate-size",
            "needs linear layers without a bias: add --disable-bias-linear",
            Fix("--disable-bias-linear"),
        )

    if model.moe_shared_expert_gate and not model.moe_shared_expert_intermediate_size:
        raise Refusal(
            "--moe-shared-expert-gate",
            "needs an expert that all tokens go to: add --moe-shared-expert-intermediate-size, or leave it out",
            LEAVE_OUT,
        )


def _pattern(model: Model) -> None:
    check_pattern("--moe-layer-freq", model.moe_layer_freq, model.num_layers)
    if all(expert_layers(model)):
        model.moe_layer_freq = 1  # so that checkpoints hold each weight of all layers in one tensor
    if not any(expert_layers(model)):
        raise Refusal("--moe-layer-freq", "leaves no layer with experts: leave --num-experts out")


def _without_reader(config: Run) -> None:
    """Note what Megatron-LM accepts but does not read, and reset it."""
    model, kinds = config.model, config.model.moe_router_load_balancing_type
    if model.moe_router_pre_softmax and model.moe_router_score_function != "softmax":
        config.notes.append(
            f"no effect here: --moe-router-pre-softmax ({model.moe_router_score_function} scores have no softmax)"
        )
        model.moe_router_pre_softmax = False
    if kinds == ["none"] and any(model.moe_aux_loss_coeff):
        config.notes.append("no effect here: --moe-aux-loss-coeff (--moe-router-load-balancing-type none has no loss)")
        model.moe_aux_loss_coeff = [0.0]


def _sinkhorn(model: Model) -> None:
    """Refuse what Sinkhorn's choice of experts does not read, and a capacity, which core refuses too."""
    refused = {
        f"--moe-router-score-function {model.moe_router_score_function}": model.moe_router_score_function != "softmax",
        "--moe-router-pre-softmax": model.moe_router_pre_softmax,
        "--moe-router-enable-expert-bias": model.moe_router_enable_expert_bias,
        "--moe-router-group-topk": model.moe_router_group_topk,
        "--moe-router-num-groups": model.moe_router_num_groups,
        "--moe-router-topk-scaling-factor": model.moe_router_topk_scaling_factor,
        "--moe-expert-capacity-factor": model.moe_expert_capacity_factor,
    }
    refuse_combinations(SINKHORN, {flag: (given, "it does not read it") for flag, given in refused.items()})


def _router(model: Model) -> None:
    experts, topk = model.num_experts, model.moe_router_topk
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if not 1 <= topk <= experts:
        raise Refusal(f"--moe-router-topk {topk}", f"is not from 1 to --num-experts {experts}: change it")
    if "sinkhorn" in model.moe_router_load_balancing_type:
        return _sinkhorn(model)
    if topk == 1 and model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax:
        raise Refusal(
            "--moe-router-topk 1",
            "gives the chosen expert the weight 1 whatever the router says: add --moe-router-pre-softmax",
            Fix("--moe-router-pre-softmax"),
        )
    if model.moe_router_enable_expert_bias and model.moe_router_score_function == "softmax":
        raise Refusal(
            "--moe-router-enable-expert-bias",
            "needs scores that a bias can change: add --moe-router-score-function sigmoid",
            Fix("--moe-router-score-function sigmoid"),
        )
    if (groups is None) != (chosen is None):
        raise Refusal("--moe-router-num-groups and --moe-router-group-topk", "go together: give both, or none")
    if groups is None:
        return
    if experts % groups or not 1 <= chosen <= groups:
        raise Refusal(
            f"--moe-router-num-groups {groups} and --moe-router-group-topk {chosen}",
            f"do not fit --num-experts {experts}: the groups must divide the experts, and a token can use at most all "
            "groups",
        )
    if topk % chosen or topk // chosen > experts // groups:
        raise Refusal(
            f"--moe-router-topk {topk}",
            f"is not shared evenly by --moe-router-group-topk {chosen} groups of {experts // groups} experts: use a "
            f"multiple of {chosen}, at most {chosen * (experts // groups)}",
        )


def _losses(model: Model) -> None:
    kinds, coefficients = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    for kind in kinds:
        if kind in OTHER_LOSSES:
            raise Refusal(
                f"--moe-router-load-balancing-type {kind}", f"{OTHER_LOSSES[kind]}: use aux_loss or seq_aux_loss"
            )
        if kind not in LOSSES:
            raise Refusal(f"--moe-router-load-balancing-type {kind}", f": not known; choose from {', '.join(LOSSES)}")
    if len(coefficients) != len(kinds) or len(set(kinds)) != len(kinds) or min(coefficients) < 0:
        raise Refusal(
            f"--moe-aux-loss-coeff {' '.join(f'{number:g}' for number in coefficients)}",
            f"must be one number, 0 or more, for each of --moe-router-load-balancing-type {' '.join(kinds)}",
        )
    for kind in {"none", "sinkhorn"} & {*kinds}:
        if len(kinds) > 1 or any(coefficients):
            raise Refusal(
                f"--moe-router-load-balancing-type {kind}",
                "cannot be combined with a coefficient or another loss: leave one out",
            )


def _check(config: Run, world_size: int) -> None:
    """Refuse a grid over which the experts, or the width of each, cannot be split evenly."""
    model, parallel = config.model, config.parallel
    if model.num_experts is None:
        return
    expert, expert_tensor = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if model.num_experts % expert:
        raise Refusal(
            f"--expert-model-parallel-size {expert}",
            f"does not divide --num-experts {model.num_experts}: use a divisor",
        )
    ranks = world_size // pipeline
    if ranks % (expert * expert_tensor):
        raise Refusal(
            f"--expert-model-parallel-size {expert} with --expert-tensor-parallel-size {expert_tensor}",
            f"does not divide the {ranks} ranks of TP x CP x DP: use smaller sizes",
        )
    if model.moe_ffn_hidden_size % expert_tensor:
        raise Refusal(
            f"--moe-ffn-hidden-size {model.moe_ffn_hidden_size}",
            f"is not a multiple of --expert-tensor-parallel-size {expert_tensor}: use a multiple",
        )
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None and shared % tensor:
        raise Refusal(
            f"--moe-shared-expert-intermediate-size {shared}",
            f"is not a multiple of --tensor-model-parallel-size {tensor}: use a multiple",
        )
    if tensor > 1 and not parallel.sequence_parallel and not config.run.skip_train:
        raise Refusal(
            f"--num-experts {model.num_experts} with --tensor-model-parallel-size {tensor}",
            "needs tokens that TP splits: add --sequence-parallel",
            Fix("--sequence-parallel"),
        )


def _shape(model: Model) -> dict[str, Any]:
    if model.num_experts == 1:  # a dense model
        return {}
    mixture = Mixture(
        experts=model.num_experts,
        topk=model.moe_router_topk,
        ffn=model.moe_ffn_hidden_size or model.ffn_hidden_size,
        shared=model.moe_shared_expert_intermediate_size or 0,
        layers=tuple(expert_layers(model)),
        capacity=model.moe_expert_capacity_factor or 0.0,
        gated=model.moe_shared_expert_gate,
        replay=model.moe_enable_routing_replay,
    )
    return {"mixture": mixture}


def _core(config: Run) -> dict[str, Any]:
    """Ours replaces core's router."""
    model, scores = config.model, config.model.moe_router_score_function
    return {
        # Only read when core checks the number of experts of a token: the router is ours.
        "moe_router_load_balancing_type": "sinkhorn" if "sinkhorn" in model.moe_router_load_balancing_type else "none",
        "moe_router_score_function": "softmax" if scores == "softmax" else "sigmoid",  # core 0.16 has no sqrtsoftplus
        # Core reads it only to refuse biases with expert TP, which core/experts.py shares among the ranks.
        "expert_tensor_parallel_size": 1 if model.add_bias_linear else config.parallel.expert_tensor_parallel_size,
    }


KIND = Kind(EXPERTS, _shape, complete=_complete, check=_check, core=_core)
