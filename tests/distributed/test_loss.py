# SPDX-License-Identifier: Apache-2.0
"""The chunked loss against plain cross-entropy in float64: sum and both gradients, for masks and logits of any kind."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from megatron.context_parallel.core.groups import initialize_grid
from megatron.context_parallel.fpdt.chunked_ffn import even_spans
from megatron.context_parallel.fpdt.chunked_loss import chunked_linear_cross_entropy
from tests.errors import worst

S, B, H = 12, 3, 16


def compare(tensor, sequence_parallel, chunks, vocab, scale, dtype):
    """Largest errors of (sum, hidden gradient, weight gradient), relative to the largest entry."""
    grid = initialize_grid(tensor=tensor)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(S, B, H, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(vocab, H, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab, (S, B), generator=generator)
    weights = (torch.rand(S, B, generator=generator) > 0.3).double()
    weights[:, 1] = 0  # a sample that is all masked
    hidden, weight = hidden.to(dtype).double(), weight.to(dtype).double()
    whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    losses = functional.cross_entropy((whole[0] @ whole[1].t()).flatten(0, 1), labels.flatten(), reduction="none")
    expected = (losses * weights.flatten()).sum()
    (expected * 0.7).backward()

    rows = -(-vocab // (4 * tensor)) * 4  # padded
    padded = torch.full((rows * tensor, H), 50.0, dtype=torch.float64)  # padding that would win, were it looked at
    padded[:vocab] = weight
    mine = padded[rows * grid.tensor.rank : rows * (grid.tensor.rank + 1)].to(dtype).requires_grad_()
    part = slice(None)
    if sequence_parallel:
        part = slice(S // tensor * grid.tensor.rank, S // tensor * (grid.tensor.rank + 1))
    local = hidden[part].to(dtype).requires_grad_()
    total = chunked_linear_cross_entropy(
        local,
        mine,
        labels,
        weights.to(dtype),
        chunks=chunks,
        vocab_size=vocab,
        tensor=grid.tensor,
        sequence_parallel=sequence_parallel,
    )
    (total * 0.7).backward()
    grads = [torch.empty_like(mine) for _ in range(tensor)]
    dist.all_gather(grads, mine.grad, group=grid.tensor.group)
    weight_grad = torch.cat(grads)
    assert not weight_grad[vocab:].any()
    with torch.no_grad():
        again = chunked_linear_cross_entropy(
            local,
            mine,
            labels,
            weights.to(dtype),
            chunks=1,
            vocab_size=vocab,
            tensor=grid.tensor,
            sequence_parallel=sequence_parallel,
        )
    pairs = [
        (total, expected),
        (again, expected),
        (local.grad, whole[0].grad[part]),
        (weight_grad[:vocab], whole[1].grad),
    ]
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]


@pytest.mark.parametrize("tensor, sequence_parallel", [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("chunks, vocab", [(1, 40), (3, 37), (5, 8), (1000, 3)])
def test_float64_matches_plain_cross_entropy(pool, tensor, sequence_parallel, chunks, vocab):
    for scale in (1.0, 1000.0):  # logits of several thousand: exp alone would overflow
        errors = pool.run(compare, tensor, tensor, sequence_parallel, chunks, vocab, scale, torch.float64)
        assert worst(errors) < 1e-10, errors


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_softmax_is_in_fp32(pool, dtype, tolerance):
    # bf16 rounds logits and gradients to 2**-8 once each
    errors = pool.run(compare, 2, 2, True, 4, 37, 1.0, dtype)
    assert worst(errors) < tolerance, errors


@pytest.mark.parametrize("rows, chunks", [(1, 1), (7, 3), (8, 8), (3, 10), (100, 7)])
def test_spans_cover_the_rows_evenly(rows, chunks):
    cut = even_spans(rows, chunks)
    assert [row for start, stop in cut for row in range(start, stop)] == list(range(rows))
    sizes = [stop - start for start, stop in cut]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1 and len(cut) == min(rows, chunks)
