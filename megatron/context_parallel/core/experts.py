# SPDX-License-Identifier: Apache-2.0
"""megatron-core's mixture of experts, with statistics and losses that are those of one process on every grid.

Core's layer, experts and dispatchers are used as they are. The router is ours, because core's (0.16.1) cannot be used:

- with ``calculate_per_token_loss``, moe/router.py (about line 466, and 498 for the z-loss) multiplies the auxiliary
  losses by the number of this rank's tokens. It should use the tokens of all ranks that share the micro-batch, so the
  gradients are too small by a factor of the number of these ranks;
- it counts masked tokens, and finalization divides by the number of unmasked ones;
- it applies the capacity of an expert on each rank separately;
- it moves its weights to CUDA.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import is_checkpointing
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_default_pg_collection
    from megatron.core.transformer.moe.router import Router
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.context_parallel.core.expert_choice import (
    RouterRule,
    balance,
    balancing_loss,
    capacity,
    choose,
    even_choice,
    probability_sums,
    ranking,
    within_capacity,
    z_loss,
)
from megatron.context_parallel.layout.spans import Span
from megatron.platform.autograd import once_differentiable
from megatron.platform.collectives import gathered, scattered
from megatron.platform.core_versions import submodules_of
from megatron.platform.hooks import replaceable

SUMS = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss", "tokens")  # they follow the counts in ``seen``
EXPERT = "local_experts"  # part of the names of experts' parameters, before their number on this rank


def router_positions(positions_s: Tensor, loss_mask_bs: Tensor) -> Tensor:
    """For the router, int64 [b, s]: each token's position, or ``~position`` if the loss leaves the token out."""
    return torch.where(loss_mask_bs > 0, positions_s, ~positions_s)


@dataclass(frozen=True)
class Statistics:
    """What the tokens of a micro-batch decide together. Given these, tokens are routed independently of each other.

    Attributes:
        learns: whether the auxiliary losses are attached.
        counted: [s, b], 1 for this rank's tokens that the loss counts, 0 for others.
        kept: bool [s, b, E], which experts have room for a token; None without a capacity.
        totals: by load-balancing loss, the choices [parts, E] and the counted tokens [parts] of all ranks.
        bias: [E], added to the scores for the choice; None: none.
        indices: [s, b, topk], the experts of each token; None: those of its logits.
    """

    learns: bool
    counted: Tensor
    kept: Tensor | None
    totals: dict[str, tuple[Tensor, Tensor]]
    bias: Tensor | None
    indices: Tensor | None = None

    def rows(self, span: Span) -> Statistics:
        """The statistics for some of this rank's tokens."""
        part = slice(*span)
        own = {name: getattr(self, name) for name in ("counted", "kept", "indices")}
        return replace(self, **{name: None if x is None else x[part] for name, x in own.items()})


class ExpertRouter(Router):
    """Chooses the experts of each token, and attaches the auxiliary losses to their weights.

    Attributes:
        expert_bias: added to the scores for the choice (``--moe-router-enable-expert-bias``); saved in checkpoints.
        seen: sums since they were last read, float64 [E + len(SUMS)]: tokens of each expert, then ``SUMS`` of this
            rank; None before the first training step.
        kept: with ``RouterRule.replay``, the choices for micro-batches whose layers will be recomputed.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection, rule: RouterRule) -> None:
        super().__init__(config, pg_collection)
        self.rule, self.seen, self.kept = rule, None, deque[Tensor]()
        bias = torch.zeros(config.num_moe_experts, dtype=torch.float32) if rule.expert_bias else None
        self.register_buffer("expert_bias", bias)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> ExpertRouter:
        """Like torch's, but the bias only moves to the weights' device: half precision would round it."""
        bias = self.expert_bias
        super()._apply(fn, *args, **kwargs)
        if bias is not None:
            self.expert_bias = bias.to(self.weight.device)
        return self

    def gating(self, input: Tensor) -> Tensor:
        """[s, b, h] -> logits [s, b, E], in the dtype of ``--moe-router-dtype``."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64, None: input.dtype}[self.config.moe_router_dtype]
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(input.to(dtype), self.weight.to(dtype), bias)

    def count(self, logits: Tensor, positions: Tensor | None) -> Statistics:
        """The statistics of a micro-batch, from the logits [s, b, E] of all tokens of this rank; a collective.

        While the layer learns, they are also added to ``seen``. ``positions`` [s, b]: see :func:`router_positions`.
        """
        learns = self.training and torch.is_grad_enabled()  # with recompute, only the second pass counts
        rule, (rows, samples, experts) = self.rule, logits.shape
        counted = logits.new_ones((rows, samples)) if positions is None else (positions >= 0).to(logits.dtype)
        kept, totals, indices = None, {}, None
        with torch.no_grad():
            logits_nE, counted_n = logits.flatten(0, 1), counted.flatten()
            bias = self._even_choice(logits_nE, counted_n) if rule.sinkhorn and self.training else self.expert_bias
            if rule.replay and self.training and is_checkpointing():
                indices = self._replayed(logits_nE, bias, learns)
            if rule.capacity_factor is not None or learns:
                weights_nE, chosen_nE = choose(logits_nE, rule, bias, indices)
            if rule.capacity_factor is not None:
                positions_n = None if positions is None else positions.flatten()
                kept_nE = self._within_capacity(weights_nE, chosen_nE, positions_n, samples)
                kept, chosen_nE = kept_nE.view(rows, samples, experts), chosen_nE & kept_nE
            if learns:
                sums = dict.fromkeys(SUMS, logits.new_zeros(()))
                sums["z_loss"] = z_loss(logits_nE, counted_n) if rule.z_loss else sums["z_loss"]
                for name, (_, parts) in self._balancing(samples).items():
                    probabilities, *own = balance(logits_nE, rule, counted_n, parts)
                    totals[name] = self._over_all_ranks(*own)
                    sums[name] = balancing_loss(probabilities, *totals[name], rule.topk)
                self._add(chosen_nE, counted_n, sums)
        indices = None if indices is None else indices.unflatten(0, (rows, samples))
        return Statistics(learns, counted, kept, totals, bias, indices)

    def routing(self, logits: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """(weights [n, E], chosen [n, E]) of tokens with logits [s, b, E] and the statistics of these rows."""
        logits_nE, counted_n = logits.flatten(0, 1), statistics.counted.flatten()
        if statistics.learns and self.rule.z_loss:
            logits_nE = MoEAuxLossAutoScaler.apply(logits_nE, self.rule.z_loss * z_loss(logits_nE, counted_n))
        indices = statistics.indices
        weights_nE, chosen_nE = choose(
            logits_nE, self.rule, statistics.bias, None if indices is None else indices.flatten(0, 1)
        )
        if statistics.kept is not None:
            kept_nE = statistics.kept.flatten(0, 1)
            weights_nE, chosen_nE = weights_nE * kept_nE, chosen_nE & kept_nE
        if statistics.learns:
            for name, (coefficient, parts) in self._balancing(logits.size(1)).items():
                loss = self._balancing_loss(logits_nE, counted_n, parts, statistics.totals[name])
                weights_nE = MoEAuxLossAutoScaler.apply(weights_nE, coefficient * loss)
        return weights_nE, chosen_nE

    def forward(
        self, input: Tensor, positions: Tensor | None = None, statistics: Statistics | None = None
    ) -> tuple[Tensor, Tensor]:
        """[s, b, h] of this rank -> (weights [n, E], chosen [n, E]).

        Args:
            statistics: of these tokens, if they are only a part of this rank's; then ``positions`` is not read.
        """
        logits = self.gating(input)
        return self.routing(logits, self.count(logits, positions) if statistics is None else statistics)

    def _balancing(self, samples: int) -> dict[str, tuple[float, int]]:
        """The load-balancing losses in use: coefficient, and number of parts of a micro-batch that have their own."""
        losses = {
            "load_balancing_loss": (self.rule.aux_loss, 1),
            "seq_load_balancing_loss": (self.rule.seq_aux_loss, samples),
        }
        return {name: loss for name, loss in losses.items() if loss[0]}

    def _replayed(self, logits_nE: Tensor, bias: Tensor | None, again: bool) -> Tensor:
        """The experts of each token of a layer that is recomputed: chosen in its first pass, and taken ``again``.

        Layers are recomputed in the order of their micro-batches. What a full expert drops is decided again.
        """
        if again:
            return self.kept.popleft().long()
        indices = ranking(logits_nE, self.rule, bias)
        self.kept.append(indices.to(torch.int16))
        return indices

    @replaceable
    def _even_choice(self, logits_nE: Tensor, counted_n: Tensor) -> Tensor:
        return even_choice(logits_nE, counted_n, self._sum)

    def _over_all_ranks(self, choices: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        both = self._sum(torch.cat([choices, tokens[:, None]], dim=1))
        return both[:, :-1], both[:, -1]

    def _sum(self, sums: Tensor) -> Tensor:
        """Over TP x CP, which share the micro-batch; in place."""
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(sums, group=self.tp_cp_group)
        return sums

    def _balancing_loss(
        self, logits_nE: Tensor, counted_n: Tensor, parts: int, totals: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The part of these tokens in a load-balancing loss."""
        return balancing_loss(probability_sums(logits_nE, self.rule, counted_n, parts), *totals, self.rule.topk)

    def _within_capacity(
        self, weights_nE: Tensor, chosen_nE: Tensor, positions_n: Tensor | None, samples: int
    ) -> Tensor:
        """Which choices of this rank's tokens the experts keep, decided among all tokens of the micro-batch."""
        rows, size = weights_nE.size(0), self.tp_cp_group.size()
        if positions_n is None:
            positions_n = torch.arange(rows // samples, device=weights_nE.device).repeat_interleave(samples)
        positions_n = torch.where(positions_n < 0, ~positions_n, positions_n)
        order_n = positions_n * samples + torch.arange(rows, device=weights_nE.device) % samples
        most = min(capacity(rows * size, self.num_experts, self.rule), rows * size)
        if size == 1:
            return within_capacity(weights_nE, chosen_nE, order_n, most, self.rule.drop_policy)
        parts = (weights_nE, chosen_nE.to(torch.uint8), order_n)
        every = [gather_rows(part, self.tp_cp_group, [rows] * size) for part in parts]
        kept = within_capacity(every[0], every[1].bool(), every[2], most, self.rule.drop_policy)
        return kept[rows * self.tp_cp_group.rank() :][:rows]

    @torch.no_grad()
    def _add(self, chosen_nE: Tensor, counted_n: Tensor, sums: dict[str, Tensor]) -> None:
        """Add this micro-batch to ``seen``."""
        sums["tokens"] = counted_n.sum(dtype=torch.float64)
        counts = (chosen_nE * counted_n[:, None]).sum(dim=0, dtype=torch.float64)
        new = torch.cat([counts, torch.stack([sums[name] for name in SUMS])])
        self.seen = new if self.seen is None else self.seen + new


class GatherRows(torch.autograd.Function):
    """Gathers the rows of all ranks of a group, which may differ in number. The backward pass sums each rank's rows.

    Parts are padded to the longest, because gloo cannot gather parts of unequal length.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return gather_rows(rows, group, sizes)

    @staticmethod
    @once_differentiable("a dispatcher of experts")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_rows(grad, ctx.group, ctx.sizes), None, None


class SumRows(torch.autograd.Function):
    """The reverse of :class:`GatherRows`: rows of all ranks are summed, and each rank gets its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return sum_rows(rows, group, sizes)

    @staticmethod
    @once_differentiable("a dispatcher of experts")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_rows(grad, ctx.group, ctx.sizes), None, None


def gather_rows(rows: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
    """The rows of all ranks, of which rank r has ``sizes[r]``, in the order of ranks."""
    most, rest = max(sizes), rows.shape[1:]
    if not most:
        return rows
    padded = torch.cat([rows, rows.new_zeros((most - rows.size(0), *rest))])
    return torch.cat([part[:size] for part, size in zip(gathered(padded, group).split(most), sizes)])


def sum_rows(rows: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
    """The sum over all ranks of the ``sizes[r]`` rows that belong to this rank r."""
    most, rest = max(sizes), rows.shape[1:]
    if not most:
        return rows
    padded = torch.cat(
        [part for own in rows.split(sizes) for part in (own, rows.new_zeros((most - own.size(0), *rest)))]
    )
    return scattered(padded, group)[: sizes[group.rank()]]


class AllToAll(MoEAlltoAllTokenDispatcher):
    """Core's dispatcher, which also runs on a CPU: there the counts of tokens need no copy to the host.

    This class sends the messages of expert TP itself: see :class:`GatherRows`.
    """

    @replaceable
    def preprocess(self, routing_map: Tensor) -> Tensor:
        """As core's: the number of tokens for each expert of this rank."""
        tokens = super().preprocess(routing_map)
        if not routing_map.is_cuda:
            for name in ("input_splits", "output_splits"):
                splits = getattr(self, name)
                setattr(self, name, splits if splits is None else splits.tolist())
        return tokens

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if not self.routing_map.is_cuda:
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)

    def dispatch_postprocess(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As core's: the tokens of this rank's experts, by expert, their number, and their weights."""
        if self.tp_size > 1:
            sizes = self.output_splits_tp.tolist()
            tokens, weights = (GatherRows.apply(part, self.tp_group, sizes) for part in (tokens, weights))
        with self._without_messages():
            return super().dispatch_postprocess(tokens, weights)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """As core's: the experts' outputs in the order in which their tokens came."""
        with self._without_messages():
            output = super().combine_preprocess(hidden_states)
        if self.tp_size == 1:
            return output
        sizes = self.output_splits_tp.tolist()
        return SumRows.apply(output.to(self.probs.dtype), self.tp_group, sizes).to(output.dtype)

    @contextmanager
    def _without_messages(self) -> Iterator[None]:
        """A context in which core's methods send no messages of expert TP, because the caller sends them."""
        size, self.tp_size = self.tp_size, 1
        try:
            yield
        finally:
            self.tp_size = size


class _Share(torch.autograd.Function):
    """A rank's share of a bias that all ranks of ``group`` hold; each of them computes the complete gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
        return bias / group.size()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _share_of_bias(
    module: nn.Module, args: Any, result: tuple[Tensor, Tensor], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """A hook: the outputs of the ranks of expert TP are summed, and core adds the bias on each of them (mlp.py:247)."""
    output, bias = result
    return output, bias if group.size() == 1 else _Share.apply(bias, group)


class Experts(MoELayer):
    """megatron-core's mixture of experts with our router, on GPUs and CPUs."""

    def __init__(self, config: TransformerConfig, rule: RouterRule, layer_number: int) -> None:
        spec = submodules_of(get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts))
        spec.router = lambda config, pg_collection, **_: ExpertRouter(config, pg_collection, rule)
        groups = get_default_pg_collection()
        super().__init__(config, spec, layer_number, groups)
        if config.moe_token_dispatcher_type == "alltoall":
            self.token_dispatcher = AllToAll(
                self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
            )
        if config.add_bias_linear:
            for expert in self.experts.local_experts:
                expert.linear_fc2.register_forward_hook(partial(_share_of_bias, group=groups.expt_tp))
                # Otherwise a reduction over one rank returns a view, to which core adds the bias (mlp.py:247).
                expert.linear_fc2.explicit_expert_comm = True
        self.router.set_layer_number(layer_number)
        for parameter in self.experts.parameters():
            # Core sums the gradients of parameters with this mark over the ranks that hold the same experts. It marks
            # them only with expert parallelism. But if expert TP is below TP, TP ranks hold the same experts too.
            parameter.allreduce = False
            # Core marks a bias for a sum over TP; but the tokens of all TP ranks come to an expert's ranks anyway.
            parameter.sequence_parallel = False

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: None = None,
        padding_mask: Tensor | None = None,
        statistics: Statistics | None = None,
    ) -> tuple[Tensor, None]:
        """[s, b, h] -> [s, b, h] and no bias.

        Args:
            padding_mask: not core's mask but a result of :func:`router_positions`.
            statistics: of these tokens, if they are only a part of this rank's.
        """
        shared = self.shared_experts_compute(hidden_states)
        weights, chosen = self.router(hidden_states, None if padding_mask is None else padding_mask.t(), statistics)
        tokens, weights = self.dispatch(*self.preprocess(hidden_states, weights, chosen))
        output, _ = self.routed_experts_compute(tokens, weights)
        output = self.postprocess(self.combine(output), shared)
        # Core's dispatchers keep the last weights, and with them the graph of the step, which refers to this layer.
        self.token_dispatcher.probs = self.token_dispatcher.local_probs = None
        return output, None
