# SPDX-License-Identifier: Apache-2.0
"""One step of the real program on a simulated cluster: its memory, communication, FLOPs and time.

one_rank.py runs a rank under fake tensors, recorder.py writes its trace, replay.py plays it on a machine;
dry_run.py asks each kind of rank and sums up. gpu_kernels.py and sharded_streams.py stand for a GPU's ways.
"""
