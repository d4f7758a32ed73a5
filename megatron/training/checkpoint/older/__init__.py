# SPDX-License-Identifier: Apache-2.0
"""Weights of older forms, Megatron-LM's ``torch`` and DeepSpeed's universal, under core's names."""
