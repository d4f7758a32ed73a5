# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch in one sequence without padding, one after another or as the tree of what they share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.context_parallel.huggingface.fpdt_layers import Fpdt
from megatron.context_parallel.huggingface.rank_batch import IGNORED, Part
from megatron.context_parallel.layout.documents import restart
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.shared_rows import Saving, share
from megatron.context_parallel.layout.tree import Tree
from megatron.decisions.division import length_unit

KNOWN = ("input_ids", "attention_mask", "position_ids", "labels", "use_cache", "num_items_in_batch", "return_dict")


@dataclass
class PackedRows:
    """The tokens of a batch in one sequence, of which each rank has a part.

    Attributes:
        shape: [b, s] of the batch.
        places: [m] of each token that is not padding, in the flattened batch.
        index: [m], where it lies in the sequence; tokens that rows share lie at one place.
        last: bool [m], whether its document ends with it.
        tokens, positions: [n], of the sequence.
        part: of this rank.
        saving: what sharing saves; None if nothing is shared.
    """

    shape: tuple[int, int]
    places: Tensor
    index: Tensor
    last: Tensor
    tokens: Tensor
    positions: Tensor
    part: Part
    saving: Saving | None

    @classmethod
    def of(cls, layout: SequenceLayout, fpdt: Fpdt | None, batch: dict[str, Any], shared: bool) -> PackedRows:
        """Pack a batch; where ``position_ids`` restart, a new document begins.

        Args:
            layout, fpdt: of other batches; this one has the next length that the grid can split.
            shared: compute once what rows share at their beginning, if each row is one document.
        """
        for name, value in batch.items():
            if name not in KNOWN and value is not None and value is not False:
                raise ValueError(f"the trainer's {name} is not supported over ranks: use text, without router losses")
        tokens, mask, positions = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        mask = torch.ones_like(tokens) if mask is None else mask
        if mask.shape != tokens.shape:
            raise ValueError(f"attention_mask {list(mask.shape)} is not that of {list(tokens.shape)} tokens")
        if positions is None:
            positions = mask.cumsum(1) - 1
        positions = positions.expand_as(tokens)
        places = mask.flatten().nonzero().squeeze(1)
        chosen, own = positions.flatten()[places], tokens.flatten()[places]
        row = places // tokens.size(1)
        new_row = row.diff() != 0
        begins = (chosen.diff() != 1) | new_row
        index, ends = torch.arange(len(places)), [*(begins.nonzero().squeeze(1) + 1).tolist(), len(places)]
        saving = None
        if shared and len(ends) > 1 and bool((begins == new_row).all()):
            rows = share([one.numpy() for one in own.cpu().tensor_split(ends[:-1])])
            if len(rows.tokens) < len(places):
                saving = rows.saving
                index, ends = torch.cat([torch.from_numpy(one) for one in rows.places]), rows.tree
                own, chosen = torch.from_numpy(rows.tokens), restart(torch.arange(len(rows.tokens)), rows.tree)
        last = F.pad(begins, (0, 1), value=True)
        layout = _of_length(layout, fpdt, len(own))
        if layout.seq_length > len(own):  # the rest of the last ranks' parts
            more = (*ends, layout.seq_length)
            ends = Tree(more, (*ends.parents, -1)) if isinstance(ends, Tree) else more
        ends = ends if isinstance(ends, Tree) else tuple(ends)
        layout = layout.of_documents(ends)
        part = Part(layout, (ends,), None, int(chosen.max()) + 1, 0)
        index, own, chosen = (x.to(tokens.device) for x in (index, own, chosen))
        return cls(tokens.shape, places, index, last, own, chosen, part, saving)

    def same_sample(self, targets: Tensor) -> Tensor:
        """[n]: targets [b, s] of the packed tokens; -100 where the next token is of another document."""
        wanted = targets.flatten()[self.places].masked_fill(self.last, IGNORED)
        kept = wanted != IGNORED
        return torch.full_like(self.tokens, IGNORED).index_copy(0, self.index[kept], wanted[kept])

    def cut(self, **others: tuple[Tensor, int]) -> dict[str, Tensor]:
        """This rank's part of the tokens, of their positions, and of other values [n] with what fills their rest."""
        values = {"input_ids": (self.tokens, 0), "position_ids": (self.positions, 0), **others}
        length = self.part.layout.seq_length
        return {
            name: self.part.layout.shard(F.pad(x, (0, length - len(x)), value=rest)[None], dim=1)
            for name, (x, rest) in values.items()
        }

    def unpacked(self, own: Tensor) -> Tensor:
        """[b, s, ...] on every rank, from this rank's part [1, s_local, ...]; 0 at padding. Differentiable."""
        complete = self.part.layout.gather(own, dim=1)[0]
        rows = self.shape[0] * self.shape[1]
        spread = complete.new_zeros((rows, *complete.shape[1:])).index_copy(0, self.places, complete[self.index])
        return spread.unflatten(0, self.shape)


def _of_length(layout: SequenceLayout, fpdt: Fpdt | None, length: int) -> SequenceLayout:
    """The layout for the next length that its grid can split."""
    unit = length_unit(layout.grid.ulysses.size, layout.grid.ring.size, layout.balance)
    length = ceil(length / unit) * unit
    return replace(layout, seq_length=length, chunks=1 if fpdt is None else fpdt.chunks(length, layout.grid))
