# SPDX-License-Identifier: Apache-2.0
"""Complete models under the checker of types, in one process with a fake group.

A parameter's type follows from what the program does, not from attributes of the parameter:

- varying on an axis whose ranks would save different parts of the whole parameter;
- replicated on an axis over which the program sums its gradient (tests/gradient_sums.py);
- invariant otherwise.

The checker then tests each operation of the forward pass and the loss with these types. Two more checks show that
gradients are divided by the tokens of all ranks, and that each element of a gradient counts once in the norm for
clipping.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from spmd_types import I, P, R, V, _mesh_axis
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.platform import Platform, cpu
from megatron.platform.simulated_cluster import simulated_world
from megatron.training.arguments.parser import parse
from megatron.training.checkpoint.checkpoint import unwrap
from megatron.training.checkpoint.sharded_state import METADATA
from megatron.training.loss import sum_of_reports
from megatron.training.model import build
from megatron.training.model.core_config import compute_dtype
from megatron.training.model.optimizer import build_optimizer, wrap_for_data_parallelism
from megatron.training.setup import Runtime, start
from megatron.training.step import forward_step
from tests import distribution_types
from tests.gradient_sums import Marks, factors, set_gradients_to_one

VOCABULARY = 64
SHAPE = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    f"--max-position-embeddings 32 --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 4 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 1 --mock-data --tokenizer-type NullTokenizer "
)
TP, SP = "--tensor-model-parallel-size 2 ", "--tensor-model-parallel-size 2 --sequence-parallel "
U, RING, PP = "--ulysses-parallel-size 2 ", "--ring-parallel-size 2 ", "--pipeline-model-parallel-size 2 "
NO_BIAS = "--disable-bias-linear --normalization RMSNorm "
LLAMA = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention "
    "--num-query-groups 2 --untie-embeddings-and-output-weights "
)
LATENTS = (
    NO_BIAS + "--multi-latent-attention --kv-lora-rank 8 --q-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8 --position-embedding-type rope --latent-exchange latents "
)
GATED = (
    NO_BIAS + "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 4 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 --linear-conv-kernel-dim 4 "
    "--position-embedding-type rope "
)
FPDT = "--fpdt --fpdt-chunk-size 16 "
EXPERTS = (
    NO_BIAS + "--num-experts 4 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-z-loss-coeff 0.01 --expert-model-parallel-size 2 "
)
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 "

MODELS = {
    "GPT, TP and Ulysses, ALiBi, fp16": TP + U + "--position-embedding-type alibi --fp16",
    "GPT, TP with sequence parallelism and Ring, dropout": SP + RING + DROPOUT,
    "GPT, Ulysses and Ring, partitioned positions": U + RING + "--partition-position-embedding",
    "GPT, two stages, tied embeddings": PP + TP,
    "GPT, ZeRO 1": TP + U + "--use-distributed-optimizer",
    "GPT, ZeRO 2, partitioned positions": SP + U + "--zero-stage 2 --partition-position-embedding",
    "Llama, ZeRO 3": SP + RING + LLAMA + "--zero-stage 3",
    "Llama, norms of queries and keys, TP": TP + RING + LLAMA + "--qk-layernorm",
    "Llama, norms of the queries of all heads, TP": SP + U + LLAMA + "--qk-layernorm-all-heads",
    "Llama, full recomputation, sinks": SP + U + LLAMA + "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --softmax-type learnable",
    "Llama, loss in chunks": SP + RING + LLAMA + "--loss-chunks 2",
    "GPT, FPDT, TP with sequence parallelism and Ulysses, dropout": SP + U + FPDT + DROPOUT,
    "Llama, FPDT, Ring, hidden states in host memory": TP + RING + LLAMA + FPDT + "--fpdt-stream-hidden",
    "GPT, adapters (LoRA), TP": TP + U + "--lora-rank 4",
    "GPT, adapters (LoRA), TP with sequence parallelism": SP + U + "--lora-rank 4",
    "GPT, adapters (LoRA), ZeRO 2, partitioned positions": TP + U + "--lora-rank 4 --zero-stage 2 "
    "--partition-position-embedding",
    "latents over the ring, TP with sequence parallelism": SP + RING + LATENTS,
    "Gated DeltaNet and attention, TP with sequence parallelism": SP + RING + GATED,
    "Gated DeltaNet and attention, adapters (LoRA), TP": TP + RING + GATED + "--lora-rank 4",
    "Mamba2 and attention, TP with sequence parallelism": SP + RING + NO_BIAS + "--is-hybrid-model "
    "--hybrid-override-pattern M* --mamba-num-heads 4 --mamba-head-dim 8 --mamba-state-dim 8 --mamba-num-groups 2 "
    "--position-embedding-type none",
    "experts with biases, TP": SP + U + EXPERTS.replace(NO_BIAS, "")
    + "--expert-tensor-parallel-size 2 --moe-token-dispatcher-type alltoall",
    "experts, dispatch by all-gather": U + RING + EXPERTS + "--moe-token-dispatcher-type allgather",
    "experts with a capacity, dispatch by all-to-all, a shared expert, two stages, bf16": PP + U + EXPERTS
    + "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.0 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid --moe-shared-expert-intermediate-size 16 --bf16",
}  # fmt: skip

Axis = str
Types = dict[str, dict[Axis, Any]]


@dataclass(frozen=True)
class Change:
    """An error to plant.

    Attributes:
        model: called with each model when it is built, before it is wrapped.
        trainer: called with the wrapped models and the optimizer.
    """

    model: Callable[[nn.Module], Any] = lambda model: None
    trainer: Callable[[list, Any], Any] = lambda chunks, optimizer: None


@dataclass
class Rank:
    """What one rank has built."""

    config: Any
    runtime: Runtime
    chunks: list[Any]
    optimizer: Any
    groups: dict[Axis, dist.ProcessGroup]
    parts: dict[str, tuple] = field(default_factory=dict)  # what it saves of the whole, by parameter

    @property
    def model(self) -> nn.Module:
        return unwrap(self.chunks[0])

    @property
    def axes(self) -> dict[Axis, list[int]]:
        return {name: dist.get_process_group_ranks(group) for name, group in self.groups.items()}


@contextmanager
def built(flags: str, world: int, rank: int, change: Change) -> Iterator[Rank]:
    """What ``rank`` of a fake world builds from a command line."""
    with simulated_world(world, rank):
        config = parse(shlex.split(SHAPE + flags), None, world)
        runtime = start(config, Platform("cpu", torch.device("cpu"), "fake", simulated=True))
        grid = runtime.grid
        named = {"tp": grid.tensor, "ulysses": grid.ulysses, "ring": grid.ring, "dp": grid.data, "pp": grid.pipeline}
        groups = {name: axis.group for name, axis in named.items() if axis.size > 1}
        models = build.build_model(config, grid, runtime.layout, VOCABULARY, runtime.device, runtime.offload)
        for model in models:
            change.model(model)
        parts = {name: _parts(state) for name, state in models[0].sharded_state_dict(metadata=dict(METADATA)).items()}
        chunks = wrap_for_data_parallelism(models, config)
        optimizer = build_optimizer(chunks, config)
        change.trainer(chunks, optimizer)
        yield Rank(config, runtime, chunks, optimizer, groups, parts)


def _parts(state: Any) -> tuple:
    """(name, offset) of each part of the whole as which an entry of a sharded state dict is saved."""
    state = {"": state}
    apply_factories(state)
    return tuple((x.key, x.global_offset) for x in tree_leaves(state) if isinstance(x, ShardedTensor))


@dataclass
class Reductions:
    """How a rank reduces its gradients: what its collectives and its gradient norm make of gradients of 1."""

    axes: dict[Axis, list[int]]
    parts: dict[str, tuple]
    sizes: dict[str, int]  # elements of each parameter that is trained
    marks: dict[str, list[float]]  # of each element of the gradient that this rank has (gradient_sums.py)
    tokens: float  # the mark of the number of tokens that gradients are divided by
    counted: dict[str, int]  # elements in the sum of squares of the norm
    summed: dict[str, tuple[Axis, ...]]  # the axes over which this sum of squares is summed
    zero_stage: int


def reductions_of(flags: str, world: int, rank: int, change: Change) -> Reductions:
    """Run the program's reductions and its gradient norm on gradients of 1."""
    with built(flags, world, rank, change) as made:
        marks, tokens = Marks(made.axes), torch.ones((), dtype=torch.float64)
        with marks:
            for chunk in made.chunks:
                chunk.zero_grad_buffer()
                set_gradients_to_one(unwrap(chunk), getattr(chunk, "units", [unwrap(chunk)]))
            made.model.config.finalize_model_grads_func(made.chunks, tokens)
        trained = {name: x for name, x in made.model.named_parameters() if x.requires_grad}
        divided = float(tokens)
        sums = {name: [round(x * divided, 3) for x in _gradient(parameter).flatten().tolist() if x == x]
                for name, parameter in trained.items()}  # fmt: skip
        counted, summed = _norm(made.optimizer, trained, marks)
        sizes = {name: parameter.numel() for name, parameter in trained.items()}
        stage = made.config.parallel.zero_stage
        return Reductions(made.axes, made.parts, sizes, sums, divided, counted, summed, stage)


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = getattr(parameter, "main_grad", parameter.grad)
    return getattr(gradient, "_local_tensor", gradient)


def _norm(optimizer: Any, trained: dict[str, nn.Parameter], marks: Marks) -> tuple[dict, dict]:
    """(elements that count in the norm, axes over which the sum of their squares is summed), by parameter."""
    counted, summed, names = {}, {}, list(trained)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        scale = float(part.get_loss_scale())
        for number, parameter in enumerate(trained.values(), 1):
            _gradient(parameter).fill_(number * scale)  # tells which parameter a tensor in the norm belongs to
        part.prepare_grads()
        found = [getattr(x, "_local_tensor", x) for x in part.get_main_grads_for_grad_norm()]
        mine = {names[round(float(x.flatten()[0])) - 1]: x.numel() for x in found if x.numel()}
        for parameter in trained.values():
            _gradient(parameter).fill_(scale)
        part.prepare_grads()
        with marks:
            squares = float(part.get_grad_norm()) ** 2
        if mine:
            axes, _ = factors(round(squares / sum(mine.values()), 3))
            summed |= dict.fromkeys(mine, tuple(axes))
        counted |= mine
    return counted, summed


def parameter_types(ranks: list[Reductions], rank: int) -> Types:
    """The types of a rank's parameters.

    Raises:
        SpmdTypeError: no type describes how a gradient is reduced.
    """
    mine, types = ranks[rank], {}
    for name, parts in mine.parts.items():
        varies = {axis for axis, group in mine.axes.items()
                  if not set(parts) <= {x for other in group if other != rank for x in _all(ranks[other])}}  # fmt: skip
        found = [ranks[other].marks.get(name, []) for other in _replicas(mine, rank)]
        # With ZeRO 1 a rank has all elements, but the sums of only a part of them.
        marks = {*map(max, zip(*found))} if mine.zero_stage == 1 else {x for marks in found for x in marks}
        if len(marks) > 1:
            raise spmd.SpmdTypeError(f"{name}: its elements have different sums: {sorted(marks)}")
        mark = max(marks, default=1.0)
        counts, left = factors(mark)
        if abs(left - 1) > 1e-3:
            raise spmd.SpmdTypeError(f"{name}: its gradient is multiplied by {mark:g}, which is no product of sums")
        for axis, count in counts.items():
            if count > 1:
                raise spmd.SpmdTypeError(f"{name}: its gradient is summed {count} times over {axis}")
            if axis in varies:
                raise spmd.SpmdTypeError(f"{name}: gradients of different parts are summed over {axis}")
        if name not in mine.sizes:  # frozen: without a gradient it may be replicated or invariant, as its use needs
            counts = dict.fromkeys(set(mine.axes) - {"tp"}, 1)
        types[name] = {axis: V if axis in varies else R if axis in counts else I for axis in mine.axes}
    return types


def _all(of_rank: Reductions) -> set:
    return {part for parts in of_rank.parts.values() for part in parts}


def _replicas(of_rank: Reductions, rank: int) -> set[int]:
    """The ranks over which ZeRO splits gradients."""
    return _group(of_rank, rank, ("ulysses", "ring", "dp")) if of_rank.zero_stage else {rank}


def _group(of_rank: Reductions, rank: int, axes: tuple[Axis, ...]) -> set[int]:
    """The ranks of the group that consists of several axes."""
    group = {rank}
    for axis in axes:
        steps = [other - rank for other in of_rank.axes.get(axis, [rank])]
        group = {one + step for one in group for step in steps}
    return group


def check_tokens(of_rank: Reductions) -> None:
    """Gradients are divided by the tokens of all ranks that have different tokens.

    Raises:
        SpmdTypeError: tokens are counted over other axes than those on which they vary.
    """
    counts, _ = factors(round(of_rank.tokens))
    wanted = [axis for axis in ("ulysses", "ring", "dp") if axis in of_rank.axes]
    if sorted(counts) != sorted(wanted) or any(count > 1 for count in counts.values()):
        raise spmd.SpmdTypeError(f"the number of tokens is summed over {list(counts)}, but tokens vary on {wanted}")


def check_norm(ranks: list[Reductions], rank: int = 0) -> None:
    """In the gradient norm of ``rank`` each element of the whole model counts once.

    Raises:
        SpmdTypeError: an element counts on no rank, or on several.
    """
    parts: dict[tuple, tuple[int, int]] = {}  # (its elements, those that count), by part of the whole
    for other, of_rank in enumerate(ranks):
        for name, size in of_rank.sizes.items():
            part = of_rank.parts[name]
            counted = parts.get(part, (size, 0))[1]
            if other in _group(ranks[rank], rank, of_rank.summed.get(name, ())):
                counted += of_rank.counted.get(name, 0)
            parts[part] = size, counted
    for part, (size, counted) in parts.items():
        if size != counted:
            raise spmd.SpmdTypeError(f"{part[0][0]}: its gradient counts {counted / size:g} times in the norm")


def check_step(flags: str, world: int, rank: int, types: Types, change: Change) -> None:
    """Run the forward pass, the loss and the backward pass of a rank under the checker.

    Raises:
        SpmdTypeError: the first operation that does not fit the types of its arguments.
    """
    _mesh_axis._reset()
    with built(flags, world, rank, change) as made:
        mesh = {name: spmd.MeshAxis.of(group) for name, group in made.groups.items()}
        with spmd.set_current_mesh(mesh):
            _check_step(made, types)


def _check_step(made: Rank, types: Types) -> None:
    chunk, model, runtime = made.chunks[0], made.model, made.runtime
    others = {axis: V for axis in made.groups if axis != "tp"}
    tokens = {**others, **({"tp": I} if "tp" in made.groups else {})}
    hidden = {axis: V for axis in tokens} if made.config.parallel.sequence_parallel else tokens
    type_parameters(chunk, model, types)
    spmd.assert_type(runtime.layout.positions, tokens)
    dispatchers = [x.token_dispatcher for x in model.modules() if hasattr(x, "token_dispatcher")]
    tables = [x for dispatcher in dispatchers for x in vars(dispatcher).values() if isinstance(x, Tensor)]
    slopes = model.settings.rule.alibi_slopes
    for constant in (*model.buffers(), *tables, *([] if slopes is None else [slopes])):
        spmd.assert_type(constant, R)
    if runtime.grid.pipeline.rank:
        rows = runtime.layout.local_length // (2 if made.config.parallel.sequence_parallel else 1)
        leaf = torch.randn(rows, 1, made.config.model.hidden_size, dtype=compute_dtype(made.config), requires_grad=True)
        model.set_input_tensor(spmd.assert_type(leaf, hidden))

    def batches() -> Iterator[dict[str, Tensor]]:
        shape = (1, made.config.data.seq_length)
        words = torch.arange(shape[1])[None] % VOCABULARY
        yield {"tokens": words, "labels": words, "loss_mask": torch.ones(shape), "numbers": torch.arange(1)}

    def model_with_types(*args: Any, **kwargs: Any) -> Tensor:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor):
                spmd.assert_type(x, tokens)
        with typecheck():
            return chunk(*args, **kwargs)

    output, loss_of = forward_step(runtime, batches(), model_with_types)
    if not model.post_process:
        spmd.assert_type(output, hidden)
        output.sum().backward()
    else:
        with typecheck():
            loss, _, report = loss_of(output)
            for axis in others:  # the program differentiates the sum of the losses of all ranks
                loss = spmd.reinterpret(loss, made.groups[axis], src=V, dst=P)
            loss.backward()
            total = sum_of_reports([report], (2,), runtime)
        spmd.assert_type(total, {axis: R for axis in others if axis != "pp"})


def type_parameters(chunk: nn.Module, model: nn.Module, types: Types) -> None:
    """Give parameters their types. FSDP makes new tensors when it gathers, which then get the same types."""
    names = {module: name for name, module in model.named_modules()}

    def put(unit: nn.Module, *_: Any) -> None:
        for module in unit.modules():
            for name, parameter in module._parameters.items():
                whole = f"{names[module]}.{name}"
                if parameter is not None and not hasattr(parameter, "_local_tensor") and whole in types:
                    spmd.assert_type(parameter, types[whole])

    for unit in getattr(chunk, "units", ()):
        unit.register_forward_pre_hook(put)
    put(model)


GRADIENTS = {R: "P", I: "I", V: "V"}  # the type of a gradient before it is reduced, by that of its parameter


def check(flags: str, world: int = 8, change: Change = Change()) -> dict[str, str]:
    """Check a model on all stages of the pipeline; returns the types of the gradients of rank 0, as "tp I, dp P".

    Raises:
        SpmdTypeError: its first error of types.
    """
    os.environ["WORLD_SIZE"] = str(world)
    ranks = [reductions_of(flags, world, rank, change) for rank in range(world)]
    types = {rank: parameter_types(ranks, rank) for rank in ranks[0].axes.get("pp", [0])}
    for rank, of_rank in types.items():
        check_step(flags, world, rank, of_rank, change)
    check_tokens(ranks[0])
    check_norm(ranks)
    return {name: ", ".join(f"{axis} {GRADIENTS[kind]}" for axis, kind in types[0][name].items())
            for name in ranks[0].sizes}  # fmt: skip


AXES = {  # by core's names of their groups
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0": "ulysses",
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L1": "ring",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
}


def verdict(flags: str, world: int = 8, change: Change = Change()) -> str | dict[str, str]:
    """The first line of a model's error of types, with the names of axes; if it has none, the result of ``check``."""
    try:
        return check(flags, world, change)
    except spmd.SpmdTypeError as error:
        line = next(line for line in str(error).splitlines() if line.strip())
        for group, axis in AXES.items():
            line = line.replace(group, axis)
        return line.replace("PerMeshAxisLocalSpmdType.", "")


def main() -> int:
    """Print one JSON object: the types of the gradients of each model, or its error; and the types that were used."""
    torch.set_num_threads(1)
    cpu.run_core_on_cpu()
    distribution_types.hide_tables()
    models = {name: verdict(flags) for name, flags in MODELS.items()}
    print(json.dumps({"models": models, "ran": sorted(distribution_types.RAN)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
