# SPDX-License-Identifier: Apache-2.0
"""One step of the real program on a simulated cluster: its memory, communication, FLOPs and time.

one_rank.py runs a rank with fake tensors, recording/ records its trace, replay.py computes the trace's time on a
machine, allocation/ the memory that PyTorch's allocator reserves. dry_run.py does all this for each kind of rank.
"""
