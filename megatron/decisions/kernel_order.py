# SPDX-License-Identifier: Apache-2.0
"""The order in which ``auto`` tries attention kernels on each GPU, fastest first, and where each kernel can run.

The order comes from published measurements; our own should replace them:

- Hopper: flash-attn 3 and cuDNN use its new instructions and are 1.6 to 1.75 times as fast as FlashAttention-2
  (FlashAttention-3 paper, figure 5).
- Blackwell's data-centre GPUs: cuDNN is as fast as FlashAttention-4 (flash-attention pull request 2605); version 2 of
  flash-attn does not use their new instructions.
- Ampere, Ada and Blackwell's other GPUs: FlashAttention-2; cuDNN has 0.82 to 1.0 of its speed (Hugging Face's
  transformers, pull request 48163: A100, A10G, L40S, RTX PRO 6000).
- Small tiles: Triton's kernel computes all of them in one launch; the others need several calls for each. CROSSOVER
  says from which size on their speed makes up for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

# Every attention kernel: its name in --attention-kernel and machine files, and its class in
# context_parallel/attention/kernels/. A new kernel is a file there and a line here; `auto` takes it before `math`.
KERNELS = {
    "flash_attn": "flash_attn_kernel:FlashAttnKernel",
    "cudnn": "cudnn_kernel:CudnnKernel",
    "flash": "flash_kernel:FlashKernel",
    "cudnn_flex": "interval_kernels.cudnn_flex_kernel:CudnnFlexKernel",
    "flash_attn_4": "interval_kernels.flash_attn_4_kernel:FlashAttn4Kernel",
    "cpu": "cpu_kernel:CpuKernel",
    "triton": "triton_kernels.triton_kernel:TritonKernel",
    "math": "math_kernel:MathKernel",
}
BY_NAME = ("cudnn_flex", "flash_attn_4")  # nothing has measured them: `auto` takes them only if no other kernel can run
# Rows of a tile from which a kernel is expected to be faster than Triton's. This is a prediction for H100 with 32 heads
# of 128 in bf16; a machine's file may replace it by a measurement ("crossover"). Forward and backward of a causal tile
# of n rows are 29,000 n^2 FLOPs. Triton's kernels should reach 0.46 of the peak (0.58 and 0.43, from the machine code
# and allowing a quarter for latencies), FlashAttention-3 0.6 (0.75 and 0.55, published): 6.3e-11 and 4.9e-11 n^2
# seconds. The faster kernel takes about 0.2 ms more for each tile, for its launches and for merging out and gradients:
# 1.4e-11 n^2 = 2e-4 gives n = 3,800. cuDNN also makes a plan on the host for each new shape: 50 ms give n = 60,000.
CROSSOVER = {"flash_attn": 4096.0, "flash": 4096.0, "cudnn": 65536.0}
HOPPER, BLACKWELL = (9,), (10, 11)  # major versions of the compute capability; 12 is treated like 8
UNMEASURED = "has not been measured"
LARGEST_HEAD = 256  # of Triton's kernel
SHORTER_HEADS = "needs a head dimension of at most 128 (256 on Hopper with cuDNN 9.10)"


def preferred(
    capability: tuple[int, int] | None,
    *,
    flash_attn: int | None = None,
    tile_rows: float = inf,
    crossover: Mapping[str, float] | None = None,
) -> tuple[str, ...]:
    """Names of kernels, best first, whether or not they can run; slow kernels with all features come last.

    Kernels that this function does not rank come before ``math``, those of ``BY_NAME`` after it.

    Args:
        capability: of the GPU; None: a CPU.
        flash_attn: version of flash-attn that would run on it; None: not installed.
        tile_rows: rows of a typical tile (layout/masks.py); infinity: the mask is causal or full, and tiles are large.
        crossover: measured rows of a tile from which a kernel is faster than Triton's, instead of CROSSOVER.
    """
    major = capability[0] if capability else None
    if major in HOPPER:
        fused = ["flash_attn", "cudnn", "flash"] if flash_attn == 3 else ["cudnn", "flash_attn", "flash"]
    elif major in BLACKWELL:
        fused = ["cudnn", "flash_attn", "flash"]
    else:
        fused = ["flash_attn", "flash", "cudnn"]
    if capability is None:
        order = ["cpu", "triton", "math", "flash_attn", "cudnn", "flash"]
    elif tile_rows == inf:
        order = [*fused, "triton", "cpu", "math"]
    else:
        limits = dict(CROSSOVER)
        if major in HOPPER or major in BLACKWELL:  # Triton's kernel uses their instructions, FlashAttention-2 does not
            limits |= dict.fromkeys(["flash"] if flash_attn == 3 else ["flash", "flash_attn"], inf)
        limits |= crossover or {}
        first = [name for name in fused if tile_rows >= limits[name]]
        later = sorted(set(fused) - set(first), key=lambda name: (name == "cudnn", fused.index(name)))
        order = [*first, "triton", *later, "cpu", "math"]
    math = order.index("math")
    more = (name for name in KERNELS if name not in (*order, *BY_NAME))
    return (*order[:math], *more, *order[math:], *BY_NAME)


def lacks(kernel: str, capability: tuple[int, int], head_dim: int) -> str | None:
    """Why a kernel is not expected to run plain tiles in bf16 on a GPU of this capability, or None."""
    if kernel == "cpu":
        return "needs tensors on the CPU"
    if kernel == "math":
        return None
    if kernel == "triton":
        return f"needs a head dimension of at most {LARGEST_HEAD}" if head_dim > LARGEST_HEAD else too_old(capability)
    return fused_lacks(kernel, capability, head_dim) if kernel in CROSSOVER else UNMEASURED


def fused_lacks(kernel: str, capability: tuple[int, int], head_dim: int, *, half: bool = True) -> str | None:
    """Why a kernel of a library, for one tile, cannot run on a GPU of this capability, or None.

    Args:
        half: the tensors are bf16 or fp16.
    """
    if not half:
        return "needs bf16 or fp16"
    if head_dim % 8 or head_dim > 256:
        return "needs a head dimension that is a multiple of 8 and at most 256"
    major, minor = capability
    reason = too_old(capability)
    if kernel == "cudnn" and reason is None and head_dim > 128 and capability != (9, 0):
        return SHORTER_HEADS
    if kernel == "flash" and reason is None and head_dim > 192 and ((major == 8 and minor > 0) or major == 12):
        return "needs a data-centre GPU for the backward of head dimensions above 192"
    return reason


def too_old(capability: tuple[int, int]) -> str | None:
    """Why a GPU of this capability is too old, or None."""
    return "needs a GPU of compute capability 8.0 or newer" if capability < (8, 0) else None


def plain_kernel(capability: tuple[int, int], attention_kernel: str, head_dim: int) -> str | None:
    """The kernel for plain tiles in bf16: ``attention_kernel`` if it can run, else the choice of ``auto``, or None.

    ``flash_attn`` means that the package is installed, in the version for this GPU.
    """
    version = {"flash_attn": 3 if capability == (9, 0) else 2}.get(attention_kernel)
    measured = (None, UNMEASURED)  # the machine's file measured its own kernel
    usable = [
        kernel
        for kernel in preferred(capability, flash_attn=version)
        if lacks(kernel, capability, head_dim) in measured[: 1 + (kernel == attention_kernel)]
    ]
    if attention_kernel != "flash_attn" and attention_kernel in usable:
        return attention_kernel
    return next((kernel for kernel in usable if kernel != "flash_attn" or version), None)
