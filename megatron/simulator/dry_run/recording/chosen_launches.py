# SPDX-License-Identifier: Apache-2.0
"""The launches of learned sparsity's Triton kernels on a simulated GPU: recorded with their work, not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Launch
from megatron.context_parallel.sparse_attention import chosen_triton
from megatron.platform.hooks import replaced
from megatron.simulator.cost.kinds.sparse_operations import chosen_kernel
from megatron.simulator.cost.operations import gemm
from megatron.simulator.cost.trace import Kernel
from megatron.simulator.dry_run.recording.recorder import Recorder, bytes_of

# Products of a pair of query and key: (with the key, with the value).
PRODUCTS = {"chosen_forward": (1, 1), "chosen_query_grads": (2, 1), "chosen_key_grads": (2, 2), "mean_weights": (1, 0)}


@contextmanager
def chosen_launches(recorder: Recorder) -> Iterator[None]:
    """Inside this context tensors count as a GPU's, and launches are recorded."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    with ExitStack() as stack:
        stack.enter_context(replaced(chosen_triton.on_gpu, lambda _: lambda _: True))
        stack.enter_context(
            replaced(chosen_triton.cannot_run, lambda _: lambda _, dtype: None if dtype in dtypes else "needs bf16")
        )
        stack.enter_context(replaced(chosen_triton.kernel_named, lambda _: str))
        stack.enter_context(replaced(Launch.run, lambda _: lambda launch: recorder.price(priced(launch))))
        yield


def priced(launch: Launch) -> Kernel:
    """The work of a launch. The keys that a query reads are read once for all its heads."""
    name, given = launch.kernel, launch.arguments
    moved = float(bytes_of([x for key, x in given.items() if key not in ("kv", "dkv")]))
    if name == "add_parts":
        rows = min(given["order"].numel(), given["dkv"].size(0) * given["dkv"].size(1))
        return Kernel(name, "memory", 0.0, moved + 2 * rows * given["WIDTH"] * given["dkv"].element_size())
    q = given["q"]
    if name == "index_scores":
        product = gemm(name, given["rows"] * given["HEADS"], given["keys"], given["SIZE"])
        product.bytes, product.itemsize = moved, q.element_size()
        return product
    (rows, batch, heads, _), entries = q.shape, given["at"].size(2)
    name = "mean_weights" if name == "chosen_key_grads" and not given["GRADS"] else name
    gathered = rows * batch * entries * given["GROUPS"] * given["WIDTH"] * q.element_size()
    sizes = q.size(3), given["VALUE"]
    return chosen_kernel(name, rows, entries, batch * heads, sizes, PRODUCTS[name], moved + gathered, q.element_size())
