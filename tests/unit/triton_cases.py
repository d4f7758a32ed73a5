# SPDX-License-Identifier: Apache-2.0
"""Attention by the Triton kernels against its definition in float64; test_triton.py calls it in a subprocess."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.parallel_attention import run_kernel
from megatron.context_parallel.attention.kernels import KERNELS
from megatron.context_parallel.attention.kernels.base import Final, Scores
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.attention.kernels.triton_kernels import triton_call
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Launch
from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import TritonKernel
from megatron.context_parallel.attention.rule import AttentionRule
from megatron.context_parallel.attention.usp import attention_by_rule
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.masks import Causal, Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, Spans, positions
from megatron.context_parallel.layout.tiles import tiles
from megatron.context_parallel.linear_attention import block_scan, decay_spans
from megatron.context_parallel.linear_attention.rules import RULES, prepare
from megatron.context_parallel.linear_attention.span_maps import BlockSpans
from megatron.context_parallel.positions.position_dropout import LANES, LEVELS, Dropout
from megatron.decisions import block_sizes
from megatron.decisions.block_sizes import Blocks, BlockTable

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """Queries at ``q_at`` attend to key blocks that come one after another, as on a ring."""

    mask: Mask = Causal()
    q_at: Spans = ((0, 70),)
    blocks: tuple[Spans, ...] = (((0, 70),),)
    b: int = 1
    h: int = 2
    hk: int = 1
    d: int = 16
    dv: int = 16
    dtype: torch.dtype = torch.float32
    slopes: tuple[float, ...] | None = None
    softcap: float | None = None
    dropout: Dropout | None = None
    layout: str = "plain"
    one_pass: bool = False  # the backward pass
    plain: bool = False  # plain ranges by their own kernel, where it can run
    long: bool = False  # with the block sizes for many keys
    described: bool = False  # the backward pass loads blocks by descriptors


def slopes_of(case: Case, device: torch.device) -> Tensor:
    """fp64 [h]: ALiBi's slope of each head; those of the case, halved each time that they are repeated."""
    own = torch.tensor(case.slopes, device=device, dtype=torch.float64)
    return torch.cat([own / 2**n for n in range(-(-case.h // len(own)))])[: max(case.h, len(own))]


def some_pairs(q: Tensor, k: Tensor) -> Tensor:
    """A mask function that allows most pairs, but none for every 9th query."""
    return ((q * 7 + k * 3) % 5 != 0) & (q % 9 != 4)


@dataclass
class Tensors:
    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    dout: Tensor


def make(case: Case, device: torch.device = CPU) -> Tensors:
    torch.manual_seed(7)
    s, lengths = len(positions(case.q_at, CPU)), [len(positions(at, CPU)) for at in case.blocks]

    def random(rows: int, heads: int, size: int) -> Tensor:
        if case.layout == "surrounded":  # by numbers that must not be read
            whole = torch.full((rows + 40, case.b, heads, size + 20), torch.nan, device=device, dtype=case.dtype)
            part = whole[:rows, ..., :size]
            return part.copy_(torch.randn(part.shape))
        if case.layout == "strided":  # [b, d, h, s] memory: an unfavourable order for kernels
            return torch.randn(case.b, size, heads, rows).to(device, case.dtype).permute(3, 0, 2, 1)
        return torch.randn(rows, case.b, heads, size).to(device, case.dtype)

    q = random(s, case.h, case.d)
    keys = [random(t, case.hk, case.d) for t in lengths]
    values = [random(t, case.hk, case.dv) for t in lengths]
    dout = random(s, case.h, case.dv)
    if case.layout == "strided":
        dout = dout[:1, :, :1].expand(dout.shape)  # one gradient for all
    return Tensors(q, keys, values, dout)


def merge_errors(dtype: torch.dtype) -> dict[str, float]:
    """Errors of out and lse of 45 rows, of which some have keys in one tile alone or in none, against float64.

    The sum of dtype fp32 is merged in place; that of a narrower dtype becomes a new one.
    """
    torch.manual_seed(3)
    rows, b, h, d = 45, 2, 3, 20
    tile_out = torch.randn(b, h, rows, d).to(dtype).permute(2, 0, 1, 3)
    out = torch.randn(rows, b, 2 * h, d + 3).to(dtype)[:, :, ::2, :d]
    lse, tile_lse = torch.randn(b, rows, h).transpose(0, 1) * 30, torch.randn(b, h, rows).permute(2, 0, 1) * 30
    lse[::7], tile_lse[::3] = -torch.inf, -torch.inf
    lse[1], tile_lse[1] = 1000.0, 1000.0  # equal and large
    out[::7], tile_out[::3] = 0.0, 0.0
    weights = torch.stack([lse, tile_lse]).double().softmax(0).nan_to_num(0.0).unsqueeze(-1)
    exact = weights[0] * out.double() + weights[1] * tile_out.double()
    exact_lse, kept = torch.logaddexp(lse.double(), tile_lse.double()), out.clone()
    merged = triton_call.merge(out, lse, tile_out, tile_lse)
    assert merged.dtype == torch.float32 and (merged is out or out.equal(kept))
    finite = exact_lse.isfinite()
    assert lse.isfinite().equal(finite)
    relative = (lse - exact_lse).abs() / exact_lse.abs().clamp(min=1)
    return {"out": float((merged - exact).abs().max()), "lse": float(relative[finite].max())}


def computed(case: Case, x: Tensors) -> dict[str, Tensor]:
    """out, lse and gradients by the kernels, one key block after another.

    In the plain layout the first launches write their results, the only ones in the final dtype; in the others all
    launches add to sums.
    """
    s, device = x.q.size(0), x.q.device

    def sums(shape: tuple[int, ...], fill: float = 0.0) -> Tensor:
        if case.layout == "strided":  # every second entry of a larger tensor, which must stay unchanged
            return torch.full((shape[0], 2, *shape[1:], 2), fill, device=device)[:, 1, ..., 1]
        return torch.full(shape, fill, device=device)

    fresh, only = case.layout == "plain", len(case.blocks) == 1
    if fresh:
        result, dq = Accumulator(x.q, case.dv, only=only), GradientSum(x.q, only=only)
        grads = [KeyGradients(k, v, only=True) for k, v in zip(x.k, x.v)]
    else:
        out, lse = sums((s, case.b, case.h, case.dv), torch.nan), sums((s, case.b, case.h), -torch.inf)
        result, dq = Accumulator(x.q, case.dv, out, lse), GradientSum(x.q, sums(x.q.shape))
        totals = [sums((*k.shape[:3], case.d + case.dv)) for k in x.k]
        grads = [KeyGradients(k, v, total) for k, v, total in zip(x.k, x.v, totals)]
    slopes = None if case.slopes is None else slopes_of(case, device).float()
    scores = Scores(case.d**-0.5, case.mask, slopes, dropout=case.dropout, softcap=case.softcap)
    tiles_of_blocks, kernel = [tiles(case.q_at, at, case.mask) for at in case.blocks], TritonKernel()
    kernels, short = (("plain",) if case.plain else ()) + ("forward",), 0 if case.long else block_sizes.SHORT
    for some, k, v in zip(tiles_of_blocks, x.k, x.v):
        with launching(*kernels, short=short), mock.patch.object(triton_call, "SHORT", 0):
            kernel.attend(some, x.q, k, v, scores, result)
    out, lse = result.out_SBHD, result.lse_SBH
    final = Final(x.dout, None, lse, kernel.delta(out, x.dout))
    kernels += ("backward",) if case.one_pass else ("queries", "keys")
    sizes = replace(block_sizes.INTERPRETED, described=case.described)
    for some, k, v, dkv in zip(tiles_of_blocks, x.k, x.v, grads):
        with launching(*kernels, short=short), mock.patch.object(block_sizes, "INTERPRETED", sizes):
            kernel.attend_grad(some, x.q, k, v, scores, final, dq, dkv)
    dk, dv = (torch.cat([getattr(dkv, name).finish() for dkv in grads]) for name in ("dk", "dv"))
    out = torch.where(lse.isneginf()[..., None], 0.0, out)  # undefined for queries in no tile
    return {"out": out, "lse": lse, "dq": dq.finish(), "dk": dk, "dv": dv}


@contextmanager
def launching(*kernels: str, short: int) -> Iterator[None]:
    """In this context calls choose these kernels, and blocks for short ranges below ``short`` keys."""
    with mock.patch.object(triton_call, "passes", lambda *_, **__: kernels):
        with mock.patch.object(block_sizes, "SHORT", short):
            yield


def truth(case: Case, x: Tensors) -> dict[str, Tensor]:
    """out, lse and gradients in float64, from the definition."""
    q, k, v = (y.double().requires_grad_() for y in (x.q, torch.cat(x.k), torch.cat(x.v)))
    device = x.q.device
    q_at, k_at = positions(case.q_at, device), torch.cat([positions(at, device) for at in case.blocks])
    group = case.h // case.hk
    scores = torch.einsum("sbhd,tbhd->bhst", q, k.repeat_interleave(group, 2)) * case.d**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.slopes is not None:
        distance = (q_at[:, None] - k_at).abs()
        scores = scores - slopes_of(case, device)[:, None, None] * distance
    allowed = case.mask.allowed(q_at[:, None], k_at[None])
    scores = scores.masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    p = scores.softmax(-1).masked_fill(~allowed, 0.0)
    if case.dropout is not None:
        groups = torch.arange(-(-int(k_at.max() + 1) // 4), device=device)
        rows, columns = case.dropout.row_keys(q_at, case.h), case.dropout.column_keys(groups)[:, None]
        p = p * case.dropout.kept(rows, columns)[..., k_at] * case.dropout.scale
    out = torch.einsum("bhst,tbhd->sbhd", p, v.repeat_interleave(group, 2))
    grads = torch.autograd.grad(out, (q, k, v), x.dout.double())
    return {"out": out.detach(), "lse": lse.detach().permute(2, 0, 1), **dict(zip(("dq", "dk", "dv"), grads))}


def largest_errors(result: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, float]:
    """Errors relative to the largest entry; infinite if the two have non-finite entries at different places."""
    errors = {}
    for name, want in true.items():
        have = result[name].double()
        if not torch.equal(have.isfinite(), want.isfinite()):
            errors[name] = float("inf")
            continue
        have, want = have.nan_to_num(neginf=0.0), want.nan_to_num(neginf=0.0)
        errors[name] = ((have - want).abs().max() / want.abs().max()).item()
    return errors


def errors(case: Case, device: torch.device = CPU) -> dict[str, float]:
    x = make(case, device)
    return largest_errors(computed(case, x), truth(case, x))


def kernels_of(case: Case) -> list[str]:
    """The names of the kernels of a forward pass; nothing is run."""
    x, names = make(case), []
    with mock.patch.object(Launch, "run", lambda launch: names.append(launch.kernel.fn.__name__)):
        computed(case, x)
    return names


def errors_and_flash_errors(case: Case) -> tuple[dict[str, float], dict[str, float]]:
    """(errors of the kernels, errors of PyTorch's flash attention for the CPU)."""
    x = make(case)
    q, k, v, dout = (y.permute(1, 2, 0, 3) for y in (x.q, x.k[0], x.v[0], x.dout))
    causal, scale = isinstance(case.mask, Causal), case.d**-0.5
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, scale=scale
    )
    flash = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads))}
    flash = {name: y.permute(2, 0, 1, *range(3, y.dim())) for name, y in flash.items()}
    true = truth(case, x)
    return largest_errors(computed(case, x), true), largest_errors(flash, true)


def with_a_pair_at_the_threshold(case: Case) -> Case:
    """The case with a dropout whose threshold is the number of a pair, which is then just kept."""
    rows = positions(case.q_at, CPU)
    groups = torch.arange(-(-max(stop for at in case.blocks for _, stop in at) // LANES))

    def kept(threshold: int) -> Tensor:
        dropout = Dropout(threshold / LEVELS, seed=5)
        return dropout.kept(dropout.row_keys(rows, case.h), dropout.column_keys(groups)[:, None])

    columns = torch.cat([positions(at, CPU) for at in case.blocks])
    some = range(LEVELS // 4, LEVELS // 2)
    threshold = next(n for n in some if not torch.equal(kept(n)[..., columns], kept(n + 1)[..., columns]))
    return replace(case, dropout=Dropout(threshold / LEVELS, seed=5))


def errors_in_blocks_of(
    case: Case, block: int, step: int, split: bool = False, one_loop: bool = False
) -> dict[str, float]:
    with mock.patch.object(block_sizes, "INTERPRETED", Blocks(block, step, split=split, one_loop=one_loop)):
        return errors(case)


def errors_of_measured_passes() -> dict[str, float]:
    q, k, v, dout = (torch.randn(40, 1, heads, 16) for heads in (4, 2, 2, 4))
    mine, true = (run_kernel(kernel, q, k, v, dout) for kernel in (TritonKernel(), KERNELS["math"]))
    return largest_errors(*(dict(zip(("out", "dq", "dk", "dv"), tensors)) for tensors in (mine, true)))


def errors_far_apart(case: Case, folder: Path) -> dict[str, float]:
    """Errors for inputs in sparse files, whose heads and outer rows are more than 2^31 elements apart."""
    number = 0

    def far(y: Tensor) -> Tensor:
        nonlocal number
        number += 1
        strides = (2**26 + 32, 64, 2**31 + 2**20, 1)
        size = 1 + sum((n - 1) * stride for n, stride in zip(y.shape, strides))
        memory = torch.from_file(str(folder / f"{number}"), shared=True, size=size, dtype=y.dtype)
        return memory.as_strided(y.shape, strides).copy_(y)

    x = make(case)
    spread = Tensors(far(x.q), [far(y) for y in x.k], [far(y) for y in x.v], far(x.dout))
    return largest_errors(computed(case, spread), truth(case, x))


def measured_fields(candidates: dict[str, list[Blocks]], fastest: list[Blocks], too_large: Blocks) -> dict:
    """The fields of a machine file, measured with a timer to which only ``fastest`` are fast."""
    from triton.runtime.errors import OutOfResources

    from tools.hardware_figures import block_fields

    def timer(launches: list[Launch]) -> float:
        for launch in launches:
            launch.run()
        if launches[0].sizes == too_large:
            raise OutOfResources(2, 1, "shared memory")
        return 1.0 + (launches[0].sizes not in fastest)

    return block_fields(candidates, timer, CPU, lambda text: None, heads=(16,), length=40, count=2, dtype=torch.float16)


def launched(table: BlockTable | None, dtype: torch.dtype, **options: float) -> tuple[list[Blocks], dict[str, float]]:
    """The block sizes of all launches of attention by a rule with ``table``, and its errors against the math kernel."""
    sizes, run, layout = [], Launch.run, SequenceLayout(40, abstract_grid())
    torch.manual_seed(1)
    x = [torch.randn(40, 1, heads, 16).to(dtype) for heads in (4, 2, 2, 4)]

    def spy(launch: Launch) -> None:
        sizes.append(launch.sizes)
        run(launch)

    def passes(rule: AttentionRule) -> dict[str, Tensor]:
        leaves = [y.detach().requires_grad_() for y in x[:3]]
        out = attention_by_rule(*leaves, layout=layout, rule=rule, masks=[Causal()])
        out.backward(x[3])
        return {"out": out.detach(), **{name: y.grad for name, y in zip("qkv", leaves)}}

    with mock.patch.object(Launch, "run", spy):
        ours = passes(AttentionRule(kernel="triton", measured=table, **options))
    true = passes(AttentionRule(kernel="math", **options))
    return sizes, largest_errors(ours, {name: y.double() for name, y in true.items()})


def before_nan(x: Tensor) -> Tensor:
    """x in memory that goes on with NaN, which must not be read."""
    return torch.cat([x.flatten(), torch.full((2**12,), torch.nan)])[: x.numel()].view(x.shape)


def errors_of_decays(
    sizes: tuple[int, ...],
    rows: Span,
    starts: tuple[int, ...],
    packed: bool,
    skip: bool,
    dtype: torch.dtype,
    states: int,
) -> list[float]:
    """Errors of a span's outputs, of the state after it and of all gradients by the kernels for rules without a delta,
    against blocks in float64.

    Args:
        sizes: tokens, samples, key heads, heads, keys, values. ``starts``: tokens that forget all before them.
        packed: the state before the span is a map; then R is compared, too.
        states: elements of states that are kept at a time.
    """
    (length, b, key_heads, heads, keys, values), draw = sizes, torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(length, b, key_heads, keys), dim=-1) for _ in range(2))
    gates = [-torch.nn.functional.softplus(normal(length, b, heads) - 2), normal(length, b, heads).sigmoid()]
    gates[0][list(starts)] = -torch.inf
    gates += [normal(1, 1, heads).expand(length, b, heads)] if skip else []
    wide = normal(length, b, heads, values + 3).to(dtype)  # v and the gradient of the outputs are not contiguous
    x = [q.to(dtype), k.to(dtype), wide[..., 1 : values + 1], *(gate.float() for gate in gates)]
    dout = normal(b, heads, length, values).to(dtype).permute(2, 0, 1, 3)
    state, dstate = normal(b, heads, keys, values), normal(b, heads, keys, values)
    if packed:
        state = torch.cat((normal(b, heads, 1, 1).expand(-1, -1, keys, 1), state), dim=-1)
    results = []
    for spans, kind in ((decay_spans.DecaySpans(RULES["mamba2"]), None), (BlockSpans(RULES["mamba2"]), torch.float64)):
        own, given, before, after = [one.to(kind) for one in x], dout.to(kind), *(
            one.to(kind or torch.float32) for one in (state, dstate)
        )  # fmt: skip
        out, grads = torch.zeros_like(own[2]), [torch.zeros_like(one) for one in own]
        reads = [out.new_zeros(rows[1] - rows[0], b, heads, keys)] if packed else []
        with mock.patch.object(decay_spans, "STATES", states):
            entries, end = spans.outputs(own, rows, before, out, *reads)
            start = spans.grads(own, rows, [one[..., -values:] for one in entries], given, after, grads)
        results.append([end, start, *reads, *(one[slice(*rows)] for one in (out, *grads))])
    return [float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in zip(*results)]


def errors_of_states(name: str, keys: int, values: int) -> list[float]:
    """Errors of states and of their gradients by the kernels of linear attention, against PyTorch."""
    rule, generator = RULES[name], torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    g = -normal(2, 6, 96, *([keys] if rule.channels else [])).abs() / 4
    q, k = (torch.nn.functional.normalize(normal(2, 3, 96, keys), dim=-1) for _ in range(2))
    ready = prepare(rule, q, k, normal(2, 6, 96, values), g, normal(2, 6, 96).sigmoid(), block=block_scan.KERNEL_BLOCK)
    state, dstate = (block_scan.as_columns(normal(2, 6, keys, values), ready) for _ in range(2))
    state, dout, dstate = map(before_nan, (state, normal(*block_scan.one_head_a_key(ready).own.shape), dstate))
    ours, expected = (
        [
            *block_scan.states(ready, state, kernel=kernel),
            block_scan.state_after(ready, state, kernel=kernel),
            *block_scan.state_grads(ready, dout, dstate, kernel=kernel),
        ]
        for kernel in (True, False)
    )
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, expected)]
