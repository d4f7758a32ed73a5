# SPDX-License-Identifier: Apache-2.0
"""What a run does about bad numbers, faulty memory and slow machines."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.arguments.settings.flag import flag


@dataclass
class FaultConfig:
    """Batches that are left out, replicas that are compared, ranks that are slow."""

    skip_bad_batches: int = flag(
        0,
        "leave out up to so many batches whose loss or gradient norm is not finite (or a spike): such a step changes "
        "no weight; one more ends the run",
    )
    rollback_on_bad_batch: bool = flag(
        False, "--skip-bad-batches: go back to the weights of the last checkpoint, and leave out all batches since then"
    )
    iterations_to_skip: list[int] | None = flag(
        None, "leave out the batches that come after so many iterations", type=int, nargs="+"
    )
    check_for_spiky_loss: bool = flag(False, "a spike of the loss makes a bad batch; without --skip-bad-batches: tell")
    check_for_large_grads: bool = flag(False, "likewise a spike of the gradient norm")
    spike_factor: float = flag(10.0, "how many times the median of the last 100 good steps makes a spike")
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, "iterations between comparisons of weights that several ranks hold", type=int
    )
    log_straggler: bool = flag(
        False,
        "name ranks whose own work of a step takes a fifth longer than the median's, and when a step is slow, links "
        "between nodes that have become slow",
    )
