# SPDX-License-Identifier: Apache-2.0
"""Flags and files of other programs: Megatron-LM, its forks and DeepSpeed.

foreign_settings.py defines other names of our settings and foreign_flags.py reads them; deepspeed_file.py reads
DeepSpeed's JSON file; megatron_flags.py decides about all other flags, which ignored_flags.py, refused_flags.py and
fork_flags.py list.
"""
