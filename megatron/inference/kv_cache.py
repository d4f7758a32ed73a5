# SPDX-License-Identifier: Apache-2.0
"""The key/value cache for generation: distributed over the grid, with attention of a new token to the complete cache.

Heads are distributed over the Ulysses ranks and the sequence over the ring: a prompt by its layout, decoded tokens in
blocks. In decoding no keys are sent. Every rank has the new token's query and attends to the keys that it keeps; one
all-gather then merges the partial results by their lse in fp32 (fp64 for fp64), as FlashDecoding merges its splits.
The tiles, and therefore masks and ALiBi, are those of training (layout/tiles.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.sums import Accumulator
from megatron.context_parallel.attention.rule import AttentionRule
from megatron.context_parallel.attention.ulysses import head_plan, ulysses_attention
from megatron.context_parallel.attention.usp import attention_between_all_to_alls
from megatron.context_parallel.layout.grid import Grid
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, Spans, count, joined
from megatron.context_parallel.layout.tiles import Tiles, tiles
from megatron.platform.collectives import gathered

BLOCK = 16
"""Decoded tokens of a block. Ring ranks keep blocks in turn, so that there are few spans, and caches of equal size."""


@dataclass(frozen=True)
class CachePlan:
    """Which ring rank keeps the keys and values of which tokens.

    Attributes:
        layout: of the prompts, each padded on the right to the layout's length. No query attends to the padding: the
            causal mask hides it from the prompt, and decoded tokens overwrite it.
        lengths: tokens of each sample's prompt; samples of equal length are next to each other.
        decoded: the largest number of tokens after a prompt that are kept.
    """

    layout: SequenceLayout
    lengths: tuple[int, ...]
    decoded: int
    _tiles: dict[tuple, list[tuple[slice, Tiles]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def groups(self) -> list[tuple[slice, int]]:
        """Samples whose prompts have the same length, and that length."""
        groups, first = [], 0
        for length, samples in groupby(self.lengths):
            size = len(list(samples))
            groups.append((slice(first, first + size), length))
            first += size
        return groups

    def home(self, step: int) -> tuple[int, int]:
        """The ring rank that keeps the ``step``-th decoded token, and the token's number among those of that rank."""
        block, place = divmod(step, BLOCK)
        number, ring = divmod(block, self.layout.grid.ring.size)
        return ring, number * BLOCK + place

    def kept(self, decoded: int, ring: int) -> int:
        """How many of the first ``decoded`` tokens ring rank ``ring`` keeps."""
        rounds, remainder = divmod(decoded, BLOCK * self.layout.grid.ring.size)
        return rounds * BLOCK + min(max(remainder - ring * BLOCK, 0), BLOCK)

    def prompt_spans(self, length: int, ring: int) -> Spans:
        """Positions of a prompt's tokens on ring rank ``ring``, in the order of its first rows."""
        spans = ((start, min(stop, length)) for start, stop in self.layout.ring_spans(ring))
        return tuple(span for span in spans if span[0] < span[1])

    def spans(self, length: int, decoded: int, ring: int) -> Spans:
        """Positions of a sample's rows on ring rank ``ring`` after ``decoded`` decoded tokens."""
        blocks: list[Span] = []
        for first in range(ring * BLOCK, decoded, BLOCK * self.layout.grid.ring.size):
            blocks.append((length + first, length + min(first + BLOCK, decoded)))
        return joined((*self.prompt_spans(length, ring), *blocks))

    def step_tiles(self, step: int, ring: int, mask: Mask) -> list[tuple[slice, Tiles]]:
        """For each group of samples, the tiles between its ``step``-th decoded token and what ring rank ``ring`` keeps.

        The layers of a step share them.
        """
        key = step, ring, mask
        if key not in self._tiles:
            if any(known[0] != step for known in self._tiles):
                self._tiles.clear()
            self._tiles[key] = [
                (samples, tiles(((length + step, length + step + 1),), self.spans(length, step + 1, ring), mask))
                for samples, length in self.groups()
            ]
        return self._tiles[key]

    def rows(self, ring: int) -> int:
        """Rows of one sample's cache on ring rank ``ring``."""
        return count(self.prompt_spans(max(self.lengths), ring)) + self.kept(self.decoded, ring)


class LayerCache:
    """Keys and values of one layer that this rank keeps: [rows, b, kv heads of this rank, d] each.

    A sample's rows are those of its prompt, followed directly by those of its decoded tokens.
    """

    def __init__(self, plan: CachePlan) -> None:
        self.plan, self.ring = plan, plan.layout.grid.ring.rank
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def fill(self, k_SBHD: Tensor, v_SBHD: Tensor) -> None:
        """Store this rank's part of the prompts' keys and values [rows of the ring rank, b, heads, d]."""
        kept, rows = count(self.plan.prompt_spans(max(self.plan.lengths), self.ring)), self.plan.rows(self.ring)
        self.k, self.v = (x.new_empty((rows, *x.shape[1:])) for x in (k_SBHD, v_SBHD))
        self.k[:kept], self.v[:kept] = k_SBHD[:kept], v_SBHD[:kept]

    def append(self, k_SBHD: Tensor, v_SBHD: Tensor, step: int) -> None:
        """Store the ``step``-th decoded token [1, b, heads, d], if this rank keeps it."""
        ring, place = self.plan.home(step)
        if ring != self.ring:
            return
        for samples, length in self.plan.groups():
            row = count(self.plan.prompt_spans(length, ring)) + place
            self.k[row, samples], self.v[row, samples] = k_SBHD[0, samples], v_SBHD[0, samples]

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return 0 if self.k is None else self.k.nbytes + self.v.nbytes


class LatentCache(LayerCache):
    """Latents of one layer, in place of keys and values: [rows, b, 1, R + C], with the rotated part first.

    Args:
        rotated: R. What follows is also the value, so that it is kept once.
    """

    def __init__(self, plan: CachePlan, rotated: int) -> None:
        super().__init__(plan)
        self.rotated = rotated

    def fill(self, k_SBHD: Tensor, v_SBHD: Tensor) -> None:
        """The prompts' keys and values are not kept; see :meth:`keep`."""

    def keep(self, latents: Tensor) -> None:
        """Store this rank's part of the prompts' latents [rows of the ring rank, b, 1, R + C]."""
        super().fill(latents, latents[..., :0])
        self.v = self.k[..., self.rotated :]

    @property
    def nbytes(self) -> int:
        return 0 if self.k is None else self.k.nbytes


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, *, cache: LayerCache, rule: AttentionRule) -> Tensor:
    """Attention over the prompts like ``cp.attention``; ``cache`` keeps this rank's part of the keys and values.

    Args:
        q: [s_local, b, heads, d], tokens of the plan's layout; k, v: the same with kv_heads.
        rule: with a causal mask and without dropout.

    Returns:
        [s_local, b, heads, head size of v].
    """
    layout = cache.plan.layout

    def local(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor) -> Tensor:
        cache.fill(k_SBHD, v_SBHD)
        return attention_between_all_to_alls(q_SBHD, k_SBHD, v_SBHD, layout=layout, rule=rule)

    return ulysses_attention(q, k, v, axis=layout.grid.ulysses, attention=local)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, *, cache: LayerCache, step: int, rule: AttentionRule) -> Tensor:
    """Attention of the ``step``-th decoded token of each sample to its prompt and to all decoded tokens so far.

    All ranks of ``grid.context`` call it with the same tensors and get the same result. It needs one all-gather, of
    ``b * heads * (d + 1)`` fp32 numbers from each ring rank.

    Args:
        q: [1, b, heads, d]; k, v: [1, b, kv_heads, d], where v's head size may differ; one ring rank keeps k and v.
        rule: with a causal mask and without dropout.

    Returns:
        [1, b, heads, head size of v], in the dtype of q.
    """
    grid = cache.plan.layout.grid
    q_here, k_here, v_here = _heads_of_rank(q, k, v, grid.ulysses.size, grid.ulysses.rank)
    cache.append(k_here, v_here, step)
    longest = max(cache.plan.lengths) + step + 1
    kernel = rule.tile_kernel(q_here, grid.ulysses, longest, v.size(3))
    outs, lses = [], []
    for samples, own in cache.plan.step_tiles(step, grid.ring.rank, rule.mask):
        result = Accumulator(q_here[:, samples], v.size(3))
        if own:
            kernel.attend(own, q_here[:, samples], cache.k[:, samples], cache.v[:, samples], result)
        out, lse = result.sums()
        outs.append(out)
        lses.append(lse)
    return merged_over_ranks(q, torch.cat(outs, 1), torch.cat(lses, 1), grid, rule.sinks)


def merged_over_ranks(q: Tensor, out: Tensor, lse: Tensor, grid: Grid, sinks: Tensor | None = None) -> Tensor:
    """Merge what all ranks of ``grid.context`` read: ring ranks other keys, Ulysses ranks for other heads.

    Args:
        q: [1, b, heads, d], for the shape and dtype of the result.
        out, lse: of this rank's keys and heads, [1, b, heads of this rank, d] and without d.
    """
    part = torch.cat((out, lse[..., None]), dim=3)  # [1, b, heads of this rank, d + 1]
    parts = part if grid.context.size == 1 else gathered(part, grid.context.group)
    total = Accumulator(q, out.size(3))
    by_ring = parts.view(grid.ring.size, grid.ulysses.size, *part.shape[1:])  # Ulysses is innermost
    for ring in by_ring.transpose(1, 2).flatten(2, 3):
        total.add((0, 1), ring[:, :, None, :-1], ring[:, :, None, -1])
    return total.finish(sinks)[0]


def _heads_of_rank(q: Tensor, k: Tensor, v: Tensor, ranks: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The heads that the all-to-all would send to Ulysses rank ``rank``, of complete tensors [s, b, heads, d]."""
    if ranks == 1:
        return q, k, v
    plan = head_plan(q.size(2), k.size(2), ranks)
    q, (k, v) = q[:, :, slice(*plan.q_spans[rank])], (x[:, :, slice(*plan.kv_spans[rank])] for x in (k, v))
    if plan.needs_expansion(rank):
        k, v = (torch.stack([x[:, :, head] for head in plan.kv_index[rank]], dim=2) for x in (k, v))
    return q, k, v
