# SPDX-License-Identifier: Apache-2.0
"""The differences between a GPU, a CPU and a simulated cluster."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

from megatron.platform import cpu


@dataclass(frozen=True)
class Platform:
    """The device of tensors and the backend of torch.distributed, from :func:`select` or for a simulation.

    Attributes:
        simulated: whether the device is simulated, with fake tensors.
    """

    name: str
    device: torch.device
    backend: str
    simulated: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether GPU kernels run, or are simulated."""
        return self.name == "cuda"

    def device_name(self) -> str:
        """The name of the GPU or of the processor, for logs."""
        return torch.cuda.get_device_name(self.device) if self.name == "cuda" else cpu.processor_name()


class PlatformUnavailable(ValueError):
    """The requested device is not available."""


def select(device: str = "auto", local_rank: int = 0, backend: str | None = None) -> Platform:
    """Choose the device of this process and prepare megatron-core for it.

    Args:
        device: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.
        local_rank: index of this process on its node; selects the GPU.
        backend: torch.distributed backend; default: nccl on GPUs, gloo on a CPU.

    Raises:
        PlatformUnavailable: ``cuda`` without a GPU, nccl on a CPU, or gloo on GPUs.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise PlatformUnavailable(f"--device {device} is unknown: use auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise PlatformUnavailable("--device cuda: no GPU is visible to this torch; use --device cpu or auto")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        if backend == "gloo" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise PlatformUnavailable(
                "--distributed-backend gloo on GPUs: gloo sends host memory alone; leave it out, or use --device cpu"
            )
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return Platform("cuda", torch.device("cuda", torch.cuda.current_device()), backend or "nccl")
    if backend == "nccl":
        raise PlatformUnavailable("--distributed-backend nccl needs GPUs: leave it out, or use --device cuda")
    cpu.run_core_on_cpu()
    return Platform("cpu", torch.device("cpu"), "gloo")


def forget_meshes() -> None:
    """Clear what DTensor has cached, after groups are destroyed: it finds meshes by ranks, with the groups of old."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, debug

        cached = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding  # all that older releases have
        getattr(debug, "_clear_sharding_prop_cache", getattr(cached, "cache_clear", None))()
