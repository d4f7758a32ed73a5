# SPDX-License-Identifier: Apache-2.0
"""Errors of distribution, planted in complete models. The checker of types must find each without comparing numbers.

Each error is one typical change: a sum is left out, happens twice or over the wrong ranks, or an attribute of a
parameter is not set.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
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
from megatron.platform import cpu
from megatron.training import loss, step
from megatron.training.model import fsdp, gpt
from tests.distribution_types import RAN, hide_tables
from tests.typed_models import EXPERTS, FPDT, GATED, LATENTS, LLAMA, PP, SP, TP, Change, U, verdict

FINALIZE = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # the package hides the module
Patch = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class Planted:
    """An error, and the command line and number of ranks of a small model that has it.

    Attributes:
        where: the function or parameter that it changes.
        error: words of the error of types that it causes.
        change: what it changes in a built model.
        patches: what it changes before the model is built.
    """

    where: str
    error: str
    flags: str
    world: int
    change: Change = Change()
    patches: Patch = field(default=nullcontext)


def marked(part: str, **attributes: Any) -> Change:
    """Set attributes of every parameter and module whose name contains ``part``; "config": of the settings."""

    def change(model: nn.Module) -> None:
        whole = {"config": model.config, **dict(model.named_parameters()), **dict(model.named_modules())}
        found = [x for name, x in whole.items() if part in name]
        assert found, part
        for x in found:
            vars(x).update(attributes)

    return Change(model=change)


def unsharded_norm(model: nn.Module) -> None:
    """Core sums the gradients of norms over TP, although TP ranks have the same tokens."""
    marked("input_layernorm.", sequence_parallel=True).model(model)
    model.config.sequence_parallel = True


def replaced(owner: Any, name: str, value: Any) -> Patch:
    return lambda: patch.object(owner, name, value)


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


def loss_over_tp(loss_mask: Tensor, losses: Tensor) -> tuple:
    total, *others = LOSSES(loss_mask, losses)
    group = parallel_state.get_tensor_model_parallel_group()
    return layers.reduce_from_tensor_model_parallel_region(total, group=group), *others


LORA = "--lora-rank 4 "
MIXED, SUMMED = "axis {} cannot mix with other types", "gradients of different parts are summed over {}"
PLANTED = {
    # sums of gradients
    "gradients are summed over DP, not CP": Planted(
        "core's DDP", MIXED.format("ulysses"), U, 4,
        patches=replaced(parallel_state, "get_data_parallel_group", dp_alone),
    ),
    "FSDP sums over DP, not CP": Planted(
        "training/model/fsdp.py, shard", MIXED.format("ulysses"), U + "--zero-stage 3", 4,
        patches=replaced(fsdp, "get_data_parallel_group", dp_alone),
    ),
    "gradients are summed twice": Planted(
        "core's finalize_model_grads", "summed 2 times over ulysses", U, 2, Change(trainer=finalize_twice)
    ),
    "gradients are means over ranks": Planted(
        "core's DDP", "no product of sums", U, 2, marked("config", calculate_per_token_loss=False)
    ),
    "a norm's gradient is not summed over TP": Planted(
        "input_layernorm", MIXED.format("tp"), SP, 2, marked("input_layernorm.", sequence_parallel=False)
    ),
    "a bias's gradient is not summed over TP": Planted(
        "linear_proj.bias", MIXED.format("tp"), SP, 2, marked("linear_proj.bias", sequence_parallel=False)
    ),
    "a norm's gradient is summed over TP, whose ranks have the same tokens": Planted(
        "input_layernorm", "expects its input to be I on axis tp", TP, 2, Change(model=unsharded_norm)
    ),
    "a sharded weight's gradient is summed over TP": Planted(
        "linear_qkv.weight", SUMMED.format("tp"), SP, 2, marked("linear_qkv.weight", sequence_parallel=True)
    ),
    "norms of queries and keys are not summed over TP": Planted(
        "core's finalize_model_grads", MIXED.format("tp"), TP + LLAMA + "--qk-layernorm", 2,
        patches=replaced(FINALIZE, "_allreduce_non_tensor_model_parallel_grads", no_sum_for_norms_of_heads),
    ),
    "a norm in FPDT is not summed over TP": Planted(
        "pre_mlp_layernorm", MIXED.format("tp"), SP + FPDT, 2, marked("pre_mlp_layernorm.", sequence_parallel=False)
    ),
    "a tied embedding is not summed over stages": Planted(
        "core's finalize_model_grads", MIXED.format("pp"), PP, 2,
        patches=replaced(FINALIZE, "_allreduce_word_embedding_grads", nothing),
    ),
    "partitioned positions are summed over CP": Planted(
        "PositionRows", SUMMED.format("ulysses"), U + "--partition-position-embedding", 2,
        marked("position_embeddings.", allreduce=True),
    ),
    "partitioned positions are not summed over DP": Planted(
        "FullySharded.finish_grad_sync", MIXED.format("dp"), U + "--partition-position-embedding --zero-stage 2", 4,
        patches=replaced(fsdp.FullySharded, "finish_grad_sync", nothing),
    ),
    "different experts are summed": Planted(
        "Experts", SUMMED.format("ulysses"), U + EXPERTS, 2, marked("local_experts", allreduce=True)
    ),
    "a router's gradient is not summed over TP": Planted(
        "ExpertRouter", MIXED.format("tp"), SP + EXPERTS + "--expert-tensor-parallel-size 1 ", 2,
        marked("router.weight", sequence_parallel=False),
    ),
    "an adapter's gradient is not summed over TP": Planted(
        "ColumnParallelLinearWithLora", MIXED.format("tp"), SP + LORA, 2,
        marked("linear_qkv.lora_a", sequence_parallel=False),
    ),
    "the norm of a layer with a state is not summed over TP": Planted(
        "GatedDeltaNet.gated_norm", MIXED.format("tp"), SP + GATED, 2,
        patches=replaced(gated_delta_net, "copy_to_tensor_model_parallel_region", untouched),
    ),
    # messages of the forward pass, and of its gradient
    "the gradient of latents is not summed over the heads of TP": Planted(
        "LatentAttention._all_tokens", MIXED.format("tp"), TP + LATENTS, 2,
        patches=replaced(latent_attention, "copy_to_tensor_model_parallel_region", untouched),
    ),
    "a row-parallel layer does not sum": Planted(
        "core's RowParallelLinear", MIXED.format("tp"), TP, 2,
        patches=replaced(layers, "reduce_from_tensor_model_parallel_region", untouched),
    ),
    "a row-parallel layer in FPDT does not sum": Planted(
        "core's RowParallelLinear", MIXED.format("tp"), TP + FPDT, 2,
        patches=replaced(layers, "reduce_from_tensor_model_parallel_region", untouched),
    ),
    "a row-parallel layer scatters without a sum": Planted(
        "core's RowParallelLinear", "expects its input to be I on axis tp", SP, 2,
        patches=replaced(layers, "reduce_scatter_to_sequence_parallel_region", scattered),
    ),
    "a column-parallel layer does not sum the gradient of its input": Planted(
        "core's ColumnParallelLinear", MIXED.format("tp"), TP, 2,
        marked("linear_qkv", allreduce_dgrad=False, disable_grad_reduce=True),
    ),
    "an adapter does not sum the gradient of its input": Planted(
        "ColumnParallelLinearWithLora", MIXED.format("tp"), TP + LORA, 2,
        patches=replaced(lora, "copy_to_tensor_model_parallel_region", untouched),
    ),
    "an adapter's row-parallel part does not sum": Planted(
        "RowParallelLinearWithLora", MIXED.format("tp"), TP + LORA, 2,
        patches=replaced(lora, "reduce_from_tensor_model_parallel_region", untouched),
    ),
    "the output layer gathers the logits, of which the loss expects a part": Planted(
        "output_layer", MIXED.format("tp"), TP, 2, marked("output_layer", gather_output=True)
    ),
    "the loss in chunks does not gather the tokens of TP": Planted(
        "chunked_linear_cross_entropy", "expects its input to be I on axis tp", SP + LLAMA + "--loss-chunks 2", 2,
        patches=replaced(gpt, "chunked_linear_cross_entropy", loss_without_other_tokens),
    ),
    # losses
    "each rank differentiates the sum of all ranks' losses": Planted(
        "sum_of_losses", "expected input type V on axis cp, got R", U, 2,
        patches=replaced(step, "sum_of_losses", loss_of_all_ranks),
    ),
    "the loss is summed over TP, whose ranks have the same loss": Planted(
        "sum_of_losses", "expects its input to be V on axis tp", TP, 2,
        patches=replaced(step, "sum_of_losses", loss_over_tp),
    ),
    "each rank differentiates the complete auxiliary loss": Planted(
        "ExpertRouter._balancing_loss", "would differentiate the complete loss", U + EXPERTS, 2,
        patches=replaced(experts.ExpertRouter, "_balancing_loss", complete_auxiliary_loss),
    ),
    "the logged loss is summed over DP, not CP": Planted(
        "sum_of_reports", "axis ulysses: tensor has V, expected R", U, 4,
        patches=replaced(loss, "get_data_parallel_group", dp_alone),
    ),
    # what gradients are divided by, and the norm that clips
    "gradients are divided by the tokens of DP, not CP": Planted(
        "core's finalize_model_grads", "tokens is summed over ['dp']", U, 4, Change(trainer=count_tokens_over(DP_GROUP))
    ),
    "tokens are counted on each TP rank": Planted(
        "core's finalize_model_grads", "tokens is summed over ['tp']", TP, 2,
        Change(trainer=count_tokens_over(parallel_state.get_tensor_model_parallel_group)),
    ),
    "a norm's weight counts on each TP rank": Planted(
        "gradient norm", "counts 2 times", TP, 2, marked("input_layernorm.", tensor_model_parallel=True)
    ),
    "a sharded weight counts on one TP rank only": Planted(
        "gradient norm", "linear_fc1.weight: its gradient counts 0 times", TP, 2,
        marked("linear_fc1.weight", tensor_model_parallel=False),
    ),
    "the gradient norm is not summed over TP": Planted(
        "gradient norm", "counts 0 times", TP, 2, Change(trainer=norm_over(DP_GROUP))
    ),
    "the gradient norm is not summed over ZeRO's shards": Planted(
        "gradient norm", "counts 0 times", U + "--use-distributed-optimizer", 2,
        Change(trainer=norm_over(parallel_state.get_tensor_model_parallel_group)),
    ),
    "a tied embedding counts on both stages": Planted(
        "gradient norm", "word_embeddings.weight: its gradient counts 2 times", PP, 2, marked("weight", shared=False)
    ),
}  # fmt: skip


def main() -> int:
    """Print one JSON object: the error of each planted model, and of the same models without errors."""
    torch.set_num_threads(1)
    cpu.run_core_on_cpu()
    hide_tables()
    errors = {}
    for name, planted in PLANTED.items():
        with planted.patches():
            errors[name] = verdict(planted.flags, planted.world, planted.change)
    models = sorted({(planted.flags, planted.world) for planted in PLANTED.values()})
    unchanged = {f"{world} ranks, {flags}": verdict(flags, world) for flags, world in models}
    print(json.dumps({"planted": errors, "unchanged": unchanged, "ran": sorted(RAN)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
