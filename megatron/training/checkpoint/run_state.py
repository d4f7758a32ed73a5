# SPDX-License-Identifier: Apache-2.0
"""A run's state apart from its tensors: progress, random number generators, learning-rate schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import random as core_random

from megatron.training.refusal import Refusal, one_line


@dataclass
class Progress:
    """How far a run has come."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_train_tokens: int = 0
    run: str = ""  # identity of the run, 32 hexadecimal digits; empty in checkpoints from before December 2026

    def advance(self, samples: int, seq_length: int) -> None:
        """Count one step."""
        self.iteration += 1
        self.consumed_train_samples += samples
        self.consumed_train_tokens += samples * seq_length


def random_state() -> dict[str, Any]:
    """The states of all random generators of this rank, by name."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": core_random._get_cuda_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set the states that :func:`random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    core_random._set_cuda_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def load_schedule(schedule: OptimizerParamScheduler, loaded: dict[str, Any], path: Path) -> None:
    """Load a schedule's state. Raises Refusal if there is none, or if it differs from the flags."""
    saved = loaded.get("schedule", loaded.get("opt_param_scheduler"))  # "schedule": the key until November 2026
    if saved is None:
        raise Refusal(f"checkpoint {path} has no learning-rate schedule: pass --no-load-optim")
    try:
        schedule.load_state_dict(saved)
    except AssertionError as error:  # core asserts that the flags equal the checkpoint's
        raise Refusal(
            f"checkpoint {path} has another schedule ({one_line(error)}): pass "
            "--override-opt-param-scheduler to take the flags, or --use-checkpoint-opt-param-scheduler"
        ) from None
