# SPDX-License-Identifier: Apache-2.0
"""FPDT: a transformer layer in pipelined chunks, offloaded to host memory (FPDT paper, sections 4.1 and 4.2).

The sequence goes through projection, all-to-all, attention, all-to-all back, output projection and FFN chunk by chunk.
Only the layer's input and output exist for the complete sequence. Keys and values of finished chunks are kept in host
memory and loaded through a double buffer; so are queries, outputs and lse for the backward pass. The tiles say which
chunks meet and how they are masked.

See by_queries.py and by_keys.py for the loops over chunks, chunk_work.py for the work on one chunk, and host_store.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron.context_parallel.fpdt import by_keys, by_queries
from megatron.context_parallel.fpdt.chunk_pass import ChunkPass
from megatron.context_parallel.fpdt.chunk_work import LayerFunctions
from megatron.context_parallel.fpdt.host_store import HiddenStates
from megatron.decisions.division import goes_by_keys
from megatron.decisions.key_exchange import KEY_EXCHANGES


@dataclass(frozen=True)
class ChunkedLayer(LayerFunctions):
    """A layer as functions of one chunk, and where its chunks are kept.

    Attributes:
        project: (x of a chunk [c, b, h], chunk) -> q, k, v [c, b, heads, d] with positions applied (RoPE); the head
            size of v may differ.
        output: (attention output [c, b, heads, d of v], x of the chunk, chunk) -> [c, b, h], residual added.
        parameters: the tensors that ``project``, ``output`` and ``ffn`` use and that need gradients.
        layout: of the sequence, with its chunks.
        rule: mask, kernel, scale, ALiBi, dropout, soft-cap and sinks; sinks get a gradient if they require one.
        ffn: token-wise, on the result of ``output``: [n, b, h] -> [n, b, h]; None if the layer ends with ``output``.
        ffn_by_rows: ``ffn`` also gets the span of its rows among this rank's rows: (x, (first, end)).
        ffn_pieces: number of spans in which a chunk goes through ``ffn``.
        offload: host memory for finished chunks; None keeps them on the device.
        streamed: the result and the gradient of x are host buffers (and x may be one).
        recompute: keep only x for the backward pass, and compute attention again in that pass.
        replay: needed if ``output`` or ``ffn`` draws random numbers from a generator.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not KEY_EXCHANGES[self.rule.exchange].in_chunks and self.layout.grid.ring.size > 1:
            name = "gather_keys=True" if self.rule.gather_keys else f"exchange={self.rule.exchange!r}"
            raise ValueError(f"{name} with a layer in chunks is not supported: leave it out")
        if self.rule.up is not None:
            raise ValueError("up= with a layer in chunks is not supported: make keys and values in project")

    def start(self, x: Tensor, *, saving: bool) -> _Pass:
        return _Pass(self, x, saving=saving)


class _Pass(ChunkPass):
    def forward(self, y: HiddenStates | None) -> None:
        """By keys on a ring without offload, so that keys go around once. Otherwise by queries; on a ring all ranks'
        keys then go around for each query chunk."""
        on_device = self.layer.layout.grid.ring.size > 1 and self.layer.offload is None
        (by_keys if on_device else by_queries).forward(self, y)

    def backward(self, dy: HiddenStates) -> None:
        """By keys on a ring, or if that moves fewer bytes to and from the host; else by queries."""
        layer, heads = self.layer, (self.work.local_heads, self.work.local_kv_heads)
        fewer = layer.offload is not None and goes_by_keys(*heads, self.x.x.element_size())
        (by_keys if layer.layout.grid.ring.size > 1 or fewer else by_queries).backward(self, dy)
