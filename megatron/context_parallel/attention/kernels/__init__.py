# SPDX-License-Identifier: Apache-2.0
"""Local attention kernels, one file a backend: a tile's (out, lse), and its gradients given the final out and lse."""

from __future__ import annotations

import torch

from megatron.context_parallel.attention.kernels.base import Kernel, KernelUnavailable, tensor_reason
from megatron.context_parallel.attention.kernels.cpu import CpuKernel
from megatron.context_parallel.attention.kernels.cudnn import CudnnKernel
from megatron.context_parallel.attention.kernels.flash import FlashKernel
from megatron.context_parallel.attention.kernels.flash_attn_kernel import FlashAttnKernel, installed_version
from megatron.context_parallel.attention.kernels.math_kernel import MathKernel
from megatron.context_parallel.attention.kernels.preference import preferred

__all__ = ["KERNELS", "Kernel", "KernelUnavailable", "available", "select", "select_simulated"]

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (FlashAttnKernel(), CudnnKernel(), FlashKernel(), CpuKernel(), MathKernel())
}


def available(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    many_tiles: bool = False,
    needs_mask: bool = False,
    needs_dropout: bool = False,
) -> list[str]:
    """Names of the kernels that can run such tensors, best first (preference.py); of those only what can mask, or drop,
    if need be."""
    needs = (needs_mask, needs_dropout)
    order = _order(torch.device(device), many_tiles)
    return [name for name in order if _why_not(name, torch.device(device), dtype, head_dim, *needs) is None]


def select(
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    many_tiles: bool = False,
    needs_mask: bool = False,
    needs_dropout: bool = False,
) -> Kernel:
    """The kernel named ``name``; ``auto`` takes the first of `available`.

    Args:
        many_tiles: see `preference.preferred`.

    Raises KernelUnavailable, a ValueError of one line, for an unknown name and for a kernel that cannot run here.
    """
    needs = {"needs_mask": needs_mask, "needs_dropout": needs_dropout}
    usable = available(device, dtype, head_dim, many_tiles=many_tiles, **needs)
    if name == "auto" and usable:
        return KERNELS[usable[0]]
    if name in usable:
        return KERNELS[name]
    if name == "auto":
        reason = f"no kernel takes {dtype} on {device}"
    elif name in KERNELS:
        reason = _why_not(name, torch.device(device), dtype, head_dim, needs_mask, needs_dropout)
    else:
        reason = f"no such kernel, only auto, {', '.join(KERNELS)}"
    here = ", ".join(usable) if usable else "none"
    raise KernelUnavailable(name, f"{reason}; kernels that can run here: {here}")


def select_simulated(
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    many_tiles: bool = False,
    needs_mask: bool = False,
    needs_dropout: bool = False,
) -> Kernel:
    """As `select`, of a GPU that is simulated on ``device``: PyTorch's flash attention stands for every fused kernel,
    and the machine's file says how fast the one that would run is.

    Raises KernelUnavailable for what no GPU runs.
    """
    if name not in ("auto", *KERNELS):
        select(name, device=device, dtype=dtype, head_dim=head_dim, needs_mask=needs_mask)
    unfused = needs_mask or needs_dropout or tensor_reason(dtype, head_dim) is not None
    if name == "cpu" or (name not in ("auto", "math") and unfused):
        raise KernelUnavailable(name, "cannot run this on a GPU: use auto, or math")
    return KERNELS["math" if name == "math" or unfused else "flash"]


def _order(device: torch.device, many_tiles: bool) -> list[str]:
    capability = None
    if device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
    order = preferred(capability, flash_attn=installed_version(capability), many_tiles=many_tiles)
    return [name for name in order if name in KERNELS]


def _why_not(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, needs_mask: bool, needs_dropout: bool
) -> str | None:
    if needs_mask and not KERNELS[name].supports_mask:
        return "takes no mask, which this attention pattern needs"
    if needs_dropout and not KERNELS[name].supports_dropout:
        return "has no attention dropout by position"
    return KERNELS[name].why_not(device=device, dtype=dtype, head_dim=head_dim)
