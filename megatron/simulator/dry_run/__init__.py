# SPDX-License-Identifier: Apache-2.0
"""One step of the real program on a simulated cluster: its memory, communication, FLOPs and time.

one_rank.py runs a rank under fake tensors, recorder.py writes its trace, replay.py plays it on a machine;
dry_run.py asks each kind of rank and sums up, steady.py lets a few micro-batches stand for all. gpu_kernels.py and
sharded_streams.py stand for a GPU's ways, fp8.py for Transformer Engine's, vocabulary.py for a tokenizer.
"""
