# SPDX-License-Identifier: Apache-2.0
"""Context parallelism for any PyTorch program: Ulysses, Ring and their grid (USP), exact and load-balanced.

import megatron.context_parallel as cp

grid = cp.initialize_grid(ulysses=2, ring=2)
layout = cp.SequenceLayout(seq_length, grid)
x = layout.shard(tokens, dim=1)
out = cp.attention(q, k, v, layout=layout, mask=cp.Causal())
"""

from megatron.context_parallel.alibi import alibi_slopes
from megatron.context_parallel.block_sparse import (
    BigBirdBlocks,
    BlockList,
    BlockSparse,
    LongformerBlocks,
    StridedBlocks,
)
from megatron.context_parallel.fpdt import ChunkedLayer
from megatron.context_parallel.grid import Axis, Grid, abstract_grid, current_grid, initialize_grid
from megatron.context_parallel.layout import SequenceLayout
from megatron.context_parallel.masks import Causal, Documents, Full, MaskFunction, Window
from megatron.context_parallel.offload import Offload
from megatron.context_parallel.tile_kernel import AttentionRule
from megatron.context_parallel.ulysses import ulysses_attention
from megatron.context_parallel.usp import attention

__all__ = [
    "AttentionRule",
    "Axis",
    "BigBirdBlocks",
    "BlockList",
    "BlockSparse",
    "Causal",
    "ChunkedLayer",
    "Documents",
    "Full",
    "Grid",
    "LongformerBlocks",
    "MaskFunction",
    "Offload",
    "SequenceLayout",
    "StridedBlocks",
    "Window",
    "abstract_grid",
    "alibi_slopes",
    "attention",
    "current_grid",
    "initialize_grid",
    "ulysses_attention",
]
