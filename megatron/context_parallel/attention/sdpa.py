# SPDX-License-Identifier: Apache-2.0
"""Programs that call PyTorch's ``scaled_dot_product_attention``: over the grid while a context lasts, and unchanged.

The operator itself is replaced, in PyTorch's dispatcher. So it does not matter who calls it, by which name, and in
which thread: a backward pass that recomputes on a GPU has threads of its own. (The idea of a context around a program
that knows nothing of it is that of PyTorch's ``context_parallel``, which replaces a name of a module.)
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, wraps
from inspect import signature
from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.attention.flex_attention  # makes its operator known
from torch import Tensor
from torch.nn import functional

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
from megatron.context_parallel.attention.usp import attention
from megatron.context_parallel.layout.masks import Causal, Full, Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.platform.autograd import refuse_transforms

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# Attention over the grid as a node in the graph of a compiler, which sees its shapes and not what is in it.
#
# A graph outlives the context that it was made in, and may serve another one: what is attended to is no argument of the
# node. The node looks it up when it runs, and the backward pass finds it again by a number that the forward pass gave.


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


OPERATOR = "scaled_dot_product_attention"
KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")  # inference mode has no autograd
FIRST_OF_FLEX = "_validate_sdpa_input"  # what PyTorch's flex_attention calls before it compiles itself


@contextmanager
def context_parallel(layout: SequenceLayout, *, mask: Mask | None = None, kernel: str = "auto") -> Iterator[None]:
    """Let ``scaled_dot_product_attention`` attend over the whole sequence, of which each rank has its own tokens.

    Tensors come as the program makes them: [b, heads, s_local, d] of the tokens of ``layout.positions``, keys and
    values perhaps of fewer heads. DTensors may be cut over samples and heads. A backward pass that recomputes must lie
    within the context too. All ranks of ``layout.grid.context`` make the same calls.

    Args:
        layout: who holds which tokens. What else a program makes of positions (RoPE, learned ones) it must make of
            ``layout.positions``.
        mask: of every call; default: causal where the call says ``is_causal``, else full.
        kernel: see :func:`~megatron.context_parallel.attention.usp.attention`.

    Raises:
        RuntimeError: there is such a context already.
        ValueError: at a call that passes ``attn_mask`` or ``dropout_p``, or has other lengths than the layout's; at
            attention of PyTorch's that does not call the operator: ``MultiheadAttention`` with ``need_weights``,
            ``flex_attention``, ``varlen_attn``.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{OPERATOR}", KEYS[0]):
        raise RuntimeError("there is a context_parallel already: one at a time")
    library = torch.library.Library("aten", "IMPL")
    held = [Meaning(layout, mask, kernel)]  # emptied at the end: PyTorch keeps the last function it was given

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise ValueError(f"{OPERATOR} over ranks takes no attn_mask: give mask= to context_parallel")
        if dropout_p:
            raise ValueError(f"{OPERATOR} over ranks has no dropout_p: cp.attention(dropout=...) has, by position")
        (meaning,) = held
        _check_shapes(meaning.layout, query, key, value, enable_gqa)
        rule = meaning.rule(is_causal)
        cut = _cut_alike(query, key, value)
        parts = (query, key, value) if cut is None else (x.to_local() for x in (query, key, value))
        tokens_first = (x.permute(2, 0, 1, 3) for x in parts)
        if torch.compiler.is_compiling():
            out = node(*tokens_first, is_causal=is_causal, scale=scale)
        else:
            out = attention(*tokens_first, layout=meaning.layout, mask=rule, kernel=meaning.kernel, scale=scale)
        out = out.permute(1, 2, 0, 3)
        return out if cut is None else _whole(out, cut)

    def batched(*_: Any, **__: Any) -> Tensor:
        refuse_transforms(OPERATOR)

    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # layers of PyTorch's that would not call the operator
    try:
        for name in KEYS:
            library.impl(OPERATOR, attend, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that vmap's own rule for it is overridden
            library.impl(OPERATOR, batched, "FuncTorchVmapMode", allow_override=True)
        begin(held[0])
        with _refused() if layout.grid.context.size > 1 or mask is not None else nullcontext():
            yield
    finally:
        end()
        held.clear()
        library._destroy()
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def _refused() -> Iterator[None]:
    """Refuse PyTorch's other attention, which would see the tokens of this rank alone, and no mask of the context."""
    heads, flex = functional.multi_head_attention_forward, type(torch.ops.higher_order.flex_attention)

    @wraps(heads)
    def multi_head_attention(*args: Any, **kwargs: Any) -> Any:
        call = signature(heads).bind(*args, **kwargs)
        call.apply_defaults()
        if call.arguments["need_weights"]:
            raise ValueError("MultiheadAttention over ranks gives no weights: pass need_weights=False")
        return heads(*args, **kwargs)

    def flex_attention(*_: Any, **__: Any) -> Any:
        raise ValueError(f"flex_attention over ranks: call {OPERATOR}, and give mask= to context_parallel")

    def varlen(*_: Any, **__: Any) -> Any:
        raise ValueError(f"varlen_attn over ranks: call {OPERATOR}, and give mask=Documents(...) to context_parallel")

    replaced = [
        (functional, heads.__name__, multi_head_attention),
        (flex, "__call__", flex_attention),  # whoever imported the function, and when
    ]
    if hasattr(torch.nn.attention.flex_attention, FIRST_OF_FLEX):  # so that no compiler puts its own lines around ours
        replaced.append((torch.nn.attention.flex_attention, FIRST_OF_FLEX, flex_attention))
    with ExitStack() as stack:
        for owner, name, function in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)
        if "torch.nn.attention.varlen" in sys.modules:  # a second to import
            library = torch.library.Library("torch_attn", "IMPL")
            stack.callback(library._destroy)
            for name in ("_varlen_attn", "_varlen_attn_out"):
                for key in ("AutogradCPU", "AutogradCUDA", "CPU", "CUDA"):
                    library.impl(name, varlen, key, allow_override=True)
        yield


def _check_shapes(layout: SequenceLayout, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for x, name in ((query, "query"), (key, "key"), (value, "value")):
        if x.dim() != 4:
            raise ValueError(f"{OPERATOR} over ranks wants [b, heads, s_local, d], and {name} is {list(x.shape)}")
        if x.size(2) != layout.local_length:
            raise ValueError(
                f"{OPERATOR}: {name} has {x.size(2)} tokens, the layout gives a rank {layout.local_length}; "
                "cp.attention(key_layout=...) attends to another sequence"
            )
    if query.size(1) != key.size(1) and not enable_gqa:
        raise ValueError(f"{OPERATOR}: {query.size(1)} query heads and {key.size(1)} key heads need enable_gqa=True")


def _cut_alike(*tensors: Tensor) -> DTensor | None:
    """The first of DTensors that are cut alike over samples and heads; None of other tensors."""
    from torch.distributed.tensor import DTensor

    if not any(isinstance(x, DTensor) for x in tensors):
        return None
    if not all(isinstance(x, DTensor) for x in tensors) or len({x.device_mesh for x in tensors}) > 1:
        raise ValueError(f"{OPERATOR} over ranks: query, key and value must be DTensors of one mesh, or none of them")
    placements = {x.placements for x in tensors}
    wrong = any(p.is_partial() or (p.is_shard() and p.dim not in (0, 1)) for each in placements for p in each)
    if len(placements) > 1 or wrong:
        raise ValueError(f"{OPERATOR} over ranks: DTensors must all be cut alike, over samples (0) and heads (1)")
    query, key = tensors[:2]
    ways = prod(size for size, p in zip(query.device_mesh.shape, query.placements) if p.is_shard(1))
    if query.size(1) != key.size(1) and key.size(1) % ways:  # a part of a group of queries would meet another key
        raise ValueError(
            f"{OPERATOR} over ranks: {query.size(1)} query heads and {key.size(1)} key heads are cut {ways} ways, "
            "which must divide the key heads"
        )
    return query


def _whole(local: Tensor, query: DTensor) -> DTensor:
    """The output of which ``local`` is here, cut as ``query`` is, be the parts of one size or not."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size([*query.shape[:3], local.size(3)])
    strides = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
    return DTensor.from_local(
        local.contiguous(), query.device_mesh, query.placements, run_check=False, shape=shape, stride=strides
    )
