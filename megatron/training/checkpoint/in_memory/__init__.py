# SPDX-License-Identifier: Apache-2.0
"""Copies of the training state in the memory of the hosts: each rank's on its own node and on a neighbour's, from which
a restart on the same grid goes on (the idea of Gemini, SOSP '23; flags of Megatron-LM's local checkpoints).
"""
