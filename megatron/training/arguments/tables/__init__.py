# SPDX-License-Identifier: Apache-2.0
"""Flags of other programs that are not settings of ours, and the reason or the way out for each (megatron_flags.py)."""
