# SPDX-License-Identifier: Apache-2.0
"""A linear-attention or SSM layer for generation: it keeps its state and the last rows before the convolution.

Their size does not depend on the length of the text.

Prompts are computed over the grid as in training. The state after a prompt is composed of the maps of all ranks' spans.
Then every context-parallel rank has the same state, and decoding sends nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.core.mixers.state_mixer import StateMixer
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Spans
from megatron.context_parallel.linear_attention.mixer import linear_attention
from megatron.context_parallel.linear_attention.rules import LinearRule, recurrence
from megatron.context_parallel.linear_attention.short_convolution import convolve, short_convolution
from megatron.context_parallel.linear_attention.span_exchange import rows_of
from megatron.context_parallel.linear_attention.span_maps import apply_map, span_map
from megatron.platform.collectives import gathered
from megatron.platform.streams import to_device


class CachedState:
    """What a layer keeps of a batch, and its mixing of tokens, which takes the place of the layer's.

    Attributes:
        state: [b, heads, K, V] in fp32 (fp64), after the tokens so far.
        rows: [width - 1, b, channels], the last rows before the convolution.
    """

    def __init__(self, layer: StateMixer) -> None:
        self.layer, self.cache, layer.mixed = layer, self, self.mixed
        self.generation: Any = None
        self.state: Tensor | None = None
        self.rows: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return 0 if self.state is None else self.state.nbytes + self.rows.nbytes

    def begin(self, generation: Any) -> None:
        """Start a new batch; what is kept of the previous one is dropped."""
        self.generation, self.state, self.rows = generation, None, None

    def mixed(self, *inputs_and_batch: Any) -> Tensor:
        """As :meth:`StateMixer.mixed`, for prompts and for one token of each sample."""
        x, *others, _ = inputs_and_batch
        layer, weight, bias = self.layer, self.layer.conv1d.weight.squeeze(1), self.layer.conv1d.bias
        if self.generation.step is not None:
            rows = torch.cat((self.rows, x))
            self.rows = rows[1:]
            inputs = layer.inputs_of_rule(convolve(rows, weight, bias, "silu"), *others)
            out, self.state = recurrence(layer.rule, *(y.to(self.state.dtype) for y in inputs), state=self.state)
            return out.to(x.dtype)
        plan = self.generation.plan
        layout, ends = plan.layout, torch.tensor(plan.lengths)
        self.rows = last_rows(x, ends, weight.size(1) - 1, layout)
        convolved = short_convolution(x, weight, bias, layout=layout, activation="silu")
        q, k, v, *gates = layer.inputs_of_rule(convolved, *others)
        # Padding after a prompt changes no state: it neither forgets nor writes.
        is_padding = to_device(layout.positions[:, None] >= ends, x.device)[..., None]
        inputs = q, k, v, *(y.masked_fill(is_padding, 0.0) for y in gates)
        self.state = last_state(layer.rule, inputs, layout)
        return linear_attention(*inputs, rule=layer.rule, layout=layout)


def last_rows(x: Tensor, ends: Tensor, width: int, layout: SequenceLayout) -> Tensor:
    """The last ``width`` rows before ``ends`` of each sample, [width, b, channels]; 0 before the first token.

    Args:
        x: [s_local, b, channels].
        ends: int64 [b], on the CPU.
    """
    wanted = ends - torch.arange(width, 0, -1)[:, None]  # [width, b], positions
    found = wanted[..., None] == layout.positions  # [width, b, s_local]
    held, row = (to_device(one, x.device) for one in (found.any(-1), found.int().argmax(-1)))
    rows = x[row, torch.arange(x.size(1), device=x.device)] * held[..., None]
    if layout.grid.context.size > 1:
        dist.all_reduce(rows, group=layout.grid.context.group)
    return rows


def last_state(rule: LinearRule, inputs: tuple[Tensor, ...], layout: SequenceLayout) -> Tensor:
    """The state [b, heads, K, V] after the complete sequence, on every rank of ``grid.context``.

    Args:
        inputs: of the rule, as :func:`linear_attention` takes them.
    """
    grid, q = layout.grid, inputs[0]
    at = [(u, r) for r in range(grid.ring.size) for u in range(grid.ulysses.size)]
    held: list[Spans] = [layout.spans(ulysses=u, ring=r) for u, r in at]
    maps = [span_map(rule, inputs, rows) for rows in rows_of(held[grid.context.rank])]
    most, empty = max(map(len, held)), span_map(rule, inputs, (0, 0))
    mine = torch.stack((*maps, *(empty,) * (most - len(maps))))
    every = mine if grid.context.size == 1 else gathered(mine, grid.context.group)
    state = torch.zeros_like(empty[..., rule.map_columns(q.size(3)) :])
    numbered = [(span, rank, index) for rank, spans in enumerate(held) for index, span in enumerate(spans)]
    for _, rank, index in sorted(numbered):
        state = apply_map(rule, every[rank * most + index], state)
    return state
