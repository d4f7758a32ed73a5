# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own layers and operator over the grid are what they are on one process."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import megatron.context_parallel as cp
from tests.distributed.pool import RankError

LENGTH, WIDTH = 48, 32


class Model(nn.Module):
    """Words, two layers of PyTorch's, and a head: they know nothing of ranks."""

    def __init__(self, causal: bool, recompute: bool) -> None:
        super().__init__()
        self.causal, self.recompute = causal, recompute
        self.words, self.places = nn.Embedding(50, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens, positions):
        x = self.words(tokens) + self.places(positions)
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=x.dtype) if self.causal else None
        for layer in self.layers:
            more = {"src_mask": mask, "is_causal": self.causal}
            x = checkpoint(layer, x, use_reentrant=False, **more) if self.recompute else layer(x, **more)
        return self.head(x)


def model_of(*settings):
    torch.manual_seed(1)
    return Model(*settings).double()


def batch():
    return torch.randint(50, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def gradients(model, logits, targets):
    (functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (2 * LENGTH)).backward()
    return [parameter.grad for parameter in model.parameters()]


def over_ranks(ulysses, ring, balance, causal, recompute, mask=None):
    """Largest differences of logits and gradients from the same model on one process."""
    tokens, targets = batch(), batch().flip(1)
    whole = model_of(causal, recompute)
    seen = whole(tokens, torch.arange(LENGTH))
    expected = gradients(whole, seen, targets)
    model = model_of(causal, recompute)
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ulysses=ulysses, ring=ring), balance)
    with cp.context_parallel(layout, mask=mask):
        logits = model(layout.shard(tokens, dim=1), layout.positions)
        found = gradients(model, logits, layout.shard(targets, dim=1))
    for grad in found:
        torch.distributed.all_reduce(grad, group=layout.grid.context.group)
    pairs = [(logits.detach(), layout.shard(seen.detach(), dim=1)), *zip(found, expected)]
    after = model(tokens, torch.arange(LENGTH))  # as before
    pairs.append((after.detach(), seen.detach()))
    return max(float((mine - full).abs().max()) for mine, full in pairs)


@pytest.mark.parametrize(
    "ulysses, ring, balance, causal, recompute",
    [
        (2, 1, "zigzag", False, False),
        (1, 2, "zigzag", True, False),
        (2, 2, "zigzag", True, True),
        (1, 3, "contiguous", False, True),
    ],
)
def test_layers_of_pytorch_are_those_of_one_process(pool, ulysses, ring, balance, causal, recompute):
    assert max(pool.run(over_ranks, ulysses * ring, ulysses, ring, balance, causal, recompute)) < 1e-10


def calls(kind):
    """The operator in the ways it can be called, with documents, grouped heads and a scale."""
    uneven = kind == "uneven dtensor"
    tensors = uneven or kind == "dtensor"
    grid = cp.initialize_grid(ring=2, tensor=2) if tensors else cp.initialize_grid(ulysses=2, ring=2)
    layout = cp.SequenceLayout(LENGTH, grid)
    draw = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(2, heads, LENGTH, 8, generator=draw, dtype=torch.float64)
        for heads in ((3, 3, 3) if uneven else (4, 2, 2))
    )
    mask = cp.Documents((11, 30, LENGTH))
    at = torch.arange(LENGTH)
    allowed = mask.allowed(at[:, None], at[None])
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=0.3, enable_gqa=True)
    local = [layout.shard(x, dim=2) for x in (q, k, v)]
    same = functional.scaled_dot_product_attention  # a name taken before
    with cp.context_parallel(layout, mask=mask):
        if kind == "inference":
            with torch.inference_mode():
                out = same(*local, is_causal=True, scale=0.3, enable_gqa=True)
        elif tensors:
            mesh = torch.distributed.device_mesh.DeviceMesh.from_group(grid.tensor.group, "cpu")
            whole = same(*(distribute_tensor(x, mesh, [Shard(1)]) for x in local), scale=0.3, enable_gqa=True)
            assert whole.placements == (Shard(1),) and whole.shape == local[0].shape
            out = whole.redistribute(placements=[Replicate()]).to_local()
        else:
            out = torch.ops.aten.scaled_dot_product_attention(*local, scale=0.3, enable_gqa=True)
    return float((out - layout.shard(expected, dim=2)).abs().max())


@pytest.mark.parametrize("kind", ["inference", "dtensor", "uneven dtensor", "operator"])
def test_every_way_to_call_it(pool, kind):
    assert max(pool.run(calls, 4, kind)) < 1e-10


def refused(settings, **call):
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ring=2))
    length = call.pop("length", layout.local_length)
    x = torch.randn(1, 2, length, 8)
    key = x[:, :1] if call.pop("few", False) else x
    with cp.context_parallel(layout, **settings):
        functional.scaled_dot_product_attention(x, key, key, **call)


class Compiled(nn.Module):
    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.attend = torch.compiler.disable(self.attention) if apart else self.attention

    def attention(self, x):
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    def forward(self, x):
        return 2 * self.attend(self.linear(x))


def compiled(apart):
    """Largest difference from the uncompiled model on one process, and how often its graph breaks."""
    from torch._dynamo.utils import counters

    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ring=2))
    torch.manual_seed(1)
    model, x = Compiled(apart), torch.randn(1, 2, LENGTH, 8)
    expected, counted = layout.shard(model(x), dim=2), counters["graph_break"].total()
    with cp.context_parallel(layout):
        out = torch.compile(model, backend="aot_eager")(layout.shard(x, dim=2))
        out.sum().backward()
    breaks = counters["graph_break"].total() - counted
    torch._dynamo.reset()
    return float((out - expected).abs().max()), breaks


def test_compiled_around_it(pool):
    for error, breaks in pool.run(compiled, 2, True):
        assert error < 1e-5 and breaks == 1
    with pytest.raises(RankError, match="put @torch.compiler.disable on the forward that calls it"):
        pool.run(compiled, 2, False)


def groups_torn():
    grid = cp.initialize_grid(ring=2, tensor=2)
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(grid.tensor.group, "cpu")
    layout = cp.SequenceLayout(LENGTH, grid)
    query, key = (
        distribute_tensor(torch.randn(1, heads, layout.local_length, 8), mesh, [Shard(1)]) for heads in (6, 3)
    )
    with cp.context_parallel(layout):
        functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)


def test_a_group_of_queries_is_not_torn(pool):
    with pytest.raises(RankError, match="6 query heads and 3 key heads are cut 2 ways"):
        pool.run(groups_torn, 4)


def twice():
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ring=2))
    with cp.context_parallel(layout), cp.context_parallel(layout):
        pass


@pytest.mark.parametrize(
    "settings, call, told",
    [
        ({}, {"attn_mask": torch.ones(24, 24, dtype=torch.bool)}, "takes no attn_mask: give mask= to context_parallel"),
        ({}, {"dropout_p": 0.1}, "has no dropout_p"),
        ({"mask": cp.Full()}, {"is_causal": True}, "is called with is_causal"),
        ({}, {"length": 48}, "query has 48 tokens, the layout gives a rank 24"),
        ({}, {"few": True}, "2 query heads and 1 key heads need enable_gqa=True"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(pool, settings, call, told):
    with pytest.raises(RankError, match=told):
        pool.run(refused, 2, settings, **call)


def test_one_context_at_a_time(pool):
    with pytest.raises(RankError, match="there is a context_parallel already"):
        pool.run(twice, 2)
