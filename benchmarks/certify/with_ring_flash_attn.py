# SPDX-License-Identifier: Apache-2.0
"""ring-flash-attn's adapter for models of transformers, as its README uses it: every rank has a part of the tokens, and
attention gathers keys and values. flash-attn's kernel is stood in; loss and gradients are summed by this program."""

from __future__ import annotations

import torch
import torch.distributed as dist

import megatron.context_parallel as cp
from benchmarks.certify import flash_attn_on_a_cpu
from benchmarks.certify.cases import Case, NotApplicable, of_parts, whole


def step(case: Case, ranks: int = 1) -> cp.Outcome:
    if case.hybrid or case.experts:
        raise NotApplicable("the library is about attention alone")
    if case.window or case.dropout:
        raise NotApplicable("its README says that windows and dropout are not supported; nothing refuses them")
    if case.sinks:
        raise NotApplicable("it has no sinks")
    if ranks == 1:
        return whole(case)
    flash_attn_on_a_cpu.install()
    from ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params

    substitute_hf_flash_attn(dist.group.WORLD, heads_k_stride=1)
    model = case.model()
    model.config._attn_implementation = "flash_attention_2"
    update_ring_flash_attn_params(torch.tensor([0, *case.documents], dtype=torch.int32), dist.group.WORLD)
    return of_parts(model, case, lambda x: x.chunk(ranks, dim=1)[dist.get_rank()])
