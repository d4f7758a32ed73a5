# SPDX-License-Identifier: Apache-2.0
"""What waits in host memory between its uses, and comes back one step ahead of them: the double buffer.

:class:`Shelf` keeps chunks by name, :class:`HiddenStates` one long tensor by rows; both also work without host memory.
:class:`SavedInHost` keeps layer inputs that autograd saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatron.context_parallel.fpdt.host_pool import is_host_buffer
from megatron.context_parallel.fpdt.offload import Loading, Offload
from megatron.context_parallel.layout.spans import Span

Item, Coming, There = TypeVar("Item"), TypeVar("Coming"), TypeVar("There")


class Shelf:
    """Tensors by name, kept in host memory or, without ``offload``, on the device."""

    def __init__(self, offload: Offload | None) -> None:
        self.offload = offload
        self._kept: dict[tuple, Tensor] = {}

    def __contains__(self, name: tuple) -> bool:
        return name in self._kept

    def put(self, name: tuple, x: Tensor) -> None:
        """Keep ``x``; one that is there already is overwritten in place."""
        if self.offload is None:
            self._kept[name] = x
        elif name in self._kept:
            self.offload.write(self._kept[name], x)
        else:
            self._kept[name] = self.offload.to_host(x)

    def load(self, names: Sequence[tuple], fresh: Mapping[tuple, Tensor] = {}) -> list[Loading]:
        """Start bringing tensors to the device; those that are in ``fresh`` are there already."""
        kept = self._kept
        if self.offload is None:
            return [Loading(fresh[name] if name in fresh else kept[name]) for name in names]
        return [Loading(fresh[name]) if name in fresh else self.offload.load(kept[name]) for name in names]

    def get(self, name: tuple) -> Tensor:
        return self.load([name])[0].wait()

    def pop(self, name: tuple) -> Tensor | None:
        """As :meth:`get`, for the last time; None where nothing is kept."""
        if name not in self._kept:
            return None
        x = self.get(name)
        del self._kept[name]
        return x

    def drop(self, *names: tuple) -> None:
        for name in names:
            self._kept.pop(name, None)

    def walk(
        self, items: Sequence[Sequence[tuple]], fresh: Mapping[tuple, Tensor] = {}
    ) -> Iterator[dict[tuple, Tensor]]:
        """The tensors of each item in turn, by name; the first item's loads start now.

        While the caller computes on one item, the next one is on its way. Names that are neither kept nor fresh when
        their turn comes are left out: sums that have not begun.
        """

        def start(item: Sequence[tuple]) -> dict[tuple, Loading]:
            there = [name for name in item if name in fresh or name in self._kept]
            return dict(zip(there, self.load(there, fresh)))

        def wait(there: dict[tuple, Loading]) -> dict[tuple, Tensor]:
            return {name: loading.wait() for name, loading in there.items()}

        return _one_ahead(items, start, wait)


def _one_ahead(
    items: Sequence[Item], start: Callable[[Item], Coming], wait: Callable[[Coming], There]
) -> Iterator[There]:
    """``wait(start(item))`` of each item; the first is started now, every other while the one before it is used."""

    def steps(coming: Coming | None) -> Iterator[There]:
        for index in range(len(items)):
            current, coming = coming, start(items[index + 1]) if index + 1 < len(items) else None
            yield wait(current)
            del current

    return steps(start(items[0]) if items else None)


class HiddenStates:
    """Hidden states, or their gradients, read and written span by span: on the device, or a host buffer."""

    def __init__(self, x: Tensor, offload: Offload | None) -> None:
        self.x, self.offload = x, offload if is_host_buffer(x) else None

    @classmethod
    def empty(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, offload: Offload | None
    ) -> HiddenStates:
        """On ``device``; with ``offload``, a host buffer."""
        x = torch.empty(shape, dtype=dtype, device=device) if offload is None else offload.empty(shape, dtype)
        return cls(x, offload)

    def walk(self, spans: Sequence[Span]) -> Iterator[Tensor]:
        """The rows of each span in turn, on the device; a host buffer's come one span ahead."""
        return _one_ahead(spans, self._load, Loading.wait)

    def read(self, span: Span) -> Tensor:
        return self._load(span).wait()

    def write(self, span: Span, rows: Tensor) -> None:
        if self.offload is None:
            self.x[slice(*span)] = rows
        else:
            self.offload.write(self.x[slice(*span)], rows)

    def _load(self, span: Span) -> Loading:
        rows = self.x[slice(*span)]
        return Loading(rows) if self.offload is None else self.offload.load(rows)


class SavedInHost:
    """Hooks for ``torch.autograd.graph.saved_tensors_hooks``: layer inputs saved for backward go to host memory.

    When one is asked for in the backward pass, the one that was saved before it starts to come as well.

    Args:
        offload: what moves them.
        shape: of a layer input; other saved tensors stay where they are.
    """

    def __init__(self, offload: Offload, shape: torch.Size) -> None:
        self.offload, self.shape = offload, shape
        self._last: _Saved | None = None

    def pack(self, x: Tensor) -> Tensor | _Saved:
        if x.shape != self.shape or not x.is_floating_point() or is_host_buffer(x):
            return x
        self._last = _Saved(self.offload, self.offload.to_host(x.detach()), self._last)
        return self._last

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved.take()


@dataclass
class _Saved:
    offload: Offload
    host: Tensor
    before: _Saved | None
    coming: Loading | None = None
    used: bool = False

    def fetch(self) -> None:
        self.coming = self.coming or self.offload.load(self.host)

    def take(self) -> Tensor:
        self.offload.let_go()  # nothing may leave for the rest of the backward pass, and these copies are long done
        self.fetch()
        x, self.coming, self.used = self.coming.wait(), None, True
        if self.before is not None and not self.before.used:  # hooks may serve several passes
            self.before.fetch()
        self.before = None
        return x
