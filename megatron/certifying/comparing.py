# SPDX-License-Identifier: Apache-2.0
"""Compares the numbers of ranks with those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.certifying.recording import GRADIENT, LOSS, NORM, UPDATE, Key, Recording, Reference, error

COMPARED = (LOSS, GRADIENT, NORM, UPDATE)


@dataclass(frozen=True)
class Compared:
    """One number or tensor on all ranks of a grid that have it, compared with one process.

    Attributes:
        errors: of each rank: largest difference over the largest entry on one process; None if the rank does not have
            this parameter, infinity if it should have a tensor and has none.
        limit: the largest error that rounding may cause.
        factor, cosine: of the rank with the largest error: the tensor is about ``factor`` times the right one, and the
            angle between the two has this cosine. Factor 2 and cosine 1: the tensor is doubled; cosine 0: it is
            unrelated to the right one.
        note: what is missing.
    """

    key: Key
    errors: tuple[float | None, ...]
    limit: float
    factor: float
    cosine: float
    note: str = ""

    @property
    def worst(self) -> float:
        return max((one for one in self.errors if one is not None), default=0.0)

    @property
    def right(self) -> bool:
        return self.worst <= self.limit

    @property
    def ranks(self) -> list[int]:
        """The ranks on which it is wrong."""
        return [rank for rank, one in enumerate(self.errors) if one is not None and one > self.limit]

    def __str__(self) -> str:
        name = " ".join(str(part) for part in self.key if str(part))
        text = f"{name}: error {self.worst:.1e}, rounding explains {self.limit:.1e}"
        if self.note:
            return f"{text}; {self.note}"
        return text if self.right else f"{text}; {ratio(self.factor, self.cosine)}; ranks {listed(self.ranks)}"


def compare(reference: Reference, ranks: Sequence[Recording], grids: int = 1) -> list[Compared]:
    """All losses, gradients, norms and updates.

    Args:
        grids: how many grids are compared in all, for the probability of a false alarm.
    """
    one = reference.recording.numbers
    names = [key for key in one if key[0] in COMPARED]
    limits = reference.limits(len(names) * grids)
    result = [compared(key, one[key], [rank.numbers for rank in ranks], limits.get(key, 0.0)) for key in names]
    for key in dict.fromkeys(key for rank in ranks for key in rank.numbers if key[0] in COMPARED and key not in one):
        have = tuple(float("inf") if key in rank.numbers else None for rank in ranks)
        result.append(Compared(key, have, 0.0, 1.0, 1.0, "missing on one process"))
    return result


def compared(key: Key, right: Tensor | None, ranks: Sequence[dict], limit: float) -> Compared:
    """The result for one tensor. A rank without the parameter is left out; if no rank has it, all are wrong."""
    nowhere = not any(key in numbers for numbers in ranks)
    errors, note = [], ""
    for rank, numbers in enumerate(ranks):
        x = numbers.get(key)
        if key not in numbers and not nowhere and (GRADIENT, *key[1:]) not in numbers:
            errors.append(None)
        elif (x is None) != (right is None):
            errors.append(float("inf"))
            missing = f"missing on {'every rank' if nowhere else f'rank {rank}'}"
            note = missing if x is None else f"rank {rank} has a tensor, one process has none"
        else:
            errors.append(0.0 if x is None else error(key, x, right))
            if x is not None and x.shape != right.shape:
                shapes = f"shape {tuple(x.shape)} on rank {rank}, {tuple(right.shape)} on one process"
                note = f"{shapes}: return whole tensors in Outcome"
    known = [rank for rank, one in enumerate(errors) if one is not None and ranks[rank].get(key) is not None]
    if right is None or not known:
        return Compared(key, tuple(errors), limit, 1.0, 1.0, note)
    worst = max(known, key=lambda rank: errors[rank])
    return Compared(key, tuple(errors), limit, *fitted(ranks[worst][key], right), note)


def fitted(x: Tensor, right: Tensor) -> tuple[float, float]:
    """(k, cosine): ``x`` is about ``k * right``, and the angle between the two has this cosine."""
    if x.shape != right.shape:
        return float("nan"), float("nan")
    x, right = x.double().flatten(), right.double().flatten()
    product, square, other = float(x @ right), float(right @ right), float(x @ x)
    if not square or not other:
        return (product / square if square else float("nan")), float("nan")
    return product / square, product / (square * other) ** 0.5


def ratio(factor: float, cosine: float) -> str:
    """The results of :func:`fitted` as text."""
    if cosine > 0.999 and abs(factor - 1) > 1e-3:
        return f"{factor:.4g} times the right one (cosine {cosine:.4f})"
    return f"factor {factor:.4g}, cosine {cosine:.4f}"


def listed(numbers: Sequence[int]) -> str:
    """Numbers as text, with runs shortened: 0-3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
