#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT model on the TP x Ulysses x Ring x DP x PP grid. Megatron-LM's flags; ``--help`` lists them."""

import sys

from megatron.simulator.command import advise, simulate
from megatron.simulator.planner import fastest
from megatron.training.pretrain import main

if __name__ == "__main__":
    sys.exit(main(simulate=simulate, fastest=fastest, advise=advise))
