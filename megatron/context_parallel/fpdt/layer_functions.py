# SPDX-License-Identifier: Apache-2.0
"""A layer as functions of one chunk: what a chunked layer is made of, and its passes read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.context_parallel.attention.tile import AttentionRule
from megatron.context_parallel.fpdt.chunked_ffn import Replay
from megatron.context_parallel.fpdt.offload import Offload
from megatron.context_parallel.layout.sequence_layout import SequenceLayout


@dataclass(frozen=True)
class LayerFunctions:
    """The fields of :class:`~megatron.context_parallel.fpdt.chunked_layer.ChunkedLayer`, where they are explained."""

    project: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    output: Callable[[Tensor, Tensor, int], Tensor]
    parameters: Sequence[Tensor]
    layout: SequenceLayout
    rule: AttentionRule = AttentionRule()
    ffn: Callable[[Tensor], Tensor] | None = None
    ffn_pieces: int = 1
    offload: Offload | None = None
    streamed: bool = False
    recompute: bool = False
    replay: Replay | None = None
