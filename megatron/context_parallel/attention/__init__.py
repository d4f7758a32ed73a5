# SPDX-License-Identifier: Apache-2.0
"""Exact attention over tiles: a source gives key blocks, a kernel computes tiles, partial results are merged in fp32.

A call of `cp.attention` goes through usp.py and ulysses.py (all-to-all over heads around a ring), attend.py (the loop
over tiles), ring.py (the key blocks of a ring, by the plan of ring_plan.py), tile.py and kernels/ (one tile), and
merge.py (results). sdpa.py offers the same through PyTorch's own operator, also as a node of a compiled graph.
kv_cache.py is for generation.
"""
