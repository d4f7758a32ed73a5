# SPDX-License-Identifier: Apache-2.0
"""Copies of the training state in host memory, on each rank's own node and on another one, for a restart on the same
grid (the idea of Gemini, SOSP '23; flags of Megatron-LM's local checkpoints).
"""
