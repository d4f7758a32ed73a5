# SPDX-License-Identifier: Apache-2.0
"""Position encodings: RoPE with its long-context variants, ALiBi, and dropout by position.

Positions are global and come from the layout. The learned embedding is in core/, because it is a module of
megatron-core's model.
"""
