# SPDX-License-Identifier: Apache-2.0
"""Errors of distribution in complete models: each changes losses, norms or gradients, compared with one process.

Each error is one typical change: a sum is left out, happens twice or over the wrong ranks, or an attribute of a
parameter is not set.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    layers,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from megatron.context_parallel.core import experts, lora
from megatron.context_parallel.core.mixers import gated_delta_net, latent_attention
from megatron.training import job as job_module
from megatron.training import loss, step
from megatron.training.model import fsdp, gpt
from tests.distributed import test_experts as moe
from tests.distributed import test_gated_delta_net as states
from tests.distributed import test_latent_attention as latents
from tests.distributed import test_later_tokens as later
from tests.distributed import test_mamba2 as mamba2
from tests.distributed import test_state_adapters as adapters
from tests.distributed.flags import P2, SP, T2, U2, cp, ep, fpdt
from tests.distributed.training_runs import compare_runs, make_job, train_job, wrong_by

pytestmark = pytest.mark.lab
FINALIZE = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # the package hides the module


@dataclass(frozen=True)
class Change:
    """An error to plant.

    Attributes:
        patches: what it changes before the model is built.
        model: called with each model when it is built, before it is wrapped.
        trainer: called with the wrapped models and the optimizer.
    """

    patches: Callable[[], AbstractContextManager] = nullcontext
    model: Callable[[nn.Module], Any] = lambda model: None
    trainer: Callable[[list, Any], Any] = lambda chunks, optimizer: None


def marked(part: str, **attributes: Any) -> Change:
    """Set attributes of every parameter and module whose name contains ``part``; "config": of the settings."""

    def change(model: nn.Module) -> None:
        whole = {"config": model.config, **dict(model.named_parameters()), **dict(model.named_modules())}
        found = [x for name, x in whole.items() if part in name]
        assert found, part
        for x in found:
            vars(x).update(attributes)

    return Change(model=change)


def replaced(owner: Any, name: str, value: Any) -> Change:
    return Change(patches=lambda: patch.object(owner, name, value))


def trained(change: Callable[[list, Any], Any]) -> Change:
    return Change(trainer=change)


def untouched(x: Any, *_: Any, **__: Any) -> Any:
    return x


def nothing(*_: Any, **__: Any) -> None:
    pass


def dp_alone(with_context_parallel: bool = False, **_: Any) -> dist.ProcessGroup:
    return DP_GROUP()


DP_GROUP = parallel_state.get_data_parallel_group


def finalize_twice(chunks: list, optimizer: Any) -> None:
    config = chunks[0].module.config
    finalize = config.finalize_model_grads_func

    def twice(model: list, tokens: Tensor | None = None, **kwargs: Any) -> None:
        finalize(model, None, **kwargs)
        finalize(model, tokens, **kwargs)

    config.finalize_model_grads_func = twice


def count_tokens_over(group: Callable[[], dist.ProcessGroup]) -> Callable:
    """Gradients are divided by the number of tokens of the ranks of ``group``."""

    def change(chunks: list, optimizer: Any) -> None:
        config = chunks[0].module.config
        finalize = config.finalize_model_grads_func

        def wrong(model: list, tokens: Tensor, **kwargs: Any) -> None:
            finalize(model, None, **kwargs)
            dist.all_reduce(tokens, group=group())
            for chunk in model:
                chunk.scale_gradients(1.0 / tokens)

        config.finalize_model_grads_func = wrong

    return change


def norm_over(group: Callable[[], dist.ProcessGroup]) -> Callable:
    def change(chunks: list, optimizer: Any) -> None:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part.get_grad_stats_parallel_group = group

    return change


def no_sum_for_norms_of_heads(model: list, config: Any, *args: Any) -> None:
    with patch.object(config, "qk_layernorm", False):
        SUM_OVER_TP(model, config, *args)


SUM_OVER_TP = FINALIZE._allreduce_non_tensor_model_parallel_grads
CHUNKED_LOSS = gpt.chunked_linear_cross_entropy
BALANCING_LOSS = experts.ExpertRouter._balancing_loss
LOSSES = step.sum_of_losses


def complete_auxiliary_loss(router: Any, *args: Any) -> Tensor:
    """The auxiliary loss summed over ranks; each rank then differentiates the sum."""
    part, group = BALANCING_LOSS(router, *args), router.tp_cp_group
    return experts.GatherRows.apply(part[None], group, [1] * group.size()).sum()


def loss_without_other_tokens(*args: Any, sequence_parallel: bool, **kwargs: Any) -> Tensor:
    return CHUNKED_LOSS(*args, sequence_parallel=False, **kwargs)


def scattered(x: Tensor, group: Any = None) -> Tensor:
    return scatter_to_sequence_parallel_region(x, group=group)


def loss_of_all_ranks(loss_mask: Tensor, losses: Tensor) -> tuple:
    total, *others = LOSSES(loss_mask, losses)
    group = parallel_state.get_context_parallel_group()
    return gather_from_sequence_parallel_region(total[None], group=group).sum(), *others


GPT = "--num-layers 2 --init-method-std 0.1 --clip-grad 0.05"
LORA, FPDT = "--lora-rank 4 --lr 1e-2", fpdt(16)
LLAMA = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention "
    "--num-query-groups 2 --untie-embeddings-and-output-weights"
)
LATENTS = (
    "--disable-bias-linear --normalization RMSNorm --multi-latent-attention --kv-lora-rank 8 --q-lora-rank 8 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --position-embedding-type rope --latent-exchange latents"
)
GATED = (
    "--disable-bias-linear --normalization RMSNorm --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 2 --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 8 "
    "--linear-value-head-dim 8 --linear-conv-kernel-dim 4 --position-embedding-type rope"
)
EXPERTS = (
    "--disable-bias-linear --normalization RMSNorm --num-experts 4 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.01"
)
# By error: processes, model, grid, and the change.
PLANTED: dict[str, tuple[int, str, str, Change]] = {
    "gradients are summed over DP, not CP": (4, "", U2,
        replaced(parallel_state, "get_data_parallel_group", dp_alone)),
    "FSDP sums over DP, not CP": (4, "", f"{U2} --zero-stage 3",
        replaced(fsdp, "get_data_parallel_group", dp_alone)),
    "gradients are summed twice": (2, "", U2,
        trained(finalize_twice)),
    "gradients are means over ranks": (2, "--eod-mask-loss", U2,
        marked("config", calculate_per_token_loss=False)),
    "a norm's gradient is not summed over TP": (2, "", SP,
        marked("input_layernorm.", sequence_parallel=False)),
    "a bias's gradient is not summed over TP": (2, "", SP,
        marked("linear_proj.bias", sequence_parallel=False)),
    "a sharded weight's gradient is summed over TP": (2, "", SP,
        marked("linear_qkv.weight", sequence_parallel=True)),
    "norms of queries and keys are not summed over TP": (2, f"{LLAMA} --qk-layernorm", T2,
        replaced(FINALIZE, "_allreduce_non_tensor_model_parallel_grads", no_sum_for_norms_of_heads)),
    "a norm in FPDT is not summed over TP": (2, "", f"{SP} {FPDT}",
        marked("pre_mlp_layernorm.", sequence_parallel=False)),
    "a tied embedding is not summed over stages": (2, "", P2,
        replaced(FINALIZE, "_allreduce_word_embedding_grads", nothing)),
    "partitioned positions are summed over CP": (2, "", f"{U2} --partition-position-embedding",
        marked("position_embeddings.", allreduce=True)),
    "partitioned positions are not summed over DP": (4, "", f"{U2} --partition-position-embedding --zero-stage 2",
        replaced(fsdp.FullySharded, "finish_grad_sync", nothing)),
    "different experts are summed": (2, EXPERTS, f"{U2} {ep(2)}",
        marked("local_experts", allreduce=True)),
    "a router's gradient is not summed over TP": (2, EXPERTS, f"{SP} --expert-tensor-parallel-size 1 {ep(2)}",
        marked("router.weight", sequence_parallel=False)),
    "an adapter's gradient is not summed over TP": (2, LORA, SP,
        marked("linear_qkv.lora_a", sequence_parallel=False)),
    "the norm of a linear-attention or SSM layer is not summed over TP": (2, GATED, SP,
        replaced(gated_delta_net, "copy_to_tensor_model_parallel_region", untouched)),
    "the gradient of latents is not summed over the heads of TP": (2, LATENTS, T2,
        replaced(latent_attention, "copy_to_tensor_model_parallel_region", untouched)),
    "a row-parallel layer does not sum": (2, "", T2,
        replaced(layers, "reduce_from_tensor_model_parallel_region", untouched)),
    "a row-parallel layer in FPDT does not sum": (2, "", f"{T2} {FPDT}",
        replaced(layers, "reduce_from_tensor_model_parallel_region", untouched)),
    "a row-parallel layer scatters without a sum": (2, "", SP,
        replaced(layers, "reduce_scatter_to_sequence_parallel_region", scattered)),
    "a column-parallel layer does not sum the gradient of its input": (2, "", T2,
        marked("linear_qkv", allreduce_dgrad=False, disable_grad_reduce=True)),
    "an adapter does not sum the gradient of its input": (2, LORA, T2,
        replaced(lora, "copy_to_tensor_model_parallel_region", untouched)),
    "an adapter's row-parallel part does not sum": (2, LORA, T2,
        replaced(lora, "reduce_from_tensor_model_parallel_region", untouched)),
    "the output layer gathers the logits, of which the loss expects a part": (2, "", T2,
        marked("output_layer", gather_output=True)),
    "the loss in chunks does not gather the tokens of TP": (2, LLAMA, f"{SP} --loss-chunks 2",
        replaced(gpt, "chunked_linear_cross_entropy", loss_without_other_tokens)),
    "each rank differentiates the sum of all ranks' losses": (2, "", U2,
        replaced(step, "sum_of_losses", loss_of_all_ranks)),
    "each rank differentiates the complete auxiliary loss": (2, EXPERTS, f"{U2} {ep(2)}",
        replaced(experts.ExpertRouter, "_balancing_loss", complete_auxiliary_loss)),
    "the logged loss is summed over DP, not CP": (4, "", U2,
        replaced(loss, "get_data_parallel_group", dp_alone)),
    "gradients are divided by the tokens of DP, not CP": (4, "", U2,
        trained(count_tokens_over(DP_GROUP))),
    "tokens are counted on each TP rank": (2, "", T2,
        trained(count_tokens_over(parallel_state.get_tensor_model_parallel_group))),
    "a norm's weight counts on each TP rank": (2, "", T2,
        marked("input_layernorm.", tensor_model_parallel=True, partition_dim=0)),
    "a sharded weight counts on one TP rank only": (2, "", T2,
        marked("linear_fc1.weight", tensor_model_parallel=False)),
    "the gradient norm is not summed over TP": (2, "", T2,
        trained(norm_over(DP_GROUP))),
    "the gradient norm is not summed over ZeRO's shards": (2, "", f"{U2} --use-distributed-optimizer",
        trained(norm_over(parallel_state.get_tensor_model_parallel_group))),
    "a tied embedding counts on both stages": (2, "", P2,
        marked("weight", shared=False)),
}  # fmt: skip


def run(flags: str, name: str | None = None) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms of three steps, and the gradients of the first, with the error ``name``."""
    change, wrap = PLANTED[name][-1] if name else Change(), job_module.wrap_for_data_parallelism

    def wrapped(models: Any, config: Any) -> Any:
        for model in models:
            change.model(model)
        return wrap(models, config)

    with change.patches(), patch.object(job_module, "wrap_for_data_parallelism", wrapped):
        job = make_job(f"{GPT} {flags}", llama=False)
        change.trainer(job.model_chunks, job.optimizer)
        return train_job(job, 3)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_noticed(pool, shared, reference, name):
    world, model, grid, _ = PLANTED[name]
    alone = reference(run, model)
    right = shared(("planted", world, model, grid), lambda: pool.run(run, world, f"{model} {grid}", timeout=120))
    compare_runs(right, alone)
    with pytest.raises(AssertionError, match="losses of rank|norms of rank|gradient of"):
        compare_runs(pool.run(run, world, f"{model} {grid}", name, timeout=120), alone)


# Mistakes in one kind of layer. The gradients on the right are wrong by far more than the tolerance.

ATTENTION = "decoder.layers.0.self_attention."
ROUTER, NEXT = "decoder.layers.0.mlp.router.weight", "mtp.layers.1.eh_proj.weight"
SHORT = f"{states.SHORT} {adapters.LORA}"
R2 = cp(1, 2)
MISTAKES = [
    (states, states.without_states, states.SHORT, R2, f"{ATTENTION}in_proj.weight"),
    (states, states.without_halo, states.SHORT, R2, f"{ATTENTION}conv1d.weight"),
    (states, states.own_norm, states.SHORT, T2, f"{ATTENTION}out_norm.weight"),
    (states, states.without_states, mamba2.SHORT, R2, f"{ATTENTION}in_proj.weight"),
    (states, states.without_halo, mamba2.SHORT, R2, f"{ATTENTION}conv1d.weight"),
    (latents, latents.own_positions, latents.MLA, R2, f"{ATTENTION}linear_q_up_proj.weight"),
    (latents, latents.own_positions, latents.MLA, R2, f"{ATTENTION}linear_kv_down_proj.weight"),
    (latents, latents.as_core_sums, latents.MLA, T2, f"{ATTENTION}q_layernorm.weight"),
    (latents, latents.own_heads, latents.MLA, T2, f"{ATTENTION}linear_kv_down_proj.weight"),
    (latents, latents.first_block_alone, latents.MLA, f"{R2} {latents.SENT}",
     f"{ATTENTION}linear_kv_up_proj.weight"),
    (later, later.labels_in_place, later.MTP, "", NEXT),
    (later, later.own_rows, later.MTP, R2, NEXT),
    (later, later.over_ends, later.DOCUMENTS, "", NEXT),
    (moe, moe.alone, moe.MIXTRAL, R2, ROUTER),
    (moe, moe.as_core_does, moe.MIXTRAL, R2, ROUTER),
    (moe, moe.all_tokens, moe.MIXTRAL, R2, ROUTER),
    (moe, moe.chunk_by_chunk, f"{moe.EXPERTS} --moe-aux-loss-coeff 0.02", FPDT, ROUTER),
    *((adapters, mistake, model, grid, f"{ATTENTION}in_proj.{name}")
      for model in (SHORT, adapters.ALONE) for mistake, grid, name in (
          (adapters.cut_evenly, T2, "lora_b"), (adapters.own_rows, T2, "lora_a"),
          (states.without_states, R2, "lora_a"))),
]  # fmt: skip


def gradients(result: Any) -> dict[str, Tensor]:
    return result["grads"] if isinstance(result, dict) else result[-1]


@pytest.mark.parametrize("module, mistake, model, grid, name", MISTAKES)
def test_a_mistake_in_a_kind_of_layer_is_noticed(pool, reference, module, mistake, model, grid, name):
    right = reference(module.run, model)
    world = 1 if grid in ("", FPDT) else 2
    wrong = pool.run(module.run, world, f"{model} {grid}", mistake=mistake, timeout=120)[0]
    assert wrong_by(gradients(wrong), gradients(right), name) > 1e-3
