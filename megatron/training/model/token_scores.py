# SPDX-License-Identifier: Apache-2.0
"""For evaluation: the loss of each token, and whether greedy decoding would choose it, in chunks of tokens."""

from __future__ import annotations

from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.fpdt.chunked_ffn import even_spans
from megatron.context_parallel.fpdt.chunked_loss import all_reduce, cross_entropy, gather
from megatron.context_parallel.fpdt.host_store import HiddenStates, Offload
from megatron.context_parallel.layout.grid import Axis

LOGITS = 2**24  # default limit for a chunk of chunked_token_scores


@torch.no_grad()
def chunked_token_scores(
    hidden_SBH: Tensor,
    weight_VH: Tensor,
    labels_SB: Tensor,
    wanted_SB: Tensor,
    *,
    vocab_size: int,
    chunks: int | None = None,
    tensor: Axis = Axis(),
    sequence_parallel: bool = False,
    offload: Offload | None = None,
    softcap: float | None = None,
) -> Tensor:
    """For evaluation: the loss of each token's label, and 1 if greedy decoding would choose that label.

    If logits are equal, the lowest id is chosen. The logits are computed in chunks of tokens.

    Args:
        hidden_SBH, weight_VH, labels_SB, vocab_size, tensor, sequence_parallel, offload, softcap: see
            :func:`~megatron.context_parallel.fpdt.chunked_loss.chunked_linear_cross_entropy`.
        wanted_SB: [s, b]; tokens with 0 are not scored: their loss and hit are 0. Chunks without wanted tokens are
            skipped.
        chunks: number of spans of tokens; default: a span has at most ``LOGITS`` logits.

    Returns:
        [2, s, b], fp32 (fp64 for fp64 inputs): losses and hits, the same on every TP rank.
    """
    gathered = sequence_parallel and tensor.size > 1
    ranks = tensor.size if gathered else 1
    rows, batch, wide = hidden_SBH.size(0), hidden_SBH.size(1), accumulation_dtype(hidden_SBH.dtype)
    pieces = chunks or ceil(rows * ranks * batch * weight_VH.size(0) / LOGITS)
    spans = even_spans(rows, max(1, min(pieces, rows)))
    # Under TP-sp, rank t holds the labels from row t * rows on; a chunk takes the same rows of every rank.
    labels, wanted = (x.reshape(ranks, rows, -1) for x in (labels_SB, wanted_SB != 0))
    spans = [span for span in spans if wanted[:, slice(*span)].any()]  # the same on all TP ranks, as the labels are
    scores = torch.zeros((2, ranks, rows, batch), dtype=wide, device=weight_VH.device)
    for (start, stop), part in zip(spans, HiddenStates(hidden_SBH, offload).walk(spans)):
        tokens = (gather(part, tensor) if gathered else part).reshape(-1, hidden_SBH.size(-1))
        logits = (tokens @ weight_VH.t()).to(wide)
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        part_scores = _scores(logits, labels[:, start:stop].reshape(-1), vocab_size, tensor)
        scores[:, :, start:stop] = part_scores.view(2, ranks, stop - start, batch)
    return torch.where(wanted, scores, 0.0).view(2, ranks * rows, batch)


def _scores(logits_TV: Tensor, targets: Tensor, vocab_size: int, tensor: Axis) -> Tensor:
    """Losses and hits [2, tokens] from logits split over TP, which are overwritten."""
    width = logits_TV.size(1)
    first = tensor.rank * width
    logits_TV[:, max(min(vocab_size - first, width), 0) :] = -torch.inf
    own = (targets >= first) & (targets < first + width)
    column = torch.where(own, targets - first, 0).unsqueeze(1)
    target = torch.where(own, logits_TV.gather(1, column).squeeze(1), 0.0)  # 0 on all TP ranks but one
    all_reduce(target, tensor, dist.ReduceOp.SUM)
    target = target.unsqueeze(1)
    ahead = (logits_TV > target).sum(1)  # a count, so that one sum over TP is enough
    ids = torch.arange(first, first + width, device=targets.device)
    ahead += ((logits_TV == target) & (ids < targets.unsqueeze(1))).sum(1)
    all_reduce(ahead, tensor, dist.ReduceOp.SUM)
    losses, _ = cross_entropy(logits_TV, targets, vocab_size, tensor, False)
    hits = (ahead == 0) & losses.isfinite()  # NaN is never exceeded, so it would count as a hit
    return torch.stack((losses, hits.to(losses.dtype)))
