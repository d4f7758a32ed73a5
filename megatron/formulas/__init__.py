# SPDX-License-Identifier: Apache-2.0
"""Closed forms of parameters, FLOPs, device memory and host memory.

They use plain numbers only: neither torch nor a process group nor the code that trains. Training calls them before a
run starts; the simulator calls them where no GPU is available. papers.py has a web page's formulas for comparison.
"""
