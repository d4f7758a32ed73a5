# SPDX-License-Identifier: Apache-2.0
"""All of the heart that knows megatron-core: its groups, module specs, transformer layer and learned positions.

The other rooms of context_parallel run where megatron-core is not installed, and groups.py makes do without it.
"""
