# SPDX-License-Identifier: Apache-2.0
"""Spans of tokens under rules without a delta by the kernels of decay_kernels.py, instead of those of span_maps.py.

q, k, v and gates are read where they are, in their dtype; heads that share a key head are not expanded. Of a segment,
the states before its blocks are kept in the dtype of q until its outputs, or its gradients, are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import gpu_reason
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Launch, interpreted
from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import missing_triton
from megatron.context_parallel.layout.spans import Span, split
from megatron.context_parallel.linear_attention.rules import LinearRule
from megatron.decisions.block_sizes import Blocks
from megatron.decisions.kernel_order import too_old
from megatron.decisions.state_exchange import BLOCK, LARGEST_KEYS, STATES
from megatron.platform.autograd import without_autocast

LARGEST_VALUES = 64  # of a head
# For heads of 128 keys no loop spills registers with these (tests/unit/test_triton_compile.py).
SERIAL_VALUES, SERIAL = 32, Blocks(BLOCK, BLOCK, 4, 2)
OUTPUTS, VALUE_GRADS, KEY_GRADS = Blocks(BLOCK, BLOCK, 4, 2), Blocks(BLOCK, BLOCK, 8, 1), Blocks(BLOCK, BLOCK, 8, 2)
Inputs = Sequence[Tensor]


def why_not(rule: LinearRule, *, device: torch.device, dtype: torch.dtype, keys: int, values: int) -> str | None:
    """None if the kernels can run on these tensors, else a short reason."""
    if rule.delta:
        return "has no kernel for rules with a delta"
    if dtype != torch.bfloat16:
        return "needs bf16"
    if keys > LARGEST_KEYS or values > LARGEST_VALUES:
        return f"needs heads of at most {LARGEST_KEYS} keys and {LARGEST_VALUES} values"
    if missing := missing_triton():
        return missing
    return gpu_reason(device) or too_old(torch.cuda.get_device_capability(device))


@dataclass(frozen=True)
class DecaySpans:
    """The methods are those of :class:`~.span_maps.BlockSpans`. Documents begin where a log-decay is -inf."""

    rule: LinearRule

    @without_autocast
    def outputs(
        self, inputs: Inputs, rows: Span, state: Tensor, out: Tensor, reads: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor]:
        entries, values = [], out.size(3)
        for part in segments(inputs, rows):
            entries.append(state)
            own = [x[slice(*part)] for x in inputs]
            matrix, before = state.split((state.size(-1) - values, values), dim=-1)
            every, end = no_states(own), _like_state(before)
            states_launch(own, before, every, end).run()
            outputs_launch(own, every, out[slice(*part)]).run()
            state = end
            if reads is not None:  # M is a number for each head
                q, g = own[0], own[3]
                decay = g.to(end.dtype).cumsum(0).exp()
                read = q.repeat_interleave(end.size(1) // q.size(2), dim=2) * (decay * matrix[..., 0, 0]).unsqueeze(-1)
                reads[part[0] - rows[0] : part[1] - rows[0]] = read
                state = torch.cat((matrix * decay[-1][..., None, None], end), dim=-1)
        return entries, state

    @without_autocast
    def grads(
        self, inputs: Inputs, rows: Span, entries: Sequence[Tensor], dout: Tensor, dstate: Tensor, grads: Inputs
    ) -> Tensor:
        for part, state in reversed(list(zip(segments(inputs, rows), entries))):
            own, given = [x[slice(*part)] for x in inputs], dout[slice(*part)]
            before, after, start = no_states(own), no_states(own), _like_state(dstate)
            states_launch(own, state, before, None).run()
            backward, products = state_grads_launch(own, given, before, dstate, after, start)
            states = {"every": before, "after": after}
            parts = [x[slice(*part)] for x in grads]
            for launch in (
                backward,
                value_grads_launch(own, given, states, products, parts),
                key_grads_launch(own, given, states, parts),
            ):
                launch.run()
            dstate = start
        return dstate


def segments(inputs: Inputs, rows: Span) -> list[Span]:
    """The parts of a span whose states are kept at a time: whole blocks."""
    b, heads, values = inputs[2].shape[1:]
    return split(rows, max(STATES // (b * heads * inputs[0].size(3) * values), 1) * BLOCK)


def no_states(inputs: Inputs) -> Tensor:
    """Memory for the states before, or after, each block of some rows."""
    q, _, v = inputs[:3]
    length, b, heads, values = v.shape
    return q.new_empty((b, heads, -(-length // BLOCK), q.size(3), values))


def _like_state(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)  # kernels know no strides of states


def states_launch(inputs: Inputs, start: Tensor, every: Tensor, end: Tensor | None) -> Launch:
    """States before each block of some rows and, unless ``end`` is None, after all of them."""
    _, k, v, g, beta = inputs[:5]
    states = {"start": start.contiguous(), "every": every, "end": end}
    return _by_head("decay_states", inputs, {"k": k, "v": v, "g": g, "beta": beta}, states)


def state_grads_launch(
    inputs: Inputs, dout: Tensor, before: Tensor, dstate: Tensor, every: Tensor, start: Tensor
) -> tuple[Launch, Tensor]:
    """Gradients of the states after each block of some rows, and before all of them; and what the launch writes for
    :func:`value_grads_launch`: sums of these gradients times the states ``before`` each block."""
    products = dstate.new_empty((*before.shape[:3], _columns(inputs)), dtype=torch.float32)
    states = {"before": before, "end": dstate.contiguous(), "every": every, "products": products, "start": start}
    return _by_head("decay_state_grads", inputs, {"q": inputs[0], "dout": dout, "g": inputs[3]}, states), products


def outputs_launch(inputs: Inputs, every: Tensor, out: Tensor) -> Launch:
    """The outputs of all blocks of some rows, from the states before them."""
    return _by_block("decay_outputs", inputs, {"out": out}, {"every": every}, OUTPUTS)


def value_grads_launch(
    inputs: Inputs, dout: Tensor, states: dict[str, Tensor], products: Tensor, grads: Inputs
) -> Launch:
    """The gradients of v and gates, from the states before all blocks and the gradients of the states after them."""
    results = {"dout": dout, **dict(zip(("dv", "dg", "dbeta", "dskip"), (*grads[2:], None)[:4]))}
    launch = _by_block("decay_value_grads", inputs, results, {**states, "products": products}, VALUE_GRADS)
    b, heads = inputs[2].shape[1:3]
    arguments = {name: value for name, value in launch.arguments.items() if name != "KEY_HEADS"}
    arguments |= {"HEADS": heads, "columns": _columns(inputs)}
    return replace(launch, grid=(launch.grid[0], b * heads), arguments=arguments)


def key_grads_launch(inputs: Inputs, dout: Tensor, states: dict[str, Tensor], grads: Inputs) -> Launch:
    """The gradients of q and k, from the same."""
    results = {"dout": dout, "dq": grads[0], "dk": grads[1]}
    return _by_block("decay_key_grads", inputs, results, states, KEY_GRADS, skips=False)


def _columns(inputs: Inputs) -> int:
    """Programs that share a head's state."""
    return -(-inputs[2].size(3) // SERIAL_VALUES)


def _by_head(name: str, inputs: Inputs, rows: dict[str, Tensor], states: dict[str, Tensor | None]) -> Launch:
    q, _, v = inputs[:3]
    b, heads = v.shape[1:3]
    sizes = {**_sizes(q, v), "VALUE_BLOCK": SERIAL_VALUES, "HEADS": heads}
    grid = (_columns(inputs), b * heads)
    return Launch(_kernel(name), grid, {**_strided(rows), **states, **sizes}, SERIAL)


def _by_block(
    name: str,
    inputs: Inputs,
    rows: dict[str, Tensor | None],
    states: dict[str, Tensor],
    blocks: Blocks,
    skips: bool = True,
) -> Launch:
    q, _, v = inputs[:3]
    b, key_heads = q.shape[1:3]
    given = dict(zip(("q", "k", "v", "g", "beta", "skip"), (*inputs, None)[: 5 + skips]))
    sizes = {**_sizes(q, v), "VALUE_BLOCK": _power(v.size(3)), "KEY_HEADS": key_heads}
    sizes |= {"SKIP": len(inputs) > 5} if skips else {}
    arguments = {**_strided(given | rows), **states, **sizes}
    return Launch(_kernel(name), (arguments["blocks"], b * key_heads), arguments, blocks)


def _sizes(q: Tensor, v: Tensor) -> dict[str, Any]:
    return {
        "length": len(v), "blocks": -(-len(v) // BLOCK), "GROUP": v.size(2) // q.size(2), "KEYS": q.size(3),
        "VALUES": v.size(3), "ROWS": BLOCK, "KEY_BLOCK": _power(q.size(3)),
        "PRECISION": "interpreted" if interpreted() else "ieee",
    }  # fmt: skip


def _strided(tensors: dict[str, Tensor | None]) -> dict[str, Any]:
    """Tensors [s, b, heads, ..] and their strides by the kernels' names, for q: q_ss, q_sb, q_sh, q_sd."""
    strides = {
        f"{name}_s{at}": None if x is None else x.stride(i)
        for name, x in tensors.items()
        for i, at in enumerate("sbh" if x is None or x.dim() == 3 else "sbhd")
    }
    return tensors | strides


def _power(size: int) -> int:
    """The smallest block of a tensor core's product that holds a head."""
    return max(16, 1 << (size - 1).bit_length())


def _kernel(name: str) -> Any:
    """It is imported here because Triton takes a second to import and need not be installed."""
    from megatron.context_parallel.linear_attention import decay_kernels

    return getattr(decay_kernels, name)
