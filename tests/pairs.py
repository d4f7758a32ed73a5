# SPDX-License-Identifier: Apache-2.0
"""Pairwise testing: a few of many cases that still contain every combination of two settings.

The matrix of cases stays complete. ``by_pairs`` marks cases without a new pair as ``full``: they run only with
``--full``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence, Set
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


def acting(flags: str) -> frozenset[str]:
    """The settings that split or send something; how a layer is recomputed, for example, is left to other tests."""
    return frozenset(one for one in settings(flags) if one.startswith((*AXES, "--expert", "--moe", "--l")))


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


def seconds(world: int, model: str, grid: str) -> float:
    """Rough relative time of a run of 64 tokens on few cores, where messages and calls count, and not their sizes."""
    flags = f"{model} {grid}"

    def last(name: str, default: int) -> int:
        return int(flags.rpartition(f"{name} ")[2].split()[0]) if name in flags else default

    sharded = 2.0 if "--zero-stage 2" in flags or "--zero-stage 3" in flags else 1.0
    chunks = 48 / last("--fpdt-chunk-size", 64) if "--fpdt-chunk-size" in flags else 0.0
    return 2.0 + world * sharded * (1 + chunks) * last("--num-layers", 4) / 4


def grid_pairs(
    cases: Sequence[tuple[int, str, str]], quick: Collection[tuple[int, str, str]] = (), *, once: bool = False
) -> list[Any]:
    """Apply :func:`by_pairs` to cases of (processes, model flags, grid flags); those in ``quick`` run with --quick too.

    ``once``: the chosen cases contain each setting, not each pair; other tests cover the pairs.
    """
    assert set(quick) <= set(cases), "no such case"

    def held(_: int, model: str, grid: str) -> Set[Hashable]:
        result = settings(f"{model} {grid}")
        return result if once else pairs(result)

    result = by_pairs(cases, held, seconds)
    return [pytest.param(*one.values, marks=pytest.mark.quick) if one.values in quick else one for one in result]
