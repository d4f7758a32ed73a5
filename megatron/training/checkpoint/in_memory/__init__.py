# SPDX-License-Identifier: Apache-2.0
"""Copies of the training state in host memory, on each rank's node and on another node, for a restart on the same grid.
The idea is from Gemini (SOSP '23); the flags are those of Megatron-LM's local checkpoints. megatron-core has only their
state, without files, copies or restart: it takes these from NVIDIA's resiliency extension.
"""
