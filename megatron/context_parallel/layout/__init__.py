# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which tokens, and which (query, key) pairs are computed.

Nothing in this package computes attention or depends on megatron-core.

- grid.py: the ranks and their groups
- sequence_layout.py: the positions that each rank holds: zigzag, contiguous, by documents, in chunks
- masks.py, block_sparse.py: which keys a query attends to; documents.py: packed documents of a batch
- spans.py: arithmetic of spans of positions; tiles.py: the tiles that follow from layouts and masks
"""
