# SPDX-License-Identifier: Apache-2.0
"""What the model computes in."""

from __future__ import annotations

import torch

from megatron.training.arguments.config import Config


def compute_dtype(config: Config) -> torch.dtype:
    """The dtype of activations."""
    return torch.bfloat16 if config.optimizer.bf16 else torch.float16 if config.optimizer.fp16 else torch.float32
