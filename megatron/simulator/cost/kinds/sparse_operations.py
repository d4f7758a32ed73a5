# SPDX-License-Identifier: Apache-2.0
"""Work of latent attention to chosen keys: the indexer, the gathered latents, scores of chosen keys."""

from __future__ import annotations

from megatron.formulas.kinds.sparse_figures import SparseLatent
from megatron.formulas.strategy import Group
from megatron.simulator.cost.kinds import latent_operations
from megatron.simulator.cost.kinds.attention_operations import LayerWork, output, output_grad
from megatron.simulator.cost.operations import BF16, FP32, Segment, collective, gemm, memory
from megatron.simulator.cost.row_operations import Rows

__all__ = ["mix", "mix_grad", "output", "output_grad", "project", "project_grad"]


def _index(rows: Rows) -> list[tuple[str, int, int]]:
    """(name, width of the result, width of the input) of the indexer's products."""
    latent: SparseLatent = rows.shape.latent
    heads, dim, hidden = latent.index_heads, latent.index_dim, rows.shape.hidden
    return [("wq_b", heads * dim, latent.queries or hidden), ("wk", dim, hidden), ("weights_proj", heads, hidden)]


def project(rows: Rows) -> list[Segment]:
    """As of latents, and the indexer's queries, keys and weights."""
    own = rows.tokens / (rows.strategy.tensor if rows.strategy.sequence_parallel else 1)
    return [*latent_operations.project(rows), rows.run(*(gemm(name, own, n, k) for name, n, k in _index(rows)))]


def project_grad(rows: Rows) -> list[Segment]:
    """The backward pass of :func:`project`; the indexer's inputs have no gradient."""
    if not rows.shape.latent.learns:
        return latent_operations.project_grad(rows)
    own = rows.tokens / (rows.strategy.tensor if rows.strategy.sequence_parallel else 1)
    grads = (gemm(name, n, k, own, backward=True) for name, n, k in _index(rows))
    return [rows.run(*grads), *latent_operations.project_grad(rows)]


def _scores(work: LayerWork, backward: bool = False) -> Segment:
    """Scores of chosen keys, which are read once for each query, and means of values."""
    shape, strategy, latent = work.shape, work.strategy, work.shape.latent
    tokens, chosen = work.attended.rows, min(latent.chosen, work.workload.seq_length)
    heads, width = shape.heads // strategy.tensor, latent.keys + latent.rotated
    name, times = ("chosen_attention", 5 if backward else 2)
    product = gemm(name, tokens * heads, chosen * times / 2, width + latent.keys, backward=backward)
    moved = (BF16 + 2 * FP32 * backward) * tokens * chosen * width
    return Segment((product, memory("gather_chosen", moved, backward=backward)), count=1)


def _gathered(work: LayerWork, width: int, item: int, kind: str) -> list[Segment]:
    """Latents of the complete sequence, or the sum of their gradients."""
    strategy = work.strategy
    if strategy.context == 1:
        return []
    size = item * work.workload.seq_length * strategy.micro_batch * width
    return [Segment((), (collective(kind, "ring", Group(strategy.context, strategy.tensor), size),))]


def mix(work: LayerWork, *, saving: bool, kept: bool = False) -> list[Segment]:
    """The choice, and attention to chosen keys."""
    latent: SparseLatent = work.shape.latent
    tokens, seen = work.attended.rows, work.workload.seq_length / (2 if work.attended.causal else 1)
    index = gemm("indexer", tokens * latent.index_heads, seen, latent.index_dim)
    up = gemm("absorb", tokens, work.shape.heads // work.strategy.tensor * latent.keys, _plain(work))
    width = latent.keys + latent.rotated + latent.index_dim
    return [*_gathered(work, width, BF16, "all_gather"), Segment((index, up)), _scores(work)]


def mix_grad(work: LayerWork) -> list[Segment]:
    """The backward pass of :func:`mix`; the choice has none."""
    latent: SparseLatent = work.shape.latent
    width = latent.keys + latent.rotated + latent.index_dim * latent.learns
    up = gemm("absorb", work.attended.rows, 2 * work.shape.heads // work.strategy.tensor * latent.keys, _plain(work))
    return [
        *_gathered(work, latent.keys + latent.rotated, BF16, "all_gather"),
        _scores(work, backward=True),
        *_gathered(work, width, FP32, "reduce_scatter"),
        Segment((up,)),
    ]


def _plain(work: LayerWork) -> int:
    """Numbers of a head that go through the up-projections of keys and values."""
    return work.shape.head_dim - work.shape.latent.rotated + work.shape.latent.value
