# SPDX-License-Identifier: Apache-2.0
"""Partial outputs merge in fp32, whatever the inputs' dtype, and rows without keys do no harm."""

import pytest
import torch

import megatron.context_parallel as cp
from megatron.context_parallel.attention.attend import tiled_attention
from megatron.context_parallel.attention.kernels import select
from megatron.context_parallel.attention.merge import Accumulator
from megatron.context_parallel.attention.ring import RingSource, schedule
from megatron.context_parallel.attention.ring_plan import ring_plan


def tiles_of(dtype: torch.dtype, pieces: int):
    """Outputs and lse of one query block against ``pieces`` key blocks, from float64; and the whole in float64."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 64, 16, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(1, 2, 64 * pieces, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    kernel = select("math", device=q.device, dtype=q.dtype, head_dim=16)
    whole, _ = kernel.forward(q, k, v, causal=False, mask=None, scale=0.25)
    parts = [
        kernel.forward(q, kk, vv, causal=False, mask=None, scale=0.25)
        for kk, vv in zip(k.chunk(pieces, 2), v.chunk(pieces, 2))
    ]
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return q.permute(2, 0, 1, 3).to(dtype), [(out.to(dtype), lse.to(lse_dtype)) for out, lse in parts], whole


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_many_tiles_merge_without_loss(dtype, tolerance):
    # bf16: half a unit in the last place of the inputs and of the result, 2 * 2**-9; merging in bf16 would pile up 64.
    q, parts, whole = tiles_of(dtype, 64)
    result = Accumulator(q, q.size(3))
    for out, lse in parts:
        result.add((0, 64), out, lse)
    out, lse = result.finish()
    assert out.dtype == dtype
    error = (out.permute(1, 2, 0, 3).double() - whole).abs().max() / whole.abs().max()
    assert error < tolerance


def test_tiles_on_some_rows_and_rows_without_keys():
    q, parts, _ = tiles_of(torch.float64, 2)
    (out, lse), (other, other_lse) = parts
    result = Accumulator(q, q.size(3))
    result.add((0, 32), out[:, :, :32], lse[:, :, :32])
    nothing = torch.full_like(lse[:, :, 32:], -torch.inf)
    result.add((32, 64), torch.zeros_like(out[:, :, 32:]), nothing)
    result.add((0, 64), other, other_lse)
    merged, merged_lse = result.finish()
    assert torch.isfinite(merged).all() and torch.isfinite(merged_lse).all()
    assert torch.allclose(merged[32:], other.permute(2, 0, 1, 3)[32:], rtol=1e-14)


def test_queries_without_any_key_give_zero():
    out, lse = Accumulator(torch.ones(4, 1, 2, 8), 8).finish()
    assert not out.any() and out.shape == (4, 1, 2, 8)
    assert (lse == -torch.inf).all() and lse.shape == (4, 1, 2)


def attend(q, k, v, layout):
    plan = ring_plan(layout, cp.Causal())
    kernel = cp.AttentionRule(kernel="math", scale=0.3).tile_kernel(q, layout.grid.ulysses, len(q))
    return tiled_attention(q, k, v, source=RingSource(plan, layout.grid.ring), kernel=kernel)


def test_gradients_against_finite_differences():
    layout = cp.SequenceLayout(6, cp.abstract_grid())
    q, k, v = (torch.randn(6, 2, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda *x: attend(*x, layout), (q, k, v))


def test_second_derivatives_are_refused_not_wrong():
    layout = cp.SequenceLayout(6, cp.abstract_grid())
    q, k, v = (torch.randn(6, 1, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    (grad,) = torch.autograd.grad(attend(q, k, v, layout).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention has no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mask", [cp.Causal(), cp.Full(), cp.Window(20), cp.Documents((13, 50, 120))], ids=str)
@pytest.mark.parametrize("ring", [1, 2, 3, 5])
def test_what_a_rank_sends_at_a_step_its_peer_receives_at_that_step(balance, mask, ring):
    layout = cp.SequenceLayout(120, cp.abstract_grid(ring=ring), balance)
    steps = [schedule(ring_plan(layout, mask, rank), grads=True) for rank in range(ring)]
    for at in range(ring):
        sent, received = [], []
        for rank in range(ring):
            step = steps[rank][at]
            for found, kind, message in (
                (sent, "keys", step.keys_out),
                (sent, "grads", step.grads_out),
                (received, "keys", step.keys_in),
                (received, "grads", step.grads_in),
                (received, "grads", step.grads_home),
            ):
                ends = (rank, message.peer) if found is sent else (message.peer, rank)
                found += [(kind, ends, message.rows)] if message.rows else []
        assert sorted(sent) == sorted(received)
