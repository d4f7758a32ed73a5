# SPDX-License-Identifier: Apache-2.0
"""Closed forms that need no process group: parameters, FLOPs, memory, host memory, communication.

What they count is what the heart's own plans say (layout, ring, Ulysses), so they sit above it: training asks them
before a run starts, the simulator before any machine is there. The papers' own formulas are in papers.py.
"""
