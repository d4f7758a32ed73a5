# SPDX-License-Identifier: Apache-2.0
"""Read Megatron-LM's checkpoints without conversion: its args, names and optimizer formats."""
