# SPDX-License-Identifier: Apache-2.0
"""Finds the fastest way to train a model on given GPUs, among all that fit.

search.py prices the strategies of search_space.py; limits.py finds the longest sequence and the fewest GPUs; confirm.py
compares a plan with a dry run. The other modules report: text, tables, JSON, a page, a command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.training.settings.config import Config


def fastest(configs: list[Config], world_size: int) -> int | None:
    """`search.fastest`, imported when it is called, so that --help does not wait for the planner."""
    from megatron.simulator.planner import search

    return search.fastest(configs, world_size)
