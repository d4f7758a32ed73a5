# SPDX-License-Identifier: Apache-2.0
"""From a command line to a checked configuration; what cannot run is refused here, by name.

config.py has every setting once; parser.py makes flags of them, validate*.py completes and checks, megatron_flags.py
knows the flags of Megatron-LM and DeepSpeed that are not settings here, models.py the shapes behind ``--model``.
"""
