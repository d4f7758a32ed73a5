# SPDX-License-Identifier: Apache-2.0
"""A learned position embedding that is partitioned by tokens: a rank holds only the rows of its own tokens.

The rows have the order of the tokens (layout/). The lookup is therefore the table itself, without communication, and a
row's gradient is complete on the rank that holds it. Gradients are summed over DP only. To megatron-core these rows are
experts, with expert-parallel groups over the context-parallel ranks
(``initialize_grid(core_options={"expert_model_parallel_size": U * R})``), so that its DDP, optimizers and gradient norm
work unchanged.

The idea comes from ``SequenceParallelPositionEmbedding`` in Megatron-LM's public derivatives. That class subtracts an
offset from the ids, which requires contiguous parts; zigzag's and FPDT's parts are not contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, positions_of


def token_spans(layout: SequenceLayout, *, sequence_parallel: bool) -> tuple[Span, ...]:
    """Positions of the tokens that this rank embeds, in local order.

    Under TP sequence parallelism each TP rank embeds its part of the local tokens, otherwise all of them.
    """
    if not sequence_parallel:
        return layout.local_spans
    tensor = layout.grid.tensor
    part = layout.local_length // tensor.size
    return positions_of([(tensor.rank * part, (tensor.rank + 1) * part)], layout.local_spans)


def spare_span(layout: SequenceLayout, max_positions: int, *, sequence_parallel: bool) -> Span:
    """This rank's share of the positions after the sequence.

    No token uses their rows, but weight decay changes them, and they are saved.
    """
    tensor, context = layout.grid.tensor, layout.grid.context
    ranks, index = context.size, context.rank
    if sequence_parallel:
        ranks, index = ranks * tensor.size, index * tensor.size + tensor.rank
    spare = max_positions - layout.seq_length
    return layout.seq_length + spare * index // ranks, layout.seq_length + spare * (index + 1) // ranks


class PositionRows(nn.Module):
    """Rows of a table [max_positions, hidden]: the rows of this rank's tokens, then its share of the spare rows.

    Args:
        layout: which positions this rank holds.
        max_positions: rows of the complete table, at least the layout's sequence length.
        hidden: columns.
        sequence_parallel: whether TP ranks split the tokens between them.

    Attributes:
        weight: [rows, hidden]; ``weight.spans`` are the positions of its rows.
    """

    def __init__(self, layout: SequenceLayout, max_positions: int, hidden: int, *, sequence_parallel: bool) -> None:
        super().__init__()
        tokens = token_spans(layout, sequence_parallel=sequence_parallel)
        spare = spare_span(layout, max_positions, sequence_parallel=sequence_parallel)
        self.tokens = sum(stop - start for start, stop in tokens)
        self.shape = (max_positions, hidden)
        grid = layout.grid
        # (PP, TP, DP) numbers of the copy, as core counts them; core saves the first copy of each row.
        self.replica = (0, 0 if sequence_parallel else grid.tensor.rank, grid.data.rank)
        self.weight = nn.Parameter(torch.empty(self.tokens + spare[1] - spare[0], hidden))
        self.weight.spans = (*tokens, spare) if spare[0] < spare[1] else tokens
        self.weight.allreduce = False  # core: gradients are summed over expert-data parallelism, which is DP
        self.weight.tensor_model_parallel = sequence_parallel  # core: whether every TP rank counts in the gradient norm

    def forward(self, rows: Span | None = None) -> Tensor:
        """The rows [s_local, hidden] of this rank's tokens, or only the span ``rows`` of these rows."""
        start, stop = rows or (0, self.tokens)
        return self.weight if stop - start == self.weight.size(0) else self.weight[start:stop]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensorFactory]:
        """The rows as parts of the table that a model without partitioning saves under the same name."""
        spans, shape = self.weight.spans, self.shape

        def build(key: str, rows: Tensor, replica: tuple, _: slice | None) -> dict[str, ShardedTensor]:
            parts, row = {}, 0
            for start, stop in spans:
                part = rows.detach()[row : row + stop - start]
                parts[str(start)] = ShardedTensor(
                    key, part, part.dtype, tuple(part.shape), shape, (start, 0), None, replica
                )
                row += stop - start
            return parts

        def merge(parts: dict[str, Tensor]) -> Tensor:
            return torch.cat([parts[str(start)] for start, _ in spans])

        key = f"{prefix}weight"
        return {key: ShardedTensorFactory(key, self.weight, build, merge, self.replica)}


class PartitionedEmbedding(MegatronModule):
    """Replaces megatron-core's embedding: core's word embedding with our position rows.

    The word embeddings are summed over TP (under sequence parallelism by a reduce-scatter); then each rank adds its
    rows. Core adds the positions before it scatters.
    """

    def __init__(self, core: LanguageModelEmbedding, layout: SequenceLayout, max_positions: int) -> None:
        super().__init__(config=core.config)
        self.tp_group = core.tp_group
        self.scatter_to_sequence_parallel = core.scatter_to_sequence_parallel
        self.word_embeddings = core.word_embeddings
        self.position_embeddings = PositionRows(
            layout, max_positions, core.config.hidden_size, sequence_parallel=core.config.sequence_parallel
        )

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, rows: Span | None = None) -> Tensor:
        """Hidden states [s, b, h] of this rank's tokens, from the ids [b, s] of all tokens of its TP group.

        Args:
            position_ids: ignored; the layout determines the positions.
            rows: which of this rank's tokens the ids belong to; default: all.
        """
        words = self.word_embeddings(input_ids)  # [s / TP, b, h] under sequence parallelism, else [b, s, h]
        if not self.config.sequence_parallel:
            words = words.transpose(0, 1).contiguous()
        positions = self.position_embeddings(rows)[:, None]
        return words + positions.to(words.dtype)  # under FSDP the rows are fp32
