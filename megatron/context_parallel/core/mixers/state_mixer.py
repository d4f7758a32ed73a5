# SPDX-License-Identifier: Apache-2.0
"""A layer's mixer that carries a state in place of keys and values: what Gated DeltaNet and Mamba2 have in common.

A projection, a short convolution of some of its rows, a rule of linear attention, a norm with a gate, and a projection.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import checkpoint
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default

from megatron.context_parallel.core.core_attention import with_packed
from megatron.context_parallel.core.transformer_layer import AttentionSettings
from megatron.context_parallel.layout.documents import samples_of
from megatron.context_parallel.layout.masks import Causal
from megatron.context_parallel.linear_attention.mixer import linear_attention
from megatron.context_parallel.linear_attention.rules import LinearRule
from megatron.context_parallel.linear_attention.short_convolution import short_convolution

BY_KIND = ("weight", "lora_b")  # parameters of ``in_proj`` whose rows are of several kinds
DECAY_RANGE = (1.0, 16.0)  # of exp(A_log) at the start


class MixerSpec(NamedTuple):
    """What a layer has in place of attention, and what its weights are named in core's files.

    Attributes:
        spec: for core.
        names: beginnings of the weights' names in the layer, and in files.
    """

    spec: ModuleSpec
    names: dict[str, str]


Linear = Callable[[str], "type | ModuleSpec"]
"""The linear layer of a name, with an adapter if it gets one."""
Initial = Callable[[Tensor, torch.Generator], Tensor]
"""Fills a whole parameter in fp32 with its initial value: the attribute ``initial`` of parameters that have one."""
Mixer = Callable[["AttentionSettings", Linear, type], MixerSpec]
"""Makes the spec from the settings, the linear layers and the class of norms; each file of this folder has one."""


class MixerSizes(NamedTuple):
    """Sizes of a mixer on a rank.

    Attributes:
        rows: of ``in_proj``, by core's name of each kind, in core's order.
        convolved: those kinds that go through the convolution.
        width: tokens that the convolution sees.
        heads, value_dim: number, and size.
        bias: whether the convolution has one.
    """

    rows: Mapping[str, int]
    convolved: Collection[str]
    width: int
    heads: int
    value_dim: int
    bias: bool = False


class StateMixer(MegatronModule):
    """Takes and returns the rows of this rank's tokens, as core's self-attention does. Heads are split over TP.

    A subclass has the norm, and the functions below that this class leaves open.

    Args:
        submodules: with ``in_proj`` and ``out_proj``.
        settings: of the attention of all layers; its layout, and whether documents are separated, apply here too.
        exchange: how states go from rank to rank: see :func:`linear_attention`.
    """

    rule: LinearRule

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        settings: AttentionSettings,
        exchange: str,
        pg_collection: ProcessGroupCollection,
        sizes: MixerSizes,
    ) -> None:
        super().__init__(config)
        rows, width, heads, value_dim = sizes.rows, sizes.width, sizes.heads, sizes.value_dim
        self.settings, self.exchange, self.layer_number = settings, exchange, layer_number
        self.tp_group, size = pg_collection.tp, pg_collection.tp.size()
        self.heads, self.value_dim = heads, value_dim
        self.rows, self.convolved = dict(rows), {kind: rows[kind] for kind in rows if kind in sizes.convolved}
        linear: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(rows.values()) * size,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        channels, dtype = sum(self.convolved.values()), config.params_dtype
        # holds the weights; it is never called
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels, bias=sizes.bias, dtype=dtype)
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(heads, dtype=dtype))
        for parameter in (*self.conv1d.parameters(), self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, True, dim=0, stride=1)
        for name, parameter in self.in_proj.named_parameters():
            if name in BY_KIND:
                parameter.partition_sections = tuple(rows.values())
        for parameter in self.conv1d.parameters():
            parameter.partition_sections = tuple(self.convolved.values())
            parameter.initial = partial(_uniform, width**-0.5)  # as torch initializes a convolution
        self.A_log.initial, self.dt_bias.initial = _decays, self.initial_bias
        self.out_proj = build_module(
            submodules.out_proj,
            heads * value_dim * size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    @staticmethod
    def initial_bias(values: Tensor, generator: torch.Generator) -> Tensor:
        """The initial ``dt_bias``."""
        raise NotImplementedError

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """[s, b, h] -> what goes through the convolution [s, b, channels], other inputs of the rule [s, b, heads], the
        gate [s, b, heads * V]. With sequence parallelism the input is [s / TP, b, h]."""
        raise NotImplementedError

    def inputs_of_rule(self, convolved: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """The arguments of :func:`linear_attention` from what the convolution returns and the rule's other inputs."""
        raise NotImplementedError

    def gated_norm(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """[.., heads, V] and the gate [.., heads * V] -> [.., heads * V]."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        attention_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[s_local, b, h] -> [s_local, b, h] and no bias; with sequence parallelism both are [s_local / TP, b, h].

        Args:
            attention_mask: not a mask but the batch's samples (layout/documents.py).
            packed_seq_params: the ends of the documents in the complete sequence.

        Raises:
            ValueError: an option is not supported.
        """
        if inference_context is not None or attention_bias is not None:
            raise ValueError("a linear-attention or SSM layer supports neither inference_context nor attention_bias")
        batch = with_packed(samples_of(attention_mask), packed_seq_params, Causal())
        projected = self.projected(hidden_states)
        if self.training and self.config.recompute_granularity == "selective":
            mixed = checkpoint(lambda *x: self._mix(*x, batch), False, *projected)
        else:
            mixed = self._mix(*projected, batch)
        return self.out_proj(mixed)[0], None

    def _mix(self, *projected_and_batch: Any) -> Tensor:
        """What lies between the two projections; returns [s_local, b, heads * V]."""
        *inputs, gate, batch = projected_and_batch
        return self.gated_norm(self.mixed(*inputs, batch), gate)

    def mixed(self, *inputs_and_batch: Any) -> Tensor:
        """The convolution and the rule: what :meth:`projected` returns without the gate -> [s_local, b, heads, V]."""
        x, *others, batch = inputs_and_batch
        layout = self.settings.layout_of(batch)
        documents = batch.ends if self.settings.separate else ()
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        convolved = short_convolution(x, weight, bias, layout=layout, activation="silu", documents=documents)
        inputs = self.inputs_of_rule(convolved, *others)
        how = {"documents": documents, "exchange": self.exchange, "kernel": self.settings.linear_kernel}
        return linear_attention(*inputs, rule=self.rule, layout=layout, **how)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As core's: each kind of rows of ``in_proj`` and ``conv1d`` is one tensor of the checkpoint, split over TP; so
        is each kind of rows of an adapter's B."""
        own = dict(self.named_parameters(recurse=False))
        own |= {f"conv1d.{name}": parameter for name, parameter in self.conv1d.named_parameters()}
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            if module is not self.conv1d:
                state |= sharded_state_dict_default(
                    module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
                )
        by_kind = {f"in_proj.{name}": self.rows for name in BY_KIND}
        for name, kinds in (*by_kind.items(), *((n, self.convolved) for n in own if n[:7] == "conv1d.")):
            if (key := prefix + name) in state:
                state[key] = in_kinds(state[key], kinds)
        return state


def _uniform(bound: float, values: Tensor, generator: torch.Generator) -> Tensor:
    return values.uniform_(-bound, bound, generator=generator)


def _decays(values: Tensor, generator: torch.Generator) -> Tensor:
    return values.uniform_(*DECAY_RANGE, generator=generator).log_()


def in_kinds(whole: ShardedTensor, kinds: Mapping[str, int]) -> ShardedTensorFactory:
    """The rows of a tensor as one tensor of the checkpoint for each kind, which TP splits; names end in the kind.

    core's own function is in another module since 0.19, and in 0.16 next to imports of Triton.
    """
    place = whole.without_data()

    def build(key: str, rows: Tensor, replica: tuple, _: slice | None) -> list[ShardedTensor]:
        every = replace(place, key=key, data=rows.detach(), dtype=rows.dtype, replica_id=replica)
        parts, start = [], 0
        for kind, count in kinds.items():
            for part in every.narrow(0, start, count):
                part.key = f"{key}.{kind}"
                parts.append(part)
            start += count
        return parts

    return ShardedTensorFactory(whole.key, whole.data, build, torch.cat, whole.replica_id)
