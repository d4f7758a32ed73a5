# SPDX-License-Identifier: Apache-2.0
"""PyTorch's ``context_parallel``, with tokens, positions and labels as buffers.

It replaces ``scaled_dot_product_attention`` by a ring for CUDA's kernels. :func:`ring_on_a_cpu` gives the same ring the
kernel of a CPU. This program sums loss and gradients over the ranks, which the documentation leaves to the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import _attention, context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

import megatron.context_parallel as cp
from benchmarks.certify.cases import HEADS, LENGTH, Case, NotApplicable, counted, share, shifted, summed, whole

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def step(case: Case, ranks: int = 1, kernel: bool = True) -> cp.Outcome:
    """The outcome of one training step.

    Args:
        kernel: give PyTorch's ring a kernel for CPUs.
    """
    if ranks == 1:
        return whole(case)
    attention_alone(case)
    if case.dropout:
        raise NotApplicable("needs a GPU: the kernel for CPUs has no dropout")
    allowed = mask_of(case)
    if allowed is not None:  # a GPU's kernel with a mask; that of a CPU does not get as far
        x = torch.zeros(1, HEADS, LENGTH, 16)
        ring._scaled_dot_product_ring_efficient_attention(init_device_mesh("cpu", (ranks,)), x, x, x, allowed)
    model, batches, total = case.model(), case.batches(), torch.zeros(())
    mesh, count, own = init_device_mesh("cpu", (ranks,)), counted(batches), torch.arange(LENGTH)[None]
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(causal_by_flag, with_kwargs=True)
    with ring_on_a_cpu(mesh) if kernel else contextmanager(lambda: iter([None]))():
        for batch in batches:
            own = torch.arange(LENGTH)[None]
            buffers = [batch["input_ids"], batch["position_ids"], shifted(batch), own]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 4, no_restore_buffers={own}):
                logits = model(input_ids=buffers[0], position_ids=buffers[1], use_cache=False).logits
                loss = share(logits, buffers[2], count)
                loss.backward()
            total += loss.detach()
    return summed(model, total, case, own[0])


def attention_alone(case: Case) -> None:
    """Leave out what PyTorch's context parallelism is not about. Raises NotApplicable."""
    if case.experts:
        raise NotApplicable("the loss that balances experts is the user's program")
    if case.hybrid:
        raise NotApplicable("it splits attention, no other layers")


def causal_by_flag(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before attention: transformers would build a mask for this rank's positions, which restart between its parts."""
    return args, kwargs | {"attention_mask": None, "is_causal": True}


def mask_of(case: Case) -> Tensor | None:
    """Which keys a query sees: bool [1, 1, queries, keys]; None if all before it."""
    if len(case.documents) == 1 and not case.window:
        return None
    at = torch.arange(LENGTH)
    document = torch.bucketize(at, torch.tensor(case.documents), right=True)
    back = at[:, None] - at[None]
    near = (back >= 0) & (back < (case.window or LENGTH))
    return (near & (document[:, None] == document))[None, None]


@contextmanager
def ring_on_a_cpu(mesh: DeviceMesh) -> Iterator[None]:
    """PyTorch's ring (its order, exchange, merging and balance) with PyTorch's flash kernel for CPUs."""

    def forward(_: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
        query, key, value = (x.to_local() for x in args[:3])
        dropout, causal = (*args[3:], *(0.0, False)[len(args) - 3 :])[:2]
        out, lse, *_ = ring._templated_ring_attention(
            mesh.get_group(), 2, FORWARD, query, key, value, causal, dropout_p=dropout, scale=kwargs.get("scale")
        )
        return wrapped(out), wrapped(lse)

    def backward(_: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
        grad, query, key, value, out, lse = (x.to_local() for x in args[:6])
        dropout, causal = args[6:8]
        grads = ring._templated_ring_attention_backward(
            mesh.get_group(), 2, kernel_backward, grad, "grad_out", query, key, value, out, lse, causal,
            dropout_p=dropout, scale=kwargs.get("scale"),
        )  # fmt: skip
        return tuple(wrapped(x) for x in grads[:3])

    def wrapped(x: Tensor) -> DTensor:
        return DTensor.from_local(x, mesh, [Shard(2)], run_check=False)

    ring.custom_ops.update({FORWARD.default: forward, BACKWARD: backward})
    _attention.set_rotate_method("allgather")  # the default of accelerate
    try:
        yield
    finally:
        del ring.custom_ops[FORWARD.default], ring.custom_ops[BACKWARD]


def kernel_backward(*, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
                    dropout_p: float, is_causal: bool, scale: float | None) -> tuple[Tensor, ...]:  # fmt: skip
    return BACKWARD(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=None, scale=scale)
