# SPDX-License-Identifier: Apache-2.0
"""Device memory that no tensor of the program holds: the CUDA context, cuBLAS' workspace, NCCL's buffers.

A machine's file gives them under ``runtime``: measured by tools/measure_hardware.py on a GPU, or assumed, as the file's
sources say. What a file leaves open is assumed here:

- a context with PyTorch's kernels, loaded as they are used: 0.5 GiB;
- cuBLAS' workspace, which PyTorch takes from its own allocator, so that it is part of what that reserves: 32 MiB on
  Hopper and later, else two of 4 MiB and eight of 16 KiB (PyTorch's notes on CUDA, CUBLAS_WORKSPACE_CONFIG);
- NCCL's buffers of a communicator: NCCL_BUFFSIZE, 4 MiB, for each channel's two directions, with 16 channels over a
  node's links and 2 a neighbour over the network (NCCL's documentation of its environment variables).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.simulator.dry_run.pool import MIB
from megatron.simulator.machines.machine import Machine
from megatron.training.arguments.config import Config

CONTEXT = 512 * MIB
NCCL_BUFFER = 4 * MIB
CHANNELS, NETWORK_CHANNELS = 16, 2
ASSUMED = "assumed, not measured"


@dataclass(frozen=True)
class RuntimeMemory:
    """Bytes of one process; ``communicators``: groups of more than one rank that NCCL has buffers for; ``source``:
    where the figures come from."""

    context: int
    cublas: int
    nccl: int
    communicators: int
    source: str = ASSUMED

    @property
    def beside(self) -> int:
        """Bytes that PyTorch's allocator does not have."""
        return self.context + self.nccl


def runtime_memory(config: Config, world_size: int, machine: Machine) -> RuntimeMemory:
    """Of a rank of ``config``'s grid."""
    p = config.parallel
    tensor, ulysses, ring = p.tensor_model_parallel_size, p.ulysses_parallel_size, p.ring_parallel_size
    inner = tensor * ulysses * ring
    data = world_size // (inner * p.pipeline_model_parallel_size)
    groups = [(tensor, tensor), (ulysses, tensor * ulysses), (ring, inner), (data * ulysses * ring, inner * data)]
    groups += [(p.pipeline_model_parallel_size, world_size)]
    used = [(size, span) for size, span in groups if size > 1]
    given = machine.runtime
    hopper = machine.capability >= (9, 0)
    near, far = (2 * NCCL_BUFFER * channels for channels in (CHANNELS, 2 * NETWORK_CHANNELS))
    near, far = _or(given.nccl, near), _or(given.nccl_network, far)
    nccl = sum(near if span <= machine.gpus else far for _, span in used)
    cublas = _or(given.cublas, 32 * MIB if hopper else 8 * MIB + 128 * 1024)
    source = machine.sources.get("runtime", ASSUMED)
    return RuntimeMemory(_or(given.context, CONTEXT), cublas, nccl, len(used), source)


def _or(given: float | None, assumed: int) -> int:
    return assumed if given is None else int(given)


def needed_by_setting(
    reserved: dict[str, float], config: Config, world_size: int, machine: Machine
) -> dict[str, float]:
    """Bytes of a device that a rank's process takes, by the allocator's setting; empty where it was not replayed."""
    if not reserved or not machine.is_gpu:
        return {}
    own = runtime_memory(config, world_size, machine).beside
    return {setting: size + own for setting, size in reserved.items()}
