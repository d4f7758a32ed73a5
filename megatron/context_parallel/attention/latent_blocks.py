# SPDX-License-Identifier: Apache-2.0
"""Key blocks from latents: what is sent are the latents, and each rank makes the keys and values of its own heads.

In multi-latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1) the keys and values of all heads are products of
one latent of each token, and all heads share the rotated part of a key. Both together are shorter than the keys and
values of a few heads. This source therefore takes them from another source, ring or gather, as the key and the value of
a single head. It makes the keys and values of a block when the block is needed, again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.sums import KeyGradients, accumulation_dtype
from megatron.context_parallel.attention.ring import KeyBlock, KeySource
from megatron.platform.autograd import without_autocast


class LatentSource:
    """Gives blocks of keys and values that it makes from the latents of another source.

    Sizes: a key has R rotated and N other entries, a value V entries, a latent C.

    Args:
        latents: gives the rotated parts as keys, [rows, b, 1, R], and the latents as values, [rows, b, 1, C].
        up: the up-projection of this rank's heads, [heads, N + V, C].
        plain: N.

    Attributes:
        value_dim: V.
    """

    def __init__(self, latents: KeySource, up: Tensor, plain: int) -> None:
        self.latents, self.up, self.plain = latents, up, plain
        self.single = latents.single
        self.value_dim = up.size(1) - plain
        self._up_sum: Tensor | None = None

    def blocks(self, k: Tensor, v: Tensor, own: KeyGradients | None = None) -> Iterator[KeyBlock]:
        """See :meth:`RingSource.blocks`. The gradients in ``own`` are those of the rotated parts and the latents."""
        for block in self.latents.blocks(k, v, own):
            keys = self._expanded(block)
            grads = None if own is None else KeyGradients(*keys)
            yield KeyBlock(*keys, block.hop, None, grads)
            if grads is not None:
                self._add_grads(block, grads)

    @without_autocast
    def _expanded(self, block: KeyBlock) -> tuple[Tensor, Tensor]:
        """Keys [rows, b, heads, R + N] and values [rows, b, heads, V]."""
        heads = self.up.size(0)
        made = torch.nn.functional.linear(block.v.squeeze(2), self.up.flatten(0, 1)).unflatten(2, (heads, -1))
        rotated = block.k.expand(-1, -1, heads, -1)
        return torch.cat((rotated, made[..., : self.plain]), dim=-1), made[..., self.plain :]

    @without_autocast
    def _add_grads(self, block: KeyBlock, grads: KeyGradients) -> None:
        """Add to the gradients of a block's latents, and to that of the up-projection."""
        dk, dv = grads.dk.finish(), grads.dv.finish()
        rotated, wide = dk.size(3) - self.plain, accumulation_dtype(dk.dtype)
        d_made = torch.cat((dk[..., rotated:], dv), dim=-1).to(self.up.dtype).flatten(2)
        d_latents = d_made @ self.up.flatten(0, 1)
        d_rotated = dk[..., :rotated].sum(2, keepdim=True, dtype=wide)
        block.grads.add((0, dk.size(0)), d_rotated, d_latents.unsqueeze(2).to(wide))
        d_up = (d_made.flatten(0, 1).T @ block.v.flatten(0, 2)).view_as(self.up)
        self._up_sum = d_up.to(wide) if self._up_sum is None else self._up_sum.add_(d_up)

    def up_grad(self) -> Tensor:
        """After a backward pass: the gradient of ``up`` by the tiles of this rank, like ``up``."""
        return torch.zeros_like(self.up) if self._up_sum is None else self._up_sum.to(self.up.dtype)
