# SPDX-License-Identifier: Apache-2.0
"""All keys at once: every rank of a ring gathers them, and their gradients are reduced and scattered (Llama 3, 3.3.2).

One message a layer each way in place of a ring's many, nothing of it behind computation, and memory for the keys and
values of all ring ranks. It pays where keys are few (GQA) and hops are slow; tiles, and so results, are the ring's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.attention.merge import KeyGradients
from megatron.context_parallel.attention.packed import packed, unpacked
from megatron.context_parallel.attention.ring import KeyBlock
from megatron.context_parallel.attention.ring_plan import Hop
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.tiles import tiles


class GatherSource:
    """The keys of a whole sequence as one block, the ranks' parts one after the other.

    Args:
        layout: of the queries; its ring is gathered over.
        mask: which keys a query attends to.
        key_layout: of the keys, in cross-attention; default ``layout``.
    """

    def __init__(self, layout: SequenceLayout, mask: Mask, key_layout: SequenceLayout | None = None) -> None:
        self.axis, key_layout = layout.grid.ring, key_layout or layout
        spans = tuple(span for rank in range(self.axis.size) for span in key_layout.ring_spans(rank))
        self.tiles = tiles(layout.ring_spans(self.axis.rank), spans, mask)

    def blocks(self, k: Tensor, v: Tensor, own: KeyGradients | None = None) -> Iterator[KeyBlock]:
        """The one block; with ``own``, which then gets the gradients of ``k`` and ``v``, summed in fp32 (fp64)."""
        kv, rows = packed(k, v), ((0, self.axis.size * k.size(0)),)
        whole = kv.new_empty((rows[0][1], *kv.shape[1:]))
        dist.all_gather_into_tensor(whole, kv, group=self.axis.group)
        grads = None if own is None else KeyGradients(k, v, rows)
        nothing = {"forward": (), "grads_in": (), "grads_out": (), "grads_to": self.axis.rank}
        hop = Hop(source=self.axis.rank, held=rows, tiles=self.tiles, **nothing)
        yield KeyBlock(*unpacked(whole, k.size(3)), hop, whole, grads)
        if own is not None:
            total = grads.packed()
            mine = total.new_empty((k.size(0), *total.shape[1:]))
            dist.reduce_scatter_tensor(mine, total, group=self.axis.group)
            own.add((0, k.size(0)), *unpacked(mine, k.size(3)))
