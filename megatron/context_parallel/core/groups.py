# SPDX-License-Identifier: Apache-2.0
"""The grid's process groups: from megatron-core if it is installed, else from torch.distributed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from megatron.context_parallel.layout.grid import Grid, initialize_world, make_grid, model_size


def initialize_grid(
    *,
    ulysses: int = 1,
    ring: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int | None = None,
    backend: str | None = None,
    timeout_minutes: float = 10,
    core_options: Mapping[str, Any] | None = None,
) -> Grid:
    """Create the process groups and return the grid. The size of data parallelism follows from the world size.

    torch.distributed is initialized from the environment (torchrun) unless it already is; a single process without
    torchrun becomes a world of one. If megatron-core is installed, the groups are its own (``parallel_state``).

    Args:
        ulysses, ring, tensor, pipeline: sizes of the axes.
        virtual_pipeline: virtual stages of each pipeline rank, for the interleaved schedule.
        backend: torch.distributed backend; default: nccl if there is a GPU, else gloo.
        timeout_minutes: time limit of a collective.
        core_options: further arguments of megatron-core's ``initialize_model_parallel``.

    Raises:
        ValueError: the grid does not divide the world size, or an argument needs megatron-core, which is not installed.
    """
    sizes = {"ulysses": ulysses, "ring": ring, "tensor": tensor, "pipeline": pipeline}
    if not core_installed():
        if virtual_pipeline is not None or core_options:
            raise ValueError("virtual_pipeline and core_options are for megatron-core: pip install megatron-core")
        return make_grid(**sizes, backend=backend, timeout_minutes=timeout_minutes)
    with warnings.catch_warnings():  # core reports at import that apex and Transformer Engine are missing
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state

    initialize_world(backend, timeout_minutes)
    model_size(**sizes)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual_pipeline,
        context_parallel_size=ulysses * ring,
        hierarchical_context_parallel_sizes=[ulysses, ring],
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=dist.get_backend() != "gloo",
        distributed_timeout_minutes=timeout_minutes,
        **(core_options or {}),
    )
    return current_grid()


def current_grid() -> Grid:
    """The grid of megatron-core's current groups.

    Raises:
        ValueError: megatron-core is not installed.
    """
    if not core_installed():
        raise ValueError("current_grid needs megatron-core, which is not installed: keep what initialize_grid returns")
    from megatron.core import parallel_state as groups

    ulysses, ring = groups.get_hierarchical_context_parallel_groups()
    return Grid.from_groups(
        ulysses=ulysses,
        ring=ring,
        context=groups.get_context_parallel_group(),
        tensor=groups.get_tensor_model_parallel_group(),
        data=groups.get_data_parallel_group(),
        pipeline=groups.get_pipeline_model_parallel_group(),
    )


def core_installed() -> bool:
    """Whether megatron-core can be imported."""
    try:
        return find_spec("megatron.core") is not None
    except ImportError:
        return False


def forget_grid() -> None:
    """Forget megatron-core's groups, so that another grid can be made in this process."""
    if core_installed() and "megatron.core.parallel_state" in sys.modules:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
