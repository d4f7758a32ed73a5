# SPDX-License-Identifier: Apache-2.0
"""Starts a run: device, process groups, layout and random states."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import MutableMapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron import platform
from megatron.context_parallel.attention import kernels
from megatron.context_parallel.core.groups import initialize_grid
from megatron.context_parallel.fpdt.host_store import Offload
from megatron.context_parallel.layout.grid import Grid, initialize_world
from megatron.context_parallel.layout.masks import Mask, tile_rows
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.linear_attention.mixer import chosen_kernel
from megatron.context_parallel.linear_attention.rules import RULES
from megatron.platform import forget_meshes
from megatron.platform.network import Unusable
from megatron.training.arguments.validate import transformer_engine_installed
from megatron.training.arguments.validate.check_memory import attention_chunks
from megatron.training.arguments.validate.check_model import varies_by_batch
from megatron.training.model.attention_rule import layer_masks, measured_blocks
from megatron.training.model.batch_plans import BatchPlans, triton_calls
from megatron.training.model.core_config import compute_dtype, virtual_stages
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config
from megatron.training.settings.kinds import kinds_in
from megatron.training.settings.models import model_shape, outside_engine

# --deterministic-mode: a run gives the same bits again on the same grid and the same kind of device. PyTorch's switch
# makes every operator deterministic, or raise. The attention kernels follow it: flash-attn sums in a fixed order, and
# cuDNN's kernel is not used. cuBLAS, NCCL and Transformer Engine are controlled by environment variables, which must be
# set before the GPU is first used. VARIABLES: the value to set by default, and all values that are deterministic.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", (":4096:8", ":16:8")),
    "NCCL_ALGO": ("^NVLS", ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0", ("0",)),
}


def make_deterministic(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make all later computations deterministic.

    Raises:
        Refusal: an environment variable asks for a nondeterministic method.
    """
    for name, (default, deterministic) in VARIABLES.items():
        value = environment.setdefault(name, default)
        if value not in deterministic:
            raise Refusal(
                f"--deterministic-mode and the environment variable {name}={value} contradict each other: results may "
                f"differ between runs; unset the variable, or use {' or '.join(deterministic)}"
            )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # this program never reads uninitialized memory


@dataclass(frozen=True)
class Runtime:
    """The device, grid and layout of this process."""

    platform: platform.Platform
    grid: Grid
    layout: SequenceLayout
    offload: Offload | None = None  # moves tensors to host memory; None if the run does not
    by_documents: bool = False  # attention or positions depend on the ends of documents in a batch
    reset_positions: bool = False  # positions restart in each document
    uses_dropout: bool = False  # dropout masks depend on the numbers of the samples
    ahead: int = 0  # layers of multi-token prediction
    has_experts: bool = False  # their statistics leave out the tokens that the loss leaves out
    layer_loss: str | None = None  # name of the layers' own loss, whose mean is over the same tokens

    @property
    def device(self) -> torch.device:
        return self.platform.device

    @property
    def is_rank_zero(self) -> bool:
        return dist.get_rank() == 0

    @property
    def reads_data(self) -> bool:
        """Whether this rank reads tokens, or numbers of samples for dropout, which every pipeline stage needs."""
        return self.reads_tokens or self.uses_dropout

    @property
    def reads_tokens(self) -> bool:
        """The first pipeline stage needs tokens, the last one labels, and every one the ends of documents.

        With experts, or losses of layers, every stage needs the loss mask.
        """
        every = self.by_documents or self.has_experts or self.layer_loss is not None
        return every or self.grid.pipeline.rank in (0, self.grid.pipeline.size - 1)


def start(config: Config, target: platform.Platform | None = None, offload: Offload | None = None) -> Runtime:
    """Choose the device, make the process groups and seed the random states.

    Settings of ``config`` that are "auto" become what this device uses: the kernels of attention and of linear
    attention, and the implementation of layers. Notes for the log are added to it.

    Args:
        target: the platform of a simulation; selected by default.
        offload: moves tensors to host memory in a simulation.

    Raises:
        Refusal: the device, kernel, grid or network is not available.
    """
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine

    parallel = config.parallel
    if config.run.deterministic_mode:
        make_deterministic()
    try:
        target = target or platform.select(
            config.run.device, int(os.environ.get("LOCAL_RANK", "0")), parallel.distributed_backend
        )
        chosen = {_kernel(config, target.device, mask) for mask in layer_masks(config)}
        config.attention.linear_attention_kernel = _linear_kernel(config, target.device)
    except kernels.KernelUnavailable as error:
        raise Refusal(f"--attention-kernel {error.name}: {error.reason}") from None
    except ValueError as error:
        raise Refusal(str(error)) from None
    if config.attention.attention_block_sizes is not None:
        _check_block_sizes(config, target, chosen)
    # On a GPU `auto` may choose another kernel for each layer, and chooses by the documents of each batch.
    if len(chosen) == 1 and not (target.on_gpu and varies_by_batch(config)):
        (config.attention.attention_kernel,) = chosen
    if target.on_gpu and config.model.attention_dropout and "math" in chosen:
        config.notes.append(
            f"--attention-dropout {config.model.attention_dropout:g}: on a GPU the math kernel computes it, which is "
            "slow at long sequences (docs/inside/grid-invariance.md)"
        )
    if config.model.transformer_impl == "auto":
        engine = target.on_gpu and not target.simulated and transformer_engine_installed()
        engine = engine and outside_engine(config.model) is None
        config.model.transformer_impl = "transformer_engine" if engine else "local"
    try:
        line = initialize_world(target.backend, parallel.distributed_timeout_minutes, parallel.network_interface)
    except Unusable as error:
        refusal = Refusal(str(error))
        refusal.everywhere = True
        raise refusal from None
    if line:
        config.notes.append(line)
    grid = initialize_grid(
        ulysses=parallel.ulysses_parallel_size,
        ring=parallel.ring_parallel_size,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        virtual_pipeline=virtual_stages(config),
        backend=target.backend,
        timeout_minutes=parallel.distributed_timeout_minutes,
        core_options=_expert_groups(config),
    )
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)  # core's schedules warn without it
    chunks = config.chunks
    layout = SequenceLayout(
        config.data.seq_length,
        grid,
        parallel.context_parallel_balance,
        chunks=attention_chunks(config),
        tensor_parts=grid.tensor.size if chunks.fpdt and parallel.sequence_parallel else 1,
    )
    seed_everything(config.run.seed, grid)
    offloads = (chunks.fpdt and chunks.fpdt_offload) or chunks.offload_checkpoints
    return Runtime(
        target,
        grid,
        layout,
        (offload or Offload(target.device)) if offloads else None,
        by_documents=varies_by_batch(config),
        reset_positions=config.data.reset_position_ids,
        uses_dropout=config.model.hidden_dropout > 0 or config.model.attention_dropout > 0,
        ahead=config.model.mtp_num_layers or 0,
        has_experts=config.model.num_experts is not None,
        layer_loss=next(filter(None, (kind.loss(config.model) for kind in kinds_in(config.model))), None),
    )


def _check_block_sizes(config: Config, target: platform.Platform, chosen: set[str]) -> None:
    """Refuse block sizes that no layer uses, or that were measured on another kind of GPU."""
    flag = f"--attention-block-sizes {config.attention.attention_block_sizes}"
    _, measured_on = measured_blocks(config.attention.attention_block_sizes)
    if "triton" not in chosen:
        raise Refusal(
            f"{flag}: is for the kernel triton, but attention uses {', '.join(sorted(chosen))}: leave it out, or add "
            "--attention-kernel triton"
        )
    model = config.model
    features = {
        "fp32": compute_dtype(config).itemsize != 2,
        "ALiBi": model.position_embedding_type == "alibi",
        "a soft-cap": model.attn_logit_softcapping is not None,
        "attention dropout": model.attention_dropout > 0 and not config.run.skip_train,
        "masks of pairs": all(mask.fine for mask in layer_masks(config)),
    }
    if found := [name for name, present in features.items() if present]:
        raise Refusal(f"{flag}: its sizes are not for {found[0]}: leave it out")
    if target.on_gpu and not target.simulated:
        here = torch.cuda.get_device_capability(target.device)
        if here != measured_on:
            raise Refusal(
                f"{flag}: was measured on a GPU of capability {'{}.{}'.format(*measured_on)}, but this one has "
                f"{'{}.{}'.format(*here)}: measure this one"
            )


def _kernel(config: Config, device: torch.device, mask: Mask) -> str:
    """Name of the attention kernel of a layer with this mask. Raises KernelUnavailable."""
    kernel = kernels.select(
        config.attention.attention_kernel,
        device=device,
        dtype=compute_dtype(config),
        head_dim=config.model.kv_channels,
        tile_rows=0.0 if varies_by_batch(config) else tile_rows(mask),
        needs_mask=mask.fine,
        needs_bias=config.model.position_embedding_type == "alibi",
        needs_dropout=config.model.attention_dropout > 0 and not config.run.skip_train,
        needs_softcap=config.model.attn_logit_softcapping is not None,
        needs_value_dim=config.model.multi_latent_attention and config.model.v_head_dim != config.model.kv_channels,
    )
    return kernel.name


def _linear_kernel(config: Config, device: torch.device) -> str:
    """The kernels of linear-attention and SSM layers.

    Raises:
        Refusal: those that the command names cannot run.
    """
    linear, name = model_shape(config.model, 1).linear, config.attention.linear_attention_kernel
    if linear is None or linear.rule is None:
        return name
    sizes = {"keys": linear.keys, "values": linear.values}
    try:
        return chosen_kernel(name, RULES[linear.rule], device=device, dtype=compute_dtype(config), **sizes)
    except kernels.KernelUnavailable as error:
        raise Refusal(f"--linear-attention-kernel {name}: {error.reason}") from None


def batch_plans(config: Config, runtime: Runtime) -> BatchPlans | None:
    """Makes the attention plans of the batches where they differ by their documents; None elsewhere."""
    if not config.data.reset_attention_mask or runtime.platform.simulated:
        return None
    model, triton = config.model, None
    if config.attention.attention_kernel in ("auto", "triton"):
        present = {
            "alibi": model.position_embedding_type == "alibi",
            "softcap": model.attn_logit_softcapping is not None,
            "dropout": model.attention_dropout > 0 and not config.run.skip_train,
        }
        head = model.kv_channels
        if model.multi_latent_attention:
            head = max(model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim)
        features = [name for name, has in present.items() if has]
        measured, _ = measured_blocks(config.attention.attention_block_sizes)
        triton = triton_calls(runtime.device, compute_dtype(config), head, features, measured)
    masks = tuple(mask for mask in dict.fromkeys(layer_masks(config)) if not mask.pairwise)
    return BatchPlans(runtime.layout, masks, runtime.device, config.parallel.key_exchange, triton)


def _expert_groups(config: Config) -> dict[str, int | None] | None:
    """The sizes of core's groups of experts."""
    parallel = config.parallel
    if config.model.num_experts:
        names = ("expert_model_parallel_size", "expert_tensor_parallel_size")
        return {name: getattr(parallel, name) for name in names}
    if parallel.partition_position_embedding:
        # Without experts, this size only makes core sum the gradients of partitioned positions over DP.
        return {"expert_model_parallel_size": parallel.context_parallel_size}
    return None


def seed_everything(seed: int, grid: Grid) -> None:
    """Seed the global random states. Weights and dropout do not use them."""
    from megatron.core import tensor_parallel

    data_and_context = grid.context.rank + grid.context.size * grid.data.rank
    seed = (seed + 100 * grid.pipeline.rank + 7919 * data_and_context) % 2**31
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def stop(keep_world: bool = False) -> None:
    """Leave the process groups, so that no other rank waits for this one.

    Args:
        keep_world: stay in the group of all ranks, so that this process can make another grid.
    """
    from megatron.core import parallel_state, rerun_state_machine

    if not dist.is_initialized():
        return
    groups = list(dist.distributed_c10d._world.pg_map)  # in the order of their creation, the same on all ranks
    parallel_state.destroy_model_parallel()
    if not keep_world:
        dist.destroy_process_group()
        return
    rerun_state_machine.destroy_rerun_state_machine()
    for group in groups:
        if group is not dist.group.WORLD and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
    forget_meshes()


def free_memory() -> None:
    """Free the memory of a job that is over: it has reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
