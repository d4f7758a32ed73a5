# SPDX-License-Identifier: Apache-2.0
"""Exact attention over tiles: a kernel computes one, a source brings key blocks, partial results merge in fp32.

One tile (tile.py, kernels/), all tiles of a source (attend.py), keys around a ring (ring.py), all-to-all over heads
(ulysses.py), and both together (usp.py), which is what `cp.attention` is.
"""
