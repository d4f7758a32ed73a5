# SPDX-License-Identifier: Apache-2.0
"""The parts of context_parallel that depend on megatron-core: groups, module specs, transformer layer, positions.

The rest of context_parallel runs without megatron-core, and so does groups.py.
"""
