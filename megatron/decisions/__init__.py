# SPDX-License-Identifier: Apache-2.0
"""Decisions in plain numbers, without torch: what the heart does and the closed forms count.

division.py divides heads, FPDT's pieces and lengths; kernels.py says which attention kernel a GPU runs. Both sides ask
the same function, and a planner starts without importing torch.
"""
