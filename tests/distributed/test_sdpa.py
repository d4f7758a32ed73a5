# SPDX-License-Identifier: Apache-2.0
"""PyTorch's layers and operator over the grid give the results of one process."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import megatron.context_parallel as cp
from megatron.context_parallel import sdpa
from tests.distributed.pool import RankError
from tests.pairs import also_in_full

LENGTH, WIDTH = 48, 32


class Model(nn.Module):
    """An embedding, two layers of PyTorch and a head, unaware of ranks."""

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
        result = gradients(model, logits, layout.shard(targets, dim=1))
    for grad in result:
        torch.distributed.all_reduce(grad, group=layout.grid.context.group)
    pairs = [(logits.detach(), layout.shard(seen.detach(), dim=1)), *zip(result, expected)]
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
@pytest.mark.usual(0, 1)
def test_layers_of_pytorch_are_those_of_one_process(pool, ulysses, ring, balance, causal, recompute):
    assert max(pool.run(over_ranks, ulysses * ring, ulysses, ring, balance, causal, recompute)) < 1e-10


def calls(kind):
    """Compare the operator in all forms of its call, with documents, grouped heads and a scale."""
    uneven = kind == "uneven dtensor"
    tensors = "dtensor" in kind
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
    same = functional.scaled_dot_product_attention  # a reference from before the context
    with cp.context_parallel(layout, mask=mask):
        if kind == "inference":
            with torch.inference_mode():
                out = same(*local, is_causal=True, scale=0.3, enable_gqa=True)
        elif tensors:
            mesh = torch.distributed.device_mesh.DeviceMesh.from_group(grid.tensor.group, "cpu")
            if kind == "compiled dtensor":
                same = torch.compile(same, backend="aot_eager", fullgraph=True)
            whole = same(*(distribute_tensor(x, mesh, [Shard(1)]) for x in local), scale=0.3, enable_gqa=True)
            assert whole.placements == (Shard(1),) and whole.shape == local[0].shape
            out = whole.redistribute(placements=[Replicate()]).to_local()
        else:
            out = torch.ops.aten.scaled_dot_product_attention(*local, scale=0.3, enable_gqa=True)
    return float((out - layout.shard(expected, dim=2)).abs().max())


@pytest.mark.parametrize("kind", ["inference", "dtensor", "uneven dtensor", "compiled dtensor", "operator"])
def test_every_way_to_call_it(pool, kind):
    assert max(pool.run(calls, 4, kind)) < 1e-10


def refused(settings, **call):
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ring=2))
    length = call.pop("length", layout.local_length)
    x = torch.randn(1, 2, length, 8)
    key = x[:, :1] if call.pop("few", False) else x
    with cp.context_parallel(layout, **settings):
        functional.scaled_dot_product_attention(x, key, key, **call)


class Layer(nn.Module):
    """Four query heads on two keys', and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def compiled(ulysses, ring, backend):
    """Errors of a compiled model, alternately within contexts and outside; number of graphs and graph breaks."""
    from torch._dynamo.utils import counters

    torch.manual_seed(1)
    eager, x = nn.Sequential(Layer(), Layer()), torch.randn(2, LENGTH, WIDTH)
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ulysses=ulysses, ring=ring))
    torch._dynamo.reset()
    counters.clear()
    model, worst = torch.compile(eager, backend=backend, fullgraph=True), []

    def step(model, x):
        out = model(x)
        return out, torch.autograd.grad(out.square().sum(), list(eager.parameters()))

    for mask in (None, cp.Documents((11, 30, LENGTH)), None):
        with cp.context_parallel(layout, mask=mask):
            out, grads = step(model, layout.shard(x, dim=1))
            seen, wanted = step(eager, layout.shard(x, dim=1))  # verified by the tests above
        worst += [(out - seen).abs().max(), *((a - b).abs().max() / b.abs().max() for a, b in zip(grads, wanted))]
        worst.append((model(x) - eager(x)).abs().max())
    worst.append((layout.gather(out, dim=1) - eager(x)).abs().max())
    result = max(map(float, worst)), counters["stats"]["unique_graphs"], counters["graph_break"].total()
    torch._dynamo.reset()
    return result


@pytest.mark.parametrize(
    "ulysses, ring, backend",
    [(1, 2, "aot_eager"), *also_in_full((2, 2, "aot_eager"), (4, 1, "aot_eager"), (1, 2, "inductor"))],
)
def test_compiled_as_one_graph(pool, ulysses, ring, backend):
    """No graph breaks; one graph for all contexts, and another one outside of them."""
    for error, graphs, breaks in pool.run(compiled, ulysses * ring, ulysses, ring, backend, timeout=180):
        assert error < 1e-5 and (graphs, breaks) == (2, 0)


def checked(ulysses, ring):
    """PyTorch's own checks of an operator: schema, autograd, fake tensors, symbolic shapes."""
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ulysses=ulysses, ring=ring))
    draw = torch.Generator().manual_seed(5)
    sizes = ((4, 8), (2, 8), (2, 6))
    inputs = [
        torch.randn(layout.local_length, 2, heads, size, generator=draw, dtype=torch.float64, requires_grad=True)
        for heads, size in sizes
    ]
    with cp.context_parallel(layout, kernel="math"):
        return torch.library.opcheck(sdpa._forward, (*inputs, True, 0.3, ulysses))


@pytest.mark.parametrize("ulysses, ring", [(1, 1), (2, 1), (1, 2)])
def test_the_node_of_a_graph_keeps_pytorchs_rules(pool, ulysses, ring):
    for result in pool.run(checked, ulysses * ring, ulysses, ring, timeout=120):
        assert set(result.values()) == {"SUCCESS"}, result


def node_elsewhere(where):
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ulysses=2))
    x = torch.randn(layout.local_length, 1, 4, 8, requires_grad=True)
    if where == "outside":
        sdpa._forward(x, x, x, True, 0.3, 2)
    if where in ("full", "longer"):
        length, mask = (LENGTH, cp.Full()) if where == "full" else (2 * LENGTH, None)
        with cp.context_parallel(cp.SequenceLayout(length, layout.grid), mask=mask):
            sdpa._forward(x, x, x, True, 0.3, 2)
    with cp.context_parallel(layout):
        out = sdpa._forward(x, x, x, True, 0.3, 1 if where == "another grid" else 2)[0]
    for number in range(sdpa.KEPT - 1):
        sdpa._meanings[-1 - number] = sdpa.Meaning(layout, None, "auto")
    with cp.context_parallel(layout):
        sdpa._forward(x, x, x, True, 0.3, 2)
    out.sum().backward()


@pytest.mark.parametrize(
    "where, message",
    [
        ("outside", "runs without a context: call the graph within one"),
        ("full", "a call has is_causal=True, but context_parallel has mask=Full"),
        ("longer", "attention of 24 tokens, but each rank has 48 in the layout"),
        ("another grid", "compiled for ulysses=1 runs with ulysses=2"),
        ("too late", "runs after 1024 other context_parallel"),
    ],
)
@pytest.mark.usual(0, 1)
def test_a_node_that_has_lost_its_context(pool, where, message):
    with pytest.raises(RankError, match=message):
        pool.run(node_elsewhere, 2, where)


def groups_torn():
    grid = cp.initialize_grid(ring=2, tensor=2)
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(grid.tensor.group, "cpu")
    layout = cp.SequenceLayout(LENGTH, grid)
    query, key = (
        distribute_tensor(torch.randn(1, heads, layout.local_length, 8), mesh, [Shard(1)]) for heads in (6, 3)
    )
    with cp.context_parallel(layout):
        functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)


def test_a_split_group_of_query_heads_is_refused(pool):
    with pytest.raises(RankError, match="6 query heads and 3 key heads are split into 2 shards"):
        pool.run(groups_torn, 4)


def twice():
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ring=2))
    with cp.context_parallel(layout), cp.context_parallel(layout):
        pass


@pytest.mark.parametrize(
    "settings, call, message",
    [
        ({}, {"attn_mask": torch.ones(24, 24, dtype=torch.bool)}, "does not support attn_mask, which "),
        ({}, {"dropout_p": 0.1}, "does not support dropout_p"),
        ({"mask": cp.Full()}, {"is_causal": True}, "a call has is_causal=True, but context_parallel has mask=Full"),
        ({}, {"length": 48}, "query has 48 tokens, but the layout gives each rank 24"),
        ({}, {"few": True}, "2 query heads and 1 key heads need enable_gqa=True"),
    ],
)
@pytest.mark.usual(0, 3)
def test_unsupported_models_are_refused_by_name(pool, settings, call, message):
    with pytest.raises(RankError, match=message):
        pool.run(refused, 2, settings, **call)


def test_one_context_at_a_time(pool):
    with pytest.raises(RankError, match="a context_parallel context is already active"):
        pool.run(twice, 2)


def other_attention(how):
    """PyTorch's attention functions that do not call the operator."""
    x = torch.randn(1, LENGTH, WIDTH)
    layer = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    q = x.unflatten(2, (4, -1)).transpose(1, 2)
    ends = torch.tensor([0, 24], dtype=torch.int32)
    if how == "varlen":
        from torch.nn.attention.varlen import varlen_attn
    calls = {
        "weights": lambda x, q: layer(x, x, x),
        "flex": lambda x, q: flex_attention(q, q, q),
        "varlen": lambda x, q: varlen_attn(*[q[0].transpose(0, 1)] * 3, ends, ends, 24, 24),
        "no weights": lambda x, q: layer(x, x, x, need_weights=False)[0],
    }
    if how != "varlen":  # which needs a GPU
        calls[how](x, q)
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ring=2))
    try:
        with cp.context_parallel(layout):
            mine = calls[how](layout.shard(x, dim=1), layout.shard(q, dim=2))
    finally:  # everything is restored
        if how != "varlen":
            calls[how](x, q)
    torch.testing.assert_close(layout.gather(mine, dim=1), calls[how](x, q), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "how, message",
    [
        ("weights", "pass need_weights=False"),
        ("flex", "flex_attention cannot run over ranks"),
        ("varlen", "varlen_attn cannot run over ranks"),
    ],
)
@pytest.mark.usual(0)
def test_attention_of_this_ranks_tokens_alone_is_refused(pool, how, message):
    with pytest.raises(RankError, match=message):
        pool.run(other_attention, 2, how)


def test_multihead_attention_without_weights_is_taken(pool):
    pool.run(other_attention, 2, "no weights")
