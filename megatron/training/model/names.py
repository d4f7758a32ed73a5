# SPDX-License-Identifier: Apache-2.0
"""megatron-core's names of the weights that TP ranks share, and along which dim."""

from __future__ import annotations

SINKS = "softmax_offset"
BY_ROWS = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias", SINKS)
BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # by rows, padded
