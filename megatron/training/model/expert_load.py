# SPDX-License-Identifier: Apache-2.0
"""What the routers of a step have counted: the tokens of each expert and the auxiliary losses, of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.parallel_state import (
    get_pipeline_model_parallel_group,
    get_tensor_and_data_parallel_group,
)
from torch import Tensor, nn

from megatron.context_parallel.core.experts import SUMS, ExpertRouter
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.kinds.layer_patterns import expert_layers


@dataclass(frozen=True)
class ExpertLoad:
    """The numbers of a step, the same on every rank. Tokens that the loss leaves out are not counted.

    Attributes:
        tokens_per_expert: by layer with experts, those of multi-token prediction last, then by expert; without dropped
            tokens.
        losses: mean over these layers, without coefficient, by Megatron-LM's names.
    """

    tokens_per_expert: list[list[int]]
    losses: dict[str, float]

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest expert of any layer, over the mean of its layer."""
        return max(max(layer) * len(layer) / max(sum(layer), 1) for layer in self.tokens_per_expert)


def routers(chunks: Sequence[nn.Module]) -> Iterator[ExpertRouter]:
    """The routers of this pipeline stage."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, ExpertRouter))


def _with_experts(model: ModelConfig) -> list[int]:
    """:func:`expert_layers`, and the same for the layers of multi-token prediction, which are like the last layer."""
    layers = expert_layers(model)
    return layers + layers[-1:] * (model.mtp_num_layers or 0)


@torch.no_grad()
def take_load(chunks: Sequence[nn.Module], model: ModelConfig, device: torch.device) -> Tensor:
    """The sums of all routers since the last call, over all ranks: float64 [layers, experts + SUMS]; a collective."""
    layers = len(_with_experts(model))
    table = torch.zeros((layers, model.num_experts + len(SUMS)), dtype=torch.float64, device=device)
    for router in routers(chunks):
        if router.seen is not None:
            table[router.layer_number - 1] = router.seen
        router.seen = None
    dist.all_reduce(table, group=get_tensor_and_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(table, group=get_pipeline_model_parallel_group())
    return table


@torch.no_grad()
def move_biases(chunks: Sequence[nn.Module], table: Tensor, model: ModelConfig) -> None:
    """``--moe-router-enable-expert-bias``: raise the bias of experts with few tokens, and lower that of the others."""
    for router in routers(chunks):
        if router.expert_bias is not None:
            tokens = table[router.layer_number - 1, : model.num_experts]
            change = torch.sign(tokens.mean() - tokens) * model.moe_router_bias_update_rate
            router.expert_bias += change.to(router.expert_bias.dtype)


def load_of(table: Tensor, model: ModelConfig) -> ExpertLoad:
    """The numbers to report from the sums of a step."""
    rows = [row for row, has_experts in zip(table.tolist(), _with_experts(model)) if has_experts]
    coefficients = dict(zip(model.moe_router_load_balancing_type, model.moe_aux_loss_coeff))
    reported = {
        "load_balancing_loss": coefficients.get("aux_loss"),
        "seq_load_balancing_loss": coefficients.get("seq_aux_loss"),
        "z_loss": model.moe_z_loss_coeff,
    }
    sums = [dict(zip(SUMS, row[model.num_experts :])) for row in rows]
    return ExpertLoad(
        [[round(count) for count in row[: model.num_experts]] for row in rows],
        {
            name: sum(layer[name] / max(layer["tokens"], 1.0) for layer in sums) / len(sums)
            for name, coefficient in reported.items()
            if coefficient
        },
    )
