# SPDX-License-Identifier: Apache-2.0
"""fla's context parallelism of linear attention (Gated DeltaNet and its convolution), by ``build_cp_context``.

It is for GPUs. Here Triton's interpreter runs its kernels, with five changes, none of them to what it computes: no
check for a GPU; the first configuration of the autotuner; ``range`` in kernels takes the interpreter's tensors; masks
of loads are bool; and gathered tensors are flat, as gloo wants them. The layer with softmax attention gathers keys, and
this program sums over ranks.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn

import megatron.context_parallel as cp
from benchmarks.certify.cases import LENGTH, Case, NotApplicable, of_parts, whole


def step(case: Case, ranks: int = 1, layout: str = "contiguous") -> cp.Outcome:
    """The outcome of one training step."""
    if not case.hybrid:
        raise NotApplicable("the library is about linear attention alone")
    from transformers.models.qwen3_next import modeling_qwen3_next as layers

    if ranks == 1:
        # the rule in PyTorch, for which transformers would call fla
        layers.torch_chunk_gated_delta_rule = inspect.unwrap(layers.torch_chunk_gated_delta_rule)
        return whole(case)
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    in_the_interpreter()
    from transformers import AttentionInterface, AttentionMaskInterface

    model = case.model()
    context = build_cp_context(
        torch.tensor([0, LENGTH]), dist.group.WORLD, conv1d_kernel_size=model.config.linear_conv_kernel_dim
    )

    def convolve(x: Tensor, weight: Tensor, bias: None, activation: str, **_: Any) -> Tensor:
        """x [b, channels, s]"""
        out = causal_conv1d(x.transpose(1, 2).contiguous(), weight, activation=activation, cp_context=context)[0]
        return out.transpose(1, 2)

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
        return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cp_context=context)

    layers.causal_conv1d_fn, layers.torch_chunk_gated_delta_rule = convolve, rule
    AttentionInterface.register("gathered", gathered)
    AttentionMaskInterface.register("gathered", lambda *_, **__: None)
    model.config._attn_implementation = "gathered"
    return of_parts(model, case, lambda x: x.chunk(ranks, dim=1)[dist.get_rank()])


def gathered(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float = 1.0, **_: Any
) -> tuple[Tensor, None]:
    """Softmax attention of this rank's queries [b, h, s, d] to the keys of all ranks; returns [b, s, h, d]."""
    parts = [differentiable.all_gather(x.contiguous()) for x in (k, v)]
    for part in parts[0] + parts[1]:
        part.register_hook(torch.Tensor.contiguous)  # see programs/pytorch_gloo_all_gather.py
    k, v = (torch.cat(own, dim=2) for own in parts)
    at = torch.arange(q.size(2)) + q.size(2) * dist.get_rank()
    seen = at[:, None] >= torch.arange(k.size(2))
    out = nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def in_the_interpreter() -> None:
    """Make the five changes."""
    import fla.ops.cp.chunk_delta_h  # noqa: F401 - imported before its range is replaced
    import triton.language as tl
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpreterBuilder

    class Number(int):
        def to(self, kind: Any) -> Any:
            return tl.full((), int(self), kind)

    def numbers(*ends: Any) -> Iterator[Number]:
        return map(
            Number, builtins.range(*(int(getattr(x, "handle", x).data.item()) if is_tensor(x) else x for x in ends))
        )

    def is_tensor(x: Any) -> bool:
        return hasattr(getattr(x, "handle", None), "data")

    def run(self: Autotuner, *args: Any, **options: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args))
        return self.fn.run(*args, **options | self.configs[0].all_kwargs())

    def load(
        self: Any, pointers: Any, mask: Any, *others: Any, of: Callable = InterpreterBuilder.create_masked_load
    ) -> Any:
        mask.data = mask.data.astype(bool)
        return of(self, pointers, mask, *others)

    def gather(out: Tensor, x: Tensor, *args: Any, of: Callable = dist.all_gather_into_tensor, **options: Any) -> Any:
        return of(out.view(-1), x.contiguous().view(-1), *args, **options)

    InterpreterBuilder.create_masked_load = load
    Autotuner.run, dist.all_gather_into_tensor = run, gather
    for name, module in [*sys.modules.items()]:
        if name.startswith("fla.ops"):
            module.range = numbers
        if name.startswith("fla.") and hasattr(module, "_check_cp_device"):
            module._check_cp_device = lambda device: None
