# SPDX-License-Identifier: Apache-2.0
"""Flags and files of other programs: Megatron-LM's, its forks' and DeepSpeed's.

foreign_settings.py and foreign_flags.py hold names for settings of ours, deepspeed_file.py reads DeepSpeed's JSON
file, megatron_flags.py says what becomes of every other flag, by the tables beside it.
"""
