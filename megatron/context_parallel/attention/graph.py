# SPDX-License-Identifier: Apache-2.0
"""Attention over the grid as a node in the graph of a compiler, which sees its shapes and not what is in it.

A graph outlives the context that it was made in, and may serve another one: what is attended to is no argument of the
node. The node looks it up when it runs, and the backward pass finds it again by a number that the forward pass gave.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import torch
from torch import Tensor

from megatron.context_parallel.attention.attend import attend_all, attend_all_grad
from megatron.context_parallel.attention.kernels.base import accumulation_dtype
from megatron.context_parallel.attention.ring import RingSource
from megatron.context_parallel.attention.ring_plan import ring_plan
from megatron.context_parallel.attention.tile import AttentionRule, TileKernel
from megatron.context_parallel.attention.ulysses import (
    head_plan,
    heads_to_sequence,
    heads_to_sequence_grad,
    sequence_to_heads,
    sequence_to_heads_grad,
)
from megatron.context_parallel.layout.masks import Causal, Full, Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout

MARK = "ipu"
"""A device that nobody has here. Autocast for it is on while a context lasts: nothing changes for other devices, but
torch.compile guards on it, so that what was compiled outside of contexts is compiled anew within them."""

KEPT = 1024  # contexts of compiled graphs that a backward pass can still ask for


@dataclass(frozen=True, eq=False)
class Meaning:
    """What attention means while a context lasts; see ``context_parallel``."""

    layout: SequenceLayout
    mask: Mask | None
    kernel: str

    @cached_property
    def number(self) -> int:
        return next(_numbers)

    def rule(self, is_causal: bool) -> Mask:
        """Of a call.

        Raises:
            ValueError: the call and the context say two things.
        """
        if is_causal and isinstance(self.mask, Full):
            raise ValueError("a call says is_causal, and context_parallel has the mask Full(): leave one out")
        return self.mask if self.mask is not None else Causal() if is_causal else Full()

    def tiles(self, q_SBHD: Tensor, v_SBHD: Tensor, is_causal: bool, scale: float) -> tuple[RingSource, TileKernel]:
        """Of this rank's heads: where key blocks come from, and what computes them."""
        grid, mask = self.layout.grid, self.rule(is_causal)
        rule = AttentionRule(mask, self.kernel, scale)
        kernel = rule.tile_kernel(q_SBHD, grid.ulysses, self.layout.seq_length, v_SBHD.size(3))
        return RingSource(ring_plan(self.layout, mask), grid.ring), kernel


# Of the process, as the operator that is replaced is: a backward pass may run in a thread of its own.
_numbers = count(1)
_meanings: OrderedDict[int, Meaning] = OrderedDict()  # by number
_now: list[Meaning] = []  # one, while a context lasts


def begin(meaning: Meaning) -> None:
    """From now on nodes mean this."""
    torch.set_autocast_enabled(MARK, True)
    _now.append(meaning)


def end() -> None:
    """From now on forward passes mean nothing."""
    torch.set_autocast_enabled(MARK, False)
    _now.clear()


def keep(meaning: Meaning) -> None:
    """For the backward pass of a graph that has run."""
    _meanings[meaning.number] = meaning
    while len(_meanings) > KEPT:
        _meanings.popitem(last=False)


def _meaning(ulysses: int) -> Meaning:
    if not _now:
        raise RuntimeError("a graph made within context_parallel runs outside of it: call it within one")
    if (found := _now[0].layout.grid.ulysses.size) != ulysses:
        raise RuntimeError(f"a graph made for ulysses={ulysses} runs with {found}: torch.compiler.reset() before that")
    return _now[0]


def node(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, *, is_causal: bool, scale: float | None) -> Tensor:
    """Differentiable attention [s_local, b, heads, d] that a graph holds as one node, and its backward pass as one."""
    scale = q_SBHD.size(3) ** -0.5 if scale is None else scale
    return _forward(q_SBHD, k_SBHD, v_SBHD, is_causal, scale, _now[0].layout.grid.ulysses.size)[0]


@torch.library.custom_op("megatron_longcontext::attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, ulysses: int) -> list[Tensor]:
    """out; then for the backward pass: the number, lse, and, with Ulysses, q, k, v and out of this rank's heads."""
    meaning = _meaning(ulysses)
    if q.size(0) != (length := meaning.layout.local_length):  # in a graph of another context
        raise ValueError(f"attention has {q.size(0)} tokens, the layout gives a rank {length}")
    axis = meaning.layout.grid.ulysses
    here = [x.contiguous() for x in sequence_to_heads(q, k, v, axis)] if axis.size > 1 else [q, k, v]
    out, lse = attend_all(*here, *meaning.tiles(here[0], here[2], is_causal, scale))
    keep(meaning)
    found = [torch.tensor(meaning.number), lse.contiguous()]
    if axis.size == 1:
        return [out.contiguous(), *found]
    return [heads_to_sequence(out, axis).contiguous(), *found, *here, out.contiguous()]


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, ulysses: int) -> list[Tensor]:
    axis, wide = _meaning(ulysses).layout.grid.ulysses, accumulation_dtype(q.dtype)
    (s, b, h, d), (kv_heads, value_size) = q.shape, v.shape[2:]
    shapes = [(s, b, h, value_size)]
    number = torch.empty((), dtype=torch.int64, device="cpu")
    if axis.size == 1:
        return [q.new_empty(shapes[0]), number, q.new_empty((s, b, h), dtype=wide)]
    plan = head_plan(int(h), int(kv_heads), axis.size)
    s, h, kv_heads = s * axis.size, plan.q_heads, len(plan.kv_index[axis.rank])
    shapes += [(s, b, h, d), (s, b, kv_heads, d), (s, b, kv_heads, value_size), (s, b, h, value_size)]
    out, *here = (q.new_empty(shape) for shape in shapes)
    return [out, number, q.new_empty((s, b, h), dtype=wide), *here]


def _setup(ctx, inputs: tuple, output: list[Tensor]) -> None:
    q, k, v, ctx.is_causal, ctx.scale, _ = inputs
    out, number, lse, *here = output
    ctx.heads, ctx.kv_heads = q.size(2), k.size(2)
    ctx.save_for_backward(number, lse, *(here or (q, k, v, out)))


def _differentiate(ctx, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    made = _backward(grads[0], *ctx.saved_tensors, ctx.heads, ctx.kv_heads, ctx.is_causal, ctx.scale)
    return *made, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)


@torch.library.custom_op("megatron_longcontext::attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    number: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    heads: int,
    kv_heads: int,
    is_causal: bool,
    scale: float,
) -> list[Tensor]:
    """dq, dk and dv of this rank's tokens; q, k, v and out are of its heads."""
    meaning = _meanings.get(int(number))
    if meaning is None:
        raise RuntimeError(f"a backward pass came after {KEPT} other context_parallel: call it sooner")
    axis = meaning.layout.grid.ulysses
    grads = attend_all_grad(
        heads_to_sequence_grad(dout, axis), q, k, v, out, lse, *meaning.tiles(q, v, is_causal, scale)
    )
    return [x.contiguous() for x in sequence_to_heads_grad(*grads, axis, heads=heads, kv_heads=kv_heads)]


@_backward.register_fake
def _(
    dout: Tensor,
    number: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    heads: int,
    kv_heads: int,
    *_,
) -> list[Tensor]:
    s, b = dout.shape[:2]
    return [q.new_empty((s, b, h, x.size(3))) for h, x in ((heads, q), (kv_heads, k), (kv_heads, v))]
