# SPDX-License-Identifier: Apache-2.0
"""Stands in for fla-core on CPUs: its three functions with their arguments and results, token by token in PyTorch.

Like the library's, they take and return states for each piece of `cu_seqlens`, want one sample where there are pieces,
and make NaN of a log-decay of -inf. tests/gpu compares the library itself.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megatron.context_parallel.linear_attention import fla_kernels


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    assert not (use_qk_l2norm_in_kernel or use_beta_sigmoid_in_kernel or state_v_first or kwargs)
    assert v.shape[2] % q.shape[2] == 0 and g.shape == beta.shape == v.shape[:3]
    return by_pieces(q, k, v, g[..., None], beta, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
):  # fmt: skip
    assert not (use_qk_l2norm_in_kernel or use_gate_in_kernel or use_beta_sigmoid_in_kernel or state_v_first or kwargs)
    assert g.shape == (*v.shape[:3], q.shape[3]) and beta.shape == v.shape[:3]
    return by_pieces(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)


def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
):  # fmt: skip
    assert not (g_gamma or state_v_first or kwargs) and q.shape[2] == v.shape[2] and g.shape == v.shape[:3]
    return by_pieces(q, k, v, g[..., None], None, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)


def by_pieces(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float | None, state: Tensor | None,
    output_final_state: bool, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """[B, T, heads, ..] and states [N, heads, K, V] -> [B, T, heads, V] and the states after the pieces."""
    batch, length = v.shape[:2]
    if cu_seqlens is None:
        pieces = [(sample, 0, length) for sample in range(batch)]
    else:
        assert batch == 1 and cu_seqlens.dtype == torch.int64 and cu_seqlens[-1] == length
        assert cu_seqlens_cpu is None or torch.equal(cu_seqlens_cpu, cu_seqlens.cpu())
        pieces = [(0, int(a), int(b)) for a, b in zip(cu_seqlens, cu_seqlens[1:])]
        assert all(a < b for _, a, b in pieces)
    assert state is None or (state.size(0) == len(pieces) and state.dtype in (torch.float32, torch.float64))
    shared = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(shared, dim=2) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    decay = (g - g.detach() + g.detach()).exp()  # infinite numbers are subtracted there, too
    outs, states = [], []
    for number, (sample, start, stop) in enumerate(pieces):
        now = v.new_zeros(v.shape[2], q.shape[3], v.shape[3]) if state is None else state[number]
        out = []
        for t in range(start, stop):
            now = decay[sample, t].unsqueeze(-1) * now
            new = v[sample, t]
            if beta is not None:
                new = beta[sample, t].unsqueeze(-1) * (new - torch.einsum("hk,hkv->hv", k[sample, t], now))
            now = now + torch.einsum("hk,hv->hkv", k[sample, t], new)
            out.append(torch.einsum("hk,hkv->hv", q[sample, t], now))
        outs.append(torch.stack(out))
        states.append(now)
    out = torch.cat(outs).view(v.shape).to(q.dtype)
    return out, torch.stack(states) if output_final_state else None


@contextmanager
def fla_stand_in() -> Iterator[list[str]]:
    """Within it, `fla` can run on CPUs, and segments are short; yields the names of the functions that were called."""
    called = []

    def recorded(function):
        def call(*args, **kwargs):
            called.append(function.__name__)
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in set(fla_kernels.PLACES.values()):
            stand_in = types.SimpleNamespace(**{name: recorded(globals()[name])})
            patch.setitem(sys.modules, module, stand_in)
        patch.setattr(fla_kernels, "why_not", lambda *_, **__: None)
        patch.setattr(fla_kernels, "FLA_SEGMENT", 1)
        yield called
