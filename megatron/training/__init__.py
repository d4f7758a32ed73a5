# SPDX-License-Identifier: Apache-2.0
"""The training program: from a Megatron-LM command line to a trained checkpoint.

pretrain.py runs the program: job.py builds the model and its data, loop.py repeats step.py and calls the features in
features/. arguments/, data/, model/, checkpoint/, evaluation/ and report/ hold the parts of a run.
"""
