# SPDX-License-Identifier: Apache-2.0
"""FPDT for learned sparsity: a layer in chunks against the same layer in one piece, in float64, under late copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import megatron.context_parallel as cp
from megatron.context_parallel.fpdt.host_store import Offload
from megatron.context_parallel.fpdt.sparse.chunked_choice import ChunkedChoiceLayer, Lesson
from megatron.context_parallel.sparse_attention.chosen_math import Form
from tests.adversary import Adversary
from tests.errors import worst
from tests.pairs import also_in_full

LENGTH, WIDTH, BATCH, TOP = 96, 10, 2, 7
HEADS, ROTATED, LATENT, INDEX = 3, 4, 6, 5
FORM = Form(0.4, LATENT)
MASKS = {
    "causal": (cp.Causal(),),
    "documents": (cp.Documents((1, 40, 41, 96)),),
    "each sample": (cp.Documents((30, 96)), cp.Window(20)),
}
CPU = torch.device("cpu")


def weights() -> dict[str, Tensor]:
    torch.manual_seed(4)
    head = ROTATED + LATENT
    shapes = {"q": HEADS * head, "kv": head, "iq": 2 * INDEX, "ik": INDEX, "iw": 2}
    drawn = {name: torch.randn(WIDTH, size, dtype=torch.float64) / 3 for name, size in shapes.items()}
    return drawn | {"out": torch.randn(HEADS * LATENT, WIDTH, dtype=torch.float64) / 3}


def project(w: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, cp.Indexer]:
    q, kv = (x @ w["q"]).unflatten(-1, (HEADS, -1)), (x @ w["kv"]).unsqueeze(2)
    return q, kv, cp.Indexer((x @ w["iq"]).unflatten(-1, (2, -1)), x @ w["ik"], x @ w["iw"])


def output(w: dict[str, Tensor], out: Tensor, x: Tensor) -> Tensor:
    return x + out.flatten(2) @ w["out"]


def whole(w: dict[str, Tensor], x: Tensor, masks) -> tuple[Tensor, Tensor]:
    """The layer's result and the losses of its indexer [s, b]."""
    layout = cp.SequenceLayout(LENGTH, cp.abstract_grid())
    q, kv, _ = project(w, x)
    index = project(w, x.detach())[2]
    each = list(masks) * (BATCH // len(masks))
    chosen = cp.choose_keys(*(part.detach() for part in index), layout=layout, top_k=TOP, mask=each)
    sizes = {"layout": layout, "value_size": LATENT, "scale": FORM.scale}
    out, losses = cp.sparse_attention(q, kv, chosen, indexer=index, **sizes)
    return output(w, out, x), losses


def chunked(w: dict[str, Tensor], x: Tensor, masks, layout, **options) -> Tensor:
    def taught(part: Tensor, chunk: int) -> tuple[Tensor, Tensor, cp.Indexer]:
        return *project(w, part)[:2], project(w, part.detach())[2]

    layer = ChunkedChoiceLayer(
        project=taught,
        output=lambda out, part, chunk: output(w, out, part),
        parameters=list(w.values()),
        layout=layout,
        top_k=TOP,
        form=FORM,
        masks=masks,
        **options,
    )
    return layer(x)


def compare(ulysses: int, ring: int, balance: str, chunks: int, name: str, how: str) -> dict[str, float]:
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ulysses=ulysses, ring=ring), balance, chunks)
    torch.manual_seed(2)
    x, dy = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64), torch.randn(WIDTH, LENGTH, BATCH).double()
    dy, (ours, theirs) = dy.permute(1, 2, 0), [weights() for _ in range(2)]
    for one in (x, *theirs.values()):
        one.requires_grad_()
    expected, losses = whole(theirs, x, MASKS[name])
    learns, factors = how != "device", torch.rand_like(losses)
    results = (expected, losses) if learns else (expected,)
    right = torch.autograd.grad(results, [x, *theirs.values()], (dy, factors)[: len(results)], allow_unused=True)
    found = {}
    for seed in (0, 1, 2) if how == "late copies" else (None,):
        offload = None if how == "device" else Offload(CPU, None if seed is None else Adversary(seed))
        mine = layout.shard(x.detach())
        mine = offload.to_host(mine) if how == "streamed" else mine
        for one in (mine, *ours.values()):
            one.requires_grad_()
        reported = torch.zeros(len(mine), BATCH).double()
        lesson = Lesson(
            lambda loss, chunk, into=reported: into[slice(*layout.local_chunks[chunk])].add_(loss),
            lambda chunk: layout.shard(factors)[slice(*layout.local_chunks[chunk])],
        )
        y = chunked(
            ours, mine, MASKS[name], layout, lesson=lesson if learns else None,
            offload=offload, streamed=how == "streamed", recompute=how == "streamed",
        )  # fmt: skip
        grads = torch.autograd.grad(y, [mine, *ours.values()], layout.shard(dy), allow_unused=True)
        if offload:
            offload.streams.synchronize()
        if seed is not None:
            assert not offload.streams.faults, offload.streams.faults
        found[f"y {seed}"] = float((y - layout.shard(expected)).detach().abs().max())
        found[f"loss {seed}"] = float((reported - layout.shard(losses.detach() * learns)).abs().max())
        found[f"dx {seed}"] = float((grads[0] - layout.shard(right[0])).abs().max())
        for key, grad, other in zip(ours, grads[1:], right[1:]):
            assert (grad is None or not grad.any()) == (other is None or not other.any())
            if grad is not None and other is not None:
                torch.distributed.all_reduce(grad)
                found[f"{key} {seed}"] = float((grad - other).abs().max())
    return found


GRIDS = [(1, 2, "zigzag", 4), (2, 1, "zigzag", 3), (1, 1, "zigzag", 6), (2, 2, "zigzag", 5), (1, 4, "contiguous", 3)]
HOW = ["late copies", "streamed", "device"]
CASES = [(grid, list(MASKS)[i % 3], HOW[i % 3]) for i, grid in enumerate(GRIDS)]
OTHERS = [(g, m, h) for g in GRIDS for m in MASKS for h in HOW if (g, m, h) not in CASES]


@pytest.mark.parametrize("grid, name, how", [*CASES, *also_in_full(*OTHERS)])
@pytest.mark.usual(0, 1, 2)
def test_equals_the_layer_in_one_piece(pool, grid, name, how):
    found = pool.run(compare, grid[0] * grid[1], *grid, name, how)
    assert worst(rank.values() for rank in found) < 1e-10, found[0]


def test_refuses_a_rule():
    with pytest.raises(ValueError, match="rule= is for attention to all keys"):
        ChunkedChoiceLayer(
            project=None, output=None, parameters=[], top_k=1, form=FORM, rule=cp.AttentionRule(cp.Full()),
            layout=cp.SequenceLayout(4, cp.abstract_grid()),
        )  # fmt: skip
