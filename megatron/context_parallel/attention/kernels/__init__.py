# SPDX-License-Identifier: Apache-2.0
"""Local attention kernels, one file for each: they add lists of tiles to out and lse, or to dq, dk and dv.

base.py has their contract, sums.py the sums; tile_by_tile.py and fused_kernel.py adapt kernels of one tile. A new
kernel needs a file in this folder and a line in megatron/decisions/kernel_order.py, which names all kernels and the
order in which `auto` tries them.

- math_kernel.py: plain PyTorch, the reference; cpu_kernel.py: PyTorch's flash attention for CPUs
- flash_kernel.py, cudnn_kernel.py: fused kernels of PyTorch; flash_attn_kernel.py: those of the package flash-attn
- cudnn_flex_kernel.py, flash_attn_4_kernel.py: libraries that take all tiles in one call, as intervals.py gives them
- triton_kernels/: one launch for all tiles, with masks, ALiBi, dropout and soft-cap
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from math import inf

import torch

from megatron.context_parallel.attention.kernels.base import Capability, Kernel, KernelUnavailable
from megatron.context_parallel.attention.kernels.flash_attn_kernel import installed_version
from megatron.decisions.kernel_order import KERNELS as PLACES
from megatron.decisions.kernel_order import preferred
from megatron.platform.hooks import replaceable

__all__ = ["KERNELS", "NEEDS", "Kernel", "KernelUnavailable", "available", "choose_on", "select"]


def _made(module: str, name: str) -> Kernel:
    return getattr(import_module(f"{__name__}.{module}"), name)()


KERNELS: dict[str, Kernel] = {name: _made(*place.split(":")) for name, place in PLACES.items()}

NEEDS = {
    "needs_mask": ("supports_mask", "does not support masks, which this attention pattern needs"),
    "needs_bias": ("supports_bias", "does not support ALiBi"),
    "needs_dropout": ("supports_dropout", "does not support attention dropout by position"),
    "needs_softcap": ("supports_softcap", "does not support a soft-cap of attention scores"),
    "needs_value_dim": ("supports_value_dim", "does not support value heads of another size than key heads"),
}
"""Optional features of a kernel: the attribute that says whether the kernel has it, and the message if it does not."""


def available(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, *, tile_rows: float = inf, **needs: bool
) -> list[str]:
    """Names of the kernels that can run on these tensors, best first; ``needs``: some of :data:`NEEDS`."""
    device = torch.device(device)
    order = _order(device, tile_rows)
    return [name for name in order if _why_not(name, device, dtype, head_dim, needs) is None]


@replaceable
def select(
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    tile_rows: float = inf,
    **needs: bool,
) -> Kernel:
    """The kernel named ``name``; ``auto`` takes the first of `available`. ``needs`` are some of :data:`NEEDS`.

    Args:
        tile_rows: see `decisions.kernel_order.preferred`.

    Raises KernelUnavailable, a ValueError of one line, for an unknown name and for a kernel that cannot run.
    """
    usable = available(device, dtype, head_dim, tile_rows=tile_rows, **needs)
    if name == "auto" and usable:
        return KERNELS[usable[0]]
    if name in usable:
        return KERNELS[name]
    why = _why_not(name, torch.device(device), dtype, head_dim, needs) if name in KERNELS else None
    raise _unavailable(name, f"no kernel supports {dtype} on {device}", why, "here", usable)


def choose_on(
    name: str,
    capability: Capability,
    dtype: torch.dtype,
    head_dim: int,
    *,
    flash_attn: int | None = None,
    tile_rows: float = inf,
    crossover: Mapping[str, float] | None = None,
    **needs: bool,
) -> str:
    """The name of the kernel that `select` would choose on a GPU of ``capability``, which this machine need not have.

    Args:
        flash_attn: version of the package flash-attn on the machine with that GPU; None: it is not installed.
        tile_rows, crossover: see `decisions.kernel_order.preferred`.

    Raises KernelUnavailable like `select`.
    """
    why: dict[str, str | None] = {}
    for kernel in preferred(capability, flash_attn=flash_attn, tile_rows=tile_rows, crossover=crossover):
        why[kernel] = _lacks(kernel, needs) or KERNELS[kernel].why_not_on(capability, dtype, head_dim)
    usable = [kernel for kernel, reason in why.items() if reason is None]
    if name in usable:
        return name
    if name == "auto":
        usable = [kernel for kernel in usable if kernel != "flash_attn" or flash_attn]
        if usable:
            return usable[0]
    unknown = "unknown, because no such GPU is visible"
    raise _unavailable(name, f"no kernel supports {dtype}", why.get(name, unknown), "on that GPU", usable)


def _unavailable(name: str, nothing: str, why: str | None, where: str, usable: list[str]) -> KernelUnavailable:
    """The error for kernel ``name``: ``nothing`` is the reason for ``auto``, ``why`` that for a named kernel."""
    if name == "auto":
        reason = nothing
    elif name in KERNELS:
        reason = why
    else:
        reason = f"no such kernel, only auto, {', '.join(KERNELS)}"
    return KernelUnavailable(name, f"{reason}; kernels that can run {where}: {', '.join(usable) or 'none'}")


def _order(device: torch.device, tile_rows: float) -> list[str]:
    capability = None
    if device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
    order = preferred(capability, flash_attn=installed_version(capability), tile_rows=tile_rows)
    known = [name for name in order if name in KERNELS]
    return [*known, *(name for name in KERNELS if name not in known)]  # kernels added by a program come last


def _why_not(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, needs: Mapping[str, bool]
) -> str | None:
    return _lacks(name, needs) or KERNELS[name].why_not(device=device, dtype=dtype, head_dim=head_dim)


def _lacks(name: str, needs: Mapping[str, bool]) -> str | None:
    for need, wanted in needs.items():
        has, reason = NEEDS[need]
        if wanted and not getattr(KERNELS[name], has, False):
            return reason
    return None
