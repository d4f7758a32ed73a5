# SPDX-License-Identifier: Apache-2.0
"""yunchang's ``LongContextAttention`` (zigzag ring) or ``UlyssesAttention`` as attention of a model of transformers, as
its README and tests use them. flash-attn's kernel is stood in; loss and gradients are summed by this program."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

import megatron.context_parallel as cp
from benchmarks.certify import flash_attn_on_a_cpu
from benchmarks.certify.cases import Case, NotApplicable, of_parts, whole


def step(case: Case, ulysses: int = 1, ring: int = 1) -> cp.Outcome:
    if case.hybrid or case.experts:
        raise NotApplicable("the library is about attention alone")
    if case.sinks or len(case.documents) > 1:
        raise NotApplicable("its attention has no argument for sinks or documents")
    if ulysses * ring == 1:
        return whole(case)
    flash_attn_on_a_cpu.install()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from yunchang import EXTRACT_FUNC_DICT, LongContextAttention, UlyssesAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    rank, world = dist.get_rank(), ulysses * ring
    set_seq_parallel_pg(ulysses, ring, rank, world)
    kind = "zigzag" if ring > 1 else "basic"
    if ring > 1:
        attention = LongContextAttention(ring_impl_type=kind, attn_type=AttnType.FA)
    else:  # a ring of one rank sends to itself, which gloo cannot
        attention = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.FA)

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float = 1.0, dropout: float = 0.0,
        sliding_window: int | None = None, **_: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """q, k and v [b, h, s, d] -> [b, s, h, d]. In fp64: in fp32, which flash-attn does not know, the library's
        buffers would share their memory."""
        window = (sliding_window - 1, 0) if sliding_window else (-1, -1)
        rows = (x.transpose(1, 2).double() for x in (q, k, v))
        out = attention(*rows, dropout_p=dropout, softmax_scale=scaling, causal=True, window_size=window)
        return out.to(q.dtype), None

    ALL_ATTENTION_FUNCTIONS.register("yunchang", attend)
    model = case.model()
    model.config._attn_implementation = "yunchang"

    def part(x: Tensor) -> Tensor:
        return EXTRACT_FUNC_DICT[kind](x, rank, world_size=world, rd=ring, ud=ulysses)

    return of_parts(model, case, part)
