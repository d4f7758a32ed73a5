# SPDX-License-Identifier: Apache-2.0
"""Decisions in plain numbers, without torch: what the heart does and the closed forms count.

heads.py deals heads over Ulysses ranks, chunks.py says which way FPDT's loops go, lengths.py what a sequence must be a
multiple of, kernels.py which attention kernel a GPU runs. One source, so that a planner starts in a moment.
"""
