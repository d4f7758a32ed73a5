# SPDX-License-Identifier: Apache-2.0
"""Decisions that context_parallel and formulas share, in plain Python without torch.

division.py divides heads, FPDT's pieces and lengths; state_exchange.py chooses how states of layers are exchanged;
key_exchange.py lists how keys travel on a ring; kernel_order.py lists the attention kernels and says which one a GPU
runs. The planner starts without importing torch.
"""
