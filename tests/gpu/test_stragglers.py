# SPDX-License-Identifier: Apache-2.0
"""--log-straggler on a GPU: a product is timed in each step, and nothing waits for it."""

from __future__ import annotations

import pytest
import torch

from megatron.training.features.measuring.stragglers import Products

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="events need a CUDA device")


def test_products_are_timed_by_the_device() -> None:
    clock = Products(torch.device("cuda"))
    assert clock.result() == (0.0, False)
    for _ in range(clock.least):
        clock.begin()
        clock.end()
    torch.cuda.synchronize()
    milliseconds, known = clock.result()
    assert known and 0.01 < milliseconds < 1000
    clock.start_again()
    assert clock.result() == (0.0, False)
