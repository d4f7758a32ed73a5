# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compiled for A100, H100 and B200 without a GPU, and properties of their machine code.

No loop spills registers or repeats products, and the memory suffices.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.machine_code import loops, name
from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import missing_triton
from megatron.decisions.block_sizes import EXCEPTIONS, FEATURES, FOR_SHORT, TABLE, Blocks, blocks
from megatron.platform.hooks import replaced
from tests.pairs import also_in_full

needs_triton = pytest.mark.skipif(missing_triton() is not None, reason=missing_triton() or "")

CORES = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
PRODUCTS = {"forward": 2, "queries": 3, "keys": 4, "dk": 3, "dv": 2, "backward": 5}  # of [block, head] x [head, step]
VARIANTS = [(), *((feature,) for feature in FEATURES), FEATURES]
PASSES = ("forward", "queries", "keys")
USUAL = [(90, 128, "keys", ("mask",))]
ALL = [
    (capability, head, which, variant)
    for capability in (80, 90, 100)
    for head in (64, 128, 256)
    for which in PASSES
    for variant in VARIANTS
]


def _resources(
    capability: int, head: int, which: str, variant: tuple[str, ...], dtype: torch.dtype, rows: int = 2**14
) -> list[tuple]:
    """(kernel, arguments, resources) of each kernel of a pass; two where dk and dv have separate ones."""
    from benchmarks.triton_compile import example, resources

    fixed = {which: TABLE[which][capability, head]} if which == "backward" else None
    launches = example(capability, head, dtype, variant, fixed, rows=rows)
    names = [which] if which in launches else ["dk", "dv"]
    sizes = {each: {size: launches[each].arguments[size] for size in SIZES} for each in names}
    return [(each, sizes[each], resources(launches[each], capability)) for each in names]


SIZES = ("BLOCK", "STEP", "HEAD_BLOCK")


def check(kernels: list[tuple], capability: int) -> None:
    for which, sizes, taken in kernels:
        assert taken.programs >= 1, "more shared memory or registers than a multiprocessor has"
        assert taken.products.get(CORES[capability], 0) > 0 and taken.loops
        needed = PRODUCTS[which] * sizes["BLOCK"] * sizes["STEP"] * sizes["HEAD_BLOCK"]
        for loop in taken.loops:
            assert loop.spills == 0, f"{which}: {loop.spills} instructions for spilled registers in a loop"
            assert loop.products in (needed, None), f"{which}: products are repeated {loop.products / needed} times"


def check_fp32(kernels: list[tuple]) -> None:
    for _, _, taken in kernels:
        assert taken.spills == 0 and taken.programs >= 1


@needs_triton
@pytest.mark.parametrize("capability, head, which, variant", USUAL)
@pytest.mark.lab
def test_compiles(compiler, capability, head, which, variant):
    check(compiler(_resources, capability, head, which, variant, torch.bfloat16), capability)


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("capability, head, which, variant", [case for case in ALL if case not in USUAL])
def test_every_variant_compiles(compiler, capability, head, which, variant):
    check(compiler(_resources, capability, head, which, variant, torch.bfloat16), capability)


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("which, capability, head", [(which, *key) for which in FOR_SHORT for key in FOR_SHORT[which]])
def test_programs_for_short_ranges_share_a_multiprocessor(compiler, which, capability, head, variant):
    kernels = compiler(_resources, capability, head, which, variant, torch.bfloat16, 2**11)
    check(kernels, capability)
    assert variant or all(taken.programs > 1 for _, _, taken in kernels)


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("head", [32, 96])
@pytest.mark.parametrize("capability", CORES)
def test_other_head_sizes_compile(compiler, capability, head, which):
    check(compiler(_resources, capability, head, which, (), torch.bfloat16), capability)


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("capability", CORES)
def test_fp32_compiles_for_all_heads(compiler, capability, head, which):
    check_fp32(compiler(_resources, capability, head, which, ("mask",), torch.float32))


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("capability, head, which, variant", [case for case in ALL if case[1] < 256])
def test_every_variant_compiles_in_fp32(compiler, capability, head, which, variant):
    check_fp32(compiler(_resources, capability, head, which, variant, torch.float32))


SHAPES = (128, 128, True, False), (128, 128, True, True), (128, 64, False, False), (64, 96, True, False)
LINEAR = [(capability, *shape) for capability in (80, 90, 100) for shape in SHAPES]


def _linear_resources(capability: int, *shape: int) -> dict:
    from benchmarks.triton_compile import linear_example, resources

    return {name: resources(launch, capability) for name, launch in linear_example(*shape).items()}


@needs_triton
@pytest.mark.parametrize(
    "capability, keys, values, delta, channels", [LINEAR[4], *also_in_full(*LINEAR[:4], *LINEAR[5:])]
)
@pytest.mark.lab
def test_states_of_linear_attention_compile(compiler, capability, keys, values, delta, channels):
    kernels = compiler(_linear_resources, capability, keys, values, delta, channels)
    for which, taken in kernels.items():
        assert taken.programs >= 1 and sum(taken.products.values()), which
        assert all(loop.spills == 0 for loop in taken.loops), which


def _decay_resources(capability: int, *shape: int) -> dict:
    from benchmarks.triton_compile import decay_example, resources

    return {name: resources(launch, capability) for name, launch in decay_example(*shape).items()}


@needs_triton
@pytest.mark.parametrize("capability, keys", [(90, 128), *also_in_full((80, 128), (100, 128), (90, 64))])
@pytest.mark.lab
def test_kernels_for_rules_without_a_delta_compile(compiler, capability, keys):
    """No loop spills. On an A100 the gradients of values, which have no loop, spill some registers."""
    for which, taken in compiler(_decay_resources, capability, keys, 64).items():
        assert taken.programs >= 1 and sum(taken.products.values()), which
        assert all(loop.spills == 0 for loop in taken.loops), which
        assert taken.spills <= (200 if (capability, which) == (80, "value grads") else 0), which


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("capability, head", TABLE["backward"])
def test_a_backward_of_one_pass_compiles(compiler, capability, head, variant):
    """It repeats no product and fits on a multiprocessor; its loops spill some registers."""
    kernels = compiler(_resources, capability, head, "backward", variant, torch.bfloat16)
    ((which, sizes, taken),) = kernels
    needed = PRODUCTS[which] * sizes["BLOCK"] * sizes["STEP"] * sizes["HEAD_BLOCK"]
    assert taken.programs >= 1 and all(loop.products in (needed, None) for loop in taken.loops)


def _specialised(head: int) -> tuple[Any, list[tuple[str, str]]]:
    """The resources of the kernel for plain ranges, and of each of its block loads what is read and where it goes."""
    from benchmarks.triton_compile import compile_launch, example, resources

    launch = example(90, head, fixed={"plain": TABLE["plain"][90, head]}, only="plain")["plain"]
    loads = [line for line in compile_launch(launch, 90).asm["ttgir"].splitlines() if "async_tma_copy_global" in line]
    shapes = (re.findall(r"(?:tensordesc<(?:tensor<)?|memdesc<)([\dx]+)xbf16", line) for line in loads)
    return resources(launch, 90), [tuple(found) for found in shapes]


@needs_triton
@pytest.mark.lab
@pytest.mark.parametrize("head", [64, 128])
def test_warps_of_plain_ranges_are_specialised(compiler, head):
    """Where Triton does not specialise, or loads more than there is memory for, it says nothing."""
    taken, loads = compiler(_specialised, head)
    assert taken.specialised and taken.programs >= 1 and taken.spills == 0
    assert len(taken.loops) == 2 and all(loop.spills == 0 for loop in taken.loops), "two groups of warps compute"
    assert len(loads) == 4 and all(read == into for read, into in loads), loads


def _described(capability: int, which: str) -> Any:
    from benchmarks.triton_compile import example, resources

    fixed = {name: Blocks(128, 64, 8, 3, described=True) for name in ("queries", "keys")}
    return resources(example(capability, 128, fixed=fixed, only=which)[which], capability)


@needs_triton
@pytest.mark.lab
@pytest.mark.parametrize("which", ["queries", "keys"])
@pytest.mark.parametrize("capability", [90, 100])
def test_three_stages_of_descriptors_do_not_spill_in_loops(compiler, capability, which):
    """With pointers the loop over edges spills."""
    taken = compiler(_described, capability, which)
    assert taken.programs >= 1 and len(taken.loops) == 2 and all(loop.spills == 0 for loop in taken.loops)


def _merge_resources(capability: int, narrow: bool) -> tuple[Any, int]:
    """The resources of the kernel that merges outputs, and the number of its loads of 16 bytes."""
    from benchmarks.triton_compile import compile_launch, resources
    from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Launch, merge

    tile, row = (torch.empty(2**14, 1, 8, *size, device="meta") for size in ((128,), ()))
    found: list[Launch] = []
    with replaced(Launch.run, lambda _: found.append):
        merge(tile.bfloat16() if narrow else tile, row, tile.bfloat16(), row)
    ptx = compile_launch(found[0], capability).asm["ptx"]
    return resources(found[0], capability), len(re.findall(r"ld\.global\S*\.v4", ptx))


@needs_triton
@pytest.mark.lab
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_outputs_merge_by_wide_loads(compiler, capability, narrow):
    taken, wide = compiler(_merge_resources, capability, narrow)
    assert taken.spills == 0 and taken.registers <= 128 and wide >= 4


def test_blocks_by_features():
    """A plain call does not get the smaller blocks that a feature needs, and each exception applies to some feature."""
    for (which, family, head), exceptions in EXCEPTIONS.items():
        assert blocks(which, 2, head, family) == TABLE[which][family, head]
        for some, _ in exceptions:
            assert some and some <= set(FEATURES)
            for feature in some:
                smaller = blocks(which, 2, head, family, [feature])
                assert smaller == next(sizes for others, sizes in exceptions if feature in others)


def test_blocks_by_length():
    """Short ranges have small programs, the shortest one loop; dropout needs plain ranges for its hashes."""
    for which, entries in FOR_SHORT.items():
        for (family, head), sizes in entries.items():
            assert blocks(which, 2, head, family, keys=1024) == sizes != blocks(which, 2, head, family)
            assert blocks(which, 2, head, family, keys=256) == replace(sizes, one_loop=True)
            assert not blocks(which, 2, head, family, ["dropout"], keys=256).one_loop
    measured = {"forward": {128: Blocks(128, 32)}}
    assert blocks("forward", 2, 128, 90, measured=measured) == Blocks(128, 32)
    assert blocks("forward", 2, 128, 90, measured=measured, keys=256).block == 64, "long ranges were measured"


CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0020*/                   STL [R1+0x4], R3 ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R56, R24, gdesc[UR12], R56 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   FFMA R2, R2, R3, R4 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/               @P1 MUFU.EX2 R5, R5 ;
        /*0080*/              @!P0 BRA 0x10 ;
        /*0090*/                   STL [R1+0x8], R3 ;
        /*00a0*/                   EXIT ;
"""


@pytest.mark.lab
def test_machine_code_is_read():
    (loop,) = loops(CODE, warps=8, capability=90)
    assert [name(text) for text in loop.body][0] == "HGMMA" and len(loop.body) == 8
    assert loop.spills == 1  # the second one is outside of the loop
    assert loop.products == 2 * (64 * 64 * 16 + 64 * 128 * 16)  # by each of two warp groups
    assert loop.tensor == 2 * 32 + 2 * 64
    assert loop.instructions == 8 * 2
    assert loop.share(ideal=192) == 192 / (192 + 16)
    (one,) = loops(CODE.replace("HGMMA.64x64x16", "HMMA.16816").replace("HGMMA.64x128x16", "HMMA.16816"), 4, 80)
    assert one.products == 2 * 4 * 16 * 8 * 16 and one.tensor == 16
    assert not loops(CODE.replace("HGMMA", "FADD"), 8, 90)
