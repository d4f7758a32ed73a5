# SPDX-License-Identifier: Apache-2.0
"""Variants of our Triton attention kernels in one run: block sizes, short ranges, gradients in one pass or two, first
launches. Each variant is compared with what `auto` would launch today."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

import megatron.context_parallel as cp
from benchmarks.gpu.ahead import compile_ahead
from benchmarks.gpu.attention import TOLERANCE, flops, pairs_of, seconds
from benchmarks.gpu.rates import dtype_of
from benchmarks.gpu.stage import Case, Figures, Sizes, Stage
from benchmarks.parallel_attention import largest_error, log_normal
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Call, Launch
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.tiles import Tiles, tiles
from megatron.decisions.block_sizes import Blocks, Pass
from megatron.simulator.machines.measure_device import seconds_of

Way = Literal["forward", "backward"]
LONG: dict[Pass, Blocks] = {
    "forward": Blocks(128, 64, 8, 3), "queries": Blocks(128, 64, 8, 3), "keys": Blocks(128, 64, 8, 2),
}  # fmt: skip
SHORT: dict[Pass, Blocks] = {
    "forward": Blocks(64, 64, 4, 3), "queries": Blocks(64, 64, 4, 2), "keys": Blocks(64, 32, 4, 3),
}  # fmt: skip
DESCRIBED = Blocks(128, 64, 8, 3, described=True)
TWO_PASSES: dict[str, dict[Pass, Blocks]] = {
    "descriptors, 128 x 64, 3 stages": LONG | {"queries": DESCRIBED, "keys": DESCRIBED},
    "keys 128 x 64, 3 stages": LONG | {"keys": Blocks(128, 64, 8, 3)},
    "keys 128 x 64, 2 stages": LONG,
    "keys 64 x 32, 3 stages": LONG | {"keys": Blocks(64, 32, 4, 3)},
}
PLAIN = [Blocks(128, 64, 4, 3), Blocks(128, 128, 4, 2)]
ONE_PASS = [Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 3), Blocks(64, 32, 4, 2)]


@dataclass(frozen=True)
class Variant:
    """What is timed: the launches of one way with fixed block sizes.

    Attributes:
        mask: a name in `masks`.
        fixed: None: those of decisions/.
        sums: launches add to sums in fp32, which are filled before and cast after them.
    """

    mask: str
    way: Way
    name: str
    fixed: Mapping[Pass, Blocks] | None = None
    sums: bool = False


def masks(sizes: Sizes) -> dict[str, Mask]:
    length = min(sizes.masked)
    ends = log_normal(sizes.documents, length)
    windows = {f"window {left + 1}": cp.Window(left) for left in sizes.windows}
    return {"causal": cp.Causal(), **windows, f"{len(ends)} documents": cp.Documents(ends)}


def variants(sizes: Sizes) -> Iterator[Variant]:
    """The most valuable first: one pass or two, then short ranges, then the rest."""
    for mask in masks(sizes):
        yield Variant(mask, "backward", "today")
    for one in ONE_PASS:
        name = f"one pass, {one.block} x {one.step}, {one.stages} stages"
        yield Variant("causal", "backward", name, {"backward": one})
    yield from (Variant("causal", "backward", f"two passes, {name}", fixed) for name, fixed in TWO_PASSES.items())
    for mask in masks(sizes):
        yield Variant(mask, "forward", "today")
    for one in PLAIN:
        name = f"specialised, {one.block} x {one.step}, {one.stages} stages"
        yield Variant("causal", "forward", name, {"plain": one, "forward": LONG["forward"]})
    short = [mask for mask in masks(sizes) if mask != "causal"]
    for mask in short:
        for way in ("forward", "backward"):
            yield Variant(mask, way, "long blocks", LONG)
            yield Variant(mask, way, "short blocks", SHORT)
            yield Variant(mask, way, "short blocks, one loop", in_one_loop(SHORT))
        yield Variant(mask, "backward", "one pass", {"backward": ONE_PASS[0]})
        yield Variant(mask, "backward", "one pass, one loop", in_one_loop({"backward": ONE_PASS[0]}))
    for mask in ("causal", *short):
        for way in ("forward", "backward"):
            yield Variant(mask, way, "sums in fp32", sums=True)
    for one in (Blocks(64, 64, 4, 3), Blocks(128, 128, 8, 3), Blocks(128, 128, 8, 2)):
        yield Variant("causal", "forward", f"{one.block} x {one.step}, {one.stages} stages", {"forward": one})


def in_one_loop(fixed: Mapping[Pass, Blocks]) -> dict[Pass, Blocks]:
    return {which: Blocks(one.block, one.step, one.warps, one.stages, one_loop=True) for which, one in fixed.items()}


def run(stage: Stage, sizes: Sizes, device: torch.device) -> None:
    """Compile all variants in parallel, then time them."""
    found = list(variants(sizes))
    if device.type == "cpu":
        found = found[3:16:12]  # the interpreter takes seconds for each
    kinds = {(each.way, str(each.fixed), each.sums, each.mask * (each.fixed is None)): each for each in found}
    compile_ahead(stage, [partial(launches, each, sizes) for each in kinds.values()], device)
    cases = [
        Case(f"{each.mask}, {each.way}: {each.name}", partial(measured, each, sizes, device), needed(each, sizes))
        for each in found
    ]
    stage.run(cases)


def needed(variant: Variant, sizes: Sizes) -> float:
    return seconds(sizes, min(sizes.masked))


def launches(variant: Variant, sizes: Sizes, capability: int) -> list[Launch]:
    """The launches of a variant, of tensors without memory."""
    return prepared(variant, sizes, torch.device("meta"), capability)()[0]


def prepared(
    variant: Variant, sizes: Sizes, device: torch.device, capability: int | None
) -> Callable[[], tuple[list[Launch], list[Tensor]]]:
    """Makes the launches of a variant, and the results that they will write."""
    length, model, mask = min(sizes.masked), sizes.model, masks(sizes)[variant.mask]
    dtype = torch.bfloat16 if device.type == "meta" else dtype_of(device)
    draw = None if device.type == "meta" else torch.Generator(device).manual_seed(7)

    def random(heads: int) -> Tensor:
        return torch.randn(length, 1, heads, model.head_dim, generator=draw, device=device, dtype=dtype)

    q, k, v, dout = (random(heads) for heads in (model.heads, model.kv_heads, model.kv_heads, model.heads))
    call = Call(q, k, v, model.head_dim**-0.5, mask, capability=capability, fixed=variant.fixed)
    work = tiles(((0, length),), ((0, length),), mask)
    if variant.way == "forward":
        return partial(forward, call, work, variant.sums)
    row = torch.zeros(length, 1, model.heads, device=device)
    return partial(backward, call, work, variant.sums, dout, row)


def forward(call: Call, work: Tiles, sums: bool) -> tuple[list[Launch], list[Tensor]]:
    result = Accumulator(call.q, call.v.size(3), only=not call.specialised(work))
    fresh = None if sums else result.unset()
    made = call.forward_launches(work, *(fresh or result.sums()), first=fresh is not None)
    return made, [result.out_SBHD]


def backward(call: Call, work: Tiles, sums: bool, dout: Tensor, row: Tensor) -> tuple[list[Launch], list[Tensor]]:
    dq, dkv = GradientSum(call.q, only=True), KeyGradients(call.k, call.v, only=True)
    first = set() if sums else call.written(work, backward=True)
    of_q = dq.unset() if "q" in first else dq.sum()
    of_k = dkv.unset() if "k" in first else dkv.sums()
    return call.backward(work, dout, row, row, of_q, *of_k, first=first), [of_q, *of_k]


def measured(variant: Variant, sizes: Sizes, device: torch.device) -> Figures:
    """Seconds of a variant with its fills and casts, after a comparison with today's launches."""
    capability = None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
    make = prepared(variant, sizes, device, capability)

    def whole(make: Callable[[], tuple[list[Launch], list[Tensor]]] = make) -> list[Tensor]:
        made, results = make()
        for launch in made:
            launch.run()
        return [result.to(dtype_of(device)) for result in results]

    today = whole(prepared(Variant(variant.mask, variant.way, "today"), sizes, device, capability))
    error = largest_error(whole(), today)
    if not error <= TOLERANCE:
        raise ValueError(f"differs from today's by {error:.1e}: not measured")
    took = seconds_of(whole, device, sizes.window)
    work = flops(sizes, pairs_of(masks(sizes)[variant.mask], min(sizes.masked)))
    work *= 1.0 if variant.way == "forward" else 2.5
    made = make()[0]
    blocks = {launch.kernel.fn.__name__: str(launch.sizes) for launch in made}
    figures = {"mask": variant.mask, "way": variant.way, "name": variant.name, "launches": len(made)}
    return figures | {"seconds": took, "flops_per_second": work / took, "error": error, "blocks": blocks}
