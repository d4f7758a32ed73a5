# SPDX-License-Identifier: Apache-2.0
"""Exact attention over tiles: a source gives key blocks, a kernel computes tiles, partial results are merged in fp32.

- usp.py: `cp.attention`; ulysses.py: the all-to-all over heads, around a ring
- attend.py: the loop over tiles, forward and backward; merge.py: the merge of their results
- ring.py: the key blocks of a ring, by the plan of ring_plan.py
- tile.py: one tile with its mask, bias and dropout; kernels/: the kernels that compute a tile
- sdpa.py: the same through PyTorch's own operator, also as a node of a compiled graph
- kv_cache.py: keys and values of a generation
"""
