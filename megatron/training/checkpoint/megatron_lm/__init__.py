# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's checkpoints as they are: its args, its names, its forms of the optimizer."""
