# SPDX-License-Identifier: Apache-2.0
"""``--loss-scale`` changes no loss, gradient norm or gradient, in whatever dtype and at whatever stage of ZeRO."""

import pytest
import torch

from tests.distributed.training_runs import run_training
from tests.pairs import also_in_full


@pytest.mark.parametrize(
    "zero, dtype",
    [
        *((0, "--bf16"), (1, ""), (1, "--bf16"), (3, "--bf16")),
        *also_in_full((0, ""), (2, ""), (2, "--bf16"), (3, "")),
    ],
)
def test_a_fixed_loss_scale_changes_nothing(pool, zero, dtype):
    flags = f"--num-layers 2 --zero-stage {zero} {dtype}"
    plain, scaled = (pool.run(run_training, 2, f"{flags} {more}", steps=3) for more in ("", "--loss-scale 1024"))
    factor = 1 if zero >= 2 or (zero == 0 and not dtype) else 1024  # where core's optimizer unscales
    for (losses, norms, grads), (scaled_losses, scaled_norms, scaled_grads) in zip(plain, scaled):
        assert (scaled_losses, scaled_norms) == (losses, norms)  # powers of two are exact
        assert all(torch.equal(scaled_grads[name], factor * grad) for name, grad in grads.items())
