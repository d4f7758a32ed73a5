# SPDX-License-Identifier: Apache-2.0
"""Positions of a rank's tokens: rotary embedding from the layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.context_parallel.layout import SequenceLayout


def rotary_angles(positions: Tensor, inv_freq: Tensor, *, interleaved: bool = False, stretch: float = 1.0) -> Tensor:
    """Angles of RoPE at ``positions``.

    Args:
        positions: int64 [s], or [s, b] where samples differ.
        inv_freq: fp32 [dim / 2], inverse frequencies.
        interleaved: rotate neighbouring pairs in place of halves.
        stretch: linear interpolation; positions are divided by it.

    Returns:
        fp32 [s, 1 or b, 1, dim]. The product is taken in fp64 and reduced to one turn before it is rounded, so angles
        are as exact at four million as at four (in fp32 alone they are off by a tenth of a radian there).
    """
    by_sample = positions if positions.dim() == 2 else positions[:, None]
    turns = by_sample.double()[..., None] / stretch * inv_freq.to(positions.device).double() % (2 * torch.pi)
    angles = turns.float()
    both = torch.stack((angles, angles), dim=-1).flatten(-2) if interleaved else torch.cat((angles, angles), dim=-1)
    return both[:, :, None, :]


class LayoutRotaryEmbedding(nn.Module):
    """Takes the place of megatron-core's rotary embedding: angles of the positions this rank holds.

    core cuts its angles by a zigzag of its own; ours come from the layout, the one source of truth for positions.

    Args:
        core: the embedding of the model, for its frequencies (base, percentage, Llama-3 scaling, interpolation).
        layout: which positions this rank holds.
    """

    def __init__(self, core: nn.Module, layout: SequenceLayout) -> None:
        super().__init__()
        self.layout = layout
        self.inv_freq = core.inv_freq
        self.interleaved = core.rotary_interleaved
        self.stretch = core.seq_len_interpolation_factor or 1.0
        self._angles: Tensor | None = None
        self._batch: Tensor | None = None

    @contextmanager
    def of_batch(self, position_ids: Tensor) -> Iterator[None]:
        """Meanwhile :meth:`forward` gives the angles of a batch with positions of its own, int64 [b, s_local]."""
        same = bool((position_ids == position_ids[:1]).all()) if len(position_ids) > 1 else True
        self._batch = position_ids[0] if same else position_ids.t()
        try:
            yield
        finally:
            self._batch = None

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Angles, fp32 [s_local, 1 or b, 1, dim]; core's arguments say nothing that the layout does not know."""
        if self._batch is not None:
            return self.at(self._batch)
        if self._angles is None:
            angles = rotary_angles(
                self.layout.positions, self.inv_freq.cpu(), interleaved=self.interleaved, stretch=self.stretch
            )
            self._angles = angles.to(self.inv_freq.device)
        return self._angles

    def at(self, positions: Tensor) -> Tensor:
        """Angles, fp32 [s, 1 or b, 1, dim], of positions [s] or [s, b]; made on their device, nothing is kept."""
        inv_freq = self.inv_freq.to(positions.device)
        return rotary_angles(positions, inv_freq, interleaved=self.interleaved, stretch=self.stretch)

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        return self.layout.seq_length
