# SPDX-License-Identifier: Apache-2.0
"""Work of a layer's linear layers, norms and activations on one rank, with tensor parallelism's transfers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.formulas.strategy import Shape, Strategy
from megatron.simulator.cost.operations import BF16, FP32, Segment, collective, gemm, memory
from megatron.simulator.cost.trace import Kernel, Transfer


def all_gather_tokens(strategy: Strategy, width: int, tokens: float) -> tuple[Transfer, ...]:
    """The all-gather before a column-parallel layer or a row-parallel layer's gradient; ``width``: per token."""
    if strategy.tensor == 1 or not strategy.sequence_parallel:
        return ()
    return (collective("all_gather", "tp", strategy.group("tp"), BF16 * tokens * width),)


def reduce_tokens(strategy: Strategy, width: int, tokens: float) -> tuple[Transfer, ...]:
    """The reduction after a row-parallel layer, and after a column-parallel layer's gradient."""
    if strategy.tensor == 1:
        return ()
    kind = "reduce_scatter" if strategy.sequence_parallel else "all_reduce"
    return (collective(kind, "tp", strategy.group("tp"), BF16 * tokens * width),)


@dataclass(frozen=True)
class Rows:
    """Tokens of a TP group in the linear layers of a layer, ``count`` times in a row.

    Between linear layers each rank has a share of them (sequence parallel) or all. The forward pass waits for TP's
    transfers. In the backward pass megatron-core overlaps a column-parallel layer's transfers with its two products
    (core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication).
    """

    shape: Shape
    strategy: Strategy
    tokens: float
    count: int = 1

    def run(self, *kernels: Kernel) -> Segment:
        return Segment(kernels, count=self.count)

    def send(self, *transfers: Transfer) -> list[Segment]:
        """Transfers that nothing overlaps, if any."""
        return [Segment((), transfers, count=self.count)] if transfers else []

    def memory(self, name: str, width: float, *, backward: bool = False) -> Kernel:
        """A kernel that moves ``width`` bytes for each token that this rank has between linear layers."""
        split = self.strategy.tensor if self.strategy.sequence_parallel else 1
        return memory(name, width * self.tokens / split, backward=backward)

    def norm(self, width: int, *, backward: bool = False) -> Kernel:
        return self.memory("norm", (5 if backward else 2) * BF16 * width, backward=backward)

    def activation(self, inner: int, *, backward: bool = False) -> Kernel:
        """Of an MLP; ``inner``: its width on this rank."""
        up = inner * (2 if self.shape.gated else 1)
        size = BF16 * self.tokens * ((2 * up if backward else up) + inner)
        return memory("activation", size, backward=backward)

    def enter(self) -> list[Segment]:
        return self.send(*all_gather_tokens(self.strategy, self.shape.hidden, self.tokens))

    def leave(self) -> list[Segment]:
        transfers = reduce_tokens(self.strategy, self.shape.hidden, self.tokens)
        return [*self.send(*transfers), self.run(self.memory("residual", 3 * BF16 * self.shape.hidden))]

    def mlp(self, name: str, inner: int) -> list[Segment]:
        """An MLP of ``inner`` numbers on this rank, without its norm and residual."""
        up = gemm(f"{name}_up", self.tokens, inner * (2 if self.shape.gated else 1), self.shape.hidden)
        down = gemm(f"{name}_down", self.tokens, self.shape.hidden, inner)
        return [*self.enter(), self.run(up, self.activation(inner), down)]

    def mlp_grad(self, name: str, inner: int) -> list[Segment]:
        """The backward pass of :meth:`mlp`."""
        return [
            *self.row_grad(f"{name}_down", inner),
            self.run(self.activation(inner, backward=True)),
            *self.column_grad(f"{name}_up", inner * (2 if self.shape.gated else 1)),
        ]

    def out(self, width: int) -> list[Segment]:
        """The output projection of ``width`` numbers of all TP ranks, and the residual."""
        product = gemm("attention_out", self.tokens, self.shape.hidden, width // self.strategy.tensor)
        return [self.run(product), *self.leave()]

    def weight_grad(self, name: str, n: int, k: int) -> tuple[Kernel, ...]:
        """The product, which adds to DDP's fp32 gradient itself, or a kernel does.

        FSDP reduces gradients once per micro-batch; only a layer that runs in ``count`` chunks has an fp32 sum: the
        first chunk is cast up, and the sum down.
        """
        strategy = self.strategy
        product, each = gemm(name + "_wgrad", n, k, self.tokens, backward=True), BF16 + 2 * FP32
        if strategy.fused and strategy.zero < 2:
            return (replace(product, bytes=product.bytes + (2 * FP32 - BF16) * n * k),)
        if strategy.fused:
            if not (strategy.fpdt_chunk or (strategy.ffn_chunks and name.startswith("mlp"))):
                return (product,)
            each = (2 * (BF16 + FP32) + (self.count - 1) * each) / self.count
        return product, memory("main_grad", each * n * k, backward=True)

    def column_grad(self, name: str, width: int, into: int = 0) -> list[Segment]:
        """``into``: the width of the layer's input, if it is not the hidden size."""
        into, tokens, count = into or self.shape.hidden, self.tokens, self.count
        dgrad = gemm(name + "_dgrad", tokens, into, width, backward=True)
        return [
            Segment((dgrad,), all_gather_tokens(self.strategy, into, tokens), count=count),
            Segment(self.weight_grad(name, width, into), reduce_tokens(self.strategy, into, tokens), count=count),
        ]

    def row_grad(self, name: str, width: int) -> list[Segment]:
        dgrad = gemm(name + "_dgrad", self.tokens, width, self.shape.hidden, backward=True)
        return [*self.enter(), self.run(dgrad, *self.weight_grad(name, self.shape.hidden, width))]
