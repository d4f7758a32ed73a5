# SPDX-License-Identifier: Apache-2.0
"""The training program: from a Megatron-LM command line to a trained checkpoint.

pretrain.py is the whole run: job.py builds it, loop.py and step.py repeat it, features/ are what the loop calls beside
the step. arguments/, data/, model/, checkpoint/ and report/ are the parts that a run is made of.
"""
