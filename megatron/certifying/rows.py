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


LAYOUTS = (contiguous, zigzag, striped)
ALIKE = 1e-4  # rows of another module's results differ by more, relative to the largest entry


def find_positions(one: Recording, ranks: Sequence[Recording]) -> list[Rows]:
    """The positions of each rank: given by the program, or found by comparing outputs, the first ones first.

    They are empty if no output is split, or if the ranks' parts of none can be found in the whole.
    """
    if all(rank.positions for rank in ranks):
        return [rank.positions for rank in ranks]
    for key, whole in one.numbers.items():
        parts = [rank.numbers.get(key) for rank in ranks]
        if key[0] != OUTPUT or any(part is None or part.dim() != whole.dim() for part in parts):
            continue
        dims = [d for d in range(whole.dim()) if any(part.size(d) != whole.size(d) for part in parts)]
        if len(dims) == 1 and all(part.size(dims[0]) < whole.size(dims[0]) for part in parts):
            (dim,) = dims
            found = _matched(whole.movedim(dim, 0).double(), [part.movedim(dim, 0).double() for part in parts])
            if found is not None:
                return [{len(rows): rows} for rows in found]
    return [{} for _ in ranks]


def _matched(whole: Tensor, parts: Sequence[Tensor]) -> list[Tensor] | None:
    length, near = len(whole), ALIKE * float(whole.abs().max())
    for layout in LAYOUTS:
        if length % (2 * len(parts)) and layout is zigzag:
            continue
        rows = [layout(length, rank, len(parts)) for rank in range(len(parts))]
        if all(len(r) == len(part) and (whole[r] - part).abs().max() <= near for r, part in zip(rows, parts)):
            return rows
    places = []
    for part in parts:
        same = (whole.flatten(1)[None] - part.flatten(1)[:, None]).abs().amax(
            -1
        ) <= near  # [rows of the rank, all rows]
        if not bool((same.sum(1) == 1).all()):
            return None
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
    dim = dims[0]
    samples, remainder = divmod(whole.size(dim), length) if length else (0, 0)
    positions = rows.get(part.size(dim) // max(samples, 1))
    if len(dims) > 1 or remainder or not samples or positions is None or part.size(dim) != samples * len(positions):
        return _chunk(whole, part, dims)
    if samples == 1:
        return whole.index_select(dim, positions), dim
    by_sample = whole.unflatten(dim, (samples, length)).index_select(dim + 1, positions).flatten(dim, dim + 1)
    by_position = whole.unflatten(dim, (length, samples)).index_select(dim, positions).flatten(dim, dim + 1)
    errors = [float((part.double() - x.double()).abs().nan_to_num(torch.inf).mean()) for x in (by_sample, by_position)]
    return (by_sample, by_position)[errors.index(min(errors))], None


def _chunk(whole: Tensor, part: Tensor, dims: Sequence[int]) -> tuple[Tensor, None] | None:
    """The part of other splits, for example of heads or of rows and heads: the chunk that is most like ``part``.

    None if no chunk is like it, because features may also be split in another order.
    """
    if any(whole.size(dim) % max(part.size(dim), 1) for dim in dims) or not part.numel():
        return None
    chunks = [whole]
    for dim in dims:
        chunks = [piece for chunk in chunks for piece in chunk.split(part.size(dim), dim)]
    errors = [float((part.double() - x.double()).abs().nan_to_num(torch.inf).mean()) for x in chunks]
    best = errors.index(min(errors))
    return (chunks[best], None) if errors[best] <= 0.5 * float(chunks[best].double().abs().mean()) else None
