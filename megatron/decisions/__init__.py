# SPDX-License-Identifier: Apache-2.0
"""Decisions that context_parallel and formulas share, in plain Python without torch.

division.py divides heads, FPDT's pieces and lengths; ring_work.py counts what the ranks of a ring compute and send;
kernel_order.py lists the attention kernels and says which one a GPU runs. The planner starts without importing torch.
"""
