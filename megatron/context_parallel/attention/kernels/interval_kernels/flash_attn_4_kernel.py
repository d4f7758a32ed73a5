# SPDX-License-Identifier: Apache-2.0
"""The package flash-attn-4 (CuTe, Hopper and Blackwell): all tiles in one call.

Causal masks, windows and documents are arguments of the library. Other masks become a function of pairs that reads each
query's intervals of keys, and lists of the blocks that need it, so that all other blocks are skipped or complete. Out
and lse are arguments of the backward pass, and so the final ones. The functions below are those that the library's
autograd functions call; 4.0.0b36 is the version whose source was read; nothing has measured it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import Capability, Scores, package_reason
from megatron.context_parallel.attention.kernels.interval_kernels.interval_kernel import IntervalKernel
from megatron.context_parallel.attention.kernels.interval_kernels.intervals import (
    BlockLists,
    Intervals,
    block_lists,
    pieces,
    split_intervals,
    table_of,
)
from megatron.context_parallel.layout.tiles import Tiles
from megatron.platform.streams import to_device

WANTED = "flash-attn-4==4.0.0b36"
MOST = 8  # intervals of a query in one call: the function of pairs compares them one after the other
KEYS = 128  # of a block, and as many queries; on Blackwell twice as many queries


class FlashAttn4Kernel(IntervalKernel):
    """The kernel of the library, on [b, s, heads, d] or, for documents, [tokens, heads, d]."""

    name = "flash_attn_4"
    capabilities = "9.0, 10 or 11"
    supports_softcap = True
    supports_mask = False

    def runs_on(self, capability: Capability) -> bool:
        return capability[0] in (9, 10, 11)

    def missing(self) -> str | None:
        return missing()

    def calls(self, tiles: Tiles, scores: Scores, device: torch.device) -> list[_Call]:
        return calls(tiles, scores, device)

    def lacks(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        unsteady = "is not deterministic" if torch.are_deterministic_algorithms_enabled() else None
        return super().lacks(capability, dtype, head_dim) or unsteady


@dataclass(frozen=True)
class _Call:
    """One call for all rows of ``table``, with the arguments of forward and backward pass that say the mask.

    Attributes:
        ends: 0 and the ends of documents in queries and in keys, of all samples; None: no documents.
    """

    table: Intervals
    forward_mask: dict[str, Any]
    backward_mask: dict[str, Any]
    ends: Callable[[int], dict[str, Any]] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        how = {"softmax_scale": scores.scale, "softcap": scores.softcap or 0.0, "return_lse": True, "pack_gqa": False}
        if self.ends is None:
            return library().forward(q, k, v, **how, **self.forward_mask)[:2]
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = library().forward(*flat, **how, **self.forward_mask, **self.ends(q.size(0)))[:2]
        return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, ...]:
        how = {"softmax_scale": scores.scale, "softcap": scores.softcap or 0.0}
        if self.ends is None:
            return library().backward(q, k, v, out, dout, lse, **how, **self.backward_mask)[:3]
        flat = (x.flatten(0, 1) for x in (q, k, v, out, dout))
        lse = lse.transpose(0, 1).flatten(1).contiguous()
        grads = library().backward(*flat, lse, **how, **self.backward_mask, **self.ends(q.size(0)))[:3]
        return tuple(grad.view(x.shape) for grad, x in zip(grads, (q, k, v)))


def calls(tiles: Tiles, scores: Scores, device: torch.device) -> list[_Call]:
    """The calls for some tiles: one, unless queries have very many intervals."""

    def made() -> list[_Call]:
        table = table_of(tiles, scores.mask)
        if table is None:
            return []
        found = pieces(table)
        if found is None:
            return [_by_function(part, device) for part in split_intervals(table, MOST)]
        window = {"window_size_left": found.left, "window_size_right": found.right}
        window["causal"] = found.left is None and found.right == 0
        if len(found.q) == 2:
            return [_Call(table, window, window)]
        return [_Call(table, window, window, cache(lambda samples: dict(_ends(found.q, found.k, samples, device))))]

    return tiles.derived(("flash-attn 4", device), made)


def _ends(q: tuple[int, ...], k: tuple[int, ...], samples: int, device: torch.device) -> Iterator[tuple[str, Any]]:
    for name, ends in (("q", q), ("k", k)):
        every = [ends[-1] * sample + end for sample in range(samples) for end in ends[1:]]
        yield f"cu_seqlens_{name}", to_device(torch.tensor([0, *every], dtype=torch.int32), device)
        yield f"max_seqlen_{name}", max(b - a for a, b in zip(ends, ends[1:]))


def _by_function(table: Intervals, device: torch.device) -> _Call:
    """A call with a function of pairs, and lists of blocks."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    rows = KEYS * (2 if capability[0] in (10, 11) else 1)
    by_queries, by_keys = block_lists(table, rows, KEYS)
    ends = to_device(torch.from_numpy(table.table), device)
    function = {"mask_mod": library().interval_mask(len(table.table)), "aux_tensors": [ends]}

    def lists(chosen: BlockLists) -> dict[str, Any]:
        names = ("part_count", "part", "full_count", "full")
        arrays = (to_device(torch.from_numpy(getattr(chosen, name))[None, None], device) for name in names)
        return {"block_sparse_tensors": library().lists(*arrays, block_size=(rows, KEYS))}

    return _Call(table, {**function, **lists(by_queries)}, {**function, **lists(by_keys)})


@cache
def missing() -> str | None:
    """Why the package cannot be used, or None."""
    return package_reason("flash-attn-4", WANTED, lambda version: version.startswith("4.0.0"), library)


@cache
def library() -> SimpleNamespace:
    """The functions of the library. Those that its autograd functions call are private."""
    interface = import_module("flash_attn.cute.interface")
    return SimpleNamespace(
        forward=interface._flash_attn_fwd,
        backward=interface._flash_attn_bwd,
        lists=import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch,
        interval_mask=interval_mask,
    )


@cache
def interval_mask(ends: int) -> Callable[..., Any]:
    """The library's function of pairs for a table of ``ends`` rows (see :class:`~.intervals.Intervals`)."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def seen(batch, head, query, key, lengths, tables):  # no annotations: the compiler reads them
        table = tables[0]
        result = key < scalar_to_ssa(table[0, query[0]], cutlass.Int32)
        for index in cutlass.range_constexpr(1, ends, 2):
            start = scalar_to_ssa(table[index, query[0]], cutlass.Int32)
            stop = scalar_to_ssa(table[index + 1, query[0]], cutlass.Int32)
            result = result | ((key >= start) & (key < stop))
        return result

    return seen
