# SPDX-License-Identifier: Apache-2.0
"""Decisions that context_parallel and formulas share, in plain Python without torch.

division.py divides heads, FPDT's pieces and lengths; state_exchange.py chooses how states of layers are exchanged;
kernel_order.py lists the attention kernels and says which one a GPU runs. The planner starts without importing torch.
"""
