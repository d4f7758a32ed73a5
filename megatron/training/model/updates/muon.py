# SPDX-License-Identifier: Apache-2.0
"""Muon: the update of a matrix is its momentum with all singular values made almost equal, by Newton-Schulz iterations.

Embeddings, the output layer and all that is not a matrix are updated by AdamW. Flags, constants and the split of
queries, keys and values are those of megatron-core 0.19, but the matrix is the whole one on every grid. core's default
(``--muon-tp-mode blockwise``) takes the part of a TP rank, so its result depends on TP.

Each rank keeps the momentum of its own shard. Under ZeRO 1 a rank holds a range of the elements of all weights, so few
matrices lie on several ranks; these ranks send each other their parts, and each computes the whole update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle, islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.parallel_state import get_expert_tensor_parallel_group
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.context_parallel.core.experts import EXPERT
from megatron.training.model.fsdp import local_elements
from megatron.training.model.weights import POSITIONS, VOCABULARY, canonical_parameters
from megatron.training.settings.config import OptimizerSettings

SIMPLE = (3.4445, -4.7750, 2.0315)
# Coefficients (a, b, c) of the steps a X + b (X X') X + c (X X')^2 X.
COEFFICIENTS = {
    "simple": (SIMPLE,),
    "quintic": (  # github.com/KellerJordan/modded-nanogpt
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (  # arXiv:2505.16932
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "cans": (  # arXiv:2506.10935
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "aol": (  # github.com/thib-s/flash-newton-schulz
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    "deepseekv4": (*(SIMPLE,) * 8, *((2.0, -1.5, 0.5),) * 2),
}
LAST_REPEATS = ("polar_express", "cans", "deepseekv4")  # further steps repeat the last coefficients; others start again


@dataclass(frozen=True)
class Matrix:
    """A matrix that Muon updates, and where its elements are.

    Attributes:
        shape: of the part on a TP rank.
        tensor: the ranks of TP (or expert TP) that split it, and the dim of the split; None: not split.
        heads: rows of a group's queries, gate, keys and values, which are separate matrices; None: one matrix.
        holders: under ZeRO 1, the ranks that hold some of its elements, and which; None: this rank holds all.
        group: the ranks of ``holders``.
    """

    shape: tuple[int, int]
    tensor: tuple[dist.ProcessGroup, int] | None
    heads: tuple[int, ...] | None
    holders: dict[int, slice] | None = None
    group: dist.ProcessGroup | None = None

    def own(self) -> slice:
        """This rank's elements."""
        return slice(None) if self.holders is None else self.holders[dist.get_rank(self.group)]


class Muon(torch.optim.AdamW):
    """AdamW, and Muon for ``matrices``, whose only state is ``momentum_buffer``."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], matrices: dict[Tensor, Matrix], settings: OptimizerSettings
    ) -> None:
        nothing = torch.empty(0)  # core's shards are views, which PyTorch accepts only later
        super().__init__([nothing], betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps)
        self.param_groups = list(groups)
        for group in groups:
            group.update(self.defaults | group)
        self.matrices, self.settings = matrices, settings

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        every = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            mine = [weight for weight in group["params"] if weight in self.matrices and weight.grad is not None]
            self._update_matrices(mine, group)
            group["params"] = [weight for weight in group["params"] if weight not in self.matrices]
        try:
            super().step(closure)
        finally:
            for group, weights in zip(self.param_groups, every):
                group["params"] = weights

    def _update_matrices(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        if not weights:
            return
        settings, lr = self.settings, group["lr"]
        momenta = [to_local_if_dtensor(self.state[weight]["momentum_buffer"]) for weight in weights]
        grads: Sequence[Tensor] = [to_local_if_dtensor(weight.grad) for weight in weights]
        if getattr(self, "grad_scale", None) is not None:  # of clipping, which AdamW's fused kernel does as it reads
            grads = torch._foreach_div(grads, self.grad_scale)
        torch._foreach_mul_([to_local_if_dtensor(weight) for weight in weights], 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(momenta, grads, 1 - settings.muon_momentum)
        if settings.muon_nesterov:
            momenta = torch._foreach_lerp(grads, momenta, settings.muon_momentum)
        matrices = [self.matrices[weight] for weight in weights]
        for weight, matrix, direction in zip(weights, matrices, _exchanged(momenta, matrices)):
            local, own = to_local_if_dtensor(weight), matrix.own()
            if isinstance(weight, DTensor):  # FSDP's rows
                place = {"shape": weight.shape, "stride": weight.stride()}
                direction = DTensor.from_local(direction, weight.device_mesh, weight.placements, **place).full_tensor()
                first, count = local_elements(weight)
                own = slice(first, first + count)
            update = orthogonalized(direction.view(matrix.shape), matrix, settings)
            local.add_(update.reshape(-1)[own].view_as(local), alpha=-lr)


def _exchanged(parts: Sequence[Tensor], matrices: Sequence[Matrix]) -> Iterator[Tensor]:
    """The whole matrices of which this rank has parts. All ranks have the matrices in the same order."""
    whole, transfers = [], []
    for part, matrix in zip(parts, matrices):
        if matrix.holders is None or len(matrix.holders) == 1:
            whole.append(part)
            continue
        rows, columns = matrix.shape
        whole.append(part.new_empty(rows * columns))
        for rank, elements in matrix.holders.items():
            if rank == dist.get_rank(matrix.group):
                whole[-1][elements] = part
            else:
                peer = dist.get_global_rank(matrix.group, rank)
                transfers.append(dist.P2POp(dist.isend, part, peer, matrix.group))
                transfers.append(dist.P2POp(dist.irecv, whole[-1][elements], peer, matrix.group))
    for transfer in dist.batch_isend_irecv(transfers) if transfers else ():
        transfer.wait()
    yield from whole


def orthogonalized(direction: Tensor, matrix: Matrix, settings: OptimizerSettings) -> Tensor:
    """The update of the part [n, m] that a TP rank has of a matrix, before the learning rate.

    The parts are gathered in the order of the ranks, which permutes the rows of some weights; so the update's rows are
    permuted alike.
    """
    mode = settings.muon_tp_mode
    if matrix.tensor is None or mode == "blockwise":
        return _by_heads(direction, matrix.heads, settings, None)
    group, dim = matrix.tensor
    if mode == "distributed":
        return _by_heads(direction, matrix.heads, settings, matrix.tensor)
    parts = [torch.empty_like(direction) for _ in range(group.size())]
    dist.all_gather(parts, direction.contiguous(), group)
    return _by_heads(torch.cat(parts, dim), matrix.heads, settings, None).chunk(group.size(), dim)[group.rank()]


def _by_heads(
    x: Tensor, heads: tuple[int, ...] | None, settings: OptimizerSettings, tensor: tuple[dist.ProcessGroup, int] | None
) -> Tensor:
    """Orthogonalize and scale a matrix, or separately the queries, keys and values of all heads in it."""
    if heads is None or x.size(0) % sum(heads):
        return _scaled(x, settings, tensor)
    columns = x.size(1)
    parts = x.view(-1, sum(heads), columns).split(heads, 1)
    done = [_scaled(part.reshape(-1, columns), settings, tensor).view(part.shape) for part in parts]
    return torch.cat(done, 1).view_as(x)


def _scaled(x: Tensor, settings: OptimizerSettings, tensor: tuple[dist.ProcessGroup, int] | None) -> Tensor:
    size = list(x.shape)
    if tensor is not None:
        size[tensor[1]] *= tensor[0].size()
    rows, columns = size
    scale = {
        "spectral": max(rows, columns) ** 0.5,
        "shape_scaling": max(1.0, rows / columns) ** 0.5,
        "unit_rms_norm": (rows / columns) ** 0.5,
    }[settings.muon_scale_mode]
    precision = settings.muon_fp32_matmul_prec or ("medium" if settings.bf16 or settings.fp16 else "highest")
    steps = steps_of(settings.muon_coefficient_type, settings.muon_num_ns_steps)
    return newton_schulz(x, steps, precision, tensor).mul_(scale * settings.muon_extra_scale_factor)


def steps_of(kind: str, count: int) -> list[tuple[float, float, float]]:
    """The coefficients of ``count`` steps."""
    given = COEFFICIENTS[kind]
    return list(islice(chain(given, repeat(given[-1])) if kind in LAST_REPEATS else cycle(given), count))


def newton_schulz(
    x: Tensor,
    steps: Sequence[tuple[float, float, float]],
    precision: str = "highest",
    tensor: tuple[dist.ProcessGroup, int] | None = None,
) -> Tensor:
    """``x`` [n, m] with singular values near 1, in fp32.

    Args:
        precision: of the products: ``highest``, ``high`` (TF32), or ``medium``, for which numbers are in bf16.
        tensor: ranks that hold parts of the matrix, and the dim in which they split it; they add up their products.
    """
    group, dim = tensor or (None, None)
    transposed = dim == 0 if tensor else x.size(0) > x.size(1)
    if transposed:
        x = x.mT
    squares = x.square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    x = x / squares.sqrt().clamp_min(1e-7)
    if precision == "medium":
        x = x.to(torch.bfloat16)
    with _precision(precision):
        for a, b, c in steps:
            product = x @ x.mT
            if group is not None:
                dist.all_reduce(product, group=group)
            x = torch.addmm(x, torch.addmm(product, product, product, alpha=c, beta=b), x, beta=a)
    x = x.to(torch.float32)
    return x.mT if transposed else x


@contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if name != "medium":  # whose numbers are in bf16
        torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def use_muon(optimizer: MegatronOptimizer, chunks: Sequence[nn.Module], settings: OptimizerSettings) -> None:
    """Let one of core's optimizers update matrices by Muon.

    Args:
        optimizer: with PyTorch's or Transformer Engine's Adam.
        chunks: the model chunks, without wrappers.
    """
    matrices, held_here = {}, {one for group in optimizer.optimizer.param_groups for one in group["params"]}
    for chunk in chunks:
        for name, weight in canonical_parameters(chunk):
            held = _held(optimizer, weight)
            if held in held_here and weight.dim() == 2 and name not in (*VOCABULARY, POSITIONS):
                matrices[held] = _matrix(name, weight, chunk, optimizer, settings)
    optimizer.optimizer = Muon(optimizer.optimizer.param_groups, matrices, settings)


def _held(optimizer: MegatronOptimizer, weight: nn.Parameter) -> Tensor | None:
    """What the optimizer updates for a weight on this rank, if anything."""
    if isinstance(optimizer, DistributedOptimizer):
        if weight not in optimizer.model_param_gbuf_map:
            return None
        group, index = optimizer.model_param_group_index_map[weight]
        return optimizer.optimizer.param_groups[group]["params"][index]
    return getattr(weight, "main_param", weight)


def _matrix(
    name: str, weight: nn.Parameter, chunk: nn.Module, optimizer: MegatronOptimizer, settings: OptimizerSettings
) -> Matrix:
    group = get_expert_tensor_parallel_group() if EXPERT in name else chunk.pg_collection.tp
    split = getattr(weight, "tensor_model_parallel", False) and group.size() > 1
    heads = None
    if settings.muon_split_qkv and name.endswith("linear_qkv.weight"):
        core = chunk.config
        queries = core.num_attention_heads // core.num_query_groups * core.kv_channels
        gate = (queries,) * bool(getattr(core, "attention_output_gate", False))
        heads = (queries, *gate, core.kv_channels, core.kv_channels)
    holders, over = None, None
    if isinstance(optimizer, DistributedOptimizer):
        holders, over = _holders(optimizer, weight), optimizer.data_parallel_group
    return Matrix(tuple(weight.shape), (group, weight.partition_dim) if split else None, heads, holders, over)


def _holders(optimizer: DistributedOptimizer, weight: nn.Parameter) -> dict[int, slice]:
    """The elements of a weight that each rank of core's distributed optimizer holds, in the order of the ranks."""
    number, _, bucket_number = optimizer.model_param_gbuf_map[weight]
    buffer = optimizer.buffers[number]
    start, stop, _ = buffer.param_index_map[weight]
    bucket = buffer.buckets[bucket_number]
    share = bucket.grad_data.numel() // optimizer.data_parallel_group.size()
    found = {}
    for rank in range((start - bucket.offset) // share, (stop - 1 - bucket.offset) // share + 1):
        begin = bucket.offset + rank * share
        found[rank] = slice(max(begin, start) - start, min(begin + share, stop) - start)
    return found
