# SPDX-License-Identifier: Apache-2.0
"""A layer whose queries choose their keys, for generation: it keeps latents and the indexer's keys.

Both are distributed over the ring as other caches are (kv_cache.py), and Ulysses ranks share the heads of attention. Of
the keys that it keeps, each ring rank proposes those with the highest scores; one all-gather of their scores and
positions tells all ranks which keys the new token reads, and a second one merges what each rank read of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.core.mixers.sparse_attention import SparseLatentAttention
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.spans import positions
from megatron.context_parallel.sparse_attention.choice import NOTHING, choose_keys, ranked_keys
from megatron.context_parallel.sparse_attention.chosen_attention import Indexer, select, sparse_attention
from megatron.context_parallel.sparse_attention.chosen_math import Choice, Form
from megatron.inference.kv_cache import LayerCache, merged_over_ranks
from megatron.platform.collectives import gathered


class CachedChoice:
    """What a layer keeps of a batch, and its mixing of tokens, which takes the place of the layer's.

    Attributes:
        cache: latents as keys, and the indexer's keys as values, of size 0 if the layer does not choose.
    """

    def __init__(self, layer: SparseLatentAttention) -> None:
        self.layer = layer
        layer.mixed = self.mixed
        self.generation: Any = None
        self.cache: LayerCache | None = None

    def begin(self, generation: Any) -> None:
        """Start a new batch; what is kept of the previous one is dropped."""
        self.generation, self.cache = generation, LayerCache(generation.plan)

    def mixed(self, query: Tensor, k_rotated: Tensor, latent: Tensor, *index_and_batch: Any) -> Tensor:
        """As :meth:`SparseLatentAttention.mixed`, for prompts and for one token of each sample."""
        layer, core, (*index, batch) = self.layer, self.layer.core_attention, index_and_batch
        angles = self.generation.angles(core.settings.rotary.inv_freq)
        q, kv = layer.rotated(query, k_rotated, latent, angles)
        index = core.rotated(Indexer(*index), angles) if index else None
        index_k = kv[..., :0] if index is None else index.k[:, :, None]
        attend = self._of_prompts if self.generation.step is None else self._of_token
        return layer.raised(attend(q, kv, index, index_k, batch.handed_on, latent.size(-1))).flatten(2)

    def _of_prompts(
        self, q: Tensor, kv: Tensor, index: Indexer | None, index_k: Tensor, choices: dict[int, Tensor], size: int
    ) -> Tensor:
        core, layout = self.layer.core_attention, self.generation.plan.layout
        if index is not None:
            how = {"top_k": core.sparse.topk, "kernel": core.sparse.kernel, "group": self.layer.pg_collection.tp}
            choices[core.source] = choose_keys(*index, layout=layout, mask=core.rule.mask, **how)
        self.cache.fill(*(_gathered(x, layout.grid.ulysses) for x in (kv, index_k)))
        sizes = {"layout": layout, "value_size": size, "scale": core.scale}
        return sparse_attention(q, kv, choices[core.source], kernel=core.sparse.kernel, **sizes)[0]

    def _of_token(
        self, q: Tensor, kv: Tensor, index: Indexer | None, index_k: Tensor, choices: dict[int, Tensor], size: int
    ) -> Tensor:
        cache, core, grid = self.cache, self.layer.core_attention, self.generation.plan.layout.grid
        cache.append(kv, index_k, self.generation.step)
        if index is not None:
            choices[core.source] = self._choose(index)
        heads = q.size(2)
        first, last = (heads * rank // grid.ulysses.size for rank in (grid.ulysses.rank, grid.ulysses.rank + 1))
        mine = q[:, :, first:last].contiguous()
        out = mine.new_zeros((*mine.shape[:3], size), dtype=accumulation_dtype(q.dtype))
        lse = torch.full_like(out[..., 0], float("-inf"))
        if len(cache.k):
            kernel = select(core.sparse.kernel, mine, cache.k, size)
            chosen = Choice.of(choices[core.source])
            kernel.forward(mine, cache.k, chosen, Form(core.scale, size), out, lse, first=False)
        return merged_over_ranks(q, out, lse, grid)

    def _choose(self, index: Indexer) -> Tensor:
        """Rows of this rank's cache that each sample's new token reads, int32 [1, b, n]; -1 at the end."""
        plan, step, core = self.generation.plan, self.generation.step, self.layer.core_attention
        ring, top_k, device = plan.layout.grid.ring, core.sparse.topk, index.q.device
        every = torch.full((index.q.size(1), max(self.cache.k.size(0), 1)), NOTHING, device=device)
        for samples, length in plan.groups():
            held = plan.spans(length, step + 1, ring.rank)
            if not held:
                continue
            at = positions(held, device)
            allowed = core.rule.mask.allowed(torch.tensor([[length + step]], device=device), at[None])
            for sample in range(samples.start, samples.stop):
                of_sample = index.q[:, sample], self.cache.v[: len(at), sample, 0], index.weights[:, sample]
                ranked = ranked_keys(*of_sample, at)
                every[sample, : len(at)] = ranked.masked_fill(~allowed, NOTHING)[0]
        best = every.topk(min(top_k, every.size(1)), dim=1).values
        best = torch.nn.functional.pad(best, (0, top_k - best.size(1)), value=NOTHING)
        last = _gathered(best.T, ring).topk(top_k, dim=0).values[-1]  # the lowest of those that are read
        read = (every >= last[:, None]) & (every > NOTHING)
        rows = torch.arange(every.size(1), device=device).expand_as(every).masked_fill(~read, every.size(1))
        rows = rows.sort(dim=1).values[:, : max(min(top_k, every.size(1)), 1)]
        return rows.masked_fill(rows == every.size(1), -1).int()[None]


def _gathered(x: Tensor, axis: Axis) -> Tensor:
    """The rows of all ranks of an axis."""
    return x if axis.size == 1 else gathered(x, axis.group)
