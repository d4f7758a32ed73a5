# SPDX-License-Identifier: Apache-2.0
"""Which rows of a module's activations on one process are those of a rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.certifying.recording import BACKWARD, INPUT, OUTPUT, Key, Numbers, Recording

OF_CALLS = (INPUT, OUTPUT, BACKWARD)
# positions of a rank's tokens, by the number of tokens that its activations have; or, where samples and positions are
# split, those of each by the sizes of the whole dim and of the rank's
Rows = dict[int | tuple[int, int], Tensor]


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
        dim = split_dim(key, one, ranks)
        if dim is not None:
            parts = [rank.numbers[key].movedim(dim, 0).double() for rank in ranks]
            found = _matched(whole.movedim(dim, 0).double(), parts)
            if found is not None:
                return [{len(rows): rows} for rows in found]
        elif key[0] == OUTPUT and whole is not None and all(key in rank.numbers for rank in ranks):
            blocks = [_block(whole, rank.numbers[key]) for rank in ranks]
            if all(blocks):
                return blocks
    return [{} for _ in ranks]


def _block(whole: Tensor, part: Tensor | None) -> Rows:
    """Samples and positions of a rank that has a part of both; empty if the part is not at exactly one place."""
    if part is None or part.dim() != whole.dim():
        return {}
    dims = [d for d in range(whole.dim()) if whole.size(d) != part.size(d)]
    sizes = [(whole.size(d), part.size(d)) for d in dims]
    if len(dims) < 2 or len(set(sizes)) < len(dims) or dims[-1] == whole.dim() - 1:
        return {}
    near, found = ALIKE * float(whole.abs().max()), []
    for rows in itertools.product(*(torch.arange(whole.size(d)).split(part.size(d)) for d in dims)):
        block = _selected(whole, dims, rows)
        if block.shape == part.shape and float((block.double() - part.double()).abs().max()) <= near:
            found.append(dict(zip(sizes, rows)))
    return found[0] if len(found) == 1 else {}


def _selected(whole: Tensor, dims: Sequence[int], rows: Sequence[Tensor]) -> Tensor:
    for dim, own in zip(dims, rows):
        whole = whole.index_select(dim, own)
    return whole


def split_dim(key: Key, one: Recording, ranks: Sequence[Recording]) -> int | None:
    """The one dim in which each rank has a part of a module's output; None if there is no such dim."""
    whole, parts = one.numbers[key], [rank.numbers.get(key) for rank in ranks]
    if key[0] != OUTPUT or whole is None or any(part is None or part.dim() != whole.dim() for part in parts):
        return None
    dims = [d for d in range(whole.dim()) if any(part.size(d) != whole.size(d) for part in parts)]
    return dims[0] if len(dims) == 1 and all(part.size(dims[0]) < whole.size(dims[0]) for part in parts) else None


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


def with_joined_calls(recording: Recording, like: Numbers) -> Recording:
    """The recording with all calls of a module joined along their first dim, as if they had been one.

    Ranks may call their modules on other micro-batches than one process does. Together they have the same rows. Calls
    without a gradient are left out where others have one: those of recomputation. So are first calls of more rows than
    all calls of ``like`` have together: a pipeline's last stage learns shapes from zeros.
    """
    numbers = {key: x for key, x in recording.numbers.items() if key[0] not in OF_CALLS or key[2] in (0, -1)}
    rows = {
        name: sum(len(x) for key in keys if (x := like[key]) is not None and x.dim())
        for name, keys in _calls(like).items()
    }
    for name, keys in _calls(recording.numbers).items():
        used = [key for key in keys if recording.numbers.get((BACKWARD, *key[1:])) is not None] or keys
        parts = [x for key in used if (x := recording.numbers[key]) is not None and x.dim()]
        if len({part.shape[1:] for part in parts}) == 1:
            while len(parts) > 1 and sum(map(len, parts)) > rows.get(name, 0) > 0:
                del parts[0]
            numbers[keys[0]] = torch.cat(parts)
    return Recording(numbers, recording.positions)


def _calls(numbers: Numbers) -> dict[tuple, list[Key]]:
    """The calls of each module, by kind of number, name, and whether they make a graph."""
    calls: dict[tuple, list[Key]] = {}
    for key in numbers:
        if key[0] in OF_CALLS:
            calls.setdefault((key[0], key[1], key[2] >= 0), []).append(key)
    return calls


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
    known = [rows.get((whole.size(d), part.size(d))) for d in dims]
    if all(own is not None for own in known):
        return _selected(whole, dims, known), None
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
