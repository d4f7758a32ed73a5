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

With --dpo and --reward-model the loss is one mean over all pairs of answers: see `PairObjective`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_data_parallel_group
from torch import Tensor, nn

from megatron.context_parallel.losses import pair_loss, ranking_loss
from megatron.platform.hooks import replaceable
from megatron.training.settings.config import Config
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


@torch.no_grad()
def layer_loss(chunks: Sequence[nn.Module], runtime: Runtime) -> dict[str, float]:
    """Mean over counted tokens and layers of the loss that layers have themselves, since the last call."""
    if runtime.layer_loss is None:
        return {}
    total = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    for module in (module for chunk in chunks for module in chunk.modules()):
        if getattr(module, "layer_loss", None) is not None:
            total += module.layer_loss
            module.layer_loss = None
    dist.all_reduce(total, group=get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(total, group=runtime.grid.pipeline.group)
    loss, tokens = total.tolist()
    return {runtime.layer_loss: loss / tokens} if tokens else {}


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


FIELDS = ("accuracy", "margin", "chosen_reward", "rejected_reward")  # in the log, after "dpo_" or "reward_model_"
Batch = dict[str, Any]
Run = Callable[[Sequence[nn.Module], Any, Callable[[Batch, Tensor], Tensor]], list[Tensor]]


@dataclass(frozen=True)
class PairObjective:
    """The loss of pairs of answers, compared by the log-probabilities of their tokens, or by a reward model's numbers.

    Both answers of a pair are in one sample. A rank of CP adds up the scores of its tokens by answer, and the ranks add
    up these few sums; then each computes the same losses and differentiates them with respect to its own tokens. core
    divides the gradients by the number of pairs of the global batch, as it does with tokens.

    Attributes:
        reference: called with the model's chunks, gives a context manager that yields the reference model, in chunks;
            None: no reference.
        frozen: the reference's own weights, if it has any.
    """

    config: Config
    runtime: Runtime
    reference: Callable[[Sequence[nn.Module]], Any] | None
    frozen: Sequence[nn.Module] = ()

    def prepared(self, chunks: Sequence[nn.Module], batches: Any, count: int, run: Run) -> Any:
        """The next ``count`` micro-batches of ``batches``, with the reference's sums on the last pipeline stage.

        Args:
            run: runs chunks on micro-batches without gradients, and returns what its function makes of each.
        """
        if self.reference is None:
            return batches
        every = batches if isinstance(batches, list) else [batches]
        held = [None if one is None else [next(one) for _ in range(count)] for one in every]

        def again() -> Any:
            iterators = [None if one is None else iter(one) for one in held]
            return iterators if isinstance(batches, list) else iterators[0]

        with self.reference(chunks) as model:
            reports = run(model, again(), self.sums)
        for one in held if reports else ():
            for batch, sums in zip(one or (), reports, strict=True):
                batch["reference"] = sums
        return again()

    def sums(self, batch: Batch, scores: Tensor) -> Tensor:
        """Of each answer, [2, b, answers]: the sum of its scores, and its tokens that have one; equal on all CP ranks.

        For a reward model, [3, b, answers]: the last is the pair's margin, of the chosen answer.
        """
        ends, axis = batch["document_ends"], self.runtime.grid.context
        # A pair has at least two ends, those of its answers, so there are enough columns for all answers. Further ends,
        # of shared prompts and padding, may make them odd; `loss` cuts the columns into pairs, so they become even.
        rows, width = scores.size(1), ends.size(1) + ends.size(1) % 2
        index = batch["groups"] + width * torch.arange(rows, device=scores.device)[:, None]
        values = [scores[0] * batch["loss_mask"], *(batch[key] for key in ("loss_mask", "margins") if key in batch)]
        values = torch.stack(values).double().flatten(1)
        own = values.new_zeros(len(values), rows * width).index_add(1, index.flatten(), values)
        if axis.size > 1:
            total = own.detach().clone()
            dist.all_reduce(total, group=axis.group)
            own = own + (total - own).detach()  # its gradient goes to this rank's own tokens
        return own.view(-1, rows, width)

    def loss(self, batch: Batch, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(sum to differentiate, pairs counted, sums for the report) of a micro-batch, as `sum_of_losses`."""
        answers, tokens, *margins = (x.unflatten(1, (-1, 2)) for x in self.sums(batch, scores))
        is_pair = (tokens > 0).all(-1)  # bool [b, pairs]; others are padding
        answers = torch.where(is_pair[..., None], answers, -1.0)  # any value below 0, for finite gradients
        if self.config.model.reward_model:
            values, rewards = ranking_loss(*answers.unbind(-1), margins[0][..., 0]), answers.detach()
        else:
            values, rewards = self._dpo(answers, tokens.clamp(min=1), batch.get("reference"))
        total = torch.where(is_pair, values, 0.0).sum()
        first = self.runtime.grid.context.rank == 0  # the ranks of CP have the same pairs, which count once
        number = is_pair.sum() * first
        margin = rewards[..., 0] - rewards[..., 1]
        logged = torch.stack((margin.gt(0).double(), margin, *rewards.unbind(-1)))
        report = torch.cat((total.detach()[None], number.double()[None], (logged * is_pair).flatten(1).sum(1)))
        return total, number.to(torch.int), report * first

    def _dpo(self, answers: Tensor, tokens: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
        """(losses [b, pairs], implicit rewards [b, pairs, 2]) of --dpo."""
        data = self.config.data
        old = None if reference is None else reference[0].unflatten(1, (-1, 2))
        values = pair_loss(
            data.dpo_loss,
            *answers.unbind(-1),
            *((None, None) if old is None else old.unbind(-1)),
            chosen_tokens=tokens[..., 0],
            rejected_tokens=tokens[..., 1],
            beta=data.dpo_beta,
            label_smoothing=data.dpo_label_smoothing,
            margin=data.dpo_margin,
        )
        return values, data.dpo_beta * (answers - (0 if old is None else old)).detach()

    def result(self, reports: list[Tensor]) -> tuple[float, int, dict[str, float]]:
        """Mean loss, number of pairs and means for the log, of the global batch; on every rank."""
        total, pairs, *logged = sum_of_reports(reports, (2 + len(FIELDS),), self.runtime).tolist()
        means = [x / max(pairs, 1.0) for x in (total, *logged)]
        kind = "reward_model" if self.config.model.reward_model else "dpo"
        return means[0], int(pairs), {f"{kind}_{field}": mean for field, mean in zip(FIELDS, means[1:])}
