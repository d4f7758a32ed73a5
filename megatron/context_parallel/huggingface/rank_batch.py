# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a batch, and what the part alone cannot say: documents, the count of labels, the longest position.

What transformers tells by tensors as long as the sequence is read here, once and on the whole batch: documents from
positions that restart, padding from an attention mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.context_parallel.layout.masks import Causal, Documents, Mask, Window
from megatron.context_parallel.layout.sequence_layout import SequenceLayout

IGNORED = -100
KNOWN = ("input_ids", "labels", "position_ids", "attention_mask", "num_items_in_batch")
# What collators say to flash attention beside position_ids, and what is read from those here.
FOLLOWING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True)
class Part:
    """What is true of a whole batch of which a rank has a part.

    Attributes:
        layout: who holds which tokens.
        ends: for each sample, one past the last token of each of its documents.
        labelled: labels of the whole batch that count; None: it has none.
        longest: one more than the largest position.
        number: how many batches came before; dropout draws by it.
    """

    layout: SequenceLayout
    ends: tuple[tuple[int, ...], ...]
    labelled: int | None
    longest: int
    number: int

    def masks(self, window: int | None) -> list[Mask]:
        """One for all samples or one for each; ``window``: keys that a query sees, itself included."""
        whole = self.layout.seq_length
        within = Causal() if window is None or window >= whole else Window(window - 1)
        masks = [within if len(ends) == 1 else Documents(ends, within) for ends in self.ends]
        return masks[:1] if len(set(self.ends)) == 1 else masks


def cut(batch: Mapping[str, Any], layout: SequenceLayout, number: int) -> tuple[dict[str, Any], Part]:
    """This rank's part of a whole batch.

    Args:
        batch: ``input_ids`` [b, s]; maybe ``labels`` [b, s], not shifted, -100 where nothing is to be predicted;
            ``position_ids`` [b, s] or [1, s], whose restarts part documents; ``attention_mask`` [b, s], 1 for tokens
            and 0 for padding at the right; ``num_items_in_batch``; where documents end once more, for flash attention.
        layout: of all batches; with the balance "documents" it is remade for the first sample's.
        number: of this batch.

    Returns:
        ``input_ids``, ``position_ids`` and ``shift_labels`` [b, s_local], and what is true of the whole.

    Raises:
        ValueError: an entry is unknown, or says what cannot be held to.
    """
    for name in batch:
        if name not in KNOWN + FOLLOWING and batch[name] is not None:
            raise ValueError(f"the batch's {name} is not cut over ranks: leave it out, only {', '.join(KNOWN)} are")
    tokens = batch["input_ids"]
    if tokens.dim() != 2 or tokens.size(1) != layout.seq_length:
        raise ValueError(
            f"input_ids {list(tokens.shape)} are not [b, {layout.seq_length}]: shard takes the whole batch, at the "
            "seq_length of parallelize; pad or pack it"
        )
    labels, positions, padding = (batch.get(name) for name in ("labels", "position_ids", "attention_mask"))
    targets = None if labels is None else F.pad(_alike(labels, tokens, "labels"), (0, 1), value=IGNORED)[:, 1:]
    ends = _ends(tokens, positions)
    for name in FOLLOWING[:2]:
        if batch.get(name) is not None and (len(ends) > 1 or batch[name].tolist() != [0, *ends[0]]):
            raise ValueError(f"{name} parts documents otherwise than position_ids do: give position_ids that restart")
    if padding is not None:
        ends = _without_padding(ends, _alike(padding, tokens, "attention_mask"), targets)
    if positions is None:
        positions = torch.arange(layout.seq_length, device=tokens.device)[None]
    layout = layout.of_documents(ends[0])
    if layout.balance == "documents" and len(set(ends)) > 1:
        raise ValueError("balance='documents' deals by one sample's documents: use batches of one, or 'zigzag'")
    own = {
        "input_ids": layout.shard(tokens, dim=1),
        "position_ids": layout.shard(positions.expand(tokens.size(0), -1), dim=1),
    }
    if targets is not None:
        own["shift_labels"] = layout.shard(targets, dim=1)
    if batch.get("num_items_in_batch") is not None:
        own["num_items_in_batch"] = batch["num_items_in_batch"]
    labelled = None if targets is None else int(targets.ne(IGNORED).sum())
    return own, Part(layout, ends, labelled, int(positions.max()) + 1, number)


def _alike(x: Tensor, tokens: Tensor, name: str) -> Tensor:
    if x.shape != tokens.shape:
        raise ValueError(f"{name} {list(x.shape)} are not as input_ids, {list(tokens.shape)}: give one for each token")
    return x


def _ends(tokens: Tensor, positions: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """Where each sample's documents end: where a position is not one more than that before, as in transformers."""
    length = tokens.size(1)
    if positions is None:
        return ((length,),) * tokens.size(0)
    if positions.dim() != 2 or positions.size(1) != length or positions.size(0) not in (1, tokens.size(0)):
        raise ValueError(
            f"position_ids {list(positions.shape)} are not [{tokens.size(0)}, {length}] or [1, {length}]: positions of "
            "several kinds (images, video) are not read"
        )
    starts = positions.diff(dim=1).ne(1).cpu()
    rows = [(*(torch.nonzero(row).flatten() + 1).tolist(), length) for row in starts]
    return tuple(rows) if len(rows) == tokens.size(0) else tuple(rows) * tokens.size(0)


def _without_padding(
    ends: tuple[tuple[int, ...], ...], padding: Tensor, targets: Tensor | None
) -> tuple[tuple[int, ...], ...]:
    """The same with padding at the right as a document of its own, which nobody's loss is about."""
    if bool(padding.eq(1).all()):
        if any(len(row) > 1 for row in ends):
            raise ValueError(
                "attention_mask lets documents see each other whose position_ids restart: leave one of them out "
                "(without attention_mask documents are kept apart)"
            )
        return ends
    lengths = padding.eq(1).sum(1)
    right = torch.arange(padding.size(1), device=padding.device) < lengths[:, None]
    if bool(padding.ne(right.to(padding.dtype)).any()) or int(lengths.min()) == 0:
        raise ValueError(
            "attention_mask is neither all ones nor padding at the right: use padding_side='right', and position_ids "
            "that restart for packed documents"
        )
    if any(len(row) > 1 for row in ends):
        raise ValueError("attention_mask with padding beside position_ids that restart: give the padding positions")
    if targets is not None and bool(targets[~right].ne(IGNORED).any()):
        raise ValueError(f"labels at padding count in the loss: set them to {IGNORED}")
    return tuple((n,) if n == padding.size(1) else (n, padding.size(1)) for n in lengths.tolist())
