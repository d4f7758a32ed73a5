# SPDX-License-Identifier: Apache-2.0
"""Who sees whom: one token at a time is changed, and the outputs that change are compared with what the mask allows.

A leak changes an output that must not see the token: one of another document, or an earlier one. If context is missing,
an output that changes on one process stays the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch

from megatron.certifying.comparing import listed
from megatron.certifying.recording import OUTPUT, Key, Program, record
from megatron.certifying.rows import Rows

Allowed = Callable[[Tensor, Tensor], Tensor]  # (positions of queries [.., 1], of keys [1, ..]) -> bool


@dataclass(frozen=True)
class Seen:
    """The positions whose outputs change with one token, compared with one process and the mask.

    Attributes:
        token: position of the changed token.
        leaks: positions that change but must not see the token.
        missing: positions that change on one process only.
        module: the first module in which other positions change than on one process; empty if there is none.
    """

    token: int
    leaks: tuple[int, ...]
    missing: tuple[int, ...]
    module: str = ""

    @property
    def right(self) -> bool:
        return not self.leaks and not self.missing

    def __str__(self) -> str:
        parts = []
        if self.leaks:
            parts.append(f"is seen by positions {listed(self.leaks)}, which must not see it")
        if self.missing:
            parts.append(f"is not seen by positions {listed(self.missing)}, which see it on one process")
        first = f"; first in {self.module}" if self.module and parts else ""
        return f"token {self.token} {' and '.join(parts) or 'is seen where it may be'}{first}"


@dataclass
class Nudge:
    """In this context the embedding of one token is replaced by its negative.

    The embedding is the first output of a module that is a tensor of floating-point numbers.

    Attributes:
        token: position; None changes nothing.
        positions: of this rank's tokens.
    """

    token: int | None
    positions: Tensor

    def __enter__(self) -> None:
        self._done = self.token is None
        self._hook = modules_of_torch.register_module_forward_hook(self._after)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._done or not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        self._done = True
        rows = (self.positions == self.token).nonzero().flatten()
        dims = [d for d in range(output.dim() - 1) if output.size(d) == len(self.positions)]
        if not dims:
            raise ValueError(
                f"the first module's output of shape {tuple(output.shape)} has no dim with the {len(self.positions)} "
                "tokens of this rank: who sees whom cannot be examined"
            )
        sign = torch.ones(output.size(dims[-1]), dtype=output.dtype, device=output.device)
        sign[rows] = -1
        return output * sign.view([-1 if d == dims[-1] else 1 for d in range(output.dim())])


def changed_by_tokens(
    program: Program, sizes: Mapping[str, int], tokens: Sequence[int], positions: Sequence[Tensor]
) -> list[dict[Key, Tensor]]:
    """For each token, the positions whose outputs on this rank change with it: bool [length] by module call.

    Args:
        positions: of the tokens of each rank.
    """
    rank = torch.distributed.get_rank()
    own, length = positions[rank], sum(len(of_rank) for of_rank in positions)
    before = record(program, sizes, True, Nudge(None, own)).numbers
    result = []
    for token in tokens:
        after = record(program, sizes, True, Nudge(token, own)).numbers
        result.append(
            {
                key: places
                for key in before
                if key[0] == OUTPUT and (places := _changed(before[key], after.get(key), own, length)) is not None
            }
        )
    return result


def _changed(before: Tensor, after: Tensor | None, own: Tensor, length: int) -> Tensor | None:
    """Whether the output at each position changes: bool [length], False for those of other ranks; None if unknown."""
    if after is None or before.shape != after.shape:
        return None
    dims = [d for d in range(before.dim() - 1) if before.size(d) == len(own)]
    if not dims:
        return None
    others = [d for d in range(before.dim()) if d != dims[-1]]
    places = torch.zeros(length, dtype=torch.bool)
    places[own] = (before != after).sum(others) > 0
    return places


def compare_changes(
    tokens: Sequence[int], one_process: Sequence[dict[Key, Tensor]], ranks: Sequence[Sequence[dict[Key, Tensor]]],
    allowed: Allowed | None, layers: int,
) -> list[Seen]:  # fmt: skip
    """The result for each token.

    Args:
        one_process, ranks: results of :func:`changed_by_tokens`, of one process and of each rank.
        allowed: the mask of each layer; None: ranks are compared with one process only.
        layers: number of layers that attend with this mask.
    """
    result = []
    for number, token in enumerate(tokens):
        module, last = "", None
        for key, places in one_process[number].items():
            together = [rank[number][key] for rank in ranks if key in rank[number]]
            if len(together) < len(ranks):
                continue
            seen = torch.stack(together).any(0)
            if not module and not torch.equal(seen, places):
                module = key[1]
            last = seen, places
        if last is None:
            raise ValueError("no module has an output for each token: who sees whom cannot be examined")
        seen, alone = last
        may = alone if allowed is None else reach(allowed, layers, len(seen))[:, token]
        result.append(Seen(token, _places(seen & ~may), _places(alone & ~seen), module))
    return result


def _places(flags: Tensor) -> tuple[int, ...]:
    return tuple(flags.nonzero().flatten().tolist())


def reach(allowed: Allowed, layers: int, length: int) -> Tensor:
    """Whether a query's output depends on a key after some layers: bool [length, length]."""
    at = torch.arange(length)
    one = (allowed(at[:, None], at[None]) | (at[:, None] == at[None])).float()
    total = one
    for _ in range(layers - 1):
        total = (total @ one > 0).float()
    return total > 0


def tokens_to_change(
    length: int, positions: Iterable[Tensor], edges: Iterable[int] = (), random_ones: int = 4
) -> list[int]:
    """Tokens at the ends of the ranks' parts and of documents and windows, and a few random ones.

    Args:
        edges: positions at which a document, a chunk or a window ends.
    """
    ends = {0, length - 1}
    for own in positions:
        breaks = (own.diff() != 1).nonzero().flatten().tolist()
        ends |= {int(own[i]) for at in (*breaks, len(own) - 1) for i in (at, at + 1) if i < len(own)}
        ends |= {int(own[0])}
    ends |= {edge + shift for edge in edges for shift in (-1, 0)}
    ends |= set(random.Random(0).sample(range(length), min(random_ones, length)))
    return sorted(end for end in ends if 0 <= end < length)


def rows_by_rank(ranks: Sequence[Rows]) -> list[Tensor]:
    """The positions of all tokens of each rank."""
    return [max(rows.values(), key=len) for rows in ranks]
