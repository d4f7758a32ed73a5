# SPDX-License-Identifier: Apache-2.0
"""Finds the first module whose output or gradient differs from that on one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from megatron.certifying.comparing import Compared, fitted, listed, ratio
from megatron.certifying.recording import (
    BACKWARD,
    GRADIENT,
    INPUT,
    LOSS,
    NORM,
    OUTPUT,
    UPDATE,
    WEIGHT,
    Key,
    Recording,
    Reference,
    error,
)
from megatron.certifying.rows import Rows, find_positions, part_of, split_dim, with_joined_calls


@dataclass(frozen=True)
class FirstDifference:
    """Where a program first differs.

    Attributes:
        kind: weights, data, forward, backward, loss scale, scale, reduction, clipping norm, update, or loss.
        modules: names of the modules at fault; "" is the program outside of its modules.
        text: what is known, in words.
    """

    kind: str
    modules: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def bisect(reference: Reference, ranks: Sequence[Recording], wrong: Sequence[Compared]) -> FirstDifference:
    """The first difference, in the order in which a step computes.

    Args:
        reference, ranks: recorded with the inputs and outputs of modules.
        wrong: the numbers of the step that differ.
    """
    one = reference.recording
    limits = reference.limits(sum(x is not None for x in one.numbers.values()) * len(ranks))
    rows = find_positions(one, ranks)
    if not any(rows) or not _same_calls(one, ranks):
        ranks = [with_joined_calls(rank, one.numbers) for rank in ranks]
        one = with_joined_calls(one, one.numbers)
        rows = find_positions(one, ranks)
    length = _length(one, rows)
    outputs = [key for key in one.numbers if key[0] == OUTPUT]
    all_wrong = _all_wrong(one, wrong)
    return (
        _weights(one, ranks, limits)
        or _data(one, ranks, rows, outputs)
        or _forward(one, ranks, rows, length, limits, outputs)
        or _backward(one, ranks, rows, length, limits, outputs, wrong)
        or _scale(all_wrong)
        or _clipping(one, ranks, all_wrong)
        or _step(wrong, all_wrong, any(True for key in outputs for _ in _pairs(key, one, ranks, rows, length)))
    )


def _same_calls(one: Recording, ranks: Sequence[Recording]) -> bool:
    """Whether call n of a module on a rank has rows of its call n on one process, or the program says of which."""
    if any(rank.positions or rank.calls != (0, 1) for rank in ranks):
        return True
    outputs = {key for key in one.numbers if key[0] == OUTPUT}
    for rank in ranks:
        own = {key for key in rank.numbers if key[0] == OUTPUT}
        modules = {key[1] for key in own}
        if own != {key for key in outputs if key[1] in modules}:
            return False
    return True


def _data(one: Recording, ranks, rows: Sequence[Rows], outputs: Sequence[Key]) -> FirstDifference | None:
    """Rows of the batch or the sequence that no rank has; None if there are none."""
    key = next((key for key in outputs if split_dim(key, one, ranks) is not None), None)
    if key is None or not all(rows):
        return None
    whole, dim = one.numbers[key], split_dim(key, one, ranks)
    parts = [max(some.values(), key=len) for some in rows]
    if 0 < dim == whole.dim() - 1 or whole.size(dim) != sum(map(len, parts)):
        return None  # features are split, or other rows
    missing = sorted(set(range(whole.size(dim))) - {int(row) for part in parts for row in part})
    if not missing:
        return None
    text = f"rows {listed(missing)} of the output of {_named(key[1])} are on no rank"
    again = [r for r in range(len(parts)) if any(torch.equal(parts[r], other) for other in parts[:r])]
    more = f"; ranks {listed(again)} have the same rows as a rank before them" if again else ""
    return FirstDifference("data", (key[1],), text + more)


def _length(one: Recording, rows: Sequence[Rows]) -> int:
    """Tokens of the complete sequence."""
    return 1 + max((int(x.max()) for some in rows for key, x in some.items() if isinstance(key, int)), default=-1)


Pair = tuple[int, Tensor, Tensor, "int | None"]


def _pairs(key: Key, one: Recording, ranks: Sequence[Recording], rows: Sequence[Rows], length: int) -> Iterator[Pair]:
    """(rank, its tensor, the same rows of one process, dim of positions) for each rank that has the call."""
    for rank, recording in enumerate(ranks):
        first, step = recording.calls
        kind, module, number = key
        sign, at = (1, number) if number >= 0 else (-1, -1 - number)
        if (at - first) % step or at < first:
            continue
        own = (at - first) // step
        x, right = recording.numbers.get((kind, module, own if sign > 0 else -1 - own)), one.numbers[key]
        if x is None or right is None:
            continue
        same = part_of(right, x, rows[rank], length)
        if same is not None:
            yield rank, x, same[0], same[1]


def _weights(one, ranks, limits) -> FirstDifference | None:
    """Whole parameters that are not those of one process when their module is called for the first time."""
    bad = [
        (rank, key) for key, right in one.numbers.items() if key[0] == WEIGHT for rank, recording in enumerate(ranks)
        if (x := recording.numbers.get(key)) is not None and x.shape == right.shape
        and error(key, x, right) > limits.get(key, 0.0)
    ]  # fmt: skip
    if not bad:
        return None
    names = list(dict.fromkeys(f"{module}.{name}".lstrip(".") for _, (_, module, name) in bad))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    text = (
        f"before the first step {', '.join(names[:4])}{more} differ from one process, on ranks "
        f"{listed(sorted({rank for rank, _ in bad}))}"
    )
    return FirstDifference("weights", tuple(dict.fromkeys(key[1] for _, key in bad)), text)


def _forward(one, ranks, rows, length, limits, outputs) -> FirstDifference | None:
    """The first module call with a wrong output or input, in the order of the forward pass; None if all agree."""
    before = ""
    for key in outputs:
        limit = limits.get(key, 0.0)
        pairs = list(_pairs(key, one, ranks, rows, length))
        bad = _wrong(pairs, one.numbers[key], limit)
        if not bad:
            before = key[1]
            continue
        fed = _fed(key, one, ranks, rows, length, limits)
        rank, x, right, dim = next(pair for pair in pairs if pair[0] == bad[0])
        place = _at(key, rank, x, right, dim, rows, limit)
        name = _between(before, key[1]) if fed else key[1]
        calls = {other[1]: other for other in reversed(outputs)}
        while fed and name and (name not in calls or _fed(calls[name], one, ranks, rows, length, limits)):
            name = name.rpartition(".")[0]  # a list of modules, or a module whose input is wrong already
        where = f"the input of {_named(key[1])}, computed in {_named(name)}" if fed else f"the output of {_named(name)}"
        return FirstDifference("forward", (name,), f"first in {where}{_call(key)}, on ranks {listed(bad)}, {place}")
    return None


def _fed(key, one, ranks, rows, length, limits) -> bool:
    """Whether the input of a module's call is wrong."""
    inputs = (INPUT, *key[1:])
    limit = max(limits.get(inputs, 0.0), limits.get(key, 0.0))
    whole = one.numbers.get(inputs)
    return whole is not None and bool(_wrong(list(_pairs(inputs, one, ranks, rows, length)), whole, limit))


def _wrong(pairs: Sequence[Pair], whole: Tensor, limit: float) -> list[int]:
    """The ranks whose tensors differ; none if ranks with the same rows have partial sums, which may be added later."""
    bad = [rank for rank, x, right, _ in pairs if _error(x, right, whole) > limit]
    if len(bad) < 2:
        return bad
    sums = _sums(pairs)
    together = len(sums) < len(pairs) and all(_error(total, right, whole) <= limit for total, right, _ in sums)
    return [] if together else bad


def _sums(pairs: Iterable[Pair]) -> list[tuple[Tensor, Tensor, int]]:
    """(sum of the ranks' tensors, the one of one process, number of ranks) for ranks with the same rows."""
    sums: list[tuple[Tensor, Tensor, int]] = []
    for _, x, right, _ in pairs:
        same = (n for n, (_, other, _) in enumerate(sums) if right.shape == other.shape and right.equal(other))
        if (at := next(same, None)) is None:
            sums.append((x.double(), right, 1))
        else:
            sums[at] = sums[at][0] + x.double(), right, sums[at][2] + 1
    return sums


def _sharing(pairs: Iterable[Pair]) -> int:
    """The number of ranks that have the same rows."""
    return max((ranks for *_, ranks in _sums(pairs)), default=0)


def _has_features(key: Key, one: Recording, ranks: Sequence[Recording]) -> bool:
    """Whether each rank has rows with all features of an output."""
    parts, features = [rank.numbers.get(key) for rank in ranks], one.numbers[key].shape[-1:]
    return all(part is not None and part.dim() > 1 and part.shape[-1:] == features for part in parts)


def _partial(pairs: Sequence[Pair], whole: Tensor, limit: float) -> bool:
    """Whether the sum over the ranks with the same rows is the right gradient, perhaps counted several times."""
    for total, right, _ in _sums(pairs):
        times = fitted(total, right)[0]
        if not times > 0 or _error(total / times, right, whole) > limit:
            return False
    return True


def _backward(one, ranks, rows, length, limits, outputs, wrong) -> FirstDifference | None:
    """The first module call with a wrong gradient, in the order of the backward pass; None if all agree.

    A module is left out if the gradients of all its parameters are right in the end: what its ranks hold may be
    partial, or be counted several times, until the program reduces it. If more ranks share an output than share their
    tokens, as with a table of positions where samples are split, each may have its own tokens' part of the gradient.
    """
    after, scales, called = "", {}, {key[1] for key in outputs}
    sharing = {key: _sharing(_pairs(key, one, ranks, rows, length)) for key in outputs}
    usual = min([len(ranks), *(sharing[key] for key in outputs if sharing[key] and _has_features(key, one, ranks))])
    trained = {key[1] for key, x in one.numbers.items() if key[0] == GRADIENT and x is not None}
    bad_parameters = {compared.key[1] for compared in wrong if compared.key[0] == GRADIENT}

    def settled(module: str) -> bool:
        own = {name for name in trained if not module or name.startswith(f"{module}.")}
        return bool(own) and not own & bad_parameters

    for key in ((BACKWARD, *output[1:]) for output in reversed(outputs)):
        pairs = list(_pairs(key, one, ranks, rows, length))
        # a rank whose tokens have no loss has no gradient, and therefore no factor
        pairs = [pair for pair in pairs if float(pair[2].abs().max()) > 0 or float(pair[1].abs().max()) > 0]
        if not pairs:
            continue
        fits = {rank: fitted(x, right) for rank, x, right, _ in pairs}
        limit = limits.get(key, 0.0)
        if not scales:  # the last module: ranks may differ from one process by one factor, which a reduction corrects
            straight = {r: k for r, (k, cosine) in fits.items() if abs(cosine) > 0.99}
            middle = median(straight.values()) if straight else 1.0
            scales = {rank: straight.get(rank, middle) for rank in range(len(ranks))}
            off = {r: _error(x / scales[r], right, one.numbers[key]) for r, x, right, _ in pairs}
            if len(straight) == len(fits) and max(off.values()) <= limit and not settled(key[1]):
                spread = max(straight.values()) / middle - 1, 1 - min(straight.values()) / middle
                if max(map(abs, spread)) > limit:
                    each = ", ".join(f"{k:.4g} on rank {r}" for r, k in straight.items())
                    text = f"the loss after {_named(key[1])} is multiplied by a different factor on each rank: {each}"
                    return FirstDifference("loss scale", (key[1],), text)
        pairs = [(r, x / (scales[r] or 1.0), right, dim) for r, x, right, dim in pairs]
        bad = [r for r, x, right, _ in pairs if _error(x, right, one.numbers[key]) > limit]
        if bad and sharing[(OUTPUT, *key[1:])] > usual and _partial(pairs, one.numbers[key], limit):
            bad = []
        if bad and not settled(key[1]):
            rank, x, right, dim = next(pair for pair in pairs if pair[0] == bad[0])
            name = _between(after, key[1], other_is_later=False) if after else key[1]
            if name not in called:  # a list of modules
                name = ".".join(after.split(".")[: name.count(".") + 2])
            what = f"first in the gradient at the output of {_named(key[1])}{_call(key)}, computed in {_named(name)}"
            if not after:
                what = f"first in the gradient at the output of {_named(key[1])}, which the loss gives"
            place = _at(key, rank, x, right, dim, rows, limit)
            return FirstDifference("backward", (name,), f"{what}, on ranks {listed(bad)}, {place}")
        after = key[1]
    return None


def _all_wrong(one: Recording, wrong: Sequence[Compared]) -> list[Compared]:
    """The gradients, if all are wrong and none is missing."""
    bad = [compared for compared in wrong if compared.key[0] == GRADIENT]
    some = [x for key, x in one.numbers.items() if key[0] == GRADIENT and x is not None and bool(x.any())]
    return [] if len(bad) < max(len(some), 2) or any(compared.note for compared in bad) else bad


def _scale(bad: Sequence[Compared]) -> FirstDifference | None:
    """One factor of all gradients."""
    if not bad or any(not compared.cosine > 0.9999 for compared in bad):
        return None
    usual = median(compared.factor for compared in bad)
    if any(abs(compared.factor / usual - 1) > 1e-3 for compared in bad):
        return None
    where = listed(sorted({rank for compared in bad for rank in compared.ranks}))
    text = f"activations agree, and every gradient is {usual:.4g} times the right one, on ranks {where}"
    return FirstDifference("scale", ("",), text)


def _clipping(one: Recording, ranks: Sequence[Recording], bad: Sequence[Compared]) -> FirstDifference | None:
    """Each rank multiplied its shards of all gradients by a factor of its own."""
    factors: list[float] = []
    most = 1
    for compared in bad:
        for recording in ranks:
            x = recording.numbers.get(compared.key)
            used = [] if x is None else _factors(x, one.numbers[compared.key], compared.limit, factors, len(ranks))
            if used is None:
                return None
            most = max(most, len(used))
    if most < 2:
        return None
    each = ", ".join(f"{factor:.4g}" for factor in sorted(factors))
    text = f"every gradient is right but for one factor of each shard, as if ranks clip by norms of their own: {each}"
    return FirstDifference("clipping norm", ("",), text)


def _factors(x: Tensor, right: Tensor, limit: float, known: list[float], most: int) -> list[float] | None:
    """The factors by one of which each entry of ``x`` is that of ``right``; new ones are added to the ``known``."""
    x, right = x.double().flatten(), right.double().flatten()
    near, left, used = 2 * limit * float(right.abs().max()), torch.ones(x.shape, dtype=torch.bool), []
    while bool(left.any()):
        at = int((right.abs() * left).argmax())
        factor = next((k for k in known if abs(float(x[at] - k * right[at])) <= near), None)
        if factor is None:
            if len(known) == most or not float(right[at]):
                return None
            factor = float(x[at] / right[at])
            known.append(factor)
        used.append(factor)
        left &= (x - factor * right).abs() > near
    return used


def _step(wrong: Sequence[Compared], all_wrong: Sequence[Compared], seen: bool) -> FirstDifference:
    """The first difference after the backward pass, if all modules agree.

    Args:
        seen: whether any activation could be compared.
    """
    first = "activations and their gradients agree" if seen else "no activation could be compared"
    for kind, name, what in (
        (GRADIENT, "reduction", f"{first}; these parameters' gradients differ"),
        (NORM, "clipping norm", "all gradients agree, the norm does not"),
        (UPDATE, "update", "all gradients agree, the changes of these parameters do not"),
        (LOSS, "loss", "all gradients agree, the reported loss does not"),
    ):
        bad = [compared for compared in wrong if compared.key[0] == kind]
        if not bad:
            continue
        bad, others = _without_factor(all_wrong) if kind == GRADIENT and all_wrong else (bad, "")
        shown = "; ".join(f"{compared.key[1] or kind}: {_why(compared)}" for compared in bad[:4])
        more = (f"; and {len(bad) - 4} more" if len(bad) > 4 else "") + others
        modules = tuple(dict.fromkeys(compared.key[1].rpartition(".")[0] for compared in bad))
        return FirstDifference(name, modules, f"{what}: {shown}{more}")
    raise ValueError("nothing differs")


def _without_factor(bad: Sequence[Compared]) -> tuple[list[Compared], str]:
    """The gradients that are wrong by more than a factor that most share, as a wrong norm gives; and this factor."""
    straight = [one for one in bad if one.cosine > 0.9999]
    usual = median(one.factor for one in straight) if straight else 1.0
    others = [one for one in straight if abs(one.factor / usual - 1) < 1e-3]
    if len(others) < 2 or len(others) == len(bad):
        return list(bad), ""
    return [one for one in bad if one not in others], f"; {len(others)} others are {usual:.4g} times the right ones"


def _why(compared: Compared) -> str:
    return compared.note or f"{ratio(compared.factor, compared.cosine)}, on ranks {listed(compared.ranks)}"


def _error(x: Tensor, right: Tensor, whole: Tensor) -> float:
    """The largest difference of ``x`` and ``right`` over the largest entry of ``whole``, all rows on one process."""
    size = float(whole.double().abs().max()) if whole.numel() else 0.0
    off = float((x.double() - right.double()).abs().max()) if x.numel() else 0.0
    if off != off:
        return float("inf")
    return off / size if size else (float("inf") if off else 0.0)


def _at(key: Key, rank: int, x: Tensor, right: Tensor, dim: int | None, rows: Sequence[Rows], limit: float) -> str:
    text = f"error {error(key, x, right):.1e}, {ratio(*fitted(x, right))}"
    if dim is None:
        return text
    others = [d for d in range(x.dim()) if d != dim]
    off = (x.double() - right.double()).abs().amax(others)
    positions = rows[rank][x.size(dim)][off > limit * float(right.double().abs().max())]
    return f"from position {int(positions.min())} of rank {rank}; {text}" if len(positions) else text


def _named(name: str) -> str:
    return name or "the model"


def _call(key: Key) -> str:
    return f" (call {abs(key[2])})" if key[2] not in (0, -1) else ""


def _between(one: str, other: str, other_is_later: bool = True) -> str:
    """The module whose own code runs between two modules: the innermost that contains both.

    Args:
        other_is_later: whether ``other`` runs after ``one`` in the forward pass. If only the model contains both, the
            result is the parent of ``other`` if it runs later, else ``one``.
    """
    parts = []
    for a, b in zip(one.split("."), other.split(".")):
        if a != b:
            break
        parts.append(a)
    common = ".".join(parts)
    if common and common not in (one, other):
        return common
    return other.rpartition(".")[0] if other_is_later else one
