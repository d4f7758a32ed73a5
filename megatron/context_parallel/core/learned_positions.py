# SPDX-License-Identifier: Apache-2.0
"""Learned position embedding of which a rank holds the rows of its own tokens, and no others.

The rows lie in the order of the tokens (layout/), so the lookup is the table itself: nothing is searched, nothing is
sent, and a row's gradient comes from the rank that holds it. Ranks of different tokens therefore sum no gradients;
those of the same positions, along DP, do. That is what experts are to megatron-core, given expert-parallel groups over
the context-parallel ranks (``initialize_grid(core_options={"expert_model_parallel_size": U * R})``), so its DDP, its
optimizers and its gradient norm need no change.

The idea is that of ``SequenceParallelPositionEmbedding`` in Megatron-LM's public derivatives, which subtracts an offset
from the ids and so expects parts that are contiguous and ids that are all in them; zigzag's and FPDT's are not.
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

    Under TP sequence parallelism a TP rank has its part of the local tokens; else all TP ranks have all of them.
    """
    if not sequence_parallel:
        return layout.local_spans
    tensor = layout.grid.tensor
    part = layout.local_length // tensor.size
    return positions_of([(tensor.rank * part, (tensor.rank + 1) * part)], layout.local_spans)


def spare_span(layout: SequenceLayout, max_positions: int, *, sequence_parallel: bool) -> Span:
    """This rank's share of the positions past the sequence: no token has them, but they decay and are saved."""
    tensor, context = layout.grid.tensor, layout.grid.context
    ranks, index = context.size, context.rank
    if sequence_parallel:
        ranks, index = ranks * tensor.size, index * tensor.size + tensor.rank
    spare = max_positions - layout.seq_length
    return layout.seq_length + spare * index // ranks, layout.seq_length + spare * (index + 1) // ranks


class PositionRows(nn.Module):
    """Some rows of a table [max_positions, hidden]: those of this rank's tokens, then its share of the spare ones.

    Args:
        layout: which positions this rank holds.
        max_positions: rows of the whole table, at least the layout's sequence length.
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
        # (PP, TP, DP) as core counts copies: the first of each row is the one that is saved.
        self.replica = (0, 0 if sequence_parallel else grid.tensor.rank, grid.data.rank)
        self.weight = nn.Parameter(torch.empty(self.tokens + spare[1] - spare[0], hidden))
        self.weight.spans = (*tokens, spare) if spare[0] < spare[1] else tokens
        self.weight.allreduce = False  # core: gradients are summed over expert-data parallelism, which is DP
        self.weight.tensor_model_parallel = sequence_parallel  # core: whether TP ranks count in the norm one by one

    def forward(self, rows: Span | None = None) -> Tensor:
        """Rows [s_local, hidden] of this rank's tokens, or a run of them."""
        start, stop = rows or (0, self.tokens)
        return self.weight if stop - start == self.weight.size(0) else self.weight[start:stop]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensorFactory]:
        """The rows as parts of the one table that a plain model saves under the same name."""
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
    """Takes the place of megatron-core's embedding without positions: its word embedding, our rows.

    Words come first, summed over TP and, under sequence parallelism, scattered in one reduce-scatter; then each rank
    adds its rows. Core adds the whole table before it scatters.
    """

    def __init__(self, core: LanguageModelEmbedding, layout: SequenceLayout, max_positions: int) -> None:
        super().__init__(config=core.config)
        self.tp_group = core.tp_group
        self.word_embeddings = core.word_embeddings
        self.position_embeddings = PositionRows(
            layout, max_positions, core.config.hidden_size, sequence_parallel=core.config.sequence_parallel
        )

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, rows: Span | None = None) -> Tensor:
        """Hidden states [s, b, h] of this rank's tokens, from ids [b, s] of all its TP group's.

        Args:
            position_ids: not looked at; the layout knows them.
            rows: which of this rank's tokens the ids are; default all.
        """
        words = self.word_embeddings(input_ids)  # [s / TP, b, h] under sequence parallelism, else [b, s, h]
        if not self.config.sequence_parallel:
            words = words.transpose(0, 1).contiguous()
        positions = self.position_embeddings(rows)[:, None]
        return words + positions.to(words.dtype)  # FSDP's ranks hold fp32 rows, whatever the layers compute in
