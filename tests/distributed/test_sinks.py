# SPDX-License-Identifier: Apache-2.0
"""Attention sinks against megatron-core's own attention: outputs, and the gradients of q, k, v and the sinks."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.errors import worst

LENGTH, HEADS, GROUPS, SIZE = 40, 4, 2, 16


def nothing_random():
    return SimpleNamespace(fork=nullcontext)


def compare_with_core(softmax_type):
    """Largest errors of the output and each gradient, relative to core's largest entry."""
    from megatron.core.transformer import dot_product_attention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron.context_parallel as cp
    from megatron import platform
    from megatron.context_parallel.core.spec import AttentionSettings, ContextParallelAttention

    platform.select("cpu", 0, None)
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        softmax_type=softmax_type,
        init_method=lambda x: torch.nn.init.normal_(x, std=2.0),
        masked_softmax_fusion=False,
    )
    ours = ContextParallelAttention(config, AttentionSettings(layout))
    with patch.object(torch.cuda, "current_device", lambda: "cpu"):
        theirs = dot_product_attention.DotProductAttention(config, 1, AttnMaskType.causal, "self")
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(LENGTH, 2, n, SIZE, generator=draw).requires_grad_() for n in (HEADS, GROUPS, GROUPS))
    dout = torch.randn(LENGTH, 2, HEADS * SIZE, generator=draw)
    if softmax_type == "learnable":
        assert list(dict(ours.named_parameters())) == list(dict(theirs.named_parameters()))
        theirs.load_state_dict(ours.state_dict())
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    found = []
    for attention, mask in ((ours, None), (theirs, future)):
        inputs = [q, k, v, *attention.parameters()]
        with patch.object(dot_product_attention.tensor_parallel, "get_cuda_rng_tracker", nothing_random):
            out = attention(q, k, v, mask)
        found.append([out, *torch.autograd.grad(out, inputs, dout)])
    return [float((mine - full).detach().abs().max() / full.detach().abs().max()) for mine, full in zip(*found)]


@pytest.mark.parametrize("softmax_type, gradients", [("vanilla", 3), ("off-by-one", 3), ("learnable", 4)])
def test_the_same_as_core(pool, softmax_type, gradients):
    (errors,) = pool.run(compare_with_core, 1, softmax_type)
    assert len(errors) == 1 + gradients and worst(errors) < 5e-6, errors
