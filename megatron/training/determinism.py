# SPDX-License-Identifier: Apache-2.0
"""``--deterministic-mode``: a run repeats bit for bit on the same grid and the same kind of device.

PyTorch's switch makes every operator repeat or raise; the attention kernels follow it (flash-attn adds up in order,
cuDNN's is left out). What is not an operator is chosen by environment variables, which have to be set before the GPU is
first used: cuBLAS's workspace, NCCL's algorithm, Transformer Engine's kernels.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch

from megatron.training.refusal import Refusal

# What to set where the user has set nothing, and what of the user's repeats too.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", (":4096:8", ":16:8")),
    "NCCL_ALGO": ("^NVLS", ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0", ("0",)),
}


def make_deterministic(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have everything repeat from here on.

    Raises:
        Refusal: the environment asks for what does not repeat.
    """
    for name, (value, others) in VARIABLES.items():
        found = environment.setdefault(name, value)
        if found not in others:
            raise Refusal(
                f"--deterministic-mode and the environment variable {name}={found}: its results may change from run to "
                f"run; unset it, or use {' or '.join(others)}"
            )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads memory that was not written
