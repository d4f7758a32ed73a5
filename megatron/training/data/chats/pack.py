# SPDX-License-Identifier: Apache-2.0
"""Which conversations share a sample: best-fit packing (Ding et al. 2024, Fewer Truncations Improve Language Modeling,
section 3), in an order that is drawn anew for each epoch."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort

import numpy as np
import torch

GROUP = 64  # samples that are packed together: a part of an epoch, so that an epoch's samples are not the last one's


def pack(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Sort items into as few bins of ``room`` as best-fit decreasing finds; returns the items of each bin.

    Args:
        lengths: of each item, at most ``room``.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), ascending
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        at = bisect_left(free, (length, -1))
        if at == len(free):
            left, number = room, len(bins)
            bins.append([])
        else:
            left, number = free.pop(at)
        bins[number].append(item)
        if left > length:
            insort(free, (left - length, number))
    return bins


def epoch(lengths: np.ndarray, room: int, key: tuple[int, ...]) -> list[np.ndarray]:
    """The samples of one pass over all conversations, as indices [n] of the conversations that each one holds.

    Args:
        lengths: of each conversation.
        room: of a sample.
        key: the seed, the split, the number of the epoch: another key gives another order.
    """
    generator = torch.Generator().manual_seed(int(hashlib.sha256(repr(key).encode()).hexdigest()[:14], 16))
    order = torch.randperm(len(lengths), generator=generator).numpy()
    group = np.cumsum(lengths[order]) // (GROUP * room)
    samples = []
    for part in np.split(order, np.flatnonzero(np.diff(group)) + 1):
        samples += [part[items] for items in pack(lengths[part], room)]
    return [samples[number] for number in torch.randperm(len(samples), generator=generator).tolist()]
