# SPDX-License-Identifier: Apache-2.0
"""Choices of the largest scores, as routers make them: recorded, and replayed where rounding may change them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.certifying.of_torch.whole import local

CHOOSE = {  # by operation: whether it chooses the largest if its arguments do not say
    "aten::topk": True, "aten::max.dim": True, "aten::argmax": True, "aten::min.dim": False, "aten::argmin": False,
    "aten::sort": False, "aten::sort.stable": False,
}  # fmt: skip


@dataclass
class Choice:
    """One call that chooses.

    Attributes:
        scores: [rows, scores].
        chosen: [rows, chosen]; in each row the indices of its largest scores, or of its smallest.
        limit: the largest error of a score; measured, what rounding changes.
        module: the module whose code chooses.
    """

    scores: Tensor
    chosen: Tensor
    largest: bool
    limit: float
    module: str = ""

    def difference(self, other: Choice) -> float:
        """The largest difference of two scores; infinity if these are not the same calls."""
        if self.scores.shape != other.scores.shape:
            return math.inf
        return float(_differences(self.scores, other.scores).max()) if self.scores.numel() else 0.0


@dataclass
class Flip:
    """A choice of a rank that is not the one of one process, among scores that are the same within rounding.

    Attributes:
        row: of the scores on one process.
        chosen, right: by the rank and by one process.
        gap: the largest difference of the scores of these.
        limit: the largest error of a score.
    """

    module: str
    row: int
    chosen: list[int]
    right: list[int]
    gap: float
    limit: float


def same_choices(some: Sequence[Choice], others: Sequence[Choice]) -> bool:
    return len(some) == len(others) and all(a.chosen.equal(b.chosen) for a, b in zip(some, others))


def _differences(x: Tensor, y: Tensor) -> Tensor:
    """Absolute differences; 0 between two equal infinities, with which scores are masked."""
    return torch.where(x == y, 0.0, (x - y).abs().nan_to_num(torch.inf))


class Choices(TorchDispatchMode):
    """In this context choices are recorded, and replaced by given ones.

    Where two scores are as good as equal, a rank may choose another one than one process does, and all later numbers
    differ although nothing is wrong. With the same choices they can be compared. A choice is replaced only if all
    scores of its row are those of one process within their limits. Then what it chose and what it should have chosen
    differ by at most two limits.

    Args:
        given: the choices of one process.
        same_calls: call n makes choice n, whatever its scores are. Otherwise rows are found by their scores, because
            ranks have other rows than one process, in another order.

    Attributes:
        made: (id of the module, choice) of each call, before it was replaced.
        inside: ids of the modules that run; kept by the caller.
    """

    def __init__(self, given: Sequence[Choice] = (), same_calls: bool = False) -> None:
        super().__init__()
        self._given, self._same_calls = given, same_calls
        self.made: list[tuple[int, Choice]] = []
        self.flips: list[Flip] = []
        self.inside: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(func, args, kwargs or {}, out)
        return out

    def see(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """Record a call if it chooses, and write the given choice into its result."""
        if func.name() not in CHOOSE:
            return
        call = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
        x, dim = call["self"], call.get("dim", None if func.name().startswith("aten::arg") else -1)
        if not x.is_floating_point() or not x.dim() or dim is None:
            return
        values, indices = (None, out) if isinstance(out, Tensor) else out
        if hasattr(x, "placements") and (indices.dim() == x.dim() or dim % x.dim() == x.dim() - 1):
            x = x.detach().redistribute(placements=indices.placements).to_local()  # the dims of both are the same
            values, indices = (part if part is None else local(part) for part in (values, indices))
        if type(x) not in (Tensor, torch.nn.Parameter):
            return
        if indices.dim() < x.dim():
            values, indices = (part if part is None else part.unsqueeze(dim) for part in (values, indices))
        scores, chosen = (part.detach().movedim(dim, -1) for part in (x, indices))
        shape = chosen.shape
        scores, chosen = (part.reshape(-1, part.size(-1)).clone() for part in (scores, chosen))
        finite = scores[scores.isfinite()]
        last = torch.finfo(x.dtype).eps * float(finite.abs().max()) if finite.numel() else 0.0
        largest = call.get("largest", call.get("descending", CHOOSE[func.name()]))
        choice = Choice(scores.double().cpu(), chosen.cpu(), largest, last)
        number = len(self.made)
        self.made.append((self.inside[-1] if self.inside else 0, choice))
        right = self._of_call(number, choice) if self._same_calls else self._of_scores(choice)
        if not right.equal(choice.chosen):
            new = right.to(indices.device).view(shape).movedim(-1, dim)
            indices.copy_(new)
            if values is not None:
                values.copy_(x.detach().gather(dim, new))

    def _of_call(self, number: int, choice: Choice) -> Tensor:
        given = self._given[number].chosen if number < len(self._given) else choice.chosen
        return given if given.shape == choice.chosen.shape else choice.chosen

    def _of_scores(self, choice: Choice) -> Tensor:
        """The choice with rows replaced that one process chooses otherwise from the same scores."""
        right, kept = choice.chosen.clone(), choice.chosen.size(1)
        given = [
            one for one in self._given if one.limit < math.inf and one.largest == choice.largest
            and one.scores.size(1) == choice.scores.size(1) and one.chosen.size(1) == kept
        ]  # fmt: skip
        if not given or not choice.scores.numel():
            return right
        best = choice.scores.topk(min(kept + 1, choice.scores.size(1)), largest=choice.largest).values
        gaps = best.diff().abs().nan_to_num(0.0)
        near = (gaps <= 2 * max(one.limit for one in given)).any(1)
        for row in near.nonzero().flatten().tolist():
            alike = []  # (difference of the scores, choice, row of it)
            for one in given:
                off = _differences(one.scores, choice.scores[row]).amax(1)
                alike += [(float(off[at]), one, at) for at in (off <= one.limit).nonzero().flatten().tolist()]
            if not alike or any(one.chosen[at].equal(right[row]) for _, one, at in alike):
                continue
            _, one, at = min(alike, key=lambda found: found[0])
            gap = float(_differences(one.scores[at, right[row]], one.scores[at, one.chosen[at]]).max())
            self.flips.append(Flip(one.module, at, right[row].tolist(), one.chosen[at].tolist(), gap, one.limit))
            right[row] = one.chosen[at]
        return right
