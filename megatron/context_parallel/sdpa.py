# SPDX-License-Identifier: Apache-2.0
"""A context in which PyTorch's ``scaled_dot_product_attention`` runs over the grid, for unchanged programs.

The operator itself is replaced, in PyTorch's dispatcher. It therefore works for every caller, under every name and in
every thread (a backward pass that recomputes on a GPU runs in its own threads). The idea comes from PyTorch's
``context_parallel``, which replaces a function in a module.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, wraps
from inspect import signature
from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.attention.flex_attention  # registers its operator
from torch import Tensor
from torch.nn import functional

from megatron.context_parallel.attention.attend import attend_all, attend_all_grad
from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.attention.ring import RingSource
from megatron.context_parallel.attention.ring_plan import attention_plan
from megatron.context_parallel.attention.rule import AttentionRule, TileKernel
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


# Attention over the grid as one opaque node in a compiled graph.
#
# A graph may be used again in another context than the one it was compiled in. Therefore layout, mask and kernel are
# not arguments of the node. The node looks them up when it runs. For the backward pass, the forward pass saves a number
# that identifies them.


MARK = "ipu"
"""A device type that is not in use. Autocast for it is on within a context. This changes nothing for other devices, but
torch.compile guards on it, so that functions compiled outside of contexts are compiled again within them."""

KEPT = 1024  # contexts of compiled graphs that are kept for backward passes


@dataclass(frozen=True, eq=False)
class Meaning:
    """Layout, mask and kernel of attention within a context; see ``context_parallel``."""

    layout: SequenceLayout
    mask: Mask | tuple[Mask, ...] | None
    kernel: str

    @cached_property
    def number(self) -> int:
        return next(_numbers)

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether the mask surely lets a query see a later key."""
        everything = (0, self.layout.seq_length)
        masks = self.mask if isinstance(self.mask, tuple) else (self.mask,)
        return any(
            band.end - 1 > band.q[0]
            for mask in masks
            if mask is not None and not mask.pairwise
            for band in mask.bands(everything, everything)
        )

    def rule(self, is_causal: bool) -> Mask | list[Mask]:
        """The mask of a call.

        Raises:
            ValueError: the call and the context contradict each other.
        """
        if is_causal and self.looks_ahead:
            raise ValueError(
                f"a call has is_causal=True, but context_parallel has mask={type(self.mask).__name__}(...), which lets "
                "queries see later keys: leave one of them out"
            )
        if isinstance(self.mask, tuple):
            return list(self.mask)
        return self.mask if self.mask is not None else Causal() if is_causal else Full()

    def tiles(self, q_SBHD: Tensor, v_SBHD: Tensor, is_causal: bool, scale: float) -> tuple[RingSource, TileKernel]:
        """For this rank's heads, after the all-to-all: the source of key blocks and the kernel."""
        grid, mask = self.layout.grid, self.rule(is_causal)
        if isinstance(mask, list):
            raise ValueError("masks for each sample do not go with compiled code: give context_parallel one mask")
        rule = AttentionRule(mask, self.kernel, scale)
        kernel = rule.tile_kernel(q_SBHD, grid.ulysses, self.layout.seq_length, v_SBHD.size(3))
        return RingSource(attention_plan(self.layout, mask).ring(), grid.ring), kernel


# Global, like the replaced operator, because a backward pass may run in another thread.
_numbers = count(1)
_meanings: OrderedDict[int, Meaning] = OrderedDict()  # by number
_now: list[Meaning] = []  # one element within a context, else none


def _meaning(ulysses: int) -> Meaning:
    if not _now:
        raise RuntimeError("a graph compiled within context_parallel runs without a context: call the graph within one")
    if (size := _now[0].layout.grid.ulysses.size) != ulysses:
        raise RuntimeError(
            f"a graph compiled for ulysses={ulysses} runs with ulysses={size}: call torch.compiler.reset() first"
        )
    return _now[0]


def node(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, *, is_causal: bool, scale: float | None) -> Tensor:
    """Differentiable attention [s_local, b, heads, d]; one node in a graph, and one for the backward pass."""
    scale = q_SBHD.size(3) ** -0.5 if scale is None else scale
    return _forward(q_SBHD, k_SBHD, v_SBHD, is_causal, scale, _now[0].layout.grid.ulysses.size)[0]


@torch.library.custom_op("megatron_longcontext::attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, ulysses: int) -> list[Tensor]:
    """out; and for backward: the meaning's number, lse and, with Ulysses, this rank's heads of q, k, v and out."""
    meaning = _meaning(ulysses)
    if q.size(0) != (length := meaning.layout.local_length):  # the graph was compiled in another context
        raise ValueError(f"attention of {q.size(0)} tokens, but each rank has {length} in the layout")
    axis = meaning.layout.grid.ulysses
    here = [x.contiguous() for x in sequence_to_heads(q, k, v, axis)] if axis.size > 1 else [q, k, v]
    out, lse = attend_all(*here, *meaning.tiles(here[0], here[2], is_causal, scale))
    _meanings[meaning.number] = meaning  # for the backward pass
    while len(_meanings) > KEPT:
        _meanings.popitem(last=False)
    saved = [torch.tensor(meaning.number), lse.contiguous()]
    if axis.size == 1:
        return [out.contiguous(), *saved]
    return [heads_to_sequence(out, axis).contiguous(), *saved, *here, out.contiguous()]


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
    """dq, dk and dv of this rank's tokens; q, k, v and out are those of its heads, after the all-to-all."""
    meaning = _meanings.get(int(number))
    if meaning is None:
        raise RuntimeError(f"a backward pass runs after {KEPT} other context_parallel contexts: run it earlier")
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
NO_MASK = (
    "a rank's mask says nothing of other ranks' tokens; give mask= to context_parallel and pass none (for padding one "
    "for each sample: mask=[cp.Documents([n, seq_length], cp.Full()) for n in lengths])"
)
KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")  # inference mode has no autograd
FIRST_OF_FLEX = "_validate_sdpa_input"  # PyTorch's flex_attention calls it before it compiles itself


@contextmanager
def context_parallel(
    layout: SequenceLayout, *, mask: Mask | Sequence[Mask] | None = None, kernel: str = "auto"
) -> Iterator[None]:
    """Let ``scaled_dot_product_attention`` attend over the complete sequence, of which each rank has a part.

    Tensors have PyTorch's shape [b, heads, s_local, d], for the tokens of ``layout.positions``; keys and values may
    have fewer heads. DTensors may be sharded over samples and heads. A backward pass that recomputes must also run
    within the context. All ranks of ``layout.grid.context`` make the same calls.

    Args:
        layout: which rank holds which tokens. The program must use ``layout.positions`` for everything else that
            depends on positions (RoPE, learned positions).
        mask: of every call, or one for each sample (not in compiled code); default: causal if the call has
            ``is_causal``, else full.
        kernel: see :func:`~megatron.context_parallel.attention.usp.attention`.

    Raises:
        RuntimeError: such a context is already active.
        ValueError: a call passes ``attn_mask`` or ``dropout_p``, or its lengths differ from the layout's; or the
            program calls an attention function of PyTorch that does not use the operator: ``MultiheadAttention`` with
            ``need_weights``, ``flex_attention``, ``varlen_attn``.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{OPERATOR}", KEYS[0]):
        raise RuntimeError("a context_parallel context is already active: only one is supported at a time")
    library = torch.library.Library("aten", "IMPL")

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
            raise ValueError(f"{OPERATOR} over ranks does not support attn_mask, which {_caller()} passes: {NO_MASK}")
        if dropout_p:
            raise ValueError(f"{OPERATOR} over ranks does not support dropout_p: use cp.attention(dropout=...)")
        (meaning,) = _now  # not a variable of the context, because PyTorch keeps a reference to ``attend``
        _check_shapes(meaning.layout, query, key, value, enable_gqa)
        rule = meaning.rule(is_causal)
        sharded = _as_sharded(query, key, value)
        parts = (query, key, value) if sharded is None else (x.to_local() for x in (query, key, value))
        tokens_first = (x.permute(2, 0, 1, 3) for x in parts)
        if torch.compiler.is_compiling():
            out = node(*tokens_first, is_causal=is_causal, scale=scale)
        else:
            out = attention(*tokens_first, layout=meaning.layout, mask=rule, kernel=meaning.kernel, scale=scale)
        out = out.permute(1, 2, 0, 3)
        return out if sharded is None else _to_dtensor(out, sharded)

    def batched(*_: Any, **__: Any) -> Tensor:
        refuse_transforms(OPERATOR)

    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # with it PyTorch's layers do not call the operator
    try:
        for name in KEYS:
            library.impl(OPERATOR, attend, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "overriding a previously registered kernel", namely vmap's
            library.impl(OPERATOR, batched, "FuncTorchVmapMode", allow_override=True)
        torch.set_autocast_enabled(MARK, True)
        _now.append(Meaning(layout, tuple(mask) if isinstance(mask, Sequence) else mask, kernel))
        with _refused() if layout.grid.context.size > 1 or mask is not None else nullcontext():
            yield
    finally:
        torch.set_autocast_enabled(MARK, False)
        _now.clear()
        library._destroy()
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def _refused() -> Iterator[None]:
    """Refuse PyTorch's other attention functions, which would use this rank's tokens only and ignore the mask."""
    heads, flex = functional.multi_head_attention_forward, type(torch.ops.higher_order.flex_attention)

    @wraps(heads)
    def multi_head_attention(*args: Any, **kwargs: Any) -> Any:
        call = signature(heads).bind(*args, **kwargs)
        call.apply_defaults()
        if call.arguments["need_weights"]:
            raise ValueError("MultiheadAttention over ranks cannot return weights: pass need_weights=False")
        return heads(*args, **kwargs)

    def flex_attention(*_: Any, **__: Any) -> Any:
        raise ValueError(f"flex_attention cannot run over ranks: call {OPERATOR}, and give mask= to context_parallel")

    def varlen(*_: Any, **__: Any) -> Any:
        raise ValueError(
            f"varlen_attn cannot run over ranks: call {OPERATOR}, and give mask=Documents(...) to context_parallel"
        )

    replaced = [
        (functional, heads.__name__, multi_head_attention),
        (flex, "__call__", flex_attention),  # works also in modules that have already imported the function
    ]
    if hasattr(torch.nn.attention.flex_attention, FIRST_OF_FLEX):  # else the compiler would wrap our message
        replaced.append((torch.nn.attention.flex_attention, FIRST_OF_FLEX, flex_attention))
    with ExitStack() as stack:
        for owner, name, function in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)
        if "torch.nn.attention.varlen" in sys.modules:  # importing it would take a second
            library = torch.library.Library("torch_attn", "IMPL")
            stack.callback(library._destroy)
            for name in ("_varlen_attn", "_varlen_attn_out"):
                for key in ("AutogradCPU", "AutogradCUDA", "CPU", "CUDA"):
                    library.impl(name, varlen, key, allow_override=True)
        yield


def _caller() -> str:
    """The module that calls the operator, and the place outside of PyTorch that does."""
    frame, place, module = sys._getframe(1), "", ""
    while frame is not None and not (place and module):
        name = frame.f_globals.get("__name__", "")
        if not place and name != __name__ and name.partition(".")[0] != "torch":
            place = f"{name}:{frame.f_lineno}"
        values = (frame.f_locals.get(key) for key in ("self", "module"))
        module = module or next((type(value).__name__ for value in values if isinstance(value, torch.nn.Module)), "")
        frame = frame.f_back
    return f"{module} at {place}" if module else place


def _check_shapes(layout: SequenceLayout, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for x, name in ((query, "query"), (key, "key"), (value, "value")):
        if x.dim() != 4:
            raise ValueError(f"{OPERATOR} over ranks needs [b, heads, s_local, d], but {name} is {list(x.shape)}")
        if x.size(2) != layout.local_length:
            raise ValueError(
                f"{OPERATOR}: {name} has {x.size(2)} tokens, but the layout gives each rank {layout.local_length}; "
                "cp.attention(key_layout=...) attends to another sequence"
            )
    if query.size(1) != key.size(1) and not enable_gqa:
        raise ValueError(f"{OPERATOR}: {query.size(1)} query heads and {key.size(1)} key heads need enable_gqa=True")


def _as_sharded(*tensors: Tensor) -> DTensor | None:
    """The first tensor if they are DTensors, which must all be sharded equally, over samples and heads; else None."""
    from torch.distributed.tensor import DTensor

    if not any(isinstance(x, DTensor) for x in tensors):
        return None
    if not all(isinstance(x, DTensor) for x in tensors) or len({x.device_mesh for x in tensors}) > 1:
        raise ValueError(f"{OPERATOR} over ranks: query, key and value must be DTensors of one mesh, or none of them")
    placements = {x.placements for x in tensors}
    wrong = any(p.is_partial() or (p.is_shard() and p.dim not in (0, 1)) for each in placements for p in each)
    if len(placements) > 1 or wrong:
        raise ValueError(
            f"{OPERATOR} over ranks: DTensors must all have the same sharding, over samples (0) and heads (1)"
        )
    query, key = tensors[:2]
    shards = prod(size for size, p in zip(query.device_mesh.shape, query.placements) if p.is_shard(1))
    if query.size(1) != key.size(1) and key.size(1) % shards:  # a group of query heads would miss its key head
        raise ValueError(
            f"{OPERATOR} over ranks: {query.size(1)} query heads and {key.size(1)} key heads are split into {shards} "
            "shards, whose number must divide the key heads"
        )
    return query


def _to_dtensor(local: Tensor, query: DTensor) -> DTensor:
    """The output as a DTensor with this rank's part ``local``, sharded like ``query``; shards may differ in size."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size([*query.shape[:3], local.size(3)])
    strides = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
    return DTensor.from_local(
        local.contiguous(), query.device_mesh, query.placements, run_check=False, shape=shape, stride=strides
    )
