# SPDX-License-Identifier: Apache-2.0
"""Device memory that no tensor holds: the CUDA context, cuBLAS' workspace, NCCL's buffers.

Nothing of this has been measured by us. What is assumed is named where it is told:

- a context with PyTorch's kernels, loaded as they are used: 0.5 GiB;
- cuBLAS' workspace, which PyTorch takes from its own allocator: 32 MiB on Hopper and later, else 8 MiB and 16 KiB
  (PyTorch's notes on CUDA, CUBLAS_WORKSPACE_CONFIG);
- NCCL's buffers of a communicator: NCCL_BUFFSIZE, 4 MiB, for each channel's two directions, with 16 channels over a
  node's links and 2 a neighbour over the network (NCCL's documentation of its environment variables).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.simulator.machines.machine import Machine
from megatron.training.arguments.config import Config

MIB = 2**20
CONTEXT = 512 * MIB
NCCL_BUFFER = 4 * MIB
CHANNELS, NETWORK_CHANNELS = 16, 2
ASSUMED = "assumed, not measured: docs/dry-run.md"


@dataclass(frozen=True)
class RuntimeMemory:
    """Bytes of one process; ``communicators``: groups of more than one rank that NCCL has buffers for."""

    context: int
    cublas: int
    nccl: int
    communicators: int

    @property
    def total(self) -> int:
        return self.context + self.cublas + self.nccl


def runtime_memory(config: Config, world_size: int, machine: Machine) -> RuntimeMemory:
    """Of a rank of ``config``'s grid."""
    p = config.parallel
    tensor, ulysses, ring = p.tensor_model_parallel_size, p.ulysses_parallel_size, p.ring_parallel_size
    inner = tensor * ulysses * ring
    data = world_size // (inner * p.pipeline_model_parallel_size)
    groups = [(tensor, tensor), (ulysses, tensor * ulysses), (ring, inner), (data * ulysses * ring, inner * data)]
    groups += [(p.pipeline_model_parallel_size, world_size)]
    used = [(size, span) for size, span in groups if size > 1]
    nccl = sum(2 * NCCL_BUFFER * (CHANNELS if span <= machine.gpus else NETWORK_CHANNELS * 2) for _, span in used)
    cublas = 32 * MIB if machine.capability >= (9, 0) else 8 * MIB + 16 * 1024
    return RuntimeMemory(CONTEXT, cublas, nccl, len(used))


def needed_by_setting(
    reserved: dict[str, float], config: Config, world_size: int, machine: Machine
) -> dict[str, float]:
    """Bytes of a device that a rank's process takes, by the allocator's setting; empty where it was not replayed."""
    if not reserved or not machine.is_gpu:
        return {}
    own = runtime_memory(config, world_size, machine).total
    return {setting: size + own for setting, size in reserved.items()}
