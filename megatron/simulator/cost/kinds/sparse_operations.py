# SPDX-License-Identifier: Apache-2.0
"""Work of latent attention to chosen keys: the indexer, the gathered latents, scores of chosen keys."""

from __future__ import annotations

from megatron.decisions.division import SCORED, SCORED_TOGETHER
from megatron.formulas.kinds.sparse_figures import SparseLatent
from megatron.formulas.strategy import Group
from megatron.simulator.cost.kinds import latent_operations
from megatron.simulator.cost.kinds.attention_operations import LayerWork, output, output_grad
from megatron.simulator.cost.operations import BF16, FP32, Segment, collective, gemm, memory
from megatron.simulator.cost.row_operations import Rows
from megatron.simulator.cost.trace import Kernel

__all__ = ["mix", "mix_grad", "output", "output_grad", "project", "project_grad"]


def _index(rows: Rows) -> list[tuple[str, int, int]]:
    """(name, width of the result, width of the input) of the indexer's products."""
    latent: SparseLatent = rows.shape.latent
    heads, dim, hidden = latent.index_heads, latent.index_dim, rows.shape.hidden
    if not heads:
        return []
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


def chosen_kernel(
    name: str,
    rows: float,
    keys: float,
    heads: int,
    sizes: tuple[int, int],
    products: tuple[int, int],
    moved: float,
    itemsize: int = BF16,
) -> Kernel:
    """A kernel for ``rows`` queries and the keys that each of them reads; at the rate of Triton's attention to as many.

    ``sizes``: of a key and of a value. ``products``: of a pair, with each of them. ``heads``: batch x heads.
    """
    flops = 2.0 * rows * keys * heads * sum(size * times for size, times in zip(sizes, products))
    # The rate of attention depends on the keys of a query, so a tile with as many keys as queries stands for them.
    shape = (2 * keys, 2 * keys, rows * heads / 2 / keys, sum(sizes) / 2)
    return Kernel(name, "attention", flops, moved, shape, itemsize, "grads" in name)


def _chosen(work: LayerWork, name: str, products: tuple[int, int], parts: int = 0) -> Kernel:
    """Scores of chosen keys, which are read once for each query; ``parts``: bytes written for each number of them."""
    shape, strategy, latent, rows = work.shape, work.strategy, work.shape.latent, work.attended.rows
    width, keys = latent.keys + latent.rotated, min(latent.chosen, work.workload.seq_length)
    heads = shape.heads // strategy.tensor
    moved = rows * (keys * width * (BF16 + parts) + 2 * heads * (width + latent.keys) * BF16)
    return chosen_kernel(name, rows, keys, heads, (width, latent.keys), products, moved)


def _scores_grad(work: LayerWork) -> Segment:
    """Gradients of queries; parts of those of keys, which are sorted by keys, and added."""
    latent, rows = work.shape.latent, work.attended.rows
    width, keys = latent.keys + latent.rotated, min(latent.chosen, work.workload.seq_length)
    added = memory("add_parts", 3 * FP32 * rows * keys * width, backward=True)
    sort = memory("sort", 24 * rows * keys, backward=True)
    of_queries, of_keys = _chosen(work, "chosen_query_grads", (2, 1)), _chosen(work, "chosen_key_grads", (2, 2), FP32)
    return Segment((of_queries, of_keys, sort, added))


RANKED = 128  # bytes that PyTorch's operations move to rank a score and to find the highest
OPERATIONS = 24  # of these, in a block of scores


def _choose(work: LayerWork) -> Segment:
    """Scores of all keys in blocks, and the highest of them."""
    latent: SparseLatent = work.shape.latent
    rows, length, (queries, keys) = work.attended.rows, work.workload.seq_length, SCORED
    keys *= SCORED_TOGETHER
    seen = work.attended.seen or length / (2 if work.attended.causal else 1)
    strategy = work.strategy
    if work.attended.causal and not work.attended.seen and (strategy.ulysses > 1 or strategy.balance != "zigzag"):
        seen *= 2 - 1 / strategy.context  # the last ring or Ulysses rank has the latest queries
    pairs = rows / strategy.tensor * min(length, seen + keys / 2)  # TP ranks divide queries; blocks are computed whole
    blocks = max(1, round(pairs / queries / keys))
    index = gemm("index_scores", queries * latent.index_heads, pairs / blocks / queries, latent.index_dim, count=blocks)
    index.bytes = float(FP32 * pairs / blocks)  # no scores of heads are written
    return Segment((index, memory("rank", RANKED * pairs / blocks / OPERATIONS, count=OPERATIONS * blocks)))


def _gathered(work: LayerWork, width: int, item: int, kind: str) -> list[Segment]:
    """Latents of the complete sequence, or the sum of their gradients."""
    strategy = work.strategy
    if strategy.context == 1:
        return []
    size = item * work.workload.seq_length * strategy.micro_batch * width
    # Gathered rows are put into order; sums of gradients begin with zeros and are put into the order of ranks.
    ordered = memory("reorder", (3 if kind == "all_gather" else 4) * size)
    sent = collective(kind, "ring", Group(strategy.context, strategy.tensor), size)
    return [Segment((), (sent,)), Segment((ordered,))]


def mix(work: LayerWork, *, saving: bool, kept: bool = False) -> list[Segment]:
    """The choice, and attention to chosen keys."""
    latent: SparseLatent = work.shape.latent
    up = gemm("absorb", work.attended.rows, work.shape.heads // work.strategy.tensor * latent.keys, _plain(work))
    keys = _gathered(work, latent.keys + latent.rotated, BF16, "all_gather")
    chooses = [*_gathered(work, latent.index_dim, BF16, "all_gather"), _choose(work)] if latent.index_heads else []
    return [*chooses, *keys, Segment((up, _chosen(work, "chosen_forward", (1, 1))))]


def mix_grad(work: LayerWork) -> list[Segment]:
    """The backward pass of :func:`mix`; the choice has none."""
    latent: SparseLatent = work.shape.latent
    width = latent.keys + latent.rotated + latent.index_dim * latent.learns
    up = gemm("absorb", work.attended.rows, 2 * work.shape.heads // work.strategy.tensor * latent.keys, _plain(work))
    return [
        *_gathered(work, latent.keys + latent.rotated, BF16, "all_gather"),
        _scores_grad(work),
        *_gathered(work, width, FP32, "reduce_scatter"),
        Segment((up,)),
    ]


def _plain(work: LayerWork) -> int:
    """Numbers of a head that go through the up-projections of keys and values."""
    return work.shape.head_dim - work.shape.latent.rotated + work.shape.latent.value
