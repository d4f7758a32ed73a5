# SPDX-License-Identifier: Apache-2.0
"""Exact attention over tiles: a kernel computes one, a source brings key blocks, partial results merge in fp32.

In the order in which a call passes through: all-to-all over heads and a ring inside (usp.py, ulysses.py), the loop over
tiles (attend.py), the key blocks of a ring (ring.py, by the plan of ring_plan.py), one tile (tile.py, kernels/), and
how results add up (merge.py). `cp.attention` is usp.py's. sdpa.py puts it under PyTorch's own operator, for programs
that call that one, and makes it one node of a compiled graph.
"""
