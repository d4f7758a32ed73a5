# SPDX-License-Identifier: Apache-2.0
"""Linear attention and short convolutions over layouts against one process, token by token, in float64 to 1e-10."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron.context_parallel as cp
from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import missing_triton
from megatron.context_parallel.fpdt.chunked_mixer import ChunkedLinearLayer
from megatron.context_parallel.linear_attention import decay_spans
from megatron.context_parallel.linear_attention.block_scan import block_size
from megatron.context_parallel.linear_attention.mixer import linear_attention, route_of, state_sizes
from megatron.context_parallel.linear_attention.rules import RULES, LinearRule, recurrence
from megatron.context_parallel.linear_attention.short_convolution import short_convolution
from megatron.context_parallel.linear_attention.span_exchange import span_order
from megatron.context_parallel.linear_attention.span_maps import segments
from megatron.decisions.state_exchange import gather_bytes, heads_bytes, relay_bytes
from megatron.platform import collectives
from tests.errors import worst
from tests.fla_stand_in import fla_stand_in
from tests.pairs import also_in_full, by_pairs

CONTROL = 1e-2  # without the state, or without the rows before a span, the error is at least this


def tokens(rule: LinearRule, length: int, batch: int, heads: int, key_heads: int, keys: int = 6) -> list[Tensor]:
    """q, k, v, g and beta of a whole sequence; for Mamba2 also skip."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(length, batch, *shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(key_heads, keys), dim=-1) for _ in range(2))
    g = -torch.nn.functional.softplus(normal(heads, *([keys] if rule.channels else [])) - 2)
    return [q, k, normal(heads, 5), g, normal(heads).sigmoid(), *([normal(heads)] if rule.name == "mamba2" else [])]


def each_document(function, tensors: list[Tensor], ends) -> Tensor:
    """``function`` of the tokens of each document of each sample by itself."""
    batch, length = tensors[0].size(1), len(tensors[0])
    ends = ends or ((length,),)
    samples = []
    for sample in range(batch):
        own = ends[sample % len(ends)]
        if isinstance(own, cp.Tree):
            samples.append(each_path(function, [x[:, sample : sample + 1] for x in tensors], own))
            continue
        parts = [function(*(x[a:b, sample : sample + 1] for x in tensors)) for a, b in zip((0, *own), own)]
        samples.append(torch.cat(parts))
    return torch.cat(samples, dim=1)


def each_path(function, tensors: list[Tensor], tree: cp.Tree) -> Tensor:
    """``function`` of each segment after the tokens of its path: as in separate rows."""
    parts = []
    for path in tree.paths:
        spans = [tree.spans[segment] for segment in path]
        row = function(*(torch.cat([x[a:b] for a, b in spans]) for x in tensors))
        parts.append(row[-(spans[-1][1] - spans[-1][0]) :])
    return torch.cat(parts)


def random_like(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(6), dtype=x.dtype)


def errors_of(layout: cp.SequenceLayout, mine: list[Tensor], whole: list[Tensor]) -> list[float]:
    return [float((a - layout.shard(b)).abs().max() / b.abs().max()) for a, b in zip(mine, whole)]


def errors_of_sums(layout: cp.SequenceLayout, mine: list[Tensor], whole: list[Tensor]) -> list[float]:
    """Errors of gradients of parameters, after a sum over ranks."""
    if layout.grid.context.size > 1:
        for part in mine:
            dist.all_reduce(part, group=layout.grid.context.group)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, whole)]


def begins_with_spans(layout: cp.SequenceLayout) -> tuple[tuple[int, ...]]:
    """A document for each span of each rank: nothing passes from one span to another."""
    grid = layout.grid
    spans = (layout.spans(ulysses=u, ring=r) for r in range(grid.ring.size) for u in range(grid.ulysses.size))
    return (tuple(sorted(stop for of_rank in spans for _, stop in of_rank)),)


def layout_of(ulysses, ring, balance, documents, length, chunks=1) -> cp.SequenceLayout:
    """The layout; by documents it is that of the first sample's."""
    grid, ends = cp.initialize_grid(ulysses=ulysses, ring=ring), documents[0] if documents else ()
    return cp.SequenceLayout(length, grid, balance, chunks, document_ends=ends if balance == "documents" else ())


def compare_mixer(
    ulysses, ring, balance, documents, exchange, rule, length, batch, heads, key_heads, state=True, kernel="blocks"
):
    """Largest errors of out and of the gradients of all inputs on this rank."""
    rule = RULES[rule]
    layout = layout_of(ulysses, ring, balance, documents, length)
    whole = [x.requires_grad_() for x in tokens(rule, length, batch, heads, key_heads)]
    expected = each_document(lambda *x: recurrence(rule, *x)[0], whole, documents)
    dout = random_like(expected)
    grads = torch.autograd.grad(expected, whole, dout)
    local = [layout.shard(x).detach().requires_grad_() for x in whole]
    if not state:  # every span begins anew
        documents = begins_with_spans(layout)
    out = linear_attention(*local, rule=rule, layout=layout, documents=documents, exchange=exchange, kernel=kernel)
    mine = torch.autograd.grad(out, local, layout.shard(dout))
    return errors_of(layout, [out, *mine], [expected, *grads])


GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (4, 1), (1, 4), (3, 2)]
DOCUMENTS = {"one": (), "packed": ((5, 6, 51, 168),), "by sample": ((5, 51, 168), (1, 51, 101, 168))}
CASES = [
    (*grid, balance, list(DOCUMENTS)[(i + j) % 3], ["gather", "relay", "heads", "auto"][(i + 2 * j + n) % 4], rule)
    for i, grid in enumerate(GRIDS)
    for j, balance in enumerate(["zigzag", "contiguous", "documents"])
    for n, rule in enumerate(RULES)
]


def check(pool, compare, ulysses, ring, balance, documents, *case, by=None, limit=1e-10):
    """Errors are below a limit and, if nothing passes from one span to the next, large; ``by``: other kernels."""
    documents = DOCUMENTS.get(documents, documents)
    how = (compare, ulysses * ring) if by is None else (by, ulysses * ring, compare)
    run = partial(pool.run, *how, ulysses, ring, balance, documents, *case, timeout=240)
    errors = run()
    assert worst(errors) < limit, errors
    if ulysses * ring > 1 and balance != "documents":
        assert worst(run(False)) > CONTROL


OF_MIXERS = "ulysses, ring, balance, documents, exchange, rule"


def check_mixer(pool, *case, **how):
    check(pool, compare_mixer, *case, 168, 2 if case[3] == "by sample" else 1, 12, 6, **how)


@pytest.mark.parametrize(OF_MIXERS, by_pairs(CASES, lambda u, r, *x: {(u, r), *x, (x[0], x[2])}))
@pytest.mark.usual(0, 1, 2, 3, 4, 5, 6, 7)
def test_every_rule_on_every_grid(pool, ulysses, ring, balance, documents, exchange, rule):
    check_mixer(pool, ulysses, ring, balance, documents, exchange, rule)


def compare_by_fla(compare, *case):
    """The same with fla's kernels; its functions were called."""
    with fla_stand_in() as called:
        errors = compare(*case, kernel="fla")
    assert called
    return errors


@pytest.mark.parametrize(OF_MIXERS, by_pairs(CASES, lambda u, r, *x: {(u, r), *x, (x[0], x[2])}))
@pytest.mark.usual(0, 5)
def test_the_kernels_of_fla_on_every_grid(pool, ulysses, ring, balance, documents, exchange, rule):
    check_mixer(pool, ulysses, ring, balance, documents, exchange, rule, by=compare_by_fla)


def compare_by_triton(compare, *case):
    """The same with the kernels for rules without a delta, in Triton's interpreter, which computes in fp32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decay_spans, "why_not", lambda *_, **__: None)
        patch.setattr(decay_spans, "STATES", 1)  # short segments
        return compare(*case, kernel="triton")


needs_triton = pytest.mark.skipif(missing_triton() is not None, reason=missing_triton() or "")


@needs_triton
@pytest.mark.parametrize(
    OF_MIXERS, by_pairs([case for case in CASES if not RULES[case[5]].delta], lambda u, r, *x: {(u, r), *x})
)
@pytest.mark.lab
def test_our_kernels_on_every_grid(pool, ulysses, ring, balance, documents, exchange, rule):
    check_mixer(pool, ulysses, ring, balance, documents, exchange, rule, by=compare_by_triton, limit=1e-5)


def count_bytes(ulysses, ring, exchange, rule, length):
    """Bytes that this rank sends in a forward and in a backward pass, and those of the formulas for a forward pass."""
    rule, layout = RULES[rule], cp.SequenceLayout(length, cp.initialize_grid(ulysses=ulysses, ring=ring))
    heads, keys, values, rows = 4, 4, 3, layout.local_length
    shapes = (2, keys), (2, keys), (heads, values), (heads, keys) if rule.channels else (heads,), (heads,)
    shapes += ((heads,),) * (rule.name == "mamba2")
    inputs = [torch.rand(rows, 1, *shape).neg().requires_grad_() for shape in shapes]
    sent = []

    def gather(output, x, **group):
        sent[-1] += x.nbytes * (dist.get_world_size(group["group"]) - 1)
        return all_gather(output, x, **group)

    def messages(operations):
        sent[-1] += sum(one.tensor.nbytes for one in operations if one.op is dist.isend)
        return batch(operations)

    all_gather, batch = getattr(dist, collectives.ALL_GATHER), dist.batch_isend_irecv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, collectives.ALL_GATHER, gather)
        patch.setattr(dist, "batch_isend_irecv", messages)
        sent.append(0)
        out = linear_attention(*inputs, rule=rule, layout=layout, exchange=exchange)
        sent.append(0)
        torch.autograd.grad(out.sum(), inputs)
    bare, sizes = layout.without_groups(), state_sizes(rule, inputs)
    counts = span_order(bare, (), exchange == "heads").counts
    if exchange == "heads":
        moved = heads_bytes(sizes, ulysses, 2)
        return sent, moved + gather_bytes(replace(sizes, heads=heads // ulysses), counts)
    return sent, (gather_bytes if exchange == "gather" else relay_bytes)(sizes, counts)


COUNTED = [
    (1, 4, "gather", "gated_delta"),
    (2, 2, "heads", "mamba2"),
    *also_in_full(
        *((1, 4, "gather", rule) for rule in ("kda", "mamba2")),
        *((2, 2, "relay", rule) for rule in ("gated_delta", "kda", "mamba2")),
        *((2, 2, "heads", rule) for rule in ("gated_delta", "kda")),
    ),
]


@pytest.mark.parametrize("ulysses, ring, exchange, rule", COUNTED)
def test_bytes_are_those_of_the_formulas(pool, ulysses, ring, exchange, rule):
    """States and maps have the same bytes at 8K and 128K; an all-to-all of tokens has 16 times as many."""
    results = []
    for length in (8192, 131072):
        ranks = pool.run(count_bytes, ulysses * ring, ulysses, ring, exchange, rule, length)
        forward, backward = (max(sent[i] for sent, _ in ranks) for i in (0, 1))
        assert forward == backward == ranks[0][1], ranks
        results.append(forward)
    assert results[0] == results[1] if exchange != "heads" else 15 < results[1] / results[0] < 16


def compare_convolution(ulysses, ring, balance, documents, width, length, batch, activation, halo=True):
    """Largest errors of out, dx, dweight and dbias on this rank; those of dweight and dbias after a sum over ranks."""
    layout = layout_of(ulysses, ring, balance, documents, length)
    generator = torch.Generator().manual_seed(5)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((length, batch, 3), (3, width), (3,))
    )
    act = torch.nn.functional.silu if activation else torch.nn.Identity()

    def dense(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x.permute(1, 2, 0), (width - 1, 0))
        return act(torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=3)).permute(2, 0, 1)

    expected = each_document(dense, [x], documents)
    dout = random_like(expected)
    grads = torch.autograd.grad(expected, (x, weight, bias), dout)
    local, own = layout.shard(x).detach().requires_grad_(), [p.detach().requires_grad_() for p in (weight, bias)]
    if not halo:
        documents = begins_with_spans(layout)
    out = short_convolution(local, *own, layout=layout, activation=activation, documents=documents)
    dx, *dparameters = torch.autograd.grad(out, (local, *own), layout.shard(dout))
    errors = errors_of(layout, [out, dx], [expected, grads[0]])
    return errors + errors_of_sums(layout, dparameters, grads[1:])


CONVOLUTIONS = [
    (*grid, balance, list(DOCUMENTS)[(i + j) % 3], width, length, [None, "silu"][(i + j) % 2])
    for i, grid in enumerate(GRIDS)
    for j, balance in enumerate(["zigzag", "contiguous", "documents"])
    for width, length in ((4, 168), (5, 24))  # spans of one to three tokens in a sequence of 24
]


@pytest.mark.parametrize(
    "ulysses, ring, balance, documents, width, length, activation",
    by_pairs(CONVOLUTIONS, lambda u, r, *others: {(u, r), *others}),
)
def test_a_convolution_on_every_grid(pool, ulysses, ring, balance, documents, width, length, activation):
    ends = tuple(tuple(end for end in one if end < length) + (length,) for one in DOCUMENTS[documents])
    batch = 2 if len(ends) == 2 else 1
    check(pool, compare_convolution, ulysses, ring, balance, ends, width, length, batch, activation)


def compare_chunked(
    ulysses, ring, balance, documents, chunks, exchange, rule, kept, length, state=True, width=3, kernel="blocks"
):
    """Largest errors of y, dx and the gradients of all parameters, summed over ranks, of a layer in chunks.

    ``width``: of the convolution; 0: none.
    """
    rule, batch, hidden, heads, keys, values = RULES[rule], 2 if len(documents) == 2 else 1, 7, 6, 4, 3
    layout = layout_of(ulysses, ring, balance, documents, length, chunks)
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    gates = heads * (keys if rule.channels else 1)
    channels = 3 * keys * 2 + heads * values  # q and k of three key heads
    weights = [normal(channels + gates + heads, hidden), normal(hidden, heads * values)]
    weights += [normal(channels, width)] if width else []

    def project(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (x @ weight.T).split((channels, gates, heads), dim=-1)

    def mixed_heads(mixed: Tensor, g: Tensor, beta: Tensor) -> list[Tensor]:
        q, k, v = (part.unflatten(2, (n, -1)) for part, n in
                   zip(mixed.split((3 * keys, 3 * keys, heads * values), dim=-1), (3, 3, heads)))  # fmt: skip
        q, k = (torch.nn.functional.normalize(one, dim=-1) for one in (q, k))
        g = -torch.nn.functional.softplus(g - 2)
        skip = [beta.tanh()] if rule.name == "mamba2" else []
        return [q, k, v, g.unflatten(2, (heads, -1)) if rule.channels else g, beta.sigmoid(), *skip]

    def dense(x: Tensor) -> Tensor:
        mixed, *gates = project(x, weights[0])
        if width:
            padded = torch.nn.functional.pad(mixed.permute(1, 2, 0), (width - 1, 0))
            mixed = torch.nn.functional.conv1d(padded, weights[2][:, None], groups=channels)
            mixed = torch.nn.functional.silu(mixed.permute(2, 0, 1))
        return x + recurrence(rule, *mixed_heads(mixed, *gates))[0].flatten(2) @ weights[1].T

    x = normal(length, batch, hidden)
    expected = each_document(dense, [x], documents)
    dy = random_like(expected)
    grads = torch.autograd.grad(expected, [x, *weights], dy)
    own = [weight.detach().requires_grad_() for weight in weights]
    offload = cp.Offload(torch.device("cpu")) if kept != "device" else None
    layer = ChunkedLinearLayer(
        project=lambda x, chunk: project(x, own[0]), heads=mixed_heads,
        output=lambda out, x, chunk: x + out.flatten(2) @ own[1].T, parameters=own, layout=layout, linear=rule,
        weight=own[2] if width else None, activation="silu", exchange=exchange,
        documents=documents if state else begins_with_spans(layout), offload=offload, streamed=kept == "streamed",
        recompute=kept == "recomputed", kernel=kernel,
    )  # fmt: skip
    local = layout.shard(x).detach().requires_grad_()
    y = layer(local)
    dx, *dweights = torch.autograd.grad(y, [local, *own], layout.shard(dy))
    errors = errors_of(layout, [y, dx], [expected, grads[0]])
    return errors + errors_of_sums(layout, dweights, grads[1:])


KEPT = ["device", "offloaded", "streamed", "recomputed"]
CHUNKED = [
    (*grid, balance, list(DOCUMENTS)[(i + j) % 3], chunks, ["gather", "relay", "heads"][(i + j + n) % 3], rule,
     KEPT[(i + j + n) % 4])
    for i, grid in enumerate([(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
    for j, balance in enumerate(["zigzag", "contiguous", "documents"])
    for n, (chunks, rule) in enumerate([(5, "gated_delta"), (3, "kda"), (12, "mamba2")])
]  # fmt: skip


OF_LAYERS = "ulysses, ring, balance, documents, chunks, exchange, rule, kept"


@pytest.mark.parametrize(OF_LAYERS, by_pairs(CHUNKED, lambda u, r, *others: {(u, r), *others}))
@pytest.mark.usual(0, 1, 2)
def test_layers_in_chunks(pool, ulysses, ring, balance, documents, chunks, exchange, rule, kept):
    check(pool, compare_chunked, ulysses, ring, balance, documents, chunks, exchange, rule, kept, 168)


@pytest.mark.parametrize(OF_LAYERS, by_pairs(CHUNKED, lambda u, r, *others: {(u, r), *others}))
@pytest.mark.usual(0)
def test_layers_in_chunks_by_fla(pool, ulysses, ring, balance, documents, chunks, exchange, rule, kept):
    case = (ulysses, ring, balance, documents, chunks, exchange, rule, kept, 168)
    check(pool, compare_chunked, *case, by=compare_by_fla)


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize(
    OF_LAYERS, by_pairs([case for case in CHUNKED if not RULES[case[6]].delta], lambda u, r, *x: {(u, r), *x})
)
def test_layers_in_chunks_by_our_kernels(pool, ulysses, ring, balance, documents, chunks, exchange, rule, kept):
    case = (ulysses, ring, balance, documents, chunks, exchange, rule, kept, 168)
    check(pool, compare_chunked, *case, by=compare_by_triton, limit=1e-5)


@pytest.mark.parametrize("width", [0, 1])
def test_layers_in_chunks_whose_convolution_needs_no_earlier_rows(pool, width):
    case = (2, 1, "zigzag", DOCUMENTS["packed"], 3, "gather", "kda", "device", 168, True, width)
    errors = pool.run(compare_chunked, 2, *case)
    assert worst(errors) < 1e-10, errors


@pytest.mark.parametrize("ring, ends, sends", [(1, (), False), (2, (), True), (2, ((42, 84, 126, 168),), False)])
def test_states_are_sent_only_where_a_document_continues_on_another_rank(ring, ends, sends):
    layout = cp.SequenceLayout(168, cp.abstract_grid(ring=ring))
    rule = RULES["gated_delta"]
    inputs = [x[: layout.local_length] for x in tokens(rule, 168, 1, 2, 2)]
    assert route_of(inputs, rule, layout, ends, "gather").sends == sends


@pytest.mark.parametrize(
    "batch, heads, keys, values, size",
    [(1, 4, 4, 4, 174720), (1, 4, 4, 5, 161280), (2, 64, 64, 64, 320), (1, 256, 128, 100, 64), (8, 64, 128, 128, 64)],
)
def test_a_segment_holds_at_most_a_number_of_elements(batch, heads, keys, values, size):
    """Whole blocks of 64 tokens, of which q, k and v have at most 2**23 elements; at least one block."""
    q, v = (torch.empty(400000, batch, heads, width, device="meta") for width in (keys, values))
    assert size == 64 or size * batch * heads * (2 * keys + values) <= 2**23 and size % 64 == 0
    assert size * batch * heads * (2 * keys + values) + 64 * batch * heads * (2 * keys + values) > 2**23
    rows = (10, 10 + 2 * size + 1)
    assert segments([q, q, v], rows) == [(10, 10 + size), (10 + size, 10 + 2 * size), (10 + 2 * size, rows[1])]


def test_without_beta_every_token_is_written_completely():
    rule, layout = RULES["gated_delta"], cp.SequenceLayout(8, cp.abstract_grid())
    q, k, v, g, beta = tokens(rule, 8, 2, 4, 2)
    out = linear_attention(q, k, v, g, rule=rule, layout=layout)
    assert torch.equal(out, linear_attention(q, k, v, g, torch.ones_like(beta), rule=rule, layout=layout))


def test_fla_alone_has_no_second_derivative():
    rule, layout = RULES["gated_delta"], cp.SequenceLayout(8, cp.abstract_grid())
    inputs = [x.requires_grad_() for x in tokens(rule, 8, 1, 2, 2)]
    with fla_stand_in():
        out = linear_attention(*inputs, rule=rule, layout=layout, kernel="fla")
        torch.autograd.grad(out.sum(), inputs, retain_graph=True)
        with pytest.raises(RuntimeError, match="linear attention has no second derivative"):
            torch.autograd.grad(out.sum(), inputs, create_graph=True)


LAYOUT = cp.SequenceLayout(8, cp.abstract_grid())
X, WEIGHT = torch.zeros(8, 2, 6), torch.zeros(6, 4)


@pytest.mark.parametrize(
    "inputs, options, message",
    [
        ((X[:, 0], WEIGHT), {}, r"must be \[8, b, channels\]"),
        ((X[:7], WEIGHT), {}, r"must be \[8, b, channels\]"),
        ((X, WEIGHT[:, 0]), {}, r"weight must be \[6, width\]"),
        ((X, WEIGHT[:5]), {}, r"weight must be \[6, width\]"),
        ((X, WEIGHT, WEIGHT[:5, 0]), {}, r"bias \[6\]"),
        ((X, WEIGHT), {"documents": [(4, 8)] * 3}, "documents has 3 lists for 2 samples"),
        ((X, WEIGHT), {"documents": [(4, 4, 8)]}, "must ascend to the length of the sequence, 8"),
        ((X, WEIGHT), {"documents": [(4, 8), (0, 8)]}, "must ascend to the length of the sequence, 8"),
        ((X, WEIGHT), {"documents": [(4, 7)]}, "must ascend to the length of the sequence, 8"),
        ((X, WEIGHT), {"activation": "relu"}, "activation 'relu' is unknown"),
    ],
)
def test_inputs_of_a_convolution_that_do_not_fit_are_refused(inputs, options, message):
    with pytest.raises(ValueError, match=message):
        short_convolution(*inputs, layout=LAYOUT, **options)


def test_what_the_spans_of_two_documents_hand_on():
    """Documents of 8 and 16 tokens on three ranks: the second continues from the middle rank on the last."""
    counts = span_order(cp.SequenceLayout(24, cp.abstract_grid(ring=3), "contiguous"), ((8, 24),), False).counts
    assert (counts.ranks, counts.slots, counts.hops, counts.sent) == (3, 1, 1, 1)


def test_a_block_is_the_smallest_power_of_two_that_holds_the_tokens():
    sizes = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 33: 64, 64: 64, 65: 64, 1000: 64}
    assert {tokens: block_size(tokens, torch.empty(1), 8) for tokens in sizes} == sizes
