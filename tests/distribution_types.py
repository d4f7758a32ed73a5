# SPDX-License-Identifier: Apache-2.0
"""Types of distribution of our autograd functions and of megatron-core's, for the checker ``spmd_types``.

For each axis of the grid a tensor has one of these types:

- replicated (R): equal on all ranks; each rank has a part of its gradient, and the parts must be summed;
- invariant (I): equal on all ranks, and so is its gradient;
- varying (V): each rank has its own;
- partial (P): the ranks' tensors must be summed;
- sharded (S): varying, and the parts of one tensor along a dimension.

A missing or doubled reduction is then an error of types, found in one process with a fake group and without comparing
numbers. The program has no annotations: importing this module adds the types to the classes. The types prove how
functions fit together. They do not prove what a function does inside; tests of numbers do that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import cross_entropy, layers, mappings, random
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from spmd_types import I, P, R, S, V, _raw_dist, rules
from spmd_types._state import _current_mode
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state
from torch.fx.operator_schemas import normalize_function

from megatron.context_parallel.attention.attend import _TiledAttention
from megatron.context_parallel.attention.ulysses import _HeadsToSequence, _SequenceToHeads
from megatron.context_parallel.core.experts import GatherRows, SumRows, _Share
from megatron.context_parallel.core.gpt_dropout import HiddenDropout
from megatron.context_parallel.core.spec import _SumOverRanks
from megatron.context_parallel.fpdt.chunk_work import _Chunked
from megatron.context_parallel.fpdt.chunked_ffn import _InChunks
from megatron.context_parallel.fpdt.chunked_loss import _ChunkedLoss
from megatron.context_parallel.fpdt.chunked_mixer import ChunkedLinearLayer
from megatron.context_parallel.fpdt.log_probs import _LogProbs
from megatron.context_parallel.huggingface.decoder_loss import _Sum
from megatron.context_parallel.layout.sequence_layout import _Gather
from megatron.context_parallel.linear_attention.mixer import _LinearAttention
from megatron.context_parallel.linear_attention.short_convolution import _ShortConvolution
from megatron.context_parallel.positions.position_dropout import _Drop
from megatron.context_parallel.positions.rope import LayoutRotaryEmbedding, _Rotate

# Autograd functions without a type, and why.
UNTYPED = {
    "context_parallel.sparse_attention.chosen_attention._SparseAttention": "no layer of core calls it; "
    "test_sparse_attention.py compares all gradients",
    "simulator.dry_run.recording.fp8._Linear": "a simulation of a kernel of one device",
    "simulator.dry_run.recording.gpu_kernels._RmsNorm": "a simulation of a kernel of one device",
}

TYPED = (
    _SequenceToHeads, _HeadsToSequence, _TiledAttention, _ChunkedLoss, _LogProbs, _Gather, _Rotate, _Drop, _Chunked,
    _InChunks, GatherRows, SumRows, _Sum, _LinearAttention, _ShortConvolution, _SumOverRanks,
    _Share,
)  # fmt: skip

# Collectives, by the function or class that calls them, and what checks them: the type of an autograd function, the
# checker itself (CHECKED), or the marks of tests/gradient_sums.py (REDUCES). Otherwise, why they have no type.
REPORT = "a number for the log or for a decision; nothing is differentiated by it"
COPIES = "copies states or files, which tests compare bit by bit"
GENERATION = "generation, without gradients"
SIMULATION = "a simulation or a measurement"
UPDATE = "the update of weights from whole gradients, which test_muon compares on every grid"
CHECKED, REDUCES = "seen by the checker", "sums gradients, which marks show"
COLLECTIVES = {
    "context_parallel.attention.ring._Transfer": "_TiledAttention, _Chunked",
    "context_parallel.attention.ring.GatherSource.blocks": "_TiledAttention",
    "context_parallel.attention.ulysses.all_to_all": "_SequenceToHeads, _HeadsToSequence, _Chunked, _LinearAttention, "
    "_ShortConvolution",
    "context_parallel.core.experts.ExpertRouter._sum": CHECKED,
    "context_parallel.core.experts.gather_rows": f"GatherRows, SumRows, {CHECKED}",
    "context_parallel.core.experts.sum_rows": "GatherRows, SumRows",
    "context_parallel.core.spec._SumOverRanks": "_SumOverRanks",
    "context_parallel.fpdt.chunked_loss.all_reduce": "_ChunkedLoss, _LogProbs",
    "context_parallel.fpdt.chunked_loss.gather": "_ChunkedLoss, _LogProbs",
    "context_parallel.fpdt.chunked_loss._sum_over_tensor": "_ChunkedLoss, _LogProbs",
    "context_parallel.huggingface.decoder_loss._Sum": "_Sum",
    "context_parallel.huggingface.trl_trainers.over_ranks.generated": GENERATION,
    "context_parallel.layout.sequence_layout._Gather": "_Gather",
    "context_parallel.layout.sequence_layout.SequenceLayout.sum_parts": "_Gather",
    "context_parallel.sparse_attention.chosen_attention._mean_weights": "weights of which no gradient is taken",
    "context_parallel.huggingface.trainer.ContextParallelMixin._gather_samples": REPORT,
    "context_parallel.linear_attention.span_exchange._gathered": "_LinearAttention, _Chunked",
    "context_parallel.linear_attention.span_exchange._message": "_LinearAttention, _Chunked",
    "context_parallel.linear_attention.span_exchange._relayed": "_LinearAttention, _Chunked",
    "context_parallel.linear_attention.span_exchange._relayed_back": "_LinearAttention, _Chunked",
    "training.loss.PairObjective.sums": "a rank's gradient is that of its own tokens; test_preferences.py compares all",
    "training.loss.sum_of_reports": CHECKED,
    "training.model.fsdp.FullySharded.finish_grad_sync": REDUCES,
    "training.model.updates.muon": UPDATE,
    "inference.cached_attention.CachedLatents": GENERATION,
    "inference.cached_state.last_rows": GENERATION,
    "inference.cached_state.last_state": GENERATION,
    "inference.decoder.Decoder": GENERATION,
    "inference.generate.agreed": GENERATION,
    "inference.kv_cache.decode_attention": GENERATION,
    "simulator.dry_run.recording.fp8._Linear": SIMULATION,
    "simulator.machines.measure_device.communicator": SIMULATION,
    "simulator.machines.measure_links": SIMULATION,
    "certifying.programs": "gathers what is compared",
    "training.checkpoint.in_memory.copy_file.swap": COPIES,
    "training.checkpoint.in_memory.restart": COPIES,
    "training.checkpoint.in_memory.state.TrainingState.load": COPIES,
    "training.evaluation.eval_plan.check_held_out": REPORT,
    "training.features.held_out.evaluate_on": REPORT,
    "training.features.replicas._compare": REPORT,
    "training.features.stopping.Stopper.agree": REPORT,
    "training.features.measuring.stragglers": REPORT,
    "training.job.params_norm": REPORT,
    "training.model.expert_load.take_load": REPORT,
    "training.model.optimizer.ScaledFP32Optimizer.prepare_grads": "whether a gradient is finite, a maximum",
    "training.watch.Watch.judge": REPORT,
}


def axes_in(group: Any) -> list[spmd.MeshAxis]:
    """The axes of the current mesh that a process group consists of; none for a group of one rank.

    Raises:
        SpmdTypeError: the group does not consist of axes.
    """
    if group is None or group.size() == 1:
        return []
    ranks = set(spmd.MeshAxis.of(group).layout.all_ranks_from_zero())
    found = [axis for axis in spmd.current_mesh() or () if set(axis.layout.all_ranks_from_zero()) <= ranks]
    size = 1
    for axis in found:
        size *= axis.size()
    if size != group.size():
        raise spmd.SpmdTypeError(f"a group of {group.size()} ranks does not consist of axes of the mesh")
    return found


def over(rule: Callable, x: Any, group: Any, **types: Any) -> Any:
    """The type of ``x`` after ``rule`` over each axis of ``group``."""
    for axis in axes_in(group):
        x = rule(x, axis, **types)
    return x


def same(x: Any) -> Any:
    """The type of ``x``."""
    return rules.einsum("...->...", x, linear_in=(0,))


def checked(function: Callable, *args: Any) -> Any:
    """Call ``function`` under the checker, from a rule."""
    with _current_mode():
        return function(*args)


DECLARED: list[type] = []  # all functions with a type
RAN: set[str] = set()  # the names of those that this process has called under the checker


def declare(function: type) -> Callable:
    """Decorator: the type of an autograd function."""

    def put(rule: Callable) -> Callable:
        @wraps(rule)
        def noted(**arguments: Any) -> Any:
            RAN.add(function.__name__)
            return rule(**arguments)

        function.spmd_typecheck = staticmethod(noted)
        DECLARED.append(function)
        return rule

    return put


# ---- our functions


def attention_type(q: Any, k: Any, v: Any, sinks: Any, ring: Any) -> Any:
    """The type of the result of attention [s, b, heads, d]; ring ranks have different tokens."""
    for axis in axes_in(ring):
        for x in (q, k, v):
            if spmd.get_local_type(x)[axis] is not V:
                raise spmd.SpmdTypeError(f"attention on a ring: q, k and v must vary on {axis}")
    out = rules.einsum("...,...,...->...", q, k, v)
    return out if sinks is None else rules.einsum("qbhd,h->qbhd", out, sinks)


@declare(_SequenceToHeads)
def _(*, q: Any, k: Any, v: Any, axis: Any) -> Any:
    return tuple(over(rules.all_to_all, x, axis.group, src=V, dst=V) for x in (q, k, v))


@declare(_HeadsToSequence)
def _(*, out: Any, axis: Any) -> Any:
    return over(rules.all_to_all, out, axis.group, src=V, dst=V)


@declare(_TiledAttention)
def _(*, q: Any, k: Any, v: Any, sinks: Any, up: Any, source: Any) -> Any:
    if up is not None:  # keys and values of this rank's heads, from the rotated parts and the latents
        k, v = rules.einsum("sbir,sbjc,hec->sbhe", k, v, up), rules.einsum("sbjc,hec->sbhe", v, up)
    return attention_type(q, k, v, sinks, source.axis.group if source.axis.size > 1 else None)


def varying(who: str, group: Any, *tensors: Any) -> None:
    """Refuse tensors that do not vary on the axes of ``group``, whose ranks have different tokens."""
    for axis in axes_in(group):
        for x in tensors:
            if spmd.get_local_type(x)[axis] is not V:
                raise spmd.SpmdTypeError(f"{who}: the inputs must vary on {axis}")


def linear_type(context: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, skip: Any = None) -> Any:
    """The type of the result of linear attention [s, b, heads, values]."""
    others = [] if skip is None else [skip]
    varying("linear attention", context.group, q, k, v, g, beta, *others)
    gates = ["sbhk" if g.dim() == 4 else "sbh", "sbh", *["sbh"] * len(others)]
    return rules.einsum(f"sbjk,sbjk,sbhv,{','.join(gates)}->sbhv", q, k, v, g, beta, *others)


@declare(_LinearAttention)
def _(*, q: Any, k: Any, v: Any, g: Any, beta: Any, skip: Any, route: Any) -> Any:
    return linear_type(route.context, q, k, v, g, beta, skip)


def convolution_type(context: Any, x: Any, weight: Any, bias: Any) -> Any:
    varying("short convolution", context.group, x)
    out = rules.einsum("sbc,cw->sbc", x, weight)
    return out if bias is None else rules.einsum("sbc,c->sbc", out, bias)


@declare(_ShortConvolution)
def _(*, x: Any, weight: Any, bias: Any, halo: Any) -> Any:
    return convolution_type(halo.axis, x, weight, bias)


def like(x: Any, shape: Sequence[int], kind: Any) -> Any:
    """Zeros of a type."""
    made = x.new_zeros(*shape)
    spmd.assert_type(made, dict(spmd.get_local_type(kind)))
    return made


@declare(_Chunked)
def _(*, x: Any, layer: Any, parameters: Sequence[Any]) -> Any:
    """Each chunk: the functions of the layer are checked; the messages between them have the types of USP."""
    rules.ignore(x, *parameters)
    between = linear_in_chunk if isinstance(layer, ChunkedLinearLayer) else attention_in_chunk
    for chunk, span in enumerate(layer.layout.local_chunks):
        part = checked(lambda rows: x[rows], slice(*span))
        out = between(layer, checked(layer.project, part, chunk))
        y = checked(layer.output, out.requires_grad_(part.requires_grad), part, chunk)
        if layer.ffn is not None:
            y = checked(layer.ffn, y, span) if layer.ffn_by_rows else checked(layer.ffn, y)
    return same(y)


def attention_in_chunk(layer: Any, qkv: Sequence[Any]) -> Any:
    grid = layer.layout.grid
    heads = [over(rules.all_to_all, one, grid.ulysses.group, src=V, dst=V) for one in qkv]
    ring = grid.ring.group if grid.ring.size > 1 else None
    kind = over(rules.all_to_all, attention_type(*heads, layer.rule.sinks, ring), grid.ulysses.group, src=V, dst=V)
    return like(qkv[2], (*qkv[0].shape[:3], qkv[2].size(3)), kind)


def linear_in_chunk(layer: Any, projected: Sequence[Any]) -> Any:
    (mixed, *others), context = projected, layer.layout.grid.context
    if layer.weight is not None:
        mixed = like(mixed, mixed.shape, convolution_type(context, mixed, layer.weight, layer.bias))
    inputs = checked(layer.heads, mixed, *others)
    return like(inputs[2], inputs[2].shape, linear_type(context, *inputs))


@declare(_InChunks)
def _(*, x: Any, function: Callable, spans: Any, parameters: Sequence[Any]) -> Any:
    rules.ignore(*parameters, *([] if x is None else [x]))
    for start, stop in spans:
        part = None if x is None else checked(lambda rows: x[rows], slice(start, stop))
        y = checked(function, part, (start, stop))
    return same(y)


@declare(_ChunkedLoss)
def _(*, hidden: Any, weight: Any, labels: Any, token_weights: Any, rule: Any) -> Any:
    hidden, labels, token_weights, group = for_the_loss(hidden, [labels, token_weights], rule)
    losses = rules.einsum("sbh,vh,sb,sb->", hidden, weight, labels, token_weights)
    return over(rules.all_reduce, losses, group, src=V, dst=I)


@declare(_LogProbs)
def _(*, hidden: Any, weight: Any, bias: Any, tokens: Any, wanted: Any, rule: Any, entropy: bool, greedy: bool) -> Any:
    rules.ignore(*(x for x in (bias, wanted) if x is not None))
    whole, wanted_tokens, group = for_the_loss(hidden, [tokens], rule)
    scores = over(rules.all_reduce, rules.einsum("sbh,vh,sb->sb", whole, weight, wanted_tokens), group, src=V, dst=I)
    return like(hidden, (1 + entropy + greedy, *tokens.shape), scores)


def for_the_loss(hidden: Any, values: Sequence[Any], rule: Any) -> tuple[Any, ...]:
    """Hidden states and ``values`` as each TP rank needs them, and the group of TP ranks."""
    group = rule.tensor.group if rule.tensor.size > 1 else None
    if rule.sequence_parallel:
        hidden = over(rules.all_gather, hidden, group, src=S(0), dst=R)
    else:
        hidden = over(rules.convert, hidden, group, src=I, dst=R)
    for axis in axes_in(group):
        values = [rules.convert(x, axis, src=I, dst=R) if spmd.get_local_type(x)[axis] is I else x for x in values]
    return hidden, *values, group


@declare(_Gather)
def _(*, x: Any, layout: Any) -> Any:
    return over(rules.all_gather, x, layout.grid.context.group, src=S(0), dst=R)


@declare(_Rotate)
def _(*, x: Any, angles: Any) -> Any:
    rules.ignore(angles)
    return same(x)


@declare(_Drop)
def _(*, x: Any, at: Any) -> Any:
    rules.ignore(at)
    return same(x)


@declare(GatherRows)
def _(*, rows: Any, group: Any) -> Any:
    return over(rules.all_gather, rows, group, src=S(0), dst=R)


@declare(SumRows)
def _(*, rows: Any, group: Any) -> Any:
    return over(rules.reduce_scatter, rows, group, src=V, dst=S(0))


@declare(_Share)
def _(*, bias: Any, group: Any) -> Any:  # a summand, like the product that it is added to
    return over(rules.reinterpret, bias, group, src=I, dst=V)


@declare(_Sum)
def _(*, local: Any, axis: Any) -> Any:  # the factor in its backward pass undoes the mean of DDP
    return over(rules.all_reduce, local, axis.group, src=V, dst=I)


@declare(_SumOverRanks)
def _(*, x: Any, axis: Any) -> Any:
    return over(rules.all_reduce, x, axis.group, src=V, dst=R)


# ---- megatron-core 0.16.1: tensor_parallel/mappings.py, layers.py, cross_entropy.py, random.py, moe_utils.py


@declare(mappings._CopyToModelParallelRegion)
def _(*, input_: Any, group: Any) -> Any:
    return over(rules.convert, input_, group, src=I, dst=R)


@declare(mappings._ReduceFromModelParallelRegion)
def _(*, input_: Any, group: Any) -> Any:
    return over(rules.all_reduce, input_, group, src=V, dst=I)


@declare(mappings._GatherFromModelParallelRegion)
def _(*, input_: Any, group: Any) -> Any:
    return over(rules.all_gather, input_, group, src=S(input_.ndim - 1), dst=I)


@declare(mappings._ScatterToSequenceParallelRegion)
def _(*, input_: Any, group: Any) -> Any:
    return over(rules.convert, input_, group, src=I, dst=S(0))


@declare(mappings._GatherFromSequenceParallelRegion)
def _(*, input_: Any, group: Any, tensor_parallel_output_grad: bool) -> Any:
    return over(rules.all_gather, input_, group, src=S(0), dst=R if tensor_parallel_output_grad else I)


@declare(mappings._ReduceScatterToSequenceParallelRegion)
def _(*, input_: Any, group: Any) -> Any:
    return over(rules.reduce_scatter, input_, group, src=V, dst=S(0))


@declare(mappings._AllToAll)
def _(*, group: Any, input: Any) -> Any:
    return over(rules.all_to_all, same(input), group, src=V, dst=V)


def product(input: Any, weight: Any, bias: Any) -> Any:
    out = rules.einsum("...k,nk->...n", input, weight)
    return out if bias is None else rules.einsum("...n,n->...n", out, bias)


@declare(layers.LinearWithGradAccumulationAndAsyncCommunication)
def _(*, input: Any, weight: Any, bias: Any, allreduce_dgrad: bool, sequence_parallel: bool, tp_group: Any) -> Any:
    if sequence_parallel:
        input = over(rules.all_gather, input, tp_group, src=S(0), dst=R)
    elif allreduce_dgrad:
        input = over(rules.convert, input, tp_group, src=I, dst=R)
    return product(input, weight, bias)


@declare(layers.LinearWithFrozenWeight)
def _(*, input: Any, weight: Any, bias: Any, allreduce_dgrad: bool, tp_group: Any) -> Any:
    if allreduce_dgrad:
        input = over(rules.convert, input, tp_group, src=I, dst=R)
    return product(input, weight, bias)


@declare(cross_entropy._VocabParallelCrossEntropy)
def _(*, vocab_parallel_logits: Any, target: Any) -> Any:
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    group = get_tensor_model_parallel_group()
    for axis in axes_in(group):
        target = rules.convert(target, axis, src=I, dst=R)
    return over(rules.all_reduce, rules.einsum("sbv,sb->sb", vocab_parallel_logits, target), group, src=V, dst=I)


@declare(random.CheckpointFunction)
def _(*, run_function: Callable, args: Sequence[Any]) -> Any:
    rules.ignore(*(x for x in args if isinstance(x, torch.Tensor)))
    results = checked(run_function, *args)
    if isinstance(results, tuple):
        return tuple(same(x) if isinstance(x, torch.Tensor) else None for x in results)
    return same(results)


@declare(MoEAuxLossAutoScaler)
def _(*, output: Any, aux_loss: Any) -> Any:
    """The gradient of the loss is 1 on each rank: the loss must be one rank's part of a sum, or invariant."""
    rules.ignore(aux_loss)
    for axis, kind in spmd.get_local_type(aux_loss).items():
        if kind is R:
            raise spmd.SpmdTypeError(f"auxiliary loss: each rank of {axis} would differentiate the complete loss")
    return same(output)


# ---- PyTorch's FSDP2


@declare(_fsdp_param_group.RegisterPostBackwardFunction)
def _(*, inputs: Sequence[Any]) -> Any:
    return tuple(same(x) for x in inputs)


# ---- what the checker must not see


def hide_tables() -> None:
    """Exempt functions that compute no gradients: they copy parameters, compare random states or list positions."""
    for function in (
        _fsdp_param_group.FSDPParamGroup.unshard,
        _fsdp_param_group.FSDPParamGroup.wait_for_unshard,
        _fsdp_param_group.FSDPParamGroup.reshard,
        _fsdp_state.FSDPState._lazy_init,
        random.CudaRNGStatesTracker.fork,
        LayoutRotaryEmbedding.angles,
        LayoutRotaryEmbedding.of_spans,
    ):
        spmd.register_no_typecheck(function)
    positions = vars(HiddenDropout)["_at"]
    list_positions = spmd.register_no_typecheck(positions.func)
    positions.func = lambda dropout: spmd.assert_type(list_positions(dropout), V)


# ---- torch.distributed's functions on tensors without gradients, called directly


def _arguments(function: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    given = normalize_function(function, args, kwargs, normalize_to_only_use_kwargs=True).kwargs
    return {**given, "group": given["group"] or dist.group.WORLD}


def _all_reduce(function: Any, args: tuple, kwargs: dict) -> None:
    given = _arguments(function, args, kwargs)
    kind = spmd.get_local_type(given["tensor"])
    for axis in axes_in(given["group"]):
        if kind.get(axis) not in (V, P) and given["op"] == dist.ReduceOp.SUM:
            raise spmd.SpmdTypeError(f"all_reduce: the tensor is {kind.get(axis)} on {axis}, so its sum is complete")
        kind[axis] = R


def _all_gather(function: Any, args: tuple, kwargs: dict) -> None:
    given = _arguments(function, args, kwargs)
    kind = dict(spmd.get_local_type(given["input_tensor"]))
    for axis in axes_in(given["group"]):
        if kind.get(axis) is not V:
            raise spmd.SpmdTypeError(f"all_gather: the tensor is {kind.get(axis)} on {axis}, not varying")
        kind[axis] = R
    vars(given["output_tensor"]).pop("_local_type", None)
    spmd.assert_type(given["output_tensor"], kind)


def _broadcast(function: Any, args: tuple, kwargs: dict) -> None:
    given = _arguments(function, args, kwargs)
    spmd.get_local_type(given["tensor"]).update(dict.fromkeys(axes_in(given["group"]), R))


_raw_dist.RAW_DIST_RULES[dist.all_reduce] = _all_reduce
_raw_dist.RAW_DIST_RULES[dist.broadcast] = _broadcast
for _name in ("all_gather_into_tensor", "all_gather_single"):  # the second name is that of newer versions of PyTorch
    if hasattr(dist, _name):
        _raw_dist.RAW_DIST_RULES[getattr(dist, _name)] = _all_gather
