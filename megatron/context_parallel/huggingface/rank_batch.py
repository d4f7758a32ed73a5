# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a batch, with properties of the complete batch: documents, number of labels, largest position.

These properties are read before the batch is cut: documents from positions that restart, padding from the
attention mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.context_parallel.layout.masks import Causal, Documents, Full, Mask, Window
from megatron.context_parallel.layout.sequence_layout import SequenceLayout

IGNORED = -100
KNOWN = ("input_ids", "labels", "position_ids", "attention_mask", "token_type_ids", "num_items_in_batch")
OF_HEADS = ("start_positions", "end_positions")  # what heads read in addition to labels
# Entries that collators make for flash attention in addition to position_ids; they contain the same documents.
FOLLOWING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True)
class Part:
    """Properties of a complete batch, of which each rank has a part.

    Attributes:
        layout: which rank holds which tokens.
        ends: for each sample, one past the last token of each of its documents.
        labelled: number of labels in the complete batch that are not ignored; None: it has no labels.
        longest: one more than the largest position.
        number: how many batches came before; dropout depends on it.
        scoring: if given, the model returns log-probabilities; options of :func:`decoder_loss.token_scores`.
        whole: the complete batch, for a head that reads all hidden states.
        lengths: for each sample, its tokens before the padding; None: no sample has any.
    """

    layout: SequenceLayout
    ends: tuple[tuple[int, ...], ...]
    labelled: int | None
    longest: int
    number: int
    scoring: Mapping[str, Any] | None = None
    whole: Mapping[str, Any] | None = None
    lengths: tuple[int, ...] | None = None

    def masks(self, window: int | None, ahead: bool = False) -> list[Mask]:
        """One mask for all samples or one for each; for the arguments see ``transformers_attention.Shared``."""
        everything = window is None or window >= self.layout.seq_length
        if ahead:
            within: Mask = Full() if everything else Window(window, window)
        else:
            within = Causal() if everything else Window(window - 1)
        masks = [within if len(ends) == 1 else Documents(ends, within) for ends in self.ends]
        return masks[:1] if len(set(self.ends)) == 1 else masks


def cut(
    batch: Mapping[str, Any], layout: SequenceLayout, number: int, labels_of: str = "next"
) -> tuple[dict[str, Any], Part]:
    """This rank's part of a complete batch.

    Args:
        batch: ``input_ids`` [b, s]. Optional: ``labels`` [b, s], not shifted, -100 for ignored labels; ``position_ids``
            [b, s] or [1, s], which restart at each document; ``attention_mask`` [b, s], 1 for tokens and 0 for padding
            on the right; ``num_items_in_batch``; the documents' ends in the form for flash attention;
            ``token_type_ids`` [b, s].
        layout: of all batches; with the balance "documents" it is made again for the first sample's documents.
        number: of this batch.
        labels_of: what a token's output is compared with: the "next" token's label, its "own" (masked language models),
            or nothing here, because a "head" reads all tokens and the complete batch.

    Returns:
        ``input_ids``, ``position_ids`` and ``shift_labels`` [b, s_local], and properties of the complete batch.

    Raises:
        ValueError: an entry is not supported.
    """
    head = labels_of == "head"
    for name in batch:
        if name not in KNOWN + FOLLOWING + OF_HEADS * head and batch[name] is not None:
            raise ValueError(f"the batch's {name} is not supported over ranks: leave it out, use {', '.join(KNOWN)}")
    tokens = batch["input_ids"]
    if tokens.dim() != 2 or tokens.size(1) != layout.seq_length:
        raise ValueError(
            f"input_ids {list(tokens.shape)} are not [b, {layout.seq_length}]: shard needs the complete batch with the "
            "seq_length of parallelize; pad or pack it"
        )
    labels, positions, padding = (batch.get(name) for name in ("labels", "position_ids", "attention_mask"))
    targets = None if labels is None or head else _same_shape(labels, tokens, "labels")
    if targets is not None and labels_of == "next":
        targets = F.pad(targets, (0, 1), value=IGNORED)[:, 1:]
    ends, lengths = _ends(tokens, positions), None
    for name in FOLLOWING[:2]:
        if batch.get(name) is not None and (len(ends) > 1 or batch[name].tolist() != [0, *ends[0]]):
            raise ValueError(f"{name} and position_ids have different documents: give position_ids that restart")
    if padding is not None:
        ends = _without_padding(ends, _same_shape(padding, tokens, "attention_mask"), targets)
        lengths = tuple(padding.eq(1).sum(1).tolist())
        if bool(padding.ne(1).any()) and any(batch.get(name) is not None for name in OF_HEADS):
            raise ValueError(
                f"{OF_HEADS[0]} with padding: the loss of answers reads what padding sees, here other padding: "
                "use batches of one length"
            )
    if positions is None:
        positions = torch.arange(layout.seq_length, device=tokens.device)[None]
    layout = layout.of_documents(ends[0])
    if layout.balance == "documents" and len(set(ends)) > 1:
        raise ValueError("balance='documents' needs the same documents in all samples: use batches of one, or 'zigzag'")
    own = {
        "input_ids": layout.shard(tokens, dim=1),
        "position_ids": layout.shard(positions.expand(tokens.size(0), -1), dim=1),
    }
    if batch.get("token_type_ids") is not None:
        kinds = _same_shape(batch["token_type_ids"], tokens, "token_type_ids")
        own["token_type_ids"] = layout.shard(kinds, dim=1)
    if targets is not None:
        own["shift_labels"] = layout.shard(targets, dim=1)
    if batch.get("num_items_in_batch") is not None and not head:
        own["num_items_in_batch"] = batch["num_items_in_batch"]
    labelled = None if targets is None else int(targets.ne(IGNORED).sum())
    whole = {name: batch[name] for name in batch if name not in (*FOLLOWING, "num_items_in_batch")} if head else None
    return own, Part(layout, ends, labelled, int(positions.max()) + 1, number, whole=whole, lengths=lengths)


def only_within_documents(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with labels that are ignored where another document, or padding, begins; default: all tokens."""
    tokens, positions, padding = (batch.get(name) for name in ("input_ids", "position_ids", "attention_mask"))
    labels = tokens if batch.get("labels") is None else _same_shape(batch["labels"], tokens, "labels")
    labels = labels.clone()
    if padding is not None and batch.get("labels") is None:
        labels[padding == 0] = IGNORED
    for sample, ends in zip(labels, _ends(tokens, positions)):
        sample[list(ends[:-1])] = IGNORED
    return {**batch, "labels": labels}


def _same_shape(x: Tensor, tokens: Tensor, name: str) -> Tensor:
    if x.shape != tokens.shape:
        raise ValueError(f"{name} {list(x.shape)} must have the shape of input_ids, {list(tokens.shape)}")
    return x


def _ends(tokens: Tensor, positions: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """The ends of each sample's documents. As in transformers, a document ends where positions do not rise by 1."""
    length = tokens.size(1)
    if positions is None:
        return ((length,),) * tokens.size(0)
    if positions.dim() != 2 or positions.size(1) != length or positions.size(0) not in (1, tokens.size(0)):
        raise ValueError(
            f"position_ids {list(positions.shape)} are not [{tokens.size(0)}, {length}] or [1, {length}]: positions of "
            "several kinds (images, video) are not supported"
        )
    starts = positions.diff(dim=1).ne(1).cpu()
    rows = [(*(torch.nonzero(row).flatten() + 1).tolist(), length) for row in starts]
    return tuple(rows) if len(rows) == tokens.size(0) else tuple(rows) * tokens.size(0)


def _without_padding(
    ends: tuple[tuple[int, ...], ...], padding: Tensor, targets: Tensor | None
) -> tuple[tuple[int, ...], ...]:
    """The ends of documents, with padding on the right as a separate document, whose labels must be ignored."""
    if bool(padding.eq(1).all()):
        if any(len(row) > 1 for row in ends):
            raise ValueError(
                "attention_mask joins documents, but position_ids restart: leave one of them out "
                "(without attention_mask documents are separated)"
            )
        return ends
    lengths = padding.eq(1).sum(1)
    right = torch.arange(padding.size(1), device=padding.device) < lengths[:, None]
    if bool(padding.ne(right.to(padding.dtype)).any()) or int(lengths.min()) == 0:
        raise ValueError(
            "attention_mask is neither all ones nor padding on the right: use padding_side='right', and position_ids "
            "that restart for packed documents"
        )
    if any(len(row) > 1 for row in ends):
        raise ValueError("attention_mask has padding, but position_ids restart: leave attention_mask out")
    if targets is not None and bool(targets[~right].ne(IGNORED).any()):
        raise ValueError(f"labels at padding count in the loss: set them to {IGNORED}")
    return tuple((n,) if n == padding.size(1) else (n, padding.size(1)) for n in lengths.tolist())
