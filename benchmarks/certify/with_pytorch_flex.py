# SPDX-License-Identifier: Apache-2.0
"""FlexAttention under PyTorch's context parallelism, as torchtitan uses it: keys and values are gathered.

``_context_parallel_shard`` splits tokens, positions, labels and the block mask; ``_ContextParallel`` wraps the modules
that call ``flex_attention``. On a CPU flex_attention refuses gradients, although its own implementation without a
compiler has them: :func:`gradients_on_a_cpu` leaves out this check. This program sums loss and gradients over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._attention import _context_parallel_shard, _ContextParallel
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import flex_attention as flex
from transformers import AttentionInterface, AttentionMaskInterface

import megatron.context_parallel as cp
from benchmarks.certify.cases import LENGTH, Case, NotApplicable, counted, share, shifted, summed, whole
from benchmarks.certify.with_pytorch import attention_alone


def step(case: Case, ranks: int = 1, balanced: bool = True) -> cp.Outcome:
    """The outcome of one training step.

    Args:
        balanced: each rank has a part from the sequence's start and one from its end.
    """
    if ranks == 1:
        return whole(case)
    attention_alone(case)
    if case.dropout:
        raise NotApplicable("flex_attention has no dropout")
    mesh = init_device_mesh("cpu", (ranks,))
    attention = InnerAttention(case.sinks)
    plan = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.FLEX)
    parallelize_module(attention, mesh, plan)
    AttentionInterface.register("flex_of_pytorch", attention.of_layer)
    AttentionMaskInterface.register("flex_of_pytorch", lambda *_, **__: None)
    model, batches, total = case.model("flex_of_pytorch"), case.batches(), torch.zeros(())
    count = counted(batches)
    with gradients_on_a_cpu():
        for batch in batches:
            mask = flex.create_block_mask(mask_of(case), 1, None, LENGTH, LENGTH, device="cpu")
            balancer = _HeadTailLoadBalancer(LENGTH, ranks, "cpu") if balanced else None
            own = torch.arange(LENGTH)[None]
            ids, at, labels, own, attention.mask = _context_parallel_shard(
                mesh, [batch["input_ids"], batch["position_ids"], shifted(batch), own, mask], [1, 1, 1, 1, 2], balancer
            )
            logits = model(input_ids=ids, position_ids=at, use_cache=False).logits
            loss = share(logits, labels, count)
            loss.backward()
            total += loss.detach()
    return summed(model, total, case, own[0])


def mask_of(case: Case) -> Any:
    document = torch.bucketize(torch.arange(LENGTH), torch.tensor(case.documents), right=True)

    def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        back = query - key
        return (back >= 0) & (back < (case.window or LENGTH)) & (document[query] == document[key])

    return sees


class InnerAttention(nn.Module):
    """Calls ``flex_attention``, with this rank's part of the mask."""

    def __init__(self, sinks: bool) -> None:
        super().__init__()
        self.mask: Any = None
        self.sinks = sinks

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return flex.flex_attention(
            query, key, value, block_mask=self.mask, scale=scale, enable_gqa=True, return_lse=True
        )

    def of_layer(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **others: Any
    ) -> tuple[Tensor, None]:
        """As a layer of transformers calls its attention."""
        out, lse = self(query, key, value, scaling)
        if self.sinks:  # a sink adds its exponential to the softmax's denominator
            out = out * torch.sigmoid(lse - others["s_aux"].view(1, -1, 1))[..., None]
        return out.transpose(1, 2).contiguous(), None


@contextmanager
def gradients_on_a_cpu() -> Iterator[None]:
    check = flex._validate_device
    flex._validate_device = lambda *_: None
    try:
        yield
    finally:
        flex._validate_device = check
