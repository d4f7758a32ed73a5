# SPDX-License-Identifier: Apache-2.0
"""Every setting of a run, as fields of small dataclasses.

A field *is* its command-line flag: ``num_layers`` is ``--num-layers``. Names, defaults and meanings are Megatron-LM's
wherever Megatron-LM has the flag; the new ones are the contract of this project.
"""
