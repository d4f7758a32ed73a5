# SPDX-License-Identifier: Apache-2.0
"""How many tokens each expert gets in a dry run, where routers have no scores to choose by.

Every rank's tokens choose all experts equally often, except that the simulated rank may hold busier ones: then its
experts get ``imbalance`` times the mean, of every rank's tokens. The program itself runs unchanged; only the numbers
that it reads from tensors are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from megatron.core.parallel_state import get_expert_model_parallel_rank
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor

from megatron.context_parallel.core.experts import AllToAll, ExpertRouter
from megatron.platform.hooks import patched, replaced
from megatron.training.settings.config import Config


@dataclass(frozen=True)
class Routing:
    """Which experts the tokens of a micro-batch choose.

    Attributes:
        experts: of a layer.
        topk: experts of a token.
        local: numbers of this rank's experts.
        imbalance: tokens of this rank's experts, over the mean of all experts.
        capacity: most tokens of an expert, over the mean; None: no limit.
    """

    experts: int
    topk: int
    local: range
    imbalance: float = 1.0
    capacity: float | None = None

    def counts(self, tokens: int) -> np.ndarray:
        """How many of ``tokens`` choose each expert, int64 [E]; without those that a full expert drops."""
        whole, held = tokens * self.topk, len(self.local)
        others = self.experts - held
        busy = whole if not others else min(whole, round(self.imbalance * whole * held / self.experts))
        counts = np.empty(self.experts, dtype=np.int64)
        counts[self.local.start : self.local.stop] = _shares(busy, held)
        rest = _shares(whole - busy, others)
        counts[: self.local.start], counts[self.local.stop :] = rest[: self.local.start], rest[self.local.start :]
        return counts if self.capacity is None else np.minimum(counts, ceil(whole / self.experts * self.capacity))

    def selected(self, mask: Tensor) -> int:
        """How many entries of a mask [experts or this rank's experts, tokens] are set."""
        counts = self.counts(mask.size(1))
        return int(counts.sum() if mask.size(0) == self.experts else self._own(counts).sum())

    def _own(self, counts: np.ndarray) -> np.ndarray:
        return counts[self.local.start : self.local.stop]

    @contextmanager
    def numbers(self) -> Iterator[None]:
        """A context in which core's dispatchers read these counts, as numpy arrays, instead of fake tensors."""

        def preprocess(real: Callable) -> Callable:
            def run(dispatcher: AllToAll, routing_map: Tensor) -> np.ndarray:
                real(dispatcher, routing_map)  # exchanges the counts
                counts, ranks = self.counts(routing_map.size(0)), dispatcher.tp_size * dispatcher.ep_size
                own = self._own(counts)
                if ranks > 1:
                    dispatcher.input_splits = counts.reshape(dispatcher.ep_size, -1).sum(axis=1).tolist()
                    dispatcher.output_splits = [int(own.sum())] * dispatcher.ep_size
                    dispatcher.output_splits_tp = np.full(dispatcher.tp_size, dispatcher.ep_size * own.sum())
                dispatcher.num_global_tokens_per_local_expert = np.tile(own, (ranks, 1))
                places = np.arange(self.experts * dispatcher.tp_size)
                dispatcher.sort_input_by_local_experts = places.reshape(-1, len(own)).T.ravel()
                dispatcher.restore_output_by_local_experts = places.reshape(len(own), -1).T.ravel()
                return own * ranks

            return run

        of_core = MoEAllGatherTokenDispatcher.dispatch_postprocess

        def dispatch_postprocess(dispatcher: MoEAllGatherTokenDispatcher, tokens: Tensor, weights: Tensor) -> Any:
            own = self._own(self.counts(tokens.size(0)))
            permuted, _, weights = of_core(dispatcher, tokens, weights)
            return permuted, own, weights

        def even_choice(_: Callable) -> Callable:  # its number of iterations depends on the values
            return lambda router, logits_nE, counted_n: logits_nE.new_zeros(logits_nE.size(1))

        with ExitStack() as stack:
            stack.enter_context(replaced(AllToAll.preprocess, preprocess))
            stack.enter_context(replaced(ExpertRouter._even_choice, even_choice))
            stack.enter_context(patched(MoEAllGatherTokenDispatcher, "dispatch_postprocess", dispatch_postprocess))
            yield


def _shares(whole: int, parts: int) -> np.ndarray:
    """``whole`` in ``parts`` parts that differ by at most 1."""
    return np.array([whole * (at + 1) // parts - whole * at // parts for at in range(parts)], dtype=np.int64)


def routing_of(config: Config) -> Routing | None:
    """The routing on this process's simulated rank; None: no experts."""
    model = config.model
    if not model.num_experts:
        return None
    held = model.num_experts // config.parallel.expert_model_parallel_size
    rank = get_expert_model_parallel_rank()
    return Routing(
        model.num_experts,
        model.moe_router_topk,
        range(rank * held, (rank + 1) * held),
        config.simulation.dry_run_expert_imbalance,
        model.moe_expert_capacity_factor,
    )
