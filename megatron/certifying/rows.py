# SPDX-License-Identifier: Apache-2.0
"""Which rows of a module's activations on one process are those of a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.certifying.recording import OUTPUT, Recording

Rows = dict[int, Tensor]  # positions of a rank's tokens, by the number of tokens that its activations have


def contiguous(length: int, rank: int, ranks: int) -> Tensor:
    return torch.arange(length).chunk(ranks)[rank]


def striped(length: int, rank: int, ranks: int) -> Tensor:
    return torch.arange(rank, length, ranks)


def zigzag(length: int, rank: int, ranks: int) -> Tensor:
    blocks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([blocks[rank], blocks[2 * ranks - 1 - rank]])


UNKNOWN = "the positions of the ranks' tokens are unknown: return Outcome(positions=...)"
LAYOUTS = (contiguous, zigzag, striped)


def find_positions(one: Recording, ranks: Sequence[Recording]) -> list[Rows]:
    """The positions of each rank: given by the program, or found by comparing the first module's outputs.

    Raises:
        ValueError: the positions cannot be found.
    """
    if all(rank.positions for rank in ranks):
        return [rank.positions for rank in ranks]
    for key, whole in one.numbers.items():
        parts = [rank.numbers.get(key) for rank in ranks]
        if key[0] != OUTPUT or any(part is None or part.dim() != whole.dim() for part in parts):
            continue
        dims = [d for d in range(whole.dim()) if all(part.size(d) < whole.size(d) for part in parts)]
        if len(dims) != 1:
            if all(part.shape == whole.shape for part in parts):
                continue  # not split, for example the angles of positions
            break
        (dim,) = dims
        return [{len(rows): rows} for rows in _matched(whole.movedim(dim, 0), [part.movedim(dim, 0) for part in parts])]
    else:
        return [{} for _ in ranks]  # nothing is split
    raise ValueError(UNKNOWN)


def _matched(whole: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    length = len(whole)
    for layout in LAYOUTS:
        if length % (2 * len(parts)) and layout is zigzag:
            continue
        rows = [layout(length, rank, len(parts)) for rank in range(len(parts))]
        if all(len(r) == len(part) and torch.equal(whole[r], part) for r, part in zip(rows, parts)):
            return rows
    places = []
    for part in parts:
        same = (whole.flatten(1)[None] == part.flatten(1)[:, None]).all(-1)  # [rows of the rank, all rows]
        if not bool((same.sum(1) == 1).all()):
            raise ValueError(UNKNOWN)
        places.append(same.int().argmax(1))
    return places


def part_of(whole: Tensor, part: Tensor, rows: Rows, length: int) -> tuple[Tensor, int | None] | None:
    """The rows of ``whole`` that a rank has in ``part``, and the dim of positions; None if they do not correspond.

    Args:
        length: of the complete sequence.
    """
    if whole.shape == part.shape:
        return whole, None
    if whole.dim() != part.dim():
        return None
    dims = [d for d in range(whole.dim()) if whole.size(d) != part.size(d)]
    if len(dims) != 1 or not length:
        return None
    (dim,) = dims
    samples, remainder = divmod(whole.size(dim), length)
    positions = rows.get(part.size(dim) // max(samples, 1))
    if remainder or not samples or positions is None or part.size(dim) != samples * len(positions):
        return None
    if samples == 1:
        return whole.index_select(dim, positions), dim
    by_sample = whole.unflatten(dim, (samples, length)).index_select(dim + 1, positions).flatten(dim, dim + 1)
    by_position = whole.unflatten(dim, (length, samples)).index_select(dim, positions).flatten(dim, dim + 1)
    errors = [float((part.double() - x.double()).abs().nan_to_num(torch.inf).mean()) for x in (by_sample, by_position)]
    return (by_sample, by_position)[errors.index(min(errors))], None
