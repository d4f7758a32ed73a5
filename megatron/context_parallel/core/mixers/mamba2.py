# SPDX-License-Identifier: Apache-2.0
"""Mamba2 (arXiv 2405.21060): a layer that carries a state in place of keys and values.

The weights, their names, their order and their formulas are those of core's ``MambaMixer``, which needs the package
mamba_ssm, and under context parallelism splits heads alone.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

with warnings.catch_warnings():  # core reports at import that apex is missing
    warnings.simplefilter("ignore")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron.context_parallel.core.mixers.state_mixer import Linear, MixerSizes, MixerSpec, StateMixer
from megatron.context_parallel.core.transformer_layer import AttentionSettings
from megatron.context_parallel.linear_attention.rules import MAMBA2

WIDTH = 4  # of the convolution, in core
STEPS = (0.001, 0.1)  # of time at the start, without an input
EPSILON = 1e-5  # of the norm of the outputs, in core, whatever the layers' epsilon is


class Mamba2Submodules(NamedTuple):
    """The linear layers at both ends, as core's ``MambaMixerSubmodules``, whose module needs Triton."""

    in_proj: type
    out_proj: type


class Mamba2(StateMixer):
    """Consecutive heads share a group of B and C. ``config`` has the sizes ``mamba_*``.

    Args:
        dt_min: the smallest time step.
    """

    rule = MAMBA2

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Mamba2Submodules,
        layer_number: int,
        settings: AttentionSettings,
        exchange: str = "auto",
        dt_min: float = 0.0,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,  # since 0.18 core passes ``name`` and more
    ) -> None:
        size = pg_collection.tp.size()
        heads, self.groups = config.mamba_num_heads // size, config.mamba_num_groups // size
        values, keys = heads * config.mamba_head_dim, self.groups * config.mamba_state_dim
        rows = {"z": values, "x": values, "B": keys, "C": keys, "dt": heads}
        sizes = MixerSizes(rows, ("x", "B", "C"), WIDTH, heads, config.mamba_head_dim, bias=True)
        super().__init__(config, submodules, layer_number, settings, exchange, pg_collection, sizes)
        self.dt_min = dt_min
        self.D = nn.Parameter(torch.ones(heads, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.D, True, dim=0, stride=1)
        self.norm = GroupNorm(values, self.groups, config.params_dtype, self.tp_group)

    @staticmethod
    def initial_bias(values: Tensor, generator: torch.Generator) -> Tensor:
        """Its softplus is a time step without an input; steps are even in their logarithm, as in core."""
        steps = values.uniform_(*map(math.log, STEPS), generator=generator).exp_()
        return steps.expm1().log()

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """The convolution's input, dt, the gate."""
        every, _ = self.in_proj(hidden_states)
        gate, xBC, dt = every.split([self.rows["z"], sum(self.convolved.values()), self.heads], dim=-1)
        return xBC, dt, gate

    def inputs_of_rule(self, convolved: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        """C, B, x, dt * A, dt and D."""
        x, B, C = convolved.split([*self.convolved.values()], dim=-1)
        wide = torch.promote_types(dt.dtype, torch.float32)
        dt = functional.softplus(dt.to(wide) + self.dt_bias.to(wide)).clamp(min=self.dt_min)
        B, C = (y.unflatten(-1, (self.groups, -1)) for y in (B, C))
        g, skip = -self.A_log.to(wide).exp() * dt, self.D.to(wide).expand_as(dt)
        return C, B, x.unflatten(-1, (self.heads, -1)), g, dt, skip

    def gated_norm(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """The outputs times SiLU of the gate, normalized over the heads of a group."""
        return self.norm(mixed.flatten(-2), gate)


class GroupNorm(nn.Module):
    """RMSNorm of each group of channels of ``x * silu(gate)``; TP splits groups.

    Args:
        channels, groups: of this rank.
    """

    def __init__(self, channels: int, groups: int, dtype: torch.dtype, tp_group: Any) -> None:
        super().__init__()
        self.groups, self.tp_group = groups, tp_group
        self.weight = nn.Parameter(torch.ones(channels, dtype=dtype))
        set_tensor_model_parallel_attributes(self.weight, True, dim=0, stride=1)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        x_gated = (x.to(wide) * functional.silu(gate.to(wide))).unflatten(-1, (self.groups, -1))
        normed = functional.rms_norm(x_gated, x_gated.shape[-1:], eps=EPSILON).flatten(-2)
        return (normed * self.weight.to(wide)).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weights, split over TP."""
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def mamba2(
    settings: AttentionSettings, linear: Linear, norm: type, *, exchange: str = "auto", dt_min: float = 0.0
) -> MixerSpec:
    """Mamba2 in place of attention; it has no other norm than its own."""
    spec = ModuleSpec(
        Mamba2,
        params={"settings": settings, "exchange": exchange, "dt_min": dt_min},
        submodules=Mamba2Submodules(linear("in_proj"), linear("out_proj")),
    )
    return MixerSpec(spec, {"input_layernorm.": "mixer.in_proj.layer_norm_", "self_attention.": "mixer."})
