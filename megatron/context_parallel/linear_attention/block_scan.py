# SPDX-License-Identifier: Apache-2.0
"""States through the prepared blocks of a segment, and their gradients: by PyTorch, or by a Triton kernel on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Launch, interpreted
from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import missing_triton
from megatron.context_parallel.linear_attention.rules import Prepared
from megatron.decisions.block_sizes import Blocks
from megatron.decisions.state_exchange import BLOCK, KERNEL_BLOCK, LARGEST_KEYS
from megatron.platform.hooks import replaceable

PRECISION = "tf32x3"  # three products of tensor cores, nearly fp32
VALUE_BLOCK, WARPS = 16, 8  # with these no loop spills registers for 128 keys (tests/unit/test_triton_compile.py)
OLDEST_GPU = (8, 0)


def block_size(tokens: int, x: Tensor, keys: int) -> int:
    """How many tokens to prepare as one block."""
    return KERNEL_BLOCK if by_kernel(x, keys) else min(BLOCK, 1 << (tokens - 1).bit_length())


@replaceable
def by_kernel(x: Tensor, keys: int) -> bool:
    """Whether a Triton kernel computes states of tensors like ``x``: fp32 on a GPU."""
    if x.dtype == torch.float64 or x.device.type != "cuda" or keys > LARGEST_KEYS or missing_triton():
        return False
    return torch.cuda.get_device_capability(x.device) >= OLDEST_GPU and not interpreted()


def _chosen(ready: Prepared, kernel: bool | None) -> bool:
    return by_kernel(ready.own, ready.writes.size(-1)) if kernel is None else kernel


def one_head_a_key(ready: Prepared) -> Prepared:
    """The same with one dimension of columns, where heads that share a key are columns."""
    if ready.own.dim() < 6:
        return ready
    keep = ready.keep.expand(*ready.keep.shape[:-1], ready.own.size(-1)).flatten(-2)
    return ready._replace(own=ready.own.flatten(-2), keep=keep)


def as_columns(state: Tensor, like: Prepared) -> Tensor:
    """[b, heads, K, V] as ``like`` has states: heads that share a key as columns."""
    if like.own.dim() < 6:
        return state
    return state.unflatten(1, (like.own.size(1), -1)).movedim(2, 3).flatten(3)


def as_heads(x: Tensor, like: Prepared) -> Tensor:
    """The reverse of :func:`as_columns`, also for blocks [b, key heads, blocks, .., group * V]."""
    if like.own.dim() < 6:
        return x
    return x.unflatten(-1, (like.own.size(4), -1)).movedim(-2, 2).flatten(1, 2)


def states(ready: Prepared, state: Tensor, kernel: bool | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The state before each block [b, heads, blocks, K, V], what its tokens add [.., c, V], and the state after all."""
    ready = one_head_a_key(ready)
    if _chosen(ready, kernel):
        before, end = _empty_states(ready, state), _new_like(state)
        states_launch(ready, state, before, end).run()
        new = ready.own if ready.erase is None else ready.own - ready.erase @ before
        return before, new, end
    b, heads, blocks = ready.own.shape[:3]
    flat = _flat(ready)
    every, new, state = [], [], state.flatten(0, 1)
    for index in range(blocks):
        one = Prepared(*(None if x is None else x[:, index] for x in flat[:6]))
        every.append(state)
        new.append(one.own if one.erase is None else torch.baddbmm(one.own, one.erase, state, alpha=-1))
        state = torch.baddbmm(one.keep * state, one.writes.mT, new[-1])
    return _by_head(every, b), _by_head(new, b), state.unflatten(0, (b, heads))


def _flat(ready: Prepared) -> Prepared:
    return Prepared(*(None if x is None else x.flatten(0, 1) for x in ready[:6]))


def _by_head(blocks: list[Tensor], b: int) -> Tensor:
    return torch.stack(blocks, dim=1).unflatten(0, (b, -1))


def state_after(ready: Prepared, state: Tensor, kernel: bool | None = None) -> Tensor:
    """The state after the last block."""
    ready = one_head_a_key(ready)
    if _chosen(ready, kernel):
        end = _new_like(state)
        states_launch(ready, state, None, end).run()
        return end
    return states(ready, state, kernel=False)[2]


def state_grads(ready: Prepared, dout: Tensor, dstate: Tensor, kernel: bool | None = None) -> tuple[Tensor, Tensor]:
    """The gradient of the state before the first block, and those of the states after each [b, heads, blocks, K, V].

    Args:
        dout: of the outputs, in blocks, times ``entry`` if there is one; ``dstate``: of the state after the last block.
    """
    ready = one_head_a_key(ready)
    if _chosen(ready, kernel):
        after, start = _empty_states(ready, dstate), _new_like(dstate)
        grads_launch(ready, dout, dstate, after, start).run()
        return start, after
    b, heads, blocks = dout.shape[:3]
    flat = _flat(ready)
    direct = (ready.reads.mT @ dout).flatten(0, 1)
    through = None if ready.erase is None else (ready.inside.mT @ dout).flatten(0, 1)
    every, dstate = [], dstate.flatten(0, 1)
    for index in reversed(range(blocks)):
        every.append(dstate)
        before = torch.addcmul(direct[:, index], flat.keep[:, index], dstate)
        if flat.erase is not None:
            dnew = torch.baddbmm(through[:, index], flat.writes[:, index], dstate)
            before = torch.baddbmm(before, flat.erase[:, index].mT, dnew, alpha=-1)
        dstate = before
    return dstate.unflatten(0, (b, heads)), _by_head(every[::-1], b)


def _empty_states(ready: Prepared, state: Tensor) -> Tensor:
    return state.new_empty((*ready.own.shape[:3], *state.shape[-2:]))


def _new_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)  # kernels know no strides


def states_launch(ready: Prepared, start: Tensor, before: Tensor | None, end: Tensor) -> Launch:
    """The kernel of :func:`states` and, without ``before``, of :func:`state_after`."""
    tensors = {"own": ready.own.contiguous(), "start": start.contiguous(), "out": before, "end": end}
    arguments = {**_arguments(ready, "erase", "writes", "keep"), **tensors, "STATES": before is not None}
    return launch("states_kernel", ready, arguments, start.size(-1))


def grads_launch(ready: Prepared, dout: Tensor, dstate: Tensor, after: Tensor, start: Tensor) -> Launch:
    """The kernel of :func:`state_grads`."""
    tensors = {"dout": dout.contiguous(), "end": dstate.contiguous(), "out": after, "start": start}
    names = (
        ("erase", "writes", "reads", "keep") if ready.erase is None else ("erase", "writes", "reads", "inside", "keep")
    )
    arguments = {"inside": None, **_arguments(ready, *names), **tensors}
    return launch("state_grads_kernel", ready, arguments, dout.size(-1))


def _arguments(ready: Prepared, *names: str) -> dict[str, Tensor | None]:
    tensors = {name: getattr(ready, name) for name in names}
    return {name: None if x is None else x.contiguous() for name, x in tensors.items()}


@replaceable
def launch(name: str, ready: Prepared, arguments: dict[str, Any], values: int) -> Launch:
    """The kernel ``name`` of state_kernels.py on prepared blocks and a state with ``values`` columns."""
    from megatron.context_parallel.linear_attention import state_kernels

    kernel = getattr(state_kernels, name)
    b, heads, blocks, rows, _ = ready.own.shape
    keys = ready.writes.size(-1)
    key_block = max(16, 1 << (keys - 1).bit_length())
    sizes = {"ROWS": rows, "KEYS": keys, "VALUES": values, "KEY_BLOCK": key_block, "VALUE_BLOCK": VALUE_BLOCK}
    flags = {
        "ERASES": ready.erase is not None,
        "BY_CHANNEL": ready.keep.size(-2) > 1,
        "BY_COLUMN": ready.keep.size(-1) > 1,
        "PRECISION": PRECISION,
    }
    grid = (-(-values // VALUE_BLOCK), b * heads)
    return Launch(kernel, grid, {**arguments, "blocks": blocks, **sizes, **flags}, Blocks(rows, rows, WARPS, 1))
