# SPDX-License-Identifier: Apache-2.0
"""Every setting of a run.

Each is a field of a dataclass, and a command-line flag: ``num_layers`` is ``--num-layers``. If Megatron-LM has the
flag, its name, default and meaning are Megatron-LM's. The field says all that is known of the flag alone; config.py
collects them.

- flag.py: how a field is a flag; *_settings.py: the settings, by subject; foreign_settings.py: other programs' names
- models.py: the shapes of --model, and what follows from a shape; same_network.py: whether two networks are the same
"""
