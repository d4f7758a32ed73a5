#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pretrain a Llama model on the TP x Ulysses x Ring x DP x PP grid. Megatron-LM's flags; ``--help`` lists them."""

import sys

from megatron.simulator.dry_run.command import simulate
from megatron.simulator.planner.search import fastest
from megatron.training.pretrain import main

LLAMA = {
    "model.normalization": "RMSNorm",
    "model.swiglu": True,
    "model.position_embedding_type": "rope",
    "model.add_bias_linear": False,
    "model.untie_embeddings_and_output_weights": True,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
}

if __name__ == "__main__":
    sys.exit(main(defaults=LLAMA, simulate=simulate, fastest=fastest))
