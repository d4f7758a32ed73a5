# SPDX-License-Identifier: Apache-2.0
"""Closed forms of parameters, FLOPs, device memory, host memory and communication.

They use plain numbers only: neither torch nor a process group nor the code that trains. Training calls them before a
run starts; the simulator calls them where no GPU is available. The papers' published formulas are in papers.py.
"""
