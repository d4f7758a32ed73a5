# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compiled for A100, H100 and B200 without a GPU: no spills, tensor cores, enough shared memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import missing_triton
from tests.patience import patience

pytestmark = pytest.mark.skipif(missing_triton() is not None, reason=missing_triton() or "")

CORES = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
VARIANTS = [(), ("mask",), ("alibi",), ("softcap",), ("dropout",)]
PASSES = ("forward", "queries", "keys")
USUAL = [(90, 128, "forward", ("mask",))]
ALL = [
    (capability, head, which, variant)
    for capability in (80, 90, 100)
    for head in (64, 128)
    for which in PASSES
    for variant in VARIANTS
]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """Compiles in a separate process, where Triton's interpreter is off."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
            started = process.submit(abs, 0)
        started.result(patience(60))
        yield lambda *arguments: process.submit(_resources, *arguments).result(patience(120))


def _resources(capability: int, head: int, which: str, variant: tuple[str, ...], dtype: torch.dtype):
    from megatron.context_parallel.attention.kernels.triton_kernels.triton_compile import example, resources

    return resources(example(capability, head, dtype, variant)[which], capability)


def check(taken, capability: int, core: str | None) -> None:
    assert taken.spills == 0
    assert taken.programs >= 1, "more shared memory or registers than a multiprocessor has"
    assert core is None or taken.products.get(core, 0) > 0


@pytest.mark.parametrize("capability, head, which, variant", USUAL)
def test_compiles(compiler, capability, head, which, variant):
    check(compiler(capability, head, which, variant, torch.bfloat16), capability, CORES[capability])


@pytest.mark.full
@pytest.mark.parametrize("capability, head, which, variant", [case for case in ALL if case not in USUAL])
def test_every_variant_compiles(compiler, capability, head, which, variant):
    check(compiler(capability, head, which, variant, torch.bfloat16), capability, CORES[capability])


# Heads of 256 are known to spill registers; remove an entry once it is fixed.
SPILLING = {(90, 256, "queries"), (90, 256, "keys"), (100, 256, "keys")}
SPILLING_FP32: set = set()


def cases(heads: tuple[int, ...], spilling: set) -> list:
    every = [(capability, head, which) for capability in CORES for head in heads for which in PASSES]
    known = pytest.mark.xfail(strict=True, reason="spills registers")
    return [pytest.param(*case, marks=[known] if case in spilling else []) for case in every]


@pytest.mark.full
@pytest.mark.parametrize("capability, head, which", cases((32, 96, 256), SPILLING))
def test_other_head_sizes_compile(compiler, capability, head, which):
    check(compiler(capability, head, which, (), torch.bfloat16), capability, CORES[capability])


@pytest.mark.full
@pytest.mark.parametrize("capability, head, which", [(90, 128, "forward")])
def test_fp32_compiles(compiler, capability, head, which):
    check(compiler(capability, head, which, ("mask",), torch.float32), capability, None)


@pytest.mark.full
@pytest.mark.parametrize("capability, head, which", cases((64, 128, 256), SPILLING_FP32))
def test_fp32_compiles_for_all_heads(compiler, capability, head, which):
    check(compiler(capability, head, which, ("mask",), torch.float32), capability, None)


@pytest.mark.full
@pytest.mark.parametrize("capability, head, which, variant", [case for case in ALL if case[3] != ("mask",)])
def test_every_variant_compiles_in_fp32(compiler, capability, head, which, variant):
    check(compiler(capability, head, which, variant, torch.float32), capability, None)
