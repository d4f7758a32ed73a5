# SPDX-License-Identifier: Apache-2.0
"""The chunked loss against plain cross-entropy in float64: sum and both gradients, for masks and logits of any kind."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from megatron.context_parallel.core.groups import initialize_grid
from megatron.context_parallel.fpdt import chunked_loss
from megatron.context_parallel.fpdt.chunked_ffn import even_spans
from megatron.context_parallel.fpdt.chunked_loss import chunked_linear_cross_entropy
from megatron.training.loss import sum_of_losses, sum_of_reports
from tests.distributed.flags import P2, SP, STREAM, T2, ZERO1, fpdt
from tests.distributed.test_training import check, cp
from tests.distributed.training_runs import resume, run_training, train_and_save
from tests.errors import worst
from tests.pairs import also_in_full

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
    padded = torch.full((rows * tensor, H), 50.0, dtype=torch.float64)  # padding with the largest logits
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


@pytest.mark.parametrize("tensor, sequence_parallel", [(1, True), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("chunks, vocab", [(1, 40), (3, 37), (5, 8), (1000, 3)])
@pytest.mark.usual(0, 1, 2, 4, 5, 8, 12)
def test_float64_matches_plain_cross_entropy(pool, tensor, sequence_parallel, chunks, vocab):
    for scale in (1.0, 1000.0):  # logits of several thousand: exp alone would overflow
        errors = pool.run(compare, 4, tensor, sequence_parallel, chunks, vocab, scale, torch.float64)
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


@pytest.mark.parametrize("rows, chunks", [(22, 4), (3, 5), (3, 1)])
@pytest.mark.parametrize("hidden", [8, 512])
def test_logits_exist_for_a_chunk_at_a_time(monkeypatch, rows, chunks, hidden):
    """The weight's gradient is added by one product if the gradients of all logits are small beside the weight."""
    pieces, products = [], []
    losses, together = chunked_loss.cross_entropy, chunked_loss.loss_and_gradient
    monkeypatch.setattr(
        chunked_loss, "cross_entropy", lambda x, *rest, **more: pieces.append(len(x)) or losses(x, *rest, **more)
    )
    monkeypatch.setattr(chunked_loss, "loss_and_gradient", lambda *given: products.append(1) or together(*given))
    states = torch.randn(rows, 1, hidden, dtype=torch.float64, requires_grad=True)
    weight, labels = torch.randn(10, hidden, dtype=torch.float64), torch.zeros(rows, 1, dtype=torch.int64)
    chunked_linear_cross_entropy(states, weight, labels, torch.ones(rows, 1), chunks=chunks, vocab_size=10)
    used = min(chunks, rows)
    assert sum(pieces) == rows and max(pieces) <= -(-rows // used) and used <= len(pieces) <= 1.5 * used
    assert len(products) == (used if hidden == 8 else 1)


def test_sums_of_many_tokens_are_exact():
    count, report = sum_of_losses(torch.ones(1).expand(2**24 + 1), torch.tensor(3.0))[1:]
    assert count == 2**24 + 1 and report.tolist() == [3.0, 2**24 + 1]
    assert sum_of_losses(torch.ones(2), torch.tensor([2.0**24, 1.0]))[2].tolist() == [2**24 + 1, 2]


def sum_over_ranks():
    runtime = SimpleNamespace(device=torch.device("cpu"), grid=initialize_grid(ring=2))
    return sum_of_reports([torch.tensor([2.0**25, 1.0]), torch.tensor([1.0, 1.0])], (2,), runtime).tolist()


def test_reports_are_summed_in_double_precision_over_the_ranks(pool):
    assert pool.run(sum_over_ranks, 2) == [[2**26 + 2, 4]] * 2


# ``--loss-scale`` changes no loss, gradient norm or gradient, in whatever dtype and at whatever stage of ZeRO.


@pytest.mark.parametrize(
    "zero, dtype",
    [
        *((0, "--bf16"), (1, ""), (1, "--bf16"), (3, "--bf16")),
        *also_in_full((0, ""), (2, ""), (2, "--bf16"), (3, "")),
    ],
)
@pytest.mark.usual(0, 1)
def test_a_fixed_loss_scale_changes_nothing(pool, zero, dtype):
    flags = f"--num-layers 2 --zero-stage {zero} {dtype}"
    plain, scaled = (pool.run(run_training, 2, f"{flags} {more}", steps=3) for more in ("", "--loss-scale 1024"))
    factor = 1 if zero >= 2 or (zero == 0 and not dtype) else 1024  # core's optimizer unscales later
    for (losses, norms, grads), (scaled_losses, scaled_norms, scaled_grads) in zip(plain, scaled):
        assert (scaled_losses, scaled_norms) == (losses, norms)  # powers of two are exact
        assert all(torch.equal(scaled_grads[name], factor * grad) for name, grad in grads.items())


# --embed-layernorm: losses and all gradients do not depend on the grid. test_hugging_face_load.py shows that the model
# is BLOOM's.


SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0"
BLOOM = f"{SMALL} --embed-layernorm --position-embedding-type alibi"
LEARNED = f"{SMALL} --embed-layernorm"
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.mark.parametrize(
    "world, model, grid",
    [
        (4, BLOOM, f"{SP} {cp(2, 1)} {ZERO1}"),
        (2, LEARNED, SP),  # words are not scattered before the norm
        (2, BLOOM, f"{SP} {fpdt(22, STREAM)}"),
        *also_in_full(
            (4, BLOOM, f"{P2} {cp(1, 2)}"),
            (2, f"{BLOOM} {UNTIED}", "--zero-stage 3 --micro-batch-size 1"),
            (2, LEARNED, T2),
            (4, LEARNED, f"{SP} {cp(1, 2)} --partition-position-embedding"),
            (2, BLOOM, "--zero-stage 2 --micro-batch-size 1"),
            (2, f"{BLOOM} {UNTIED}", f"{P2} --recompute-granularity full --recompute-method uniform "
             "--recompute-num-layers 1"),
        ),
    ],
)  # fmt: skip
@pytest.mark.usual(1)
def test_losses_and_gradients(pool, on_one_process, world, model, grid):
    check(pool, on_one_process, world, model, grid, llama=False, steps=2)


def test_saved_and_loaded_on_another_grid(pool, tmp_path):
    flags = f"{SMALL} --embed-layernorm --micro-batch-size 1"
    _, after = pool.run(train_and_save, 2, f"{flags} --zero-stage 3", str(tmp_path), 1, 2, timeout=120)[0]
    first, resumed = pool.run(resume, 2, f"{flags} {SP} {ZERO1}", str(tmp_path), 2, timeout=120)[0]
    assert first == 1 and resumed == pytest.approx(after, rel=1e-5)


# Attention sinks against megatron-core's own attention: outputs, and the gradients of q, k, v and the sinks.


LENGTH, HEADS, GROUPS, SIZE = 40, 4, 2, 16


def nothing_random():
    return SimpleNamespace(fork=nullcontext)


def compare_with_core(softmax_type):
    """Largest errors of the output and each gradient, relative to core's largest entry."""
    from megatron.core.transformer import dot_product_attention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron.context_parallel as cp
    from megatron import platform
    from megatron.context_parallel.core.spec import AttentionSettings, ContextParallelAttention

    platform.select("cpu", 0, None)
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        softmax_type=softmax_type,
        init_method=lambda x: torch.nn.init.normal_(x, std=2.0),
        masked_softmax_fusion=False,
    )
    ours = ContextParallelAttention(config, AttentionSettings(layout))
    with patch.object(torch.cuda, "current_device", lambda: "cpu"):
        theirs = dot_product_attention.DotProductAttention(config, 1, AttnMaskType.causal, "self")
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(LENGTH, 2, n, SIZE, generator=draw).requires_grad_() for n in (HEADS, GROUPS, GROUPS))
    dout = torch.randn(LENGTH, 2, HEADS * SIZE, generator=draw)
    if softmax_type == "learnable":
        assert list(dict(ours.named_parameters())) == list(dict(theirs.named_parameters()))
        theirs.load_state_dict(ours.state_dict())
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    result = []
    for attention, mask in ((ours, None), (theirs, future)):
        inputs = [q, k, v, *attention.parameters()]
        with patch.object(dot_product_attention.tensor_parallel, "get_cuda_rng_tracker", nothing_random):
            out = attention(q, k, v, mask)
        result.append([out, *torch.autograd.grad(out, inputs, dout)])
    return [float((mine - full).detach().abs().max() / full.detach().abs().max()) for mine, full in zip(*result)]


@pytest.mark.parametrize("softmax_type, gradients", [("vanilla", 3), ("off-by-one", 3), ("learnable", 4)])
def test_the_same_as_core(pool, softmax_type, gradients):
    (errors,) = pool.run(compare_with_core, 1, softmax_type)
    assert len(errors) == 1 + gradients and worst(errors) < 5e-6, errors
