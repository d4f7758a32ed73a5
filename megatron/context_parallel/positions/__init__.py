# SPDX-License-Identifier: Apache-2.0
"""How positions enter attention: RoPE and its long-context kin, ALiBi.

Positions are global and come from the layout; these turn them into angles and slopes. A learned embedding is a module
of megatron-core's model, and lives in core/.
"""
