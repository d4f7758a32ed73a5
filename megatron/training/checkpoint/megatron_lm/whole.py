# SPDX-License-Identifier: Apache-2.0
"""Weights that are made whole by functions, any block of any of them: what StoredTensors is to ``torch_dist`` folders.

A weight is made when a block of it is asked for, and only the last one is kept, so memory holds a weight, not a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.training.checkpoint.megatron_lm.stored import Shape, copy_overlap


class WholeTensors:
    """The weights of ``folder``, each by the function that makes it."""

    def __init__(self, folder: Path, tensors: Mapping[str, Callable[[], Tensor]]) -> None:
        self.folder, self._tensors = folder, tensors
        self._last: tuple[str, Tensor] | None = None

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, key: str) -> Shape:
        return tuple(self._whole(key).shape)

    def dtype(self, key: str) -> torch.dtype:
        return self._whole(key).dtype

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The block [``offset``, ``offset + shape``) of a tensor; zeros where it lies outside."""
        whole = self._whole(key)
        out = torch.zeros(tuple(shape), dtype=whole.dtype)
        copy_overlap(out, offset, whole, (0,) * whole.dim())
        return out

    def object(self, key: str) -> None:
        """There is nothing but tensors."""

    def _whole(self, key: str) -> Tensor:
        if self._last is None or self._last[0] != key:
            self._last = None  # before the next one is there
            self._last = (key, self._tensors[key]())
        return self._last[1]
