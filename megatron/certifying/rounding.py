# SPDX-License-Identifier: Apache-2.0
"""How much rounding alone can change the results of a program.

On one process the program runs several times. In each of these runs every result of every operation is changed by a
random amount of up to one unit in its last place (Monte Carlo arithmetic, D. S. Parker 1997). The largest change of a
gradient is then what rounding can do to it, in any dtype and however ill-conditioned it is. Some gradients are zero
apart from rounding, such as that of a bias of attention's keys. They change completely and are therefore never reported
as wrong.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.certifying.of_torch.choices import Choices
from megatron.certifying.of_torch.whole import local, uncompiled

SAMPLES = 8  # runs with changed results; an even number
FALSE_ALARMS = 1e-6  # probability that a right program is called wrong


class Rounding(TorchDispatchMode):
    """In this context the results of operations are changed by up to one unit in the last place, also in backward.

    Entries that are integers are left as they are, because counts, positions and masks are computed without rounding.

    Args:
        choices: sees the choices that are made among changed scores.
    """

    def __init__(self, seed: int, choices: Choices | None = None) -> None:
        super().__init__()
        self._seed, self._choices = seed, choices
        self._generators: dict[torch.device, torch.Generator] = {}

    def __enter__(self) -> Rounding:
        self._uncompiled = uncompiled()
        self._uncompiled.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._uncompiled.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._choices is not None:
            self._choices.see(func, args, kwargs or {}, out)
        if func.name().startswith("aten::empty") or func.name().startswith("aten::new_empty"):
            return out
        given = {storage(x) for x in map(local, tensors((args, kwargs))) if type(x) in (Tensor, torch.nn.Parameter)}
        for x in map(local, tensors(out)):
            if type(x) is Tensor and x.is_floating_point() and storage(x) not in given:  # a view is no result
                self._change(x)
        return out

    def _change(self, x: Tensor) -> None:
        if x.device not in self._generators:
            self._generators[x.device] = torch.Generator(x.device).manual_seed(self._seed)
        wide = x if x.dtype == torch.float64 else x.float()
        ulps = torch.rand(x.shape, generator=self._generators[x.device], dtype=wide.dtype, device=x.device) * 2 - 1
        last = torch.finfo(x.dtype).eps * wide.abs().clamp(min=torch.finfo(x.dtype).tiny)  # also of denormal numbers
        changed = wide + last * ulps
        x.copy_(torch.where(wide == wide.round(), wide, changed))


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [x for part in value for x in tensors(part)] if isinstance(value, (tuple, list)) else []


def factor(samples: int, comparisons: int, false_alarms: float = FALSE_ALARMS) -> float:
    """The factor by which the largest change in ``samples`` runs is multiplied to give a limit.

    Of ``samples`` + 1 independent normal numbers, the last exceeds K times the largest of the others with probability
    at most (samples - 1)!! (sqrt(2 / pi) / K)^samples. K is chosen such that this is ``false_alarms`` in all
    ``comparisons`` together.
    """
    moment = math.prod(range(samples - 1, 0, -2))
    return math.sqrt(2 / math.pi) * (moment * max(comparisons, 1) / false_alarms) ** (1 / samples)
