# SPDX-License-Identifier: Apache-2.0
"""The loss of a step: how it is normalized, how it is added up over ranks, and the mean that is logged.

The loss is one mean over all tokens of the global batch that the loss mask keeps, whatever the grid is:

1. The model computes the cross-entropy of each token of a rank (model/gpt.py), or with --loss-chunks their sum
   (context_parallel/fpdt/chunked_loss.py). The ranks of TP compute it together and all have the result.
2. `sum_of_losses` adds up the losses of a rank's tokens in a micro-batch and counts the tokens. It does not divide,
   because the ranks of CP and DP hold different numbers of kept tokens.
3. megatron-core adds up the gradients and the counts over micro-batches, CP and DP, and divides the gradients once by
   the count (its finalize_model_grads.py; model/core_config.py sets calculate_per_token_loss).
4. Only the last pipeline stage has losses. `mean_loss` adds up their sums and counts in float64, sends both to the
   other stages and divides: this is lm_loss in the log, and the count is tokens.

If the loss differs with context parallelism, compare `tokens` in the two logs. If these differ, the ranks have other
tokens or another loss mask: see data/batches.py. Otherwise repeat the step in fp32 with --attention-kernel math, which
shows whether rounding is the cause. Then see context_parallel/layout/sequence_layout.py for the positions,
context_parallel/attention/ for the attention, and docs/inside/grid-invariance.md for the difference that is usual.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_data_parallel_group
from torch import Tensor, nn

from megatron.platform.hooks import replaceable
from megatron.training.setup import Runtime


def sum_of_losses(loss_mask: Tensor, loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sum to differentiate, tokens counted, sum and count for the report) of this rank's tokens.

    core divides by the tokens of the global batch, so a rank whose tokens are all masked contributes zero.
    """
    mask = loss_mask.reshape(-1)
    losses = loss.reshape(-1) * mask if loss.dim() else loss  # a sum already, with --loss-chunks; in fp32 at least
    tokens = mask.sum(dtype=torch.float64)
    report = torch.stack((losses.detach().double().sum(), tokens))
    return losses.sum(), tokens.to(torch.int), report


@replaceable
def mean_loss(reports: list[Tensor], runtime: Runtime) -> tuple[float, int]:
    """Mean loss and number of tokens of the global batch, on every rank."""
    loss_sum, tokens = sum_of_reports(reports, (2,), runtime).tolist()
    return (loss_sum / tokens if tokens else 0.0), int(tokens)


def losses_ahead(chunks: Sequence[nn.Module], runtime: Runtime) -> dict[str, float]:
    """Mean loss of each layer of multi-token prediction since the last call, by Megatron-LM's names."""
    if not runtime.ahead:
        return {}
    modules = [module for chunk in chunks for module in chunk.modules()]
    models = [module for module in modules if getattr(module, "ahead_sums", None) is not None]
    total = sum_of_reports([model.ahead_sums for model in models], (runtime.ahead, 2), runtime)
    for model in models:
        model.ahead_sums = None
    return {f"mtp_{number} loss": loss / max(tokens, 1.0) for number, (loss, tokens) in enumerate(total.tolist(), 1)}


def sum_of_reports(reports: list[Tensor], shape: tuple[int, ...], runtime: Runtime) -> Tensor:
    """The sum of the reports over micro-batches, DP and CP: float64 of ``shape``, the same on every rank."""
    total = torch.zeros(shape, dtype=torch.float64, device=runtime.device)
    for report in reports:
        total += report
    dist.all_reduce(total, group=get_data_parallel_group(with_context_parallel=True))
    if runtime.grid.pipeline.size > 1:
        last = runtime.grid.pipeline.global_rank(runtime.grid.pipeline.size - 1)
        dist.broadcast(total, last, group=runtime.grid.pipeline.group)
    return total
