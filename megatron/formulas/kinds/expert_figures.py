# SPDX-License-Identifier: Apache-2.0
"""Experts: their parameters and products, the tokens that a rank sends and receives, and the memory that they take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron.formulas.sizes import WIDE, Tensor, sizes_of
from megatron.formulas.strategy import Shape, Strategy, Workload

INDEX = 8  # bytes of a token's place among those of an expert


@dataclass(frozen=True)
class Mixture:
    """The experts of a model.

    Attributes:
        experts: experts of a layer.
        topk: experts that a token goes to.
        ffn: width of an expert.
        shared: width of the expert that all tokens go to; 0: none.
        layers: 1 for each layer that has experts in place of its MLP, 0 for the others.
        gated: the shared expert's output is multiplied by a gate.
        capacity: most tokens of an expert as a multiple of the mean; 0: no limit.
        replay: recomputed layers keep the choice of experts.
    """

    experts: int
    topk: int
    ffn: int
    shared: int = 0
    layers: tuple[int, ...] = ()
    capacity: float = 0.0
    gated: bool = False
    replay: bool = False

    def router(self, shape: Shape, tensor: int) -> tuple[Tensor, ...]:
        """The parameters of a layer's router and shared expert on one of ``tensor`` TP ranks."""
        h, shared, first = shape.hidden, self.shared // tensor, 2 if shape.gated else 1
        gate = (self.experts, h), *(((self.experts, 1),) * shape.bias)
        return (*gate, *(((1, h),) * self.gated), *(((first * shared, h), (h, shared)) if shared else ()))

    def tensors(self, shape: Shape, expert: int, expert_tensor: int) -> tuple[Tensor, ...]:
        """The parameters of a layer's experts on one of ``expert`` ranks, each of which has a part of them."""
        h, width, first = shape.hidden, self.ffn // expert_tensor, 2 if shape.gated else 1
        bias = (((first * width, 1),), ((h, 1),)) if shape.bias else ((), ())
        one = (first * width, h), *bias[0], (h, width), *bias[1]
        return one * (self.experts // expert)

    def width(self, matrices: int) -> float:
        """Multiplications for a token, divided by the hidden size: of the experts that compute the token."""
        chosen = self.topk * min(self.capacity or 1.0, 1.0)  # an expert drops what is beyond its capacity
        return self.experts + self.gated + matrices * (self.shared + chosen * self.ffn)


@dataclass(frozen=True)
class Dispatched:
    """Choices (a token and one of its experts) of a micro-batch, on the rank whose experts get most.

    Attributes:
        tokens: of this rank, which its router reads.
        sent: choices of these tokens, without those that a full expert drops.
        received: choices of all ranks' tokens for this rank's experts.
        held: experts of this rank.
        width: of the part of an expert on this rank.
        shared: width of the part of the shared expert on this rank.
    """

    tokens: int
    sent: int
    received: int
    held: int
    width: int
    shared: int

    @property
    def each(self) -> float:
        """Choices for one of the rank's experts."""
        return self.received / self.held


@lru_cache(maxsize=8192)
def dispatched(workload: Workload, strategy: Strategy) -> Dispatched:
    """The choices of a layer of a mixture; with expert TP, the ranks that split an expert each get all its tokens."""
    mixture, tokens = workload.shape.mixture, strategy.local_tokens(workload)
    most = mixture.capacity or float("inf")  # times the mean
    mean, busiest = min(1.0, most), min(workload.imbalance, strategy.expert, most)
    choices = tokens * mixture.topk
    return Dispatched(
        tokens=tokens,
        sent=int(choices * mean),
        received=int(choices * busiest) * strategy.expert_tensor,
        held=mixture.experts // strategy.expert,
        width=mixture.ffn // strategy.expert_tensor,
        shared=mixture.shared // strategy.tensor,
    )


def experts_kept(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
    """Bytes that router and experts keep for backward, without the layer's input and output.

    Of each choice: the expert's input, and inside it the halves of the first product, their product and its weighted
    form (unfused also silu's output and a copy); the token's index and weight. Of each token and expert: the order of
    the scores, weights and masks.
    """
    d, shape = dispatched(workload, strategy), workload.shape
    gated = shape.gated
    inside = (3 if fused else 6) if gated else 3
    choice = (shape.hidden + inside * d.width) * itemsize * d.received + (INDEX + itemsize + WIDE) * d.sent
    scores = d.tokens * shape.mixture.experts * (INDEX + 2 + 2 * itemsize)
    tokens = sizes_of(workload, strategy, itemsize).whole // (shape.hidden * itemsize)
    shared = ((3 if fused else 5) if gated else 2) * d.shared * itemsize * tokens
    return choice + scores + shared


def experts_peak(workload: Workload, strategy: Strategy, itemsize: int) -> tuple[int, int]:
    """Bytes that router and experts use at most in addition to what they keep, in a forward and in a backward pass.

    Forward: the received tokens, the outputs by expert and together, or these sorted for their way back. Backward: the
    gradients of the outputs as they arrive and sorted, or those of one expert's matrices and inside. FSDP keeps the
    gradients of all experts' matrices until the layer's backward pass is over.
    """
    d, shape = dispatched(workload, strategy), workload.shape
    token = shape.hidden * itemsize
    second, first = (sides * d.width * token for sides in (1, 2 if shape.gated else 1))
    hidden = sizes_of(workload, strategy, itemsize).hidden
    sorts = d.held > 1
    forward = (1 + 2 * sorts) * d.received * token
    arriving = d.received * token * 2 if sorts else (d.sent + d.received) * token
    inside = d.each * itemsize * 2 * d.width
    one = d.received * token + max(second + inside, first + inside + d.each * token)
    most = int(max(forward, hidden + arriving, hidden + one))
    if strategy.zero < 2:
        return most, most
    gradients = d.held * (first + second)
    return most, int(max(forward, hidden + arriving + gradients, hidden + one + gradients - first))


def ffn_numel(shape: Shape, strategy: Strategy) -> int:
    """Parameters of a rank in the router, the experts and the shared expert of a layer."""
    mixture, sides = shape.mixture, 3 if shape.gated else 2
    experts = mixture.experts // strategy.expert * mixture.ffn // strategy.expert_tensor
    return shape.hidden * (sides * (experts + mixture.shared // strategy.tensor) + mixture.experts)
