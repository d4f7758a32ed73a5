# SPDX-License-Identifier: Apache-2.0
"""Types of distribution of our autograd functions and of megatron-core's, for the checker ``spmd_types``.

For each axis of the grid a tensor is replicated (R, gradients are summed), invariant (I, gradients are equal), varying
(V), partial (P, to be summed) or sharded (S). A missing or doubled reduction is then an error of types, found in one
process with a fake group and without comparing numbers. The program has no annotations: the types are added from
outside. They prove that functions fit together; what a function computes is proven by numerical tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import spmd_types as spmd
from megatron.core.tensor_parallel import layers, mappings
from spmd_types import I, R, S, V, rules

from megatron.context_parallel.attention.attend import _TiledAttention
from megatron.context_parallel.attention.ulysses import _HeadsToSequence, _SequenceToHeads
from megatron.context_parallel.fpdt.chunked_loss import _ChunkedLoss
from megatron.context_parallel.layout.sequence_layout import _Gather
from megatron.context_parallel.positions.position_dropout import _Drop
from megatron.context_parallel.positions.rope import _Rotate

# Functions without a type, and why.
EXPERTS = "experts have no types yet; tests compare their losses and every gradient with one process"
UNTYPED = {
    "context_parallel.core.experts.GatherRows": EXPERTS,
    "context_parallel.core.experts.SumRows": EXPERTS,
    "context_parallel.fpdt.chunked_ffn._InChunks": "runs a function of the caller, whose operations have types",
    "context_parallel.fpdt.chunked_layer._Chunked": "runs functions of the caller; its attention is proven by numbers",
    "context_parallel.huggingface.decoder_loss._Sum": "a sum for DDP's mean, which has no type",
    "simulator.dry_run.recording.fp8._Linear": "a simulation of a kernel of one device",
    "simulator.dry_run.recording.gpu_kernels._RmsNorm": "a simulation of a kernel of one device",
}

# Collectives on tensors, by file: the function whose type they have, or why they have none.
REPORT = "a number for the log or a decision, through which no gradient passes"
COPIES = "copies of states and files, compared bit by bit in tests"
COLLECTIVES = {
    "context_parallel.attention.ring": "_TiledAttention",
    "context_parallel.attention.ulysses": "_SequenceToHeads, _HeadsToSequence",
    "context_parallel.fpdt.chunked_loss": "_ChunkedLoss",
    "context_parallel.layout.sequence_layout": "_Gather",
    "context_parallel.core.experts": EXPERTS,
    "context_parallel.huggingface.decoder_loss": UNTYPED["context_parallel.huggingface.decoder_loss._Sum"],
    "inference.decoder": "generation, without gradients",
    "inference.generate": "generation, without gradients",
    "inference.kv_cache": "generation, without gradients",
    "simulator.dry_run.recording.fp8": "a simulation",
    "simulator.machines.measure_device": "a measurement",
    "simulator.machines.measure_links": "a measurement",
    "training.certifying.whole_gradients": "gathers what tests compare",
    "training.checkpoint.in_memory.copy_file": COPIES,
    "training.checkpoint.in_memory.restart": COPIES,
    "training.checkpoint.in_memory.state": COPIES,
    "training.evaluation.eval_plan": REPORT,
    "training.features.held_out": REPORT,
    "training.features.replicas": REPORT,
    "training.features.stopping": REPORT,
    "training.features.stragglers": REPORT,
    "training.job": REPORT,
    "training.loss": REPORT,
    "training.model.expert_load": REPORT,
    "training.model.fsdp": "gradients of partitioned positions over DP, proven by numbers",
    "training.model.optimizer": "whether a gradient is finite, a maximum",
    "training.watch": REPORT,
}


def declare(function: type) -> Callable:
    def put(hook: Callable) -> Callable:
        function.spmd_typecheck = staticmethod(hook)
        return hook

    return put


@declare(_SequenceToHeads)
def _(*, q: Any, k: Any, v: Any, axis: Any) -> Any:
    return tuple(rules.all_to_all(x, axis.group, src=V, dst=V) for x in (q, k, v))


@declare(_HeadsToSequence)
def _(*, out: Any, axis: Any) -> Any:
    return rules.all_to_all(out, axis.group, src=V, dst=V)


@declare(_TiledAttention)
def _(*, q: Any, k: Any, v: Any, sinks: Any, source: Any) -> Any:
    ring = getattr(source, "axis", None)
    if ring is not None and ring.size > 1:
        for x in (q, k, v):
            spmd.assert_type(x, {ring.group: V})
    out = rules.einsum("...,...,...->...", q, k, v)
    return out if sinks is None else rules.einsum("qbhd,h->qbhd", out, sinks)


@declare(_ChunkedLoss)
def _(*, hidden: Any, weight: Any, labels: Any, token_weights: Any, tensor: Any, sequence_parallel: bool) -> Any:
    if tensor.size > 1:
        if sequence_parallel:
            hidden = rules.all_gather(hidden, tensor.group, src=S(0), dst=R)
        else:
            hidden = rules.convert(hidden, tensor.group, src=I, dst=R)
        labels, token_weights = (
            rules.convert(x, tensor.group, src=I, dst=R) if spmd.get_axis_local_type(x, tensor.group) is I else x
            for x in (labels, token_weights)
        )
    losses = rules.einsum("sbh,vh,sb,sb->", hidden, weight, labels, token_weights)
    return rules.all_reduce(losses, tensor.group, src=V, dst=I) if tensor.size > 1 else losses


@declare(_Gather)
def _(*, x: Any, layout: Any) -> Any:
    return rules.all_gather(x, layout.grid.context.group, src=S(0), dst=R)


@declare(_Rotate)
def _(*, x: Any) -> Any:
    return x


@declare(_Drop)
def _(*, x: Any) -> Any:
    return x


# ---- megatron-core 0.16.1: tensor_parallel/mappings.py, layers.py


def _unless_alone(rule: Callable) -> Callable:
    def hook(*, input_: Any, group: Any) -> Any:
        return input_ if group.size() == 1 else rule(input_, group)

    return hook


declare(mappings._CopyToModelParallelRegion)(_unless_alone(lambda x, g: rules.convert(x, g, src=I, dst=R)))
declare(mappings._ReduceFromModelParallelRegion)(_unless_alone(lambda x, g: rules.all_reduce(x, g, src=V, dst=I)))
declare(mappings._ScatterToModelParallelRegion)(
    _unless_alone(lambda x, g: rules.convert(x, g, src=I, dst=S(x.ndim - 1)))
)
declare(mappings._GatherFromModelParallelRegion)(
    _unless_alone(lambda x, g: rules.all_gather(x, g, src=S(x.ndim - 1), dst=I))
)
declare(mappings._ScatterToSequenceParallelRegion)(_unless_alone(lambda x, g: rules.convert(x, g, src=I, dst=S(0))))
declare(mappings._ReduceScatterToSequenceParallelRegion)(
    _unless_alone(lambda x, g: rules.reduce_scatter(x, g, src=V, dst=S(0)))
)


@declare(mappings._GatherFromSequenceParallelRegion)
def _(*, input_: Any, group: Any, tensor_parallel_output_grad: bool) -> Any:
    return rules.all_gather(input_, group, src=S(0), dst=R if tensor_parallel_output_grad else I)


@declare(layers.LinearWithGradAccumulationAndAsyncCommunication)
def _(*, input: Any, weight: Any, bias: Any, allreduce_dgrad: bool, sequence_parallel: bool, tp_group: Any) -> Any:
    if tp_group is not None and tp_group.size() > 1:
        if sequence_parallel:
            input = rules.all_gather(input, tp_group, src=S(0), dst=R)
        elif allreduce_dgrad:
            input = rules.convert(input, tp_group, src=I, dst=R)
    out = rules.einsum("...k,nk->...n", input, weight)
    return out if bias is None else rules.einsum("...n,n->...n", out, bias)


TYPED = (_SequenceToHeads, _HeadsToSequence, _TiledAttention, _ChunkedLoss, _Gather, _Rotate, _Drop)
