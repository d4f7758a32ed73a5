# SPDX-License-Identifier: Apache-2.0
"""One step of the real program on a simulated cluster: its memory, communication, FLOPs and time.

one_rank.py runs a rank under fake tensors, recording/ writes its trace, replay.py plays the trace on a machine and
allocation/ asks how much memory PyTorch's allocator reserves for it. dry_run.py does so for each kind of rank.
"""
