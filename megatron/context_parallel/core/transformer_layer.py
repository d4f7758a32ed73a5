# SPDX-License-Identifier: Apache-2.0
"""megatron-core's TransformerLayer in chunks: all of it by FPDT, or the FFN alone in spans of tokens.

The sub-modules, and so the parameters' names and checkpoints, are core's; only the order in which tokens go through
them is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch
from megatron.core.tensor_parallel import random as core_random
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.context_parallel.attention.tile import AttentionRule
from megatron.context_parallel.fpdt.chunked_ffn import apply_in_chunks, even_spans
from megatron.context_parallel.fpdt.chunked_layer import ChunkedLayer
from megatron.context_parallel.fpdt.offload import Offload
from megatron.context_parallel.layout.documents import document_rows
from megatron.context_parallel.layout.masks import Documents, Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.positions.rotary import LayoutRotaryEmbedding


@dataclass(frozen=True)
class AttentionSettings:
    """What the attention of every layer needs to know.

    Attributes:
        layout: who holds which tokens.
        rule: the mask inside a document, and the rest.
        separate: packed documents do not see each other.
        rotary: RoPE; None where positions enter otherwise.
    """

    layout: SequenceLayout
    rule: AttentionRule = AttentionRule()
    separate: bool = True
    rotary: LayoutRotaryEmbedding | None = None

    def of_documents(self, document_ends: Tensor | None) -> tuple[SequenceLayout, list[Mask]]:
        """Layout and masks (one, or one a sample) of a batch.

        Args:
            document_ends: int64 [b, n] in host memory, one past the last token of each document; rows are filled up
                with the length of the sequence. None: the sequences are one document each.
        """
        if document_ends is None:
            return self.layout, [self.rule.mask]
        ends = document_rows(document_ends)
        masks = [Documents(row, self.rule.mask) for row in ends] if self.separate else [self.rule.mask]
        return self.layout.of_documents(ends[0]), masks


@dataclass
class ChunkSettings:
    """How a layer cuts its work.

    Attributes:
        attention: layout of the sequence and rule of the attention.
        fpdt: the layer in the layout's chunks; otherwise core's attention half is left as it is.
        ffn_chunks: the FFN in (at least) this many spans; None, only without FPDT: whole.
        offload: host memory for FPDT's chunks and for streamed hidden states; None: everything stays on the device.
        streamed: hidden states are host buffers.
    """

    attention: AttentionSettings
    fpdt: bool = False
    ffn_chunks: int | None = None
    offload: Offload | None = None
    streamed: bool = False


class ChunkedTransformerLayer(TransformerLayer):
    """A transformer layer that never holds the insides of more than one chunk.

    Args:
        chunks: how it cuts its work.
        recompute: under FPDT, keep the layer's input alone and compute attention again in the backward pass.
    """

    def __init__(self, *args: Any, chunks: ChunkSettings, recompute: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chunks, self.recompute = chunks, recompute

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[s_local, b, h], the same, and no context. ``attention_mask``: see :meth:`AttentionSettings.of_documents`."""
        if not self.chunks.fpdt:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        if attention_mask is None or len(attention_mask) == 1:
            return self._chunked(hidden_states, attention_mask), None
        samples = zip(hidden_states.split(1, dim=1), attention_mask.split(1))  # each has tiles of its own
        return torch.cat([self._chunked(*sample) for sample in samples], dim=1), None

    def _chunked(self, hidden_states: Tensor, document_ends: Tensor | None) -> Tensor:
        settings = self.chunks
        layout, (mask,) = settings.attention.of_documents(document_ends)
        ends = None if document_ends is None else document_rows(document_ends)[0]
        layer = ChunkedLayer(
            project=partial(self._project, layout, ends),
            output=self._output,
            ffn=self._ffn,
            ffn_pieces=ceil(settings.ffn_chunks / layout.chunks),
            parameters=list(self.parameters()),
            layout=layout,
            rule=replace(settings.attention.rule, mask=mask, scale=self.self_attention.core_attention.scale),
            offload=settings.offload,
            streamed=settings.streamed,
            recompute=self.recompute and self.training,
            replay=self._replay(),
        )
        return layer(hidden_states)

    def _project(
        self, layout: SequenceLayout, ends: tuple[int, ...] | None, x: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[c, b, h] -> q, k, v [c, b, heads, d], rotated; under TP sequence parallelism c grows by TP."""
        query, key, value = self.self_attention.get_query_key_value_tensors(self.input_layernorm(x), None)
        rotary = self.chunks.attention.rotary
        if rotary is not None:
            query, key = rotary.rotate(query, key, rotary.of_spans(layout.local_chunk_spans(chunk), ends))
        return query, key, value

    def _output(self, out: Tensor, x: Tensor, chunk: int) -> Tensor:
        """Output projection of [c, b, heads, d], bias, dropout and the residual x."""
        add = self.self_attn_bda(self.training, self.config.bias_dropout_fusion)
        return add(self.self_attention.linear_proj(out.flatten(2)), x, self.hidden_dropout)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        settings = self.chunks
        if not settings.ffn_chunks:
            return super()._forward_mlp(hidden_states, *args, **kwargs)
        return apply_in_chunks(
            lambda part, _: self._ffn(part),
            hidden_states,
            [*self.pre_mlp_layernorm.parameters(), *self.mlp.parameters()],
            even_spans(hidden_states.size(0), settings.ffn_chunks),
            replay=self._replay(),
        )

    def _ffn(self, x: Tensor) -> Tensor:
        add = self.mlp_bda(self.training, self.config.bias_dropout_fusion)
        return add(self.mlp(self.pre_mlp_layernorm(x)), x, self.hidden_dropout)

    def _replay(self) -> Callable[[], Callable[[], AbstractContextManager]] | None:
        return replay_random_state if self.hidden_dropout and self.training else None


def replay_random_state() -> Callable[[], AbstractContextManager]:
    """Note all random states, core's per region included; what is returned brings them back for a while."""
    states = core_random._get_all_rng_states()

    @contextmanager
    def again() -> Iterator[None]:
        with core_random._fork_rng():
            core_random._set_all_rng_states(*states)
            yield

    return again
