# SPDX-License-Identifier: Apache-2.0
"""The kernel that an operation is on a device: its FLOPs, and the bytes that it reads and writes."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron.simulator.cost.trace import HostCopy, Kernel

aten = torch.ops.aten


def bytes_of(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_in(tensors))


def tensors_in(things: Any) -> list[Tensor]:
    """All tensors in what an operation is given or returns."""
    if isinstance(things, Tensor):
        return [things]
    if isinstance(things, tuple | list):
        return [x for thing in things for x in ((thing,) if isinstance(thing, Tensor) else tensors_in(thing))]
    return [x for x in tree_leaves(things) if isinstance(x, Tensor)] if isinstance(things, dict) else []


@cache
def called(func: Any) -> str:
    """An operation's name in the trace."""
    return func._schema.name.removeprefix("aten::")


MOVES_NOTHING = (
    aten._local_scalar_dense.default,
    aten.new_empty.default,
    aten.empty_like.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.lift_fresh.default,
)


@cache
def moves_nothing(func: Any) -> bool:
    """Whether an operation only makes views or memory."""
    if func.namespace == "prim" or func._schema.name.startswith(("aten::empty", "aten::detach", "aten::set_")):
        return True
    if func in MOVES_NOTHING:
        return True
    returned = func._schema.returns
    return bool(returned) and all(x.alias_info is not None and not x.alias_info.is_write for x in returned)


def host_copy(func: Any, args: tuple, out: Any) -> HostCopy | None:
    """A copy between a host buffer and the device."""
    if func is aten.copy_.default:
        to, source = args[0], args[1]
    elif func is aten.clone.default:
        to, source = out, args[0]
    else:
        return None
    there, here = in_host(to), in_host(source)
    if there == here:
        return None
    return HostCopy("to_host" if there else "to_device", to.numel() * to.element_size())


def in_host(x: Tensor) -> bool:
    x = getattr(x, "_local_tensor", x)
    return torch._C._has_storage(x) and getattr(x.untyped_storage(), "is_host_buffer", False)


# Of every overload: into a given sum, in place, of narrow matrices into a wide sum. The place of the first matrix.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
GEMMS = {
    getattr(getattr(aten, name), overload): first
    for name, first in PRODUCTS.items()
    for overload in getattr(aten, name).overloads()
}
WRITES_ALONE = (aten.copy_.default, aten.zero_.default, aten.fill_.Scalar)
ATTENTION = ("_scaled_dot_product_", "_flash_attention_")


def kernel(func: Any, args: tuple, kwargs: dict, out: Any) -> Kernel | None:
    """Work of the compute stream."""
    name = called(func)
    given = [value for name, value in kwargs.items() if name != "out"]  # which is what is returned
    tensors = [getattr(x, "_local_tensor", x) for x in tensors_in((args, given, out))]
    size = sum(x.numel() * x.element_size() for x in tensors)
    if not size:
        return None
    if func in WRITES_ALONE:  # what is written over is not read
        size -= tensors[0].numel() * tensors[0].element_size()
    if func in GEMMS:
        a, b = args[GEMMS[func] : GEMMS[func] + 2]
        shape = (1 if a.dim() == 2 else a.size(0), a.size(-2), b.size(-1), a.size(-1))
        return Kernel(name, "gemm", 2.0 * prod(shape), size, shape, a.element_size())
    if name.startswith(ATTENTION):
        return _attention(func, name, args, kwargs, size)
    return Kernel(name, "memory", 0.0, size, itemsize=tensors[-1].element_size())


def _attention(func: Any, name: str, args: tuple, kwargs: dict, size: int) -> Kernel:
    """Forward: (q, k, v, ...); backward: (dout, q, k, v, ...), all [b, heads, s, d]."""
    given = dict(zip((x.name for x in func._schema.arguments), args)) | kwargs
    q, k = given["query"], given["key"]
    backward = "backward" in name
    batch, heads, rows, head_dim = q.shape
    keys, causal = k.size(2), bool(given.get("is_causal", False))
    pairs = rows * (rows + 1) / 2 if causal else rows * keys
    flops = (10.0 if backward else 4.0) * batch * heads * head_dim * pairs
    return Kernel(name, "attention", flops, size, (rows, keys, batch * heads, head_dim), q.element_size(), backward)
