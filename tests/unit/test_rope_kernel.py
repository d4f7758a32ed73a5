# SPDX-License-Identifier: Apache-2.0
"""RoPE's fused kernel: correct in Triton's interpreter, and compiled without a GPU."""

from __future__ import annotations

import importlib.util
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron.context_parallel.positions.rope import Rope, Yarn, rotary_angles
from tests.distributed.pool import fork_server
from tests.errors import worst
from tests.patience import patience

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

FAR = 2**22


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable]:
    """Calls functions in a separate process, because Triton chooses its interpreter at its first import."""
    with ProcessPoolExecutor(1, fork_server()) as one:  # its processes have imported Triton with the interpreter
        yield lambda function, *arguments: one.submit(function, *arguments).result(patience(100))


@pytest.fixture(scope="module")
def compiling() -> Iterator[Callable]:
    """Calls functions in a separate process with Triton's compiler."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as one:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "0")
            started = one.submit(abs, 0)  # with the current environment
        started.result(patience(60))
        yield lambda function, *arguments: one.submit(function, *arguments).result(patience(100))


# ---- in the interpreter


def exactly(x: torch.Tensor, angles: torch.Tensor, rope: Rope, sign: int) -> torch.Tensor:
    """``x`` rotated by ``sign`` times the angles, in fp64 by complex multiplication."""
    half = rope.dim // 2
    first = list(range(0, rope.dim, 2)) if rope.interleaved else list(range(half))
    second = [i + (1 if rope.interleaved else half) for i in first]
    z = torch.complex(x[..., first].double(), x[..., second].double())
    z = z * torch.polar(torch.full_like(angles.double(), rope.attention_factor), sign * angles.double())
    out = x.double().clone()
    out[..., first], out[..., second] = z.real, z.imag
    return out


def errors(rope: Rope, size: int, dtype: torch.dtype, per_sample: bool, heads: int) -> list[float]:
    """Largest errors for several strides and both signs: absolute in fp32, else in units of the last place."""
    from megatron.context_parallel.positions.rope_kernel import rotated

    torch.manual_seed(0)
    rows = 19 if rope.dim < 64 else 70  # with large heads a program has few rows
    angles = rotary_angles(torch.randint(FAR, (rows, 2 if per_sample else 1)), rope.inverse_frequencies())[:, :, None]
    wide = torch.randn(rows, 2, heads, 3 * size).to(dtype)
    inputs = [
        wide[..., size : 2 * size],
        wide[..., :size].contiguous(),
        wide[..., :size].permute(3, 2, 1, 0).contiguous(),
    ]
    inputs[2] = inputs[2].permute(3, 2, 1, 0)
    results = []
    for x, sign in zip(inputs, (1, -1, 1)):
        out = rotated(x, angles, rope.dim, rope.attention_factor, rope.interleaved, sign)
        exact = exactly(x, angles, rope, sign)
        assert out.dtype == dtype and out.shape == x.shape
        assert torch.equal(out[..., rope.dim :], x[..., rope.dim :])
        unit = torch.finfo(dtype).eps * exact.abs().clamp(min=1e-2) if dtype != torch.float32 else torch.tensor(1.0)
        results.append(float(((out.double() - exact).abs() / unit).max()))
    return results


@pytest.mark.parametrize(
    "rope, size, dtype, per_sample, heads",
    [
        (Rope(16), 16, torch.float32, False, 3),
        (Rope(12, yarn=Yarn(40.0)), 20, torch.float32, True, 17),  # sizes that do not fill a block
        (Rope(12), 12, torch.float32, False, 2),  # after a head's pairs another token's head begins
        (Rope(16), 19, torch.float32, False, 2),  # after its last entry
        (Rope(16, interleaved=True), 16, torch.float32, True, 2),
        (Rope(6, interleaved=True), 10, torch.bfloat16, False, 3),
        (Rope(16, llama3=8.0), 16, torch.bfloat16, False, 1),
        (Rope(8), 8, torch.float16, True, 2),
        (Rope(64), 66, torch.float32, True, 1),
    ],
    ids=str,
)
def test_rotation_of_any_strides(interpreted, rope, size, dtype, per_sample, heads) -> None:
    # Rounded once, at the end. The interpreter truncates bf16, but a GPU rounds it, as checked below.
    limit = {torch.float32: 1e-6, torch.float16: 0.51, torch.bfloat16: 1.0}[dtype]
    results = interpreted(errors, rope, size, dtype, per_sample, heads)
    assert worst(results) < limit, results


def through_autograd(rope: Rope) -> list[float]:
    """Errors of output and gradient against `Rope.rotate`, for tensors that claim to be on a GPU."""
    from megatron.context_parallel.positions import rope as module
    from megatron.context_parallel.positions import rope_kernel

    calls = []

    class OnGpu(torch.Tensor):
        is_cuda = True

    def counting(x, *others):
        calls.append(x.dtype)
        return rope_kernel_rotated(x.as_subclass(torch.Tensor), *others)

    rope_kernel_rotated, rope_kernel.rotated = rope_kernel.rotated, counting
    angles = rotary_angles(torch.arange(FAR, FAR + 5), rope.inverse_frequencies())[:, None, None]
    x, grad = torch.randn(5, 1, 2, 8), torch.randn(8, 2, 1, 5).permute(3, 2, 1, 0)
    out = module.rotated(x.as_subclass(OnGpu), angles, rope, 1)
    back = module.rotated(grad.as_subclass(OnGpu), angles, rope, -1)
    leaf = x.clone().requires_grad_()
    plain = rope.rotate(leaf, angles)
    (wanted,) = torch.autograd.grad(plain, leaf, grad)
    assert calls == [torch.float32] * 2
    module.rotated(x.double().as_subclass(OnGpu), angles, rope, 1)
    assert len(calls) == 2  # PyTorch computes fp64
    return [float((out - plain).abs().max()), float((back - wanted).abs().max())]


def test_the_kernel_equals_pytorch(interpreted) -> None:
    assert worst(interpreted(through_autograd, Rope(8, yarn=Yarn(4.0)))) < 1e-6


def worst_sine() -> float:
    from megatron.context_parallel.positions.rope_kernel import rotated

    angles = torch.cat([torch.linspace(0, 2 * torch.pi, 8190), torch.tensor([0.0, 2 * torch.pi])])
    angles = angles.float().clamp(max=torch.tensor(2 * torch.pi).float()).view(-1, 1, 1, 2)
    x = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(len(angles), 1, 1, 4)
    out = rotated(x, angles, 4, 1.0, False, 1).double()[:, 0, 0]
    at = angles[:, 0, 0].double()
    return float(torch.stack([out[:, :2] - at.cos(), out[:, 2:] - at.sin()]).abs().max())


def test_sine_and_cosine_within_a_turn(interpreted) -> None:
    assert interpreted(worst_sine) < 1.5e-7


def far_apart() -> bool:
    """Whether rows of a tensor are right at offsets beyond 32 bits; a sparse file holds the tensor."""
    from megatron.context_parallel.positions.rope_kernel import rotated

    rope = Rope(8)
    angles = rotary_angles(torch.arange(2), rope.inverse_frequencies())[:, None, None]
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(4 * (2**31 + 100))
        whole = torch.from_file(file.name, shared=True, size=2**31 + 100, dtype=torch.float32)
        x = whole.as_strided((2, 1, 2, 8), (2**31 + 50, 2**31 + 50, 8, 1)).normal_()
        return torch.equal(rotated(x, angles, 8, 1.0, False, 1), rotated(x.contiguous(), angles, 8, 1.0, False, 1))


def test_addresses_in_64_bits(interpreted) -> None:
    assert interpreted(far_apart)


# ---- compiled


def resources(capability: int, size: int, dim: int, dtype: torch.dtype, interleaved: bool) -> dict[str, int]:
    """Properties of the compiled kernel: registers, stack and local memory, 16-byte loads and stores, whether bf16 is
    rounded to the nearest."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.context_parallel.positions import rope_kernel

    x = torch.empty(4096, 1, 8, size, dtype=dtype, device="meta")
    angles = torch.empty(4096, 1, 1, dim // 2, device="meta")
    given, constants = rope_kernel.launch(x, x, angles, dim, 1.0, interleaved, 1)
    names = [parameter.name for parameter in rope_kernel.rotate_kernel.params]
    arguments = dict(zip(names, given)) | constants
    pointers = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
    signature, fixed, aligned = {}, {}, {}
    for index, (name, value) in enumerate(arguments.items()):
        if name in constants or (type(value) is int and value == 1):
            signature[name], fixed[name] = "constexpr", value
            continue
        tensor = isinstance(value, torch.Tensor)
        signature[name] = pointers[value.dtype] if tensor else "fp32" if isinstance(value, float) else "i32"
        if tensor or (isinstance(value, int) and value % 16 == 0):
            aligned[index,] = [["tt.divisibility", 16]]
    source = ASTSource(rope_kernel.rotate_kernel, signature, fixed, aligned)
    options = {"num_warps": rope_kernel.WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = {name: int(count) for name, count in re.findall(r"\b([A-Z]+):(\d+)", report)}
    wide = re.findall(r"(?:ld|st)\.global\S*\.v4\.b32", compiled.asm["ptx"])
    rounds = "cvt.rn.bf16" in compiled.asm["ptx"] or dtype == torch.float32
    return {"registers": usage["REG"], "spills": usage["STACK"] + usage["LOCAL"], "wide": len(wide), "rounds": rounds}


COMPILED = [
    (size, dim, dtype, interleaved)
    for size, dim in ((64, 64), (128, 128), (128, 64))
    for dtype in (torch.bfloat16, torch.float32)
    for interleaved in (False, True)
]
SOME = [(90, *COMPILED[4])]
OTHERS = [(c, *case) for c in (80, 90, 100) for case in COMPILED if (c, *case) not in SOME]


@pytest.mark.full
@pytest.mark.parametrize("case", [*SOME, *OTHERS], ids=str)
def test_compiled_without_spills_and_with_wide_loads(compiling, tmp_path, case) -> None:
    results = compiling(resources, *case)
    assert results["spills"] == 0 and results["registers"] <= 128 and results["wide"] >= 2 and results["rounds"], (
        results
    )
