# SPDX-License-Identifier: Apache-2.0
"""All of the heart that knows megatron-core: module specs, its transformer layer, its learned positions.

The other rooms of context_parallel run where megatron-core is not installed.
"""
