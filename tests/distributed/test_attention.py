# SPDX-License-Identifier: Apache-2.0
"""Ulysses, Ring and USP against dense attention on one process: outputs and all gradients, in float64 to 1e-10."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron.context_parallel as cp
from megatron.context_parallel.attention import kernels
from tests.distributed.test_mask_attention import dense
from tests.errors import worst
from tests.pairs import by_pairs, pairs

MASKS = {"causal": cp.Causal(), "full": cp.Full()}
WRITTEN_OUT = MASKS | {"causal": cp.MaskFunction(lambda q, k: k <= q, cp.Full())}  # without Causal's own code


def compare_with_dense(
    ulysses, ring, heads, kv_heads, batch, length, balance, mask, kernel="math", dtype=torch.float64, tensor=1
):
    """Largest errors of (out, dq, dk, dv) on this rank, each relative to its largest entry."""
    grid = cp.initialize_grid(ulysses=ulysses, ring=ring, tensor=tensor)
    layout = cp.SequenceLayout(length, grid, balance)
    generator = torch.Generator().manual_seed(7)
    shape = (length, batch)
    q = torch.randn(*shape, heads, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(*shape, kv_heads, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    # The output's gradient has another memory order, to detect code that ignores strides.
    dout = torch.randn(batch, 8, heads, length, generator=generator, dtype=torch.float64).permute(3, 0, 2, 1)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = dense(*whole, WRITTEN_OUT[mask])
    expected_grads = torch.autograd.grad(expected, whole, dout)

    local = [layout.shard(x).to(dtype).requires_grad_() for x in (q, k, v)]
    out = cp.attention(*local, layout=layout, mask=MASKS[mask], kernel=kernel)
    local_dout = layout.shard(dout.permute(1, 3, 2, 0), dim=3).permute(3, 0, 2, 1).to(dtype)
    assert not local_dout.is_contiguous()
    grads = torch.autograd.grad(out, local, local_dout)
    pairs = [(out, expected), *zip(grads, expected_grads)]
    return [float((mine.double() - layout.shard(full)).abs().max() / full.abs().max()) for mine, full in pairs]


def check(pool, ulysses, ring, *case, tensor=1, tolerance=1e-10):
    errors = pool.run(compare_with_dense, ulysses * ring * tensor, ulysses, ring, *case, tensor=tensor)
    assert worst(errors) < tolerance, errors


GRIDS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (4, 2), (2, 4), (1, 8), (8, 1)]
HEADS = [(8, 8), (8, 2), (8, 1)]
CASES = [
    (u, r, heads, kv, batch, balance, mask)
    for index, (u, r) in enumerate(GRIDS)
    for h_index, (heads, kv) in enumerate(HEADS)
    for batch, balance, mask in [
        ((1, "zigzag", "causal"), (2, "contiguous", "causal"), (3, "zigzag", "full"))[(index + h_index) % 3],
        ((2, "zigzag", "causal"), (1, "contiguous", "full"), (2, "contiguous", "causal"))[(index + h_index) % 3],
    ]
]


@pytest.mark.quick
@pytest.mark.parametrize(
    "ulysses, ring, heads, kv_heads, batch, balance, mask",
    by_pairs(
        CASES,
        lambda u, r, heads, kv, *others: pairs({f"U{u}", f"R{r}", f"kv{kv}", *others[1:]}),
        lambda u, r, *_: 2 + u * r,
        lambda u, r, heads, kv, *others: f"U{u}-R{r}-h{heads}kv{kv}-b{'-'.join(map(str, others))}",
    ),
)
def test_float64_matches_dense_attention(pool, ulysses, ring, heads, kv_heads, batch, balance, mask):
    check(pool, ulysses, ring, heads, kv_heads, batch, 48, balance, mask)


@pytest.mark.parametrize(
    "ulysses, ring, heads, kv_heads, length",
    [
        (4, 1, 12, 6, 40),  # 3 query heads per rank in groups of 2: a group is split between ranks
        (2, 2, 6, 3, 24),
        (3, 1, 6, 2, 21),
        (1, 3, 3, 1, 42),
        (2, 3, 10, 5, 84),
        (7, 1, 14, 2, 35),
    ],
)
@pytest.mark.usual(0, 1, 2, 3)
def test_uneven_heads_and_odd_grids(pool, ulysses, ring, heads, kv_heads, length):
    for balance in ("zigzag", "contiguous"):
        check(pool, ulysses, ring, heads, kv_heads, 2, length, balance, "causal")


FAST = [
    (*grid, *kind)
    for kind in ((torch.float64, 1e-10), (torch.float32, 5e-6), (torch.bfloat16, 2e-2))
    for grid in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))
]


@pytest.mark.parametrize("ulysses, ring, dtype, tolerance", by_pairs(FAST, lambda u, r, dtype, _: {(u, r), dtype}))
def test_the_fast_cpu_kernel(pool, ulysses, ring, dtype, tolerance):
    # bf16 has 8 bits, 2**-8 = 4e-3; a gradient is rounded several times.
    check(pool, ulysses, ring, 8, 2, 2, 256, "zigzag", "causal", "cpu", dtype, tolerance=tolerance)


class Late:
    """A batch of messages whose rows are there only after a wait, as on a GPU."""

    def __init__(self, operations):
        arriving = [x for x in operations if x.op is dist.irecv]
        self.places, self.operations = [x.tensor for x in arriving], operations
        for one in arriving:
            one.tensor = torch.empty_like(one.tensor)
        self.works = DIRECT(operations)

    def wait(self):
        for work in self.works:
            work.wait()
        for place, one in zip(self.places, (x for x in self.operations if x.op is dist.irecv)):
            place.copy_(one.tensor)


DIRECT = dist.batch_isend_irecv


def attend_late(balance):
    with mock.patch.object(dist, "batch_isend_irecv", lambda operations: [Late(operations)]):
        return compare_with_dense(1, 4, 2, 1, 1, 48, balance, "causal")


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
def test_rows_are_read_after_a_wait_for_their_message(pool, balance):
    assert worst(pool.run(attend_late, 4, balance)) < 1e-10


def test_with_tensor_parallelism(pool):
    check(pool, 2, 2, 8, 2, 1, 48, "zigzag", "causal", tensor=2)


def gather_inverts_shard(ulysses, ring, balance):
    grid = cp.initialize_grid(ulysses=ulysses, ring=ring)
    layout = cp.SequenceLayout(48, grid, balance)
    x = torch.randn(3, 48, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shard = layout.shard(x, dim=1).requires_grad_()
    whole = layout.gather(shard, dim=1)
    weight = torch.randn(2, 48, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).transpose(0, 2)
    (whole * weight * (1 + dist.get_rank())).sum().backward()
    ranks = sum(range(1, ulysses * ring + 1))
    return torch.equal(whole, x), torch.allclose(shard.grad, layout.shard(weight, 1) * ranks, rtol=1e-14)


@pytest.mark.parametrize("ulysses, ring", [(1, 1), (2, 1), (1, 4), (2, 2), (2, 4)])
@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
def test_gather_inverts_shard(pool, ulysses, ring, balance):
    assert all(same and grad for same, grad in pool.run(gather_inverts_shard, ulysses * ring, ulysses, ring, balance))


def gradient_of_gathered(ulysses, ring, tensor):
    """Each rank's loss weighs the gathered tokens by its number; a token's gradient has the sum of its context."""
    layout = cp.SequenceLayout(24, cp.initialize_grid(ulysses=ulysses, ring=ring, tensor=tensor))
    x = torch.arange(24.0, dtype=torch.float64)[layout.positions].view(-1, 1).requires_grad_()
    (layout.gather(x) * (1 + layout.grid.context.rank)).sum().backward()
    size = layout.grid.context.size
    return bool((x.grad == size * (size + 1) // 2).all())


@pytest.mark.parametrize("ulysses, ring, tensor", [(1, 2, 2), (2, 2, 1)])
def test_the_gradient_of_gathered_tokens_is_summed_over_the_context(pool, ulysses, ring, tensor):
    assert all(pool.run(gradient_of_gathered, 4, ulysses, ring, tensor))


def grid_coordinates(tensor, ulysses, ring, pipeline):
    grid = cp.initialize_grid(tensor=tensor, ulysses=ulysses, ring=ring, pipeline=pipeline)
    axes = (grid.tensor, grid.ulysses, grid.ring, grid.data, grid.pipeline)
    return [axis.rank for axis in axes], [axis.size for axis in axes], grid.context.rank, grid.world_size


@pytest.mark.parametrize(
    "tensor, ulysses, ring, pipeline", [(2, 2, 2, 1), (1, 2, 1, 2), (2, 1, 2, 2), (1, 1, 4, 1), (1, 1, 1, 1)]
)
def test_rank_order_is_tp_ulysses_ring_dp_pp(pool, tensor, ulysses, ring, pipeline):
    results = pool.run(grid_coordinates, 8, tensor, ulysses, ring, pipeline)
    for rank, ((t, u, r, d, p), sizes, context, world) in enumerate(results):
        assert rank == t + tensor * (u + ulysses * (r + ring * (d + sizes[3] * p)))
        assert context == u + ulysses * r
        assert world == 8


def refuse_a_grid_that_does_not_fit():
    with pytest.raises(ValueError, match="does not divide the 2 processes"):
        cp.initialize_grid(ulysses=2, ring=2)
    with pytest.raises(ValueError, match="at least 1"):
        cp.initialize_grid(ulysses=0)


def test_a_grid_that_does_not_fit_is_refused(pool):
    pool.run(refuse_a_grid_that_does_not_fit, 2)


def refuse_bad_inputs():
    grid = cp.initialize_grid(ulysses=2)
    layout = cp.SequenceLayout(16, grid)
    q = torch.zeros(8, 1, 3, 8)
    with pytest.raises(ValueError, match="ulysses=2 does not divide the 3 query heads"):
        cp.attention(q, q, q, layout=layout)
    q = torch.zeros(8, 1, 4, 8)
    with pytest.raises(ValueError, match="not a multiple of the 3"):
        cp.attention(q, q[:, :, :3], q[:, :, :3], layout=layout)
    with pytest.raises(ValueError, match="the layout gives each rank 8"):
        cp.attention(q[:4], q, q, layout=layout)
    with pytest.raises(kernels.KernelUnavailable, match="cudnn"):
        cp.attention(q, q, q, layout=layout, kernel="cudnn")


def test_bad_inputs_are_refused_by_name(pool):
    pool.run(refuse_bad_inputs, 2)
