# SPDX-License-Identifier: Apache-2.0
"""Layer inputs that autograd saves for the backward pass, in host memory (--offload-checkpoints)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.context_parallel.fpdt.host_pool import is_host_buffer
from megatron.context_parallel.fpdt.offload import Loading, Offload


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

    def fetch(self) -> None:
        self.coming = self.coming or self.offload.load(self.host)

    def take(self) -> Tensor:
        self.offload.let_go()  # nothing may leave for the rest of the backward pass, and these copies are long done
        self.fetch()
        x, self.coming = self.coming.wait(), None
        if self.before is not None:
            self.before.fetch()
            self.before = None
        return x
