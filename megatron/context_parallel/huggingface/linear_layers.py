# SPDX-License-Identifier: Apache-2.0
"""Layers of transformers that carry a state, over ranks: Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo hybrid), KDA (Kimi
Linear), and Mamba2 (Mamba2, Bamba, Falcon H1, Granite hybrid, Nemotron H, Zamba2).

Such a layer mixes tokens in two functions of its module: a short convolution and the rule. Its forward runs unchanged,
except that these two names mean ours. Both get the keyword arguments that the model was called with; one of them says
how tokens are mixed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.context_parallel.huggingface.rank_batch import Part
from megatron.context_parallel.linear_attention.mixer import linear_attention
from megatron.context_parallel.linear_attention.rules import GATED_DELTA, KDA, MAMBA2, LinearRule
from megatron.context_parallel.linear_attention.short_convolution import short_convolution

MIXER = "context_mixer"  # the keyword argument
EPSILON = 1e-6  # of the norm of queries and keys


class Mixer(Protocol):
    """How tokens are mixed."""

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """[s, b, channels] -> the same shape; weight [channels, width]."""
        ...

    def state(self, rule: LinearRule, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """A rule, with the arguments and the result of :func:`linear_attention`."""
        ...


class OverRanks:
    """Mixes the tokens of all ranks of a batch."""

    def __init__(self, part: Part) -> None:
        self.layout = part.layout
        self.documents = part.ends if any(len(ends) > 1 for ends in part.ends) else ()

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        return short_convolution(
            x, weight, bias, layout=self.layout, activation=activation, documents=self.documents
        )  # fmt: skip

    def state(self, rule: LinearRule, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return linear_attention(q, k, v, g, beta, rule=rule, layout=self.layout, documents=self.documents)


class Alone:
    """Each token sees only itself: see probe.py."""

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        x = x * weight[:, -1]
        x = x if bias is None else x + bias
        return F.silu(x) if activation else x

    def state(self, rule: LinearRule, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        answered = (q * k).sum(-1, keepdim=True).repeat_interleave(v.size(2) // q.size(2), dim=2)
        return (answered * v * beta.unsqueeze(-1)).to(v.dtype)


def has_state(module: nn.Module) -> bool:
    """Whether a module's forward mixes tokens in the two functions that are replaced here."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and CONVOLUTION in code.co_names and not RULES.keys().isdisjoint(code.co_names)


def layers_with_state(model: nn.Module) -> list[nn.Module]:
    """The modules of a model with :func:`has_state`. Raises ValueError if another library has replaced a forward."""
    found = [module for module in model.modules() if has_state(module)]
    for module in found:
        if "forward" in vars(module):
            raise ValueError(f"the forward of {type(module).__name__} was replaced: not supported over ranks")
    return found


def forward_with_ours(module: nn.Module, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a module with :func:`has_state`, with our functions in place of the module's."""
    own = inspect.unwrap(type(module).forward)
    ours = {CONVOLUTION: _convolution, **RULES, FUSED: lambda *_, **__: None}
    changed = FunctionType(own.__code__, own.__globals__ | ours, own.__name__, own.__defaults__, own.__closure__)
    changed.__kwdefaults__ = own.__kwdefaults__
    return changed(module, *args, **kwargs)


def _convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    context_mixer: Mixer | None = None,
    **_: Any,
) -> Tensor:
    """[b, channels, s] -> the same shape."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation {activation} after the convolution is not supported over ranks")
    activation = activation and "silu"
    return _mixer(context_mixer).convolve(hidden_states.permute(2, 0, 1), weight, bias, activation).permute(1, 2, 0)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    context_mixer: Mixer | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """q, k [b, s, key heads, K], v [b, s, heads, V], g [b, s, heads] or for KDA [b, s, heads, K], beta [b, s, heads] ->
    [b, s, heads, V], and no last state."""
    if initial_state is not None or output_final_state:
        raise ValueError("a cache of states is not supported over ranks")
    query, key, value, g, beta = (x.transpose(0, 1) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON) for x in (query, key))
    query = query * query.size(-1) ** -0.5
    rule = GATED_DELTA if g.dim() == 3 else KDA
    out = _mixer(context_mixer).state(rule, query, key, value, g, beta.to(g.dtype))
    return out.transpose(0, 1).contiguous(), None


def _mamba2(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    context_mixer: Mixer | None = None,
    **_: Any,
) -> Tensor:
    """x [b, s, heads, P], dt [b, s, heads], A and D [heads], B and C [b, s, groups, N] -> [b, s, heads, P], at least
    in fp32."""
    if initial_states is not None or return_final_states:
        raise ValueError("a cache of states is not supported over ranks")
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    dt, x, B, C = (y.to(torch.promote_types(y.dtype, torch.float32)).transpose(0, 1) for y in (dt, hidden_states, B, C))
    out = _mixer(context_mixer).state(MAMBA2, C, B, x, A.to(dt.dtype) * dt, dt)
    out = out if D is None else out + D[:, None] * x
    return out.transpose(0, 1).contiguous()


def _mixer(given: Mixer | None) -> Mixer:
    if given is None:
        raise ValueError(
            "a linear-attention or SSM layer did not get the model's keyword arguments: not supported over ranks"
        )
    return given


CONVOLUTION = "causal_conv1d_fn"
RULES: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
}
FUSED = "mamba2_split_conv1d_scan_combined"  # convolution and rule in one kernel; None: go on without it
