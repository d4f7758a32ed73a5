# SPDX-License-Identifier: Apache-2.0
"""Context parallelism for PyTorch programs: Ulysses, Ring and their combination (USP), exact and load-balanced.

import megatron.context_parallel as cp

grid = cp.initialize_grid(ulysses=2, ring=2)
layout = cp.SequenceLayout(seq_length, grid)
x = layout.shard(tokens, dim=1)
out = cp.attention(q, k, v, layout=layout, mask=cp.Causal())
"""

from megatron.certifying.certificate import certify
from megatron.certifying.recording import Outcome
from megatron.context_parallel.attention.rule import AttentionRule
from megatron.context_parallel.attention.ulysses import ulysses_attention
from megatron.context_parallel.attention.usp import attention
from megatron.context_parallel.core.groups import current_grid, initialize_grid
from megatron.context_parallel.fpdt.chunked_layer import ChunkedLayer
from megatron.context_parallel.fpdt.chunked_mixer import ChunkedLinearLayer
from megatron.context_parallel.fpdt.host_store import Offload
from megatron.context_parallel.fpdt.log_probs import TokenScores, log_probs
from megatron.context_parallel.layout.block_sparse import (
    BigBirdBlocks,
    BlockList,
    BlockSparse,
    LongformerBlocks,
    StridedBlocks,
)
from megatron.context_parallel.layout.grid import Axis, Grid, abstract_grid
from megatron.context_parallel.layout.masks import Causal, Documents, Full, MaskFunction, Window
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.tree import Tree
from megatron.context_parallel.linear_attention.mixer import linear_attention
from megatron.context_parallel.linear_attention.rules import LinearRule
from megatron.context_parallel.linear_attention.short_convolution import short_convolution
from megatron.context_parallel.positions.alibi import alibi_slopes
from megatron.context_parallel.positions.position_dropout import Dropout
from megatron.context_parallel.sdpa import context_parallel
from megatron.context_parallel.sparse_attention.blocks import block_attention, choose_blocks
from megatron.context_parallel.sparse_attention.choice import choose_keys
from megatron.context_parallel.sparse_attention.chosen_attention import Indexer, sparse_attention

__all__ = [
    "AttentionRule",
    "Axis",
    "BigBirdBlocks",
    "BlockList",
    "BlockSparse",
    "Causal",
    "ChunkedLayer",
    "ChunkedLinearLayer",
    "Documents",
    "Dropout",
    "Full",
    "Grid",
    "Indexer",
    "LinearRule",
    "LongformerBlocks",
    "MaskFunction",
    "Offload",
    "Outcome",
    "SequenceLayout",
    "StridedBlocks",
    "TokenScores",
    "Tree",
    "Window",
    "abstract_grid",
    "alibi_slopes",
    "attention",
    "block_attention",
    "certify",
    "choose_blocks",
    "choose_keys",
    "context_parallel",
    "current_grid",
    "initialize_grid",
    "linear_attention",
    "log_probs",
    "short_convolution",
    "sparse_attention",
    "ulysses_attention",
]
