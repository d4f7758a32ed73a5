# SPDX-License-Identifier: Apache-2.0
"""Exact attention over tiles: a source gives key blocks, and a kernel adds their tiles to sums in fp32.

- usp.py: `cp.attention`; ulysses.py: the all-to-all over heads, around a ring
- attend.py: the loop over key blocks, forward and backward
- ring.py: the key blocks of a ring, by the plan of ring_plan.py
- rule.py: what attention computes, and the choice of its kernel; kernels/: the kernels and their sums
- sdpa.py: the same through PyTorch's own operator, also as a node of a compiled graph
"""
