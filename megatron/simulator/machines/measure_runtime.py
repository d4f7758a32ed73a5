# SPDX-License-Identifier: Apache-2.0
"""Measures device memory that no tensor holds: the CUDA context, cuBLAS' workspace, NCCL's buffers. GPUs only.

What others take is the device's memory in use less what PyTorch's allocator reserves, as the driver and PyTorch say.
Nobody else may use the GPU meanwhile.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

SIDE = 256  # of the product that makes cuBLAS take its workspace


def outside(device: torch.device) -> int:
    """Bytes in use on the device that PyTorch's allocator has not."""
    torch.cuda.synchronize(device)
    free, whole = torch.cuda.mem_get_info(device)
    return whole - free - torch.cuda.memory_reserved(device)


def context_and_workspace(device: torch.device) -> dict[str, int]:
    """Bytes of the context, with what the process's first product loads; and of cuBLAS' workspace, which is what that
    product leaves allocated."""
    a = torch.ones(SIDE, SIDE, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    before = torch.cuda.memory_allocated(device)
    torch.mm(a, a, out=out)
    workspace = torch.cuda.memory_allocated(device) - before
    return {"context": outside(device), "cublas": workspace}


def communicator(group: dist.ProcessGroup, device: torch.device) -> int:
    """Bytes that the group's first all_reduce and all_gather leave in use: all its ranks call this."""
    whole = torch.ones(dist.get_world_size(group), device=device)
    one = whole[:1].clone()  # kernels are loaded, too
    before = outside(device)
    dist.all_reduce(one, group=group)
    dist.all_gather_into_tensor(whole, one, group=group)
    return max(0, outside(device) - before)
