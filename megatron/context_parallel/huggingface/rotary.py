# SPDX-License-Identifier: Apache-2.0
"""RoPE whose frequencies depend on how long the sequence is (dynamic NTK, LongRoPE), told the whole length.

transformers takes the largest position that it is given for the length. A rank is given its own positions alone, so one
more is put at their end, the largest of the whole batch, and what is computed for it is taken away again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def by_length(module: nn.Module) -> bool:
    """Whether a module is a RoPE that looks at the length."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def tell_length(module: nn.Module, longest: Callable[[], int]) -> list[RemovableHandle]:
    """Hooks that have a RoPE's (x, position_ids [b, s]) -> (cos, sin) [b, s, d] count with ``longest()`` positions."""

    def more(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positions: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        last = torch.full_like(positions[:, :1], longest() - 1)
        positions = torch.cat((positions, last), dim=1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": positions}
        return (args[0], positions, *args[2:]), kwargs

    def less(_: nn.Module, args: tuple[Any, ...], found: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(x[:, :-1] for x in found)

    return [module.register_forward_pre_hook(more, with_kwargs=True), module.register_forward_hook(less)]
