# SPDX-License-Identifier: Apache-2.0
"""The head of a reward model (--reward-model): one number for each answer, from the hidden state of its last token."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.layout.grid import Axis

HEAD = "reward_head"


def is_head(name: str) -> bool:
    """Whether ``name`` is the name of a parameter of a reward model's head."""
    return name.startswith(f"{HEAD}.")


class RewardHead(nn.Module):
    """A linear layer with one output, as that of transformers' models for sequence classification.

    Every TP rank has it. Without sequence parallelism all compute the same numbers; with it each computes those of its
    tokens, and core sums the gradients of the weight.
    """

    def __init__(self, hidden_size: int, tensor: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size))
        self.weight.sequence_parallel = sequence_parallel
        self.tensor, self.sequence_parallel = tensor, sequence_parallel

    def forward(self, hidden_SBH: Tensor, wanted_SB: Tensor) -> Tensor:
        """[s, b] of all tokens of the TP group, 0 where ``wanted`` is; ``hidden`` may be a host buffer."""
        wanted, wide = wanted_SB, accumulation_dtype(self.weight.dtype)
        if self.sequence_parallel:
            wanted = wanted.chunk(self.tensor.size)[self.tensor.rank]
        rows = wanted.flatten().nonzero().squeeze(1)
        chosen = hidden_SBH.flatten(0, 1).index_select(0, rows.to(hidden_SBH.device)).to(self.weight.device)
        values = F.linear(chosen.to(wide), self.weight.to(wide)).squeeze(1)
        rewards = values.new_zeros(wanted.numel()).index_copy(0, rows, values).view_as(wanted)
        if not self.sequence_parallel:
            return rewards
        group = self.tensor.group
        return gather_from_sequence_parallel_region(rewards, tensor_parallel_output_grad=False, group=group)
