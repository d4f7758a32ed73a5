# SPDX-License-Identifier: Apache-2.0
"""ZeRO 2 and 3: gradients and weights split over DP x CP by PyTorch's FSDP2; experts over the ranks that hold them.

megatron-core's wrapper (TorchFullyShardedDataParallel) cannot be used: it averages gradients, but ours are sums over
tokens; it does not scale them by the tokens of the batch; and it shards a tied embedding separately from the output
layer that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import get_data_parallel_group, get_expert_data_parallel_group
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron.platform.core_versions import inner_layer
from megatron.training.model.core_config import compute_dtype
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config

try:  # a private module; without these names fully_shard has one mesh for all parameters of a unit
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
except ImportError:
    ShardPlacementResult = None


class FullySharded(_BaseDataParallel):
    """A model whose weights, gradients and optimizer states are split over DP x CP, row by row.

    The shards are fp32, so they are also the optimizer's main weights. A layer is gathered in the compute dtype when it
    runs, and its gradients are summed into the shards after its backward pass. Stage 2 keeps gathered weights until
    then; stage 3 frees them after the forward pass.
    """

    def __init__(self, chunk: GPTModel, config: Config) -> None:
        super().__init__(chunk.config, chunk)
        self.ddp_config = DistributedDataParallelConfig()  # core reads from it whether its FSDP is in use
        self.units = shard(chunk, config)
        self.partitioned = partitioned_parameters(chunk)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = self.module(*inputs, **kwargs)
        if not torch.is_grad_enabled():  # without a backward pass, FSDP does not free units that are kept after forward
            for unit in self.units:
                unit.reshard()
        return output

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sum the gradients of partitioned positions over DP. FSDP has summed the others after each backward pass."""
        for parameter in self.partitioned:
            if parameter.requires_grad:  # LoRA freezes them
                dist.all_reduce(parameter.grad, group=get_data_parallel_group())

    @torch.no_grad()
    def scale_gradients(self, scaling_factor: Tensor) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                to_local_if_dtensor(parameter.grad).mul_(scaling_factor)


Range = tuple[int, int]  # first element, number of elements


def local_elements(parameter: Tensor) -> Range:
    """The elements of a parameter on this rank: all of them, or FSDP's rows, which are split as by torch.chunk."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.numel()
    rows, row = parameter.size(0), prod(parameter.shape[1:])
    share = ceil(rows / parameter.device_mesh.size())
    first = min(parameter.device_mesh.get_local_rank() * share, rows)
    return first * row, parameter.to_local().size(0) * row


def partitioned_parameters(chunk: nn.Module) -> set[nn.Parameter]:
    """Partitioned positions, whose rows are split over ranks already; FSDP ignores them."""
    return {parameter for parameter in chunk.parameters() if hasattr(parameter, "spans")}


def shard(chunk: GPTModel, config: Config) -> list[FSDPModule]:
    """Make units that FSDP gathers at once: each layer, the embedding, the output layer, and the rest (the root).

    A layer is not split further, because parts of it may run again outside its forward pass with its weights gathered.
    A layer's experts are gathered at the same time from a group of their own.
    """
    attributes = {name: dict(vars(parameter)) for name, parameter in chunk.named_parameters()}
    narrow = compute_dtype(config) != torch.float32
    device, group = next(chunk.parameters()).device, get_data_parallel_group(with_context_parallel=True)
    settings = {
        "mesh": DeviceMesh.from_group(group, device.type),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype(config) if narrow else None,
            reduce_dtype=torch.float32 if narrow and not config.parallel.grad_reduce_in_bf16 else None,
            cast_forward_inputs=False,  # hidden states come in the compute dtype
        ),
    }
    # Meshes of equal ranks are equal in PyTorch's caches, so a tensor would get now one group and now the other.
    experts = get_expert_data_parallel_group() if config.model.num_experts else group
    if dist.get_process_group_ranks(experts) != dist.get_process_group_ranks(group):
        settings["shard_placement_fn"] = _place_of_experts(experts, device)
    free = config.parallel.zero_stage == 3
    ignored = partitioned_parameters(chunk)
    layers, units = list(chunk.decoder.layers), []
    layers += [inner_layer(layer) for layer in chunk.mtp.layers] if chunk.mtp_process else []

    def make_unit(module: nn.Module, *, free: bool) -> None:
        module.float()
        fully_shard(module, reshard_after_forward=free, ignored_params=ignored, **settings)
        units.append(module)

    for layer in layers:
        make_unit(layer, free=free)
    # These stay with the root, which remains gathered for the entire step: a tied embedding, which the output layer
    # reads too; a streamed embedding, which runs again chunk by chunk; and the output layer of a loss in chunks, or of
    # log-probabilities, whose weight is read without a call of the layer.
    streamed = chunk.chunks is not None and chunk.chunks.streamed
    if not chunk.share_embeddings_and_output_weights and not streamed:
        if norm := getattr(getattr(chunk.embedding, "word_embeddings", None), "norm", None):
            make_unit(norm, free=free)  # a separate unit, because its gradient needs its weight
        make_unit(chunk.embedding, free=free)
        chunk.embedding.set_unshard_in_backward(False)  # a lookup's gradient does not need the table
    reads_weight = chunk.loss_chunks or chunk.scoring or config.evaluation.eval_tasks
    if not chunk.share_embeddings_and_output_weights and not reads_weight:
        make_unit(chunk.output_layer, free=False)  # its backward pass comes next and needs the weight again
    make_unit(chunk, free=False)
    for unit in units:
        unit.set_gradient_divide_factor(1.0)  # gradients are sums; they are divided by the tokens last
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no average and no scaled sum
    if config.attention.recompute_granularity is not None:
        # FSDP prefetches in the order it recorded, which is wrong if layers run again in the backward pass.
        for layer, before in zip(layers, [chunk, *layers]):
            layer.set_modules_to_backward_prefetch([before])
    for name, parameter in chunk.named_parameters():
        vars(parameter).update(attributes[name])  # FSDP drops them: github.com/pytorch/pytorch/issues/136929
    return units


def _place_of_experts(group: dist.ProcessGroup, device: torch.device) -> Callable[[nn.Parameter], Any]:
    """For fully_shard: experts are split over the ranks that hold the same experts, other parameters as by default."""
    if ShardPlacementResult is None:
        raise Refusal(
            "--num-experts with --zero-stage 2 or 3",
            f"needs a PyTorch whose fully_shard can split parameters over several meshes, but this is "
            f"{torch.__version__}: use --zero-stage 1",
        )
    mesh = DeviceMesh.from_group(group, device.type)
    place = ShardPlacementResult(None, FSDPMeshInfo(mesh, shard_mesh_dim=0))
    return lambda parameter: None if getattr(parameter, "allreduce", True) else place
