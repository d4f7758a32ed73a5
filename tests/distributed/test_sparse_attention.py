# SPDX-License-Identifier: Apache-2.0
"""Learned sparsity on grids against dense attention in float64: the same keys, outputs, losses and all gradients."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron.context_parallel as cp
from megatron.context_parallel.sparse_attention import choice, chosen_math
from tests.errors import worst
from tests.pairs import also_in_full

LENGTH, TOP, BATCH = 48, 7, 2
HEADS, ROTATED, LATENT = 4, 4, 6
INDEX_HEADS, INDEX = 3, 8
ENDS = (1, 17, 30, 48)
MASKS = {
    "causal": cp.Causal(),
    "window": cp.Window(9),
    "documents": cp.Documents(ENDS),
    "each sample": [cp.Documents((20, 48)), cp.Causal()],
    "function": cp.MaskFunction(lambda q, k: (q + k) % 3 != 1, cp.Causal()),
}
GRIDS = [(1, 2, "zigzag"), (2, 1, "zigzag"), (2, 2, "zigzag"), (1, 4, "zigzag"), (4, 1, "zigzag"), (1, 4, "contiguous"),
         (2, 2, "documents"), (1, 1, "zigzag")]  # fmt: skip


def inputs(dtype: torch.dtype = torch.float64, whole: bool = False) -> dict[str, Tensor]:
    """Complete tensors. Whole numbers make scores exact, and many of them equal."""
    torch.manual_seed(3)
    shapes = {
        "q": (HEADS, ROTATED + LATENT),
        "kv": (1, ROTATED + LATENT),
        "index_q": (INDEX_HEADS, INDEX),
        "index_k": (INDEX,),
        "index_weights": (INDEX_HEADS,),
    }
    draw = {name: torch.randn(LENGTH, BATCH, *shape, dtype=dtype) for name, shape in shapes.items()}
    if whole:
        draw |= {name: x.round().clamp(-1, 1) for name, x in draw.items() if name.startswith("index")}
    return draw


def allowed(mask) -> Tensor:
    masks = mask if isinstance(mask, list) else [mask] * BATCH
    at = torch.arange(LENGTH)
    return torch.stack([one.allowed(at[:, None], at[None]) for one in masks])


def scores(index_q: Tensor, index_k: Tensor, index_weights: Tensor) -> Tensor:
    """[b, s, s]."""
    each = torch.relu(torch.einsum("qbhd,kbd->bqhk", index_q, index_k))
    return torch.einsum("qbh,bqhk->bqk", index_weights, each)


def selection(mask, **index: Tensor) -> Tensor:
    """bool [b, s, s], by sorting all scores."""
    found = scores(**{name: x.float() for name, x in index.items()}).masked_fill(~allowed(mask), float("-inf"))
    order = found.sort(dim=-1, descending=True, stable=True).indices[..., :TOP]
    return torch.zeros_like(found, dtype=torch.bool).scatter(-1, order, True) & allowed(mask)


def dense(x: dict[str, Tensor], seen: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [s, b, heads, LATENT] and the indexer's loss [s, b]."""
    weights = torch.einsum("qbhd,kbd->bhqk", x["q"], x["kv"][:, :, 0]) * 0.3
    weights = weights.masked_fill(~seen[:, None], float("-inf")).softmax(-1).nan_to_num(0)
    out = torch.einsum("bhqk,kbd->qbhd", weights, x["kv"][:, :, 0, ROTATED:])
    target = weights.mean(1).detach()
    found = scores(x["index_q"], x["index_k"], x["index_weights"]).masked_fill(~seen, float("-inf"))
    apart = torch.special.xlogy(target, target) - target * found.log_softmax(-1)
    return out, apart.masked_fill(~seen, 0).sum(-1).T


def over_ranks(x: dict[str, Tensor], layout: cp.SequenceLayout, mask) -> tuple[Tensor, Tensor, Tensor]:
    mine = {name: layout.shard(value) for name, value in x.items()}
    indexer = cp.Indexer(mine["index_q"], mine["index_k"], mine["index_weights"])
    chosen = cp.choose_keys(*indexer, layout=layout, top_k=TOP, mask=mask)
    sizes = {"layout": layout, "value_size": LATENT, "scale": 0.3}
    out, loss = cp.sparse_attention(mine["q"], mine["kv"], chosen, indexer=indexer, **sizes)
    return chosen, layout.gather(out), layout.gather(loss)


def as_matrix(chosen: Tensor) -> Tensor:
    """[s, b, n] -> bool [b, s, s]."""
    found = torch.zeros(len(chosen), BATCH, LENGTH + 1, dtype=torch.bool)
    return found.scatter(-1, chosen.long() % (LENGTH + 1), True)[..., :LENGTH].transpose(0, 1)


def compare(ulysses: int, ring: int, balance: str, name: str, whole: bool, rows: int) -> dict[str, float]:
    mask = MASKS[name]
    ends = ENDS if balance == "documents" else ()
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ulysses=ulysses, ring=ring), balance, document_ends=ends)
    start = inputs(whole=whole)
    ours, theirs = ({key: x.clone().requires_grad_() for key, x in start.items()} for _ in range(2))
    seen = selection(mask, **{key: x for key, x in start.items() if key.startswith("index")})
    small = mock.patch.multiple(choice, ROWS=rows, KEYS=16), mock.patch.object(chosen_math, "ENTRIES", 1000)
    with small[0], small[1]:
        chosen, out, loss = over_ranks(ours, layout, mask)
        expected = dense(theirs, seen)
        torch.manual_seed(5)
        factors = torch.randn_like(out), torch.rand_like(loss)
        for result in (expected, (out, loss)):
            sum((x * y).sum() for x, y in zip(result, factors)).backward()
    size = dist.get_world_size()
    for x in ours.values():
        dist.all_reduce(x.grad)
        x.grad /= size  # every rank computed the gathered result's loss
    wrong = as_matrix(layout.gather(chosen)).ne(seen).sum()
    return {
        "keys": float(wrong),
        "out": (out - expected[0]).abs().max().item(),
        "loss": (loss - expected[1]).abs().max().item(),
        **{key: (ours[key].grad - theirs[key].grad).abs().max().item() for key in start},
    }


CASES = [(grid, list(MASKS)[index % len(MASKS)]) for index, grid in enumerate(GRIDS)]
OTHERS = [(grid, name) for grid in GRIDS for name in MASKS if (grid, name) not in CASES]


@pytest.mark.parametrize("grid, name", [*CASES, *also_in_full(*OTHERS)])
@pytest.mark.usual(1, 3, 4, 6, 7)
def test_equals_dense_attention_of_the_same_keys(pool, grid, name):
    if grid[2] == "documents" and name not in ("documents", "causal"):
        name = "documents"
    for whole in (False, True):
        result = pool.run(compare, grid[0] * grid[1], *grid, name, whole, 16 if whole else 5)
        assert worst(rank.values() for rank in result) < 1e-10, (whole, result[0])


def chosen_here(ulysses: int, ring: int) -> tuple[int, int, int, float]:
    """Wrong keys if each rank asks only its own keys; if ties fall to the later key; and if the loss is the mean of
    ranks that hold different numbers of counted tokens, the error of this mean."""
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ulysses=ulysses, ring=ring))
    x = inputs(whole=True)
    index = {key: value for key, value in x.items() if key.startswith("index")}
    seen = selection(cp.Causal(), **index)
    mine = {key: layout.shard(value) for key, value in index.items()}
    alone = cp.SequenceLayout(layout.local_length, cp.abstract_grid())
    own = cp.choose_keys(mine["index_q"], mine["index_k"], mine["index_weights"], layout=alone, top_k=TOP)
    places = torch.cat((layout.positions, torch.tensor([-1])))[own.long()]
    at_shard = as_matrix(layout.gather(places.int())).ne(seen).sum()
    turned = {key: value.flip(0) for key, value in index.items()}
    later = selection(cp.MaskFunction(lambda q, k: k >= q, cp.Full()), **turned).flip(1, 2).ne(seen).sum()
    _, _, loss = over_ranks(x, layout, cp.Causal())
    counted = torch.arange(LENGTH)[:, None] < 10  # all on a few ranks
    local = layout.shard(loss), layout.shard(counted.expand(-1, BATCH))
    mean = local[0][local[1]].sum() / max(1, int(local[1].sum()))
    dist.all_reduce(mean)
    wrong = mean / dist.get_world_size() - loss[counted.expand(-1, BATCH)].mean()
    other = as_matrix(layout.gather(over_ranks(x, layout, cp.Causal())[0])) & ~allowed(cp.Documents(ENDS))
    return int(at_shard), int(later), int(other.sum()), abs(wrong.item())


def test_controls_fail(pool):
    for shard, later, other, mean in pool.run(chosen_here, 2, 1, 2):
        assert shard > 50 and later > 50 and other > 50 and mean > 1e-2


def test_all_keys_chosen_is_dense_attention():
    layout = cp.SequenceLayout(LENGTH, cp.abstract_grid())
    x = inputs()
    chosen = cp.choose_keys(x["index_q"], x["index_k"], x["index_weights"], layout=layout, top_k=10**6)
    out, loss = cp.sparse_attention(x["q"], x["kv"], chosen, layout=layout, value_size=LATENT, scale=0.3)
    expected, _ = dense(x, allowed(cp.Causal()))
    assert loss is None and (out - expected).abs().max() < 1e-12


def test_refusals():
    layout = cp.SequenceLayout(LENGTH, cp.abstract_grid())
    x = inputs()
    with pytest.raises(ValueError, match="at least one key, not 0"):
        cp.choose_keys(x["index_q"], x["index_k"], x["index_weights"], layout=layout, top_k=0)
    chosen = torch.zeros(LENGTH, BATCH, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not fit"):
        cp.sparse_attention(x["q"], x["kv"], chosen, layout=layout, value_size=LATENT + ROTATED + 1, scale=1.0)
