# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet (Qwen3-Next, arXiv 2412.06464): a layer that carries a state in place of keys and values.

The weights, their names, their order and their formulas are those of core's ``GatedDeltaNet``. Core's class is not
used: it needs the package fla and refuses context parallelism, and without sequence parallelism it does not sum the
gradient of ``out_norm`` over TP.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.context_parallel.core.mixers.state_mixer import Linear, MixerSizes, MixerSpec, StateMixer
from megatron.context_parallel.core.transformer_layer import AttentionSettings
from megatron.context_parallel.linear_attention.rules import GATED_DELTA

EPSILON = 1e-6  # of the norm of queries and keys, in fla and in transformers


class GatedDeltaNet(StateMixer):
    """Consecutive value heads share a query and key head. ``config`` has the sizes ``linear_*``."""

    rule = GATED_DELTA

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        settings: AttentionSettings,
        exchange: str = "auto",
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,  # since 0.18 core passes ``name`` and more
    ) -> None:
        self.key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        size = pg_collection.tp.size()
        self.key_heads, heads = config.linear_num_key_heads // size, config.linear_num_value_heads // size
        keys, values = self.key_heads * self.key_dim, heads * value_dim
        rows = {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}
        sizes = MixerSizes(rows, ("query", "key", "value"), config.linear_conv_kernel_dim, heads, value_dim)
        super().__init__(config, submodules, layer_number, settings, exchange, pg_collection, sizes)
        self.out_norm = build_module(
            submodules.out_norm, config=config, hidden_size=value_dim, eps=config.layernorm_epsilon
        )
        self.out_norm.weight.sequence_parallel = False  # its gradient is summed over TP in `gated_norm`

    @staticmethod
    def initial_bias(values: Tensor, generator: torch.Generator) -> Tensor:
        """As in core."""
        return values.fill_(1.0)

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """The convolution's input, beta and alpha, the gate."""
        every, _ = self.in_proj(hidden_states)
        sizes = sum(self.convolved.values()), *(self.rows[kind] for kind in ("z", "beta", "alpha"))
        qkv, gate, beta, alpha = every.split(sizes, dim=-1)
        return qkv, beta, alpha, gate

    def inputs_of_rule(self, convolved: Tensor, beta: Tensor, alpha: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, log-decay g and beta."""
        q, k, v = convolved.split([*self.convolved.values()], dim=-1)
        q, k = (unit(x.unflatten(-1, (self.key_heads, -1))) for x in (q, k))
        wide = torch.promote_types(alpha.dtype, torch.float32)
        g = -self.A_log.to(wide).exp() * functional.softplus(alpha.to(wide) + self.dt_bias.to(wide))
        return q * self.key_dim**-0.5, k, v.unflatten(-1, (self.heads, -1)), g, beta.to(wide).sigmoid()

    def gated_norm(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """The norm of each head, times SiLU of the gate."""
        # Each TP rank normalizes other heads with the same weight, whose gradient is therefore the sum over TP.
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)
        weight = weight + 1 if self.config.layernorm_zero_centered_gamma else weight
        wide = torch.promote_types(mixed.dtype, torch.float32)
        normed = functional.rms_norm(mixed.to(wide), (self.value_dim,), weight.to(wide), self.config.layernorm_epsilon)
        return (normed.flatten(-2) * functional.silu(gate.to(wide))).to(mixed.dtype)


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1 along the last dim, in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)).to(x.dtype)


def gated_delta_net(settings: AttentionSettings, linear: Linear, norm: type, *, exchange: str = "auto") -> MixerSpec:
    """A Gated DeltaNet in place of attention."""
    spec = ModuleSpec(
        GatedDeltaNet,
        params={"settings": settings, "exchange": exchange},
        submodules=GatedDeltaNetSubmodules(linear("in_proj"), norm, linear("out_proj")),
    )
    return MixerSpec(spec, {"input_layernorm.": "self_attention.in_proj.layer_norm_"})
