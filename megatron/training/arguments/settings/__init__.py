# SPDX-License-Identifier: Apache-2.0
"""Every setting of a run, as fields of small dataclasses.

Each field is a command-line flag: ``num_layers`` is ``--num-layers``. If Megatron-LM has the flag, its name, default
and meaning are Megatron-LM's.
"""
