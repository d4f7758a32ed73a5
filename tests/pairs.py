# SPDX-License-Identifier: Apache-2.0
"""Pairwise testing: a few of many cases that still contain every combination of two settings.

The matrix of cases stays complete. ``by_pairs`` marks cases without a new pair as ``full``: they run only with
``--full``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from itertools import combinations
from typing import Any

import pytest

# Settings of which only on or off matters (1 is off). For other settings each value counts.
AMOUNTS = (
    "--tensor-model-parallel-size",
    "--ulysses-parallel-size",
    "--ring-parallel-size",
    "--pipeline-model-parallel-size",
    "--num-virtual-stages-per-pipeline-rank",
    "--fpdt-chunk-size",
    "--ffn-chunks",
    "--loss-chunks",
)
# Settings that are ignored, because they follow from others, only shorten a run or have a test of their own.
PLAIN = (
    "--fpdt",
    "--group-query-attention",
    "--sequence-parallel",
    "--context-parallel-balance zigzag",
    "--overlap-param-gather",
    "--micro-batch-size 4",
    "--global-batch-size",
    "--recompute-num-layers",
    "--keep-attention",
)
# Settings that interact; for any other setting one occurrence is enough.
AXES = ("--tensor", "--ulysses", "--ring", "--pipeline", "--zero", "--fpdt", "saved --", "loaded --")


def settings(flags: str) -> frozenset[str]:
    """The settings of a command line: ``--zero-stage 3``, or only the name for a size above 1."""
    words: list[str] = []
    for word in flags.split():
        if word.startswith("--"):
            words.append(word)
        else:
            words[-1] += f" {word}"
    result = set()
    for word in words:
        name, _, value = word.partition(" ")
        if name in AMOUNTS and value != "1":
            result.add(name)
        elif name not in AMOUNTS and name not in PLAIN and word not in PLAIN:
            result.add(word)
    return frozenset(result)


def pairs(levels: Set[Hashable]) -> set[frozenset[Hashable]]:
    """Every setting, and every two settings that may interact."""
    acting = [level for level in levels if str(level).startswith(AXES)]
    return {frozenset(two) for two in combinations(acting, 2)} | {frozenset([one]) for one in levels} | {frozenset()}


def covering(held: Sequence[Set[Hashable]], costs: Sequence[float]) -> list[int]:
    """Indices of cases that together contain everything that any case contains.

    The search is greedy and deterministic: it always takes the first case with the most new pairs for its cost. Cases
    that the later ones have made superfluous are then left out, the most expensive one first.
    """
    left = set().union(*held)
    chosen: list[int] = []
    while left:
        best = max(range(len(held)), key=lambda index: (len(held[index] & left) / costs[index], -index))
        chosen.append(best)
        left -= held[best]
    for index in sorted(chosen, key=lambda index: (-costs[index], index)):
        others = [other for other in chosen if other != index]
        if held[index] <= set().union(*(held[other] for other in others)):
            chosen = others
    return sorted(chosen)


def by_pairs(
    cases: Sequence[tuple[Any, ...]],
    held: Callable[..., Set[Hashable]],
    cost: Callable[..., float] = lambda *_: 1.0,
    ids: Callable[..., str] | None = None,
) -> list[Any]:
    """``cases`` for ``pytest.mark.parametrize``; those that add nothing are marked ``full``.

    Args:
        held: returns the pairs that a case (passed as arguments) contains.
        cost: returns the cost of a case; of cases that add equally many pairs the cheapest is kept.
        ids: returns the name of a case.
    """
    kept = set(covering([held(*case) for case in cases], [cost(*case) for case in cases]))
    return [
        pytest.param(*case, marks=[] if index in kept else [pytest.mark.full], id=ids and ids(*case))
        for index, case in enumerate(cases)
    ]


def also_in_full(*cases: Any) -> list[Any]:
    """Cases for ``pytest.mark.parametrize`` that run only with ``--full``."""
    every = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.full) for case in every]


def full_but(cases: Iterable[Any], *usual: Any) -> list[Any]:
    """``cases`` for ``pytest.mark.parametrize``; only those in ``usual`` run without ``--full``."""
    every = list(cases)
    assert set(usual) <= set(every), "no such case"
    return [case if case in usual else also_in_full(case)[0] for case in every]


def quick_too(cases: Sequence[tuple[Any, ...]], *quick: tuple[Any, ...]) -> list[Any]:
    """``cases`` for ``pytest.mark.parametrize``; those in ``quick`` run with --quick too."""
    assert set(quick) <= set(cases), "no such case"
    return [pytest.param(*case, marks=pytest.mark.quick) if case in quick else case for case in cases]
