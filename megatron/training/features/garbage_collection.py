# SPDX-License-Identifier: Apache-2.0
"""``--manual-gc``: Python collects garbage on all ranks at the same iterations, so that no rank waits for another."""

from __future__ import annotations

import gc

from megatron.training.features.feature import Feature, Step, due


class GarbageCollection(Feature):
    def __init__(self, interval: int) -> None:
        self.interval = interval
        gc.disable()

    def after_log(self, step: Step) -> None:
        if due(self.interval, step.iteration):
            gc.collect()

    def stop(self) -> None:
        gc.enable()
