# SPDX-License-Identifier: Apache-2.0
"""The training program: from a Megatron-LM command line to a trained checkpoint.

pretrain.py is the whole run; job.py what it builds, loop.py and step.py what it repeats. The rooms beside them:
arguments, data, model, checkpoint, report.
"""
