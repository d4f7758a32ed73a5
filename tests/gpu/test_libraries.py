# SPDX-License-Identifier: Apache-2.0
"""Libraries on a GPU: attention's kernels that take all tiles in one call, and fla-core's linear attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import megatron.context_parallel as cp
from megatron.context_parallel.attention.kernels import KERNELS
from megatron.context_parallel.attention.kernels.base import Final, Kernel, Scores
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.tiles import tiles
from megatron.context_parallel.linear_attention import decay_spans, fla_kernels
from megatron.context_parallel.linear_attention.rules import RULES
from megatron.context_parallel.linear_attention.span_maps import BlockSpans, identity
from tests.gpu.test_masks import LENGTH, PAIRS, SIZE, TILED, TOLERANCE, largest_error
from tests.unit.triton_cases import Case, Tensors, largest_errors, make, truth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the libraries need a CUDA device")

PLAIN = {"causal": cp.Causal(), "full": cp.Full(), **TILED}
DEVICE = torch.device("cuda")


def skip_without(name: str, head_dim: int = SIZE) -> None:
    reason = KERNELS[name].why_not(device=DEVICE, dtype=torch.bfloat16, head_dim=head_dim)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


@pytest.mark.parametrize("name", ["cudnn_flex", "flash_attn_4"])
@pytest.mark.parametrize("mask", PLAIN)
def test_all_tiles_in_one_call(mask, name):
    skip_without(name)
    assert largest_error(PLAIN[mask], name) < TOLERANCE


@pytest.mark.parametrize("mask", PAIRS)
def test_masks_of_pairs_as_intervals(mask):
    skip_without("cudnn_flex")
    assert largest_error(PAIRS[mask], "cudnn_flex") < TOLERANCE


# Key blocks come one after another, as on a ring; some queries see no key of a block, and some none at all.
ZIGZAG = {"q_at": ((0, 256), (768, 1024)), "blocks": (((256, 512), (512, 768)), ((0, 256), (768, 1024)))}
RING = {
    "causal": cp.Causal(),
    "window": cp.Window(300),
    "documents": cp.Documents((100, 900, 1024)),
    "empty rows": cp.BlockSparse(128, cp.BlockList(((0,), (), (1,), (2,), (3,), (4,), (), (0, 7))), 1024),
}


def block_by_block(case: Case, x: Tensors, kernel: Kernel) -> dict[str, Tensor]:
    """out, lse and gradients, one key block after another."""
    scores, result = Scores(case.d**-0.5, case.mask), Accumulator(x.q, case.dv)
    work = [tiles(case.q_at, at, case.mask) for at in case.blocks]
    for some, k, v in zip(work, x.k, x.v):
        kernel.attend(some, x.q, k, v, scores, result)
    out, lse = result.finish()
    final, dq, sums = Final(x.dout, out, lse, kernel.delta(out, x.dout)), GradientSum(x.q), []
    for some, k, v in zip(work, x.k, x.v):
        sums.append(KeyGradients(k, v))
        kernel.attend_grad(some, x.q, k, v, scores, final, dq, sums[-1])
    dk, dv = torch.cat([one.packed() for one in sums]).split((case.d, case.dv), dim=3)
    return {"out": out, "lse": lse, "dq": dq.finish(), "dk": dk, "dv": dv}


def ring_case(mask: str, dtype: torch.dtype) -> Case:
    return Case(RING[mask], **ZIGZAG, b=2, h=4, hk=2, d=64, dv=64, dtype=dtype)


@pytest.mark.parametrize("name", ["cudnn_flex", "flash_attn_4"])
@pytest.mark.parametrize("mask", RING)
def test_blocks_merge_by_lse(mask, name):
    skip_without(name, 64)
    case = ring_case(mask, torch.bfloat16)
    x = make(case, DEVICE)
    found = largest_errors(block_by_block(case, x, KERNELS[name]), truth(case, x))
    assert max(found.values()) < TOLERANCE, found


def linear_inputs(rule: str, length: int, batch: int, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator(DEVICE).manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(length, batch, *shape, generator=draw, device=DEVICE)

    q, k = (torch.nn.functional.normalize(normal(2, 64), dim=-1) for _ in range(2))
    g = -torch.nn.functional.softplus(normal(4, *([64] if RULES[rule].channels else [])) - 2)
    skip = [normal(4)] if rule == "mamba2" else []
    return [*(x.to(dtype) for x in (q / 8, k, normal(4, 64))), g, normal(4).sigmoid(), *skip]


def errors(mine: list[Tensor], true: list[Tensor]) -> list[float]:
    return [float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in zip(mine, true)]


@pytest.mark.parametrize("documents", [(), ((100, 101, LENGTH),), ((100, LENGTH), (500, LENGTH))], ids=len)
@pytest.mark.parametrize(
    "rule, name",
    [
        ("gated_delta", "fla"),
        ("kda", "fla"),
        ("mamba2", "fla"),
        ("decay", "fla"),
        ("mamba2", "triton"),
        ("decay", "triton"),
    ],
)
def test_kernels_of_linear_attention_agree_with_blocks(rule, name, documents):
    how = {"device": DEVICE, "dtype": torch.bfloat16, "keys": 64, "values": 64}
    if reason := (fla_kernels if name == "fla" else decay_spans).why_not(RULES[rule], **how):
        pytest.skip(reason)
    layout, x = cp.SequenceLayout(LENGTH, abstract_grid()), linear_inputs(rule, LENGTH, 2, torch.bfloat16)
    results = []
    for kernel in (name, "blocks"):
        leaves = [one.clone().requires_grad_() for one in x]
        skip = {"skip": leaves[5]} if len(x) > 5 else {}
        out = cp.linear_attention(*leaves[:5], **skip, rule=rule, layout=layout, documents=documents, kernel=kernel)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert max(errors(*results)) < 3e-2, errors(*results)  # both keep states in bf16


@pytest.mark.parametrize("rule", ["gated_delta", "kda", "mamba2"])
def test_maps_and_reads_of_a_span_by_fla(rule):
    how = {"device": DEVICE, "dtype": torch.bfloat16, "keys": 64, "values": 64}
    if reason := fla_kernels.why_not(RULES[rule], **how):
        pytest.skip(reason)
    x, results = linear_inputs(rule, LENGTH, 1, torch.bfloat16), []
    for spans in (fla_kernels.FlaSpans(RULES[rule]), BlockSpans(RULES[rule])):
        out, reads = torch.empty_like(x[2]), x[2].new_empty(LENGTH, 1, 4, 64)
        _, after = spans.outputs(x, (0, LENGTH), identity(RULES[rule], x), out, reads)
        results.append([out, reads, after])
    assert max(errors(*results)) < 3e-2, errors(*results)
