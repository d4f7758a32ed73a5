# SPDX-License-Identifier: Apache-2.0
"""The launches of our Triton kernels in a simulated step, with all that Triton compiles for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.context_parallel.attention import kernels
from megatron.context_parallel.attention.kernels import sums
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Launch, merge
from megatron.context_parallel.fpdt import chunked_loss
from megatron.context_parallel.linear_attention import block_scan, mixer
from megatron.context_parallel.positions import rope
from megatron.context_parallel.sparse_attention import chosen_triton
from megatron.platform.hooks import patched, replaced
from megatron.platform.simulated_cluster import outside_fakes


class Wanted(NamedTuple):
    """A kernel to compile: where it is, and the arguments of a launch, with tensors on the device ``meta``."""

    module: str
    name: str
    grid: tuple[int, ...]
    given: tuple
    named: dict[str, Any]


@contextmanager
def recorded(found: dict[Any, Wanted], capability: tuple[int, int]) -> Iterator[None]:
    """In this context launches of our Triton kernels are noted in ``found`` instead of simulated."""
    from megatron.context_parallel.fpdt import loss_kernel
    from megatron.context_parallel.positions import rope_kernel

    def note(kernel: Any, grid: tuple[int, ...], given: tuple, named: dict[str, Any]) -> None:
        every = dict(zip(kernel.arg_names, given)) | named
        constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        key = kernel.fn.__name__, *((name, compiled_for(x, name in constants)) for name, x in every.items())
        if key not in found:
            given, named = tuple(map(without_memory, given)), {name: without_memory(x) for name, x in named.items()}
            found[key] = Wanted(kernel.fn.__module__, kernel.fn.__name__, grid, given, named)

    def launched(launch: Launch) -> None:
        note(launch.kernel, launch.grid, (), {**launch.arguments, **launch.options})

    def select(before: Callable) -> Callable:
        def chosen(*args: Any, **needs: Any) -> Any:
            kernel = before(*args, **needs)
            return kernels.KERNELS["triton"] if kernel.name == "triton" else kernel

        return chosen

    def rotated(x: Tensor, angles: Tensor, settings: rope.Rope, sign: int) -> Tensor:
        out = torch.empty_like(x)
        how = settings.dim, settings.attention_factor, settings.interleaved, sign
        given, constants = rope_kernel.launch(x, out, angles, *how)
        note(rope_kernel.rotate_kernel, (1, 1), given, constants | {"num_warps": rope_kernel.WARPS})
        return out

    def row_sums(logits: Tensor, bias: Tensor | None, targets: Tensor, real: int, *others: Any) -> Tensor:
        sums, (first, cap, heat) = logits.new_empty((4, logits.size(0)), dtype=torch.float32), others
        given, named = loss_kernel.call(logits, bias, targets, sums, (real, first), cap, heat)
        note(loss_kernel.sums_kernel, (1,), given, named)
        return sums

    def write_gradient(
        logits: Tensor, bias: Tensor | None, targets: Tensor, factors: Tensor, real: int, *others: Any
    ) -> None:
        first, cap, heat = others
        sizes = logits.size(1), real, first
        given, named = loss_kernel.call(logits, bias, targets, factors, sizes, cap, heat)
        note(loss_kernel.gradient_kernel, (1, 1), given, named)

    def linear(name: str, *_: Any, **__: Any) -> str:
        return "triton" if name == "triton" else "blocks"

    with ExitStack() as stack:
        stack.enter_context(patched(torch.cuda, "get_device_capability", lambda *_: capability))
        stack.enter_context(replaced(Launch.run, lambda _: launched))
        stack.enter_context(replaced(chosen_triton.kernel_named, lambda _: chosen_triton.kernel_named.function))
        stack.enter_context(replaced(kernels.select, select))
        stack.enter_context(replaced(block_scan.launch, lambda _: block_scan.launch.function))
        stack.enter_context(replaced(mixer.chosen_kernel, lambda _: linear))
        stack.enter_context(replaced(sums.merged, lambda _: merge))
        stack.enter_context(replaced(rope.rotated, lambda _: rotated))
        stack.enter_context(replaced(chunked_loss.loss_kernels, lambda _: lambda _: (row_sums, write_gradient)))
        yield


def compiled_for(x: Any, constant: bool) -> Any:
    """What Triton compiles anew for, of an argument."""
    if hasattr(x, "block_shape"):  # a descriptor
        return x.base.dtype, tuple(x.block_shape)
    if isinstance(x, Tensor):
        return x.dtype, aligned(x)
    if isinstance(x, int) and not constant and not isinstance(x, bool):
        return x == 1, x % 16 == 0, x >= 2**31
    return float if isinstance(x, float) and not constant else x


def aligned(x: Tensor) -> bool:
    return x.storage_offset() * x.element_size() % 16 == 0


def without_memory(x: Any) -> Any:
    """A tensor of the device ``meta`` that is aligned as ``x``, also in a descriptor; anything else as it is."""
    if hasattr(x, "block_shape"):
        return replace(x, base=without_memory(x.base))
    if not isinstance(x, Tensor):
        return x
    return outside_fakes(lambda: torch.empty(32, dtype=x.dtype, device="meta")[0 if aligned(x) else 1 :])()
