# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet (Qwen3-Next, arXiv 2412.06464): a layer that carries a state in place of keys and values.

The weights, their names, their order and their formulas are those of core's ``GatedDeltaNet``. Core's class is not
used: it needs the package fla and refuses context parallelism, and without sequence parallelism it does not sum the
gradient of ``out_norm`` over TP.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules, _split_tensor_factory
    from megatron.core.tensor_parallel import checkpoint
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default

from megatron.context_parallel.core.core_attention import with_packed
from megatron.context_parallel.core.transformer_layer import AttentionSettings
from megatron.context_parallel.layout.documents import Samples, samples
from megatron.context_parallel.layout.masks import Causal
from megatron.context_parallel.linear_attention.mixer import linear_attention
from megatron.context_parallel.linear_attention.rules import GATED_DELTA
from megatron.context_parallel.linear_attention.short_convolution import short_convolution

EPSILON = 1e-6  # of the norm of queries and keys, in fla and in transformers
PROJECTED = ("query", "key", "value", "z", "beta", "alpha")  # core's names of the rows of in_proj, in this order
CONVOLVED = PROJECTED[:3]


class GatedDeltaNet(MegatronModule):
    """Takes and returns the rows of this rank's tokens, as core's self-attention does.

    Heads are split over TP. Consecutive value heads share a query and key head.

    Args:
        config: with the sizes ``linear_*``.
        settings: of the attention of all layers; its layout, and whether documents are separated, apply here too.
        exchange: how states go from rank to rank: see :func:`linear_attention`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        settings: AttentionSettings,
        exchange: str = "auto",
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.settings, self.exchange, self.layer_number = settings, exchange, layer_number
        self.tp_group = pg_collection.tp
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        size = self.tp_group.size()
        self.key_heads, self.heads = config.linear_num_key_heads // size, config.linear_num_value_heads // size
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        self.rows = [keys, keys, values, values, self.heads, self.heads]  # of in_proj on this rank
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(self.rows) * size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )
        channels = sum(self.rows[:3])
        self.conv1d = nn.Conv1d(
            channels,
            channels,
            config.linear_conv_kernel_dim,
            groups=channels,
            bias=False,
            dtype=config.params_dtype,
        )  # holds the weight; it is never called
        self.dt_bias = nn.Parameter(torch.empty(self.heads, dtype=config.params_dtype))
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=config.params_dtype))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, True, dim=0, stride=1)
        self.in_proj.weight.partition_sections = tuple(rows * size for rows in self.rows)
        self.conv1d.weight.partition_sections = tuple(rows * size for rows in self.rows[:3])
        self.out_norm = build_module(
            submodules.out_norm, config=config, hidden_size=self.value_dim, eps=config.layernorm_epsilon
        )
        self.out_norm.weight.sequence_parallel = False  # its gradient is summed over TP in `_mix`
        self.out_proj = build_module(
            submodules.out_proj,
            values * size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

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
            attention_mask: not a mask but the batch's samples, as layout/documents.py packs them.
            packed_seq_params: the ends of the documents in the complete sequence.

        Raises:
            ValueError: an option is not supported.
        """
        if inference_context is not None or attention_bias is not None:
            raise ValueError("a Gated DeltaNet layer supports neither inference_context nor attention_bias")
        batch = with_packed(samples(attention_mask), packed_seq_params, Causal())
        projected = self.projected(hidden_states)
        if self.training and self.config.recompute_granularity == "selective":
            mixed = checkpoint(lambda *x: self._mix(*x, batch), False, *projected)
        else:
            mixed = self._mix(*projected, batch)
        return self.out_proj(mixed)[0], None

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[s, b, h] -> what goes through the convolution [s, b, channels], beta and alpha [s, b, heads], the gate.

        With sequence parallelism the input is [s / TP, b, h].
        """
        every, _ = self.in_proj(hidden_states)
        qkv, gate, beta, alpha = every.split([sum(self.rows[:3]), *self.rows[3:]], dim=-1)
        return qkv, beta, alpha, gate

    def _mix(self, qkv: Tensor, beta: Tensor, alpha: Tensor, gate: Tensor, batch: Samples) -> Tensor:
        """What lies between the two projections; returns [s_local, b, heads * V]."""
        return self.gated_norm(self.mixed(qkv, beta, alpha, batch), gate)

    def mixed(self, qkv: Tensor, beta: Tensor, alpha: Tensor, batch: Samples) -> Tensor:
        """The convolution and the rule: [s_local, b, channels] and gates [s_local, b, heads] -> [.., heads, V]."""
        layout = self.settings.layout_of(batch)
        documents = batch.ends if self.settings.separate else ()
        convolved = short_convolution(
            qkv, self.conv1d.weight.squeeze(1), layout=layout, activation="silu", documents=documents
        )
        inputs = self.inputs_of_rule(convolved, beta, alpha)
        return linear_attention(
            *inputs, rule=GATED_DELTA, layout=layout, documents=documents, exchange=self.exchange
        )  # fmt: skip

    def inputs_of_rule(self, convolved: Tensor, beta: Tensor, alpha: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, log-decay g and beta from what the convolution returns and from the gates' projections."""
        q, k, v = convolved.split(self.rows[:3], dim=-1)
        q, k = (unit(x.unflatten(-1, (self.key_heads, -1))) for x in (q, k))
        wide = torch.promote_types(alpha.dtype, torch.float32)
        g = -self.A_log.to(wide).exp() * functional.softplus(alpha.to(wide) + self.dt_bias.to(wide))
        return q * self.key_dim**-0.5, k, v.unflatten(-1, (self.heads, -1)), g, beta.to(wide).sigmoid()

    def gated_norm(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """The norm of each head [.., heads, V], times SiLU of the gate [.., heads * V] -> [.., heads * V]."""
        # Each TP rank normalizes other heads with the same weight, whose gradient is therefore the sum over TP.
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)
        weight = weight + 1 if self.config.layernorm_zero_centered_gamma else weight
        wide = torch.promote_types(mixed.dtype, torch.float32)
        normed = functional.rms_norm(mixed.to(wide), (self.value_dim,), weight.to(wide), self.config.layernorm_epsilon)
        return (normed.flatten(-2) * functional.silu(gate.to(wide))).to(mixed.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As core's: each kind of rows of ``in_proj`` and ``conv1d`` is one tensor of the checkpoint, split over TP."""
        own = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d.weight}
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name in ("in_proj", "out_norm", "out_proj"):
            state |= sharded_state_dict_default(
                getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        for name, kinds in (("in_proj.weight", PROJECTED), ("conv1d.weight", CONVOLVED)):
            key = prefix + name
            state[key] = _split_tensor_factory(state[key], self.rows[: len(kinds)], list(kinds), 0)
        return state


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1 along the last dim, in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)).to(x.dtype)
