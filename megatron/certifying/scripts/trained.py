# SPDX-License-Identifier: Apache-2.0
"""The model of a program that does not return it: the modules whose parameters an optimizer changes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Trained:
    """Every module that has parameters of an optimizer, directly or below it."""

    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._order: dict[int, int] = {}  # of the optimizers' parameters

    def add(self, optimizer: Any, *_: object) -> None:
        """Called before each step of an optimizer, while the program still holds its model."""
        parameters = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if all(one in self._order for one in parameters):
            return
        for one in parameters:
            self._order.setdefault(one, len(self._order))
        for x in gc.get_objects():
            if issubclass(type(x), nn.Module) and "_modules" in x.__dict__:
                if any(id(p) in self._order for p in x.parameters()):
                    self._modules[id(x)] = x

    def model(self) -> nn.Module | dict[str, nn.Module]:
        """The one module that contains them all, without wrappers; or several by the names of their classes.

        Raises:
            ValueError: there is none.
        """
        inner = {id(child) for module in self._modules.values() for child in module.children()}
        roots = [module for at, module in self._modules.items() if at not in inner]
        own = {id(root): {id(p) for p in root.parameters()} & self._order.keys() for root in roots}
        chosen: list[nn.Module] = []
        covered: set[int] = set()
        for root in sorted(roots, key=lambda root: -len(own[id(root)])):
            if own[id(root)] - covered:
                chosen.append(root)
                covered |= own[id(root)]
        if not chosen:
            raise ValueError(
                "the program returned no model, and none was found: no optimizer of torch changed a module's "
                "parameters; return (model, loss)"
            )
        if len(chosen) == 1:
            return chosen[0]
        chosen.sort(key=lambda root: min(self._order[one] for one in own[id(root)]))
        return {f"{type(root).__name__}_{number}": root for number, root in enumerate(chosen)}


@contextmanager
def trained() -> Iterator[Trained]:
    """Look for the model of the program that runs in this context."""
    found = Trained()
    hook = register_optimizer_step_pre_hook(found.add)
    try:
        yield found
    finally:
        hook.remove()
