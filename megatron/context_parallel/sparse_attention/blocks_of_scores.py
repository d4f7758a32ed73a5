# SPDX-License-Identifier: Apache-2.0
"""Scores of all keys are made in blocks, whose borders and shapes are the same on every grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.spans import Span
from megatron.decisions.division import SCORED
from megatron.platform.hooks import replaceable

T = TypeVar("T")
ROWS, KEYS = SCORED


def count_of(span: Span) -> int:
    return span[1] - span[0]


@replaceable
def one_by_one(parts: Sequence[T], work: Callable[[T], int] = count_of) -> Iterable[T]:
    """The parts that a loop takes one by one with the same operations: a dry run takes one, and counts it for all.

    ``work``: what a part takes, in any unit; default: parts are spans, and it is in proportion to their length.
    """
    return parts


def masks_of_samples(mask: Mask | Sequence[Mask], samples: int) -> list[Mask]:
    """One mask for each sample; ``mask``: for all, or for each of the samples, which may be there several times."""
    return list(mask) * (samples // len(mask)) if isinstance(mask, Sequence) else [mask] * samples


def key_blocks(reached: Sequence[Span], length: int, block: int) -> Iterator[Span]:
    """The blocks of keys that hold a position of ``reached``."""
    numbers = {n for start, stop in reached for n in range(start // block, -(-stop // block))}
    for n in sorted(numbers):
        yield n * block, min((n + 1) * block, length)


def padded(x: Tensor, rows: int) -> Tensor:
    """With zeros up to ``rows``: products of equal shapes round alike, wherever a rank's blocks begin and end."""
    return x if len(x) == rows else torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))
