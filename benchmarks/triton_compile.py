# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels for a GPU that this machine does not have, and read the resources that they use.

Triton includes NVIDIA's assembler. A `Launch` with tensors on the ``meta`` device is compiled as in its first call
on a GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from benchmarks.machine_code import Loop, loops
from megatron.context_parallel.attention.kernels.triton_kernels.triton_ahead import compiled
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Call, Launch
from megatron.context_parallel.layout.masks import Causal, MaskFunction
from megatron.context_parallel.layout.tiles import tiles
from megatron.context_parallel.linear_attention import decay_spans
from megatron.context_parallel.linear_attention.block_scan import KERNEL_BLOCK, grads_launch, states_launch
from megatron.context_parallel.linear_attention.rules import Prepared
from megatron.context_parallel.positions.position_dropout import Dropout
from megatron.context_parallel.sparse_attention import chosen_triton
from megatron.context_parallel.sparse_attention.chosen_math import Choice, Form
from megatron.decisions.block_sizes import Blocks, Pass

TENSOR_CORES = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")  # of compute capability 8, 9 and 10
SM_SHARED_KIB = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}  # CUDA's programming guide
SM_WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
SM_REGISTERS = 2**16
TENSOR_COLUMNS = 512  # of Blackwell's tensor memory


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel.

    Attributes:
        registers: of a thread.
        spills: bytes of a thread's local memory (spilled registers), in loops or outside.
        shared: bytes of a block's shared memory.
        warps: of a block.
        products: number of tensor core instructions in its PTX, by name.
        half: whether Blackwell's tensor cores work on 64 rows at a time, in the time that 128 rows take.
        columns: of tensor memory (Blackwell).
        loops: the innermost loops with tensor core instructions, the shortest first.
        capability: the compute capability that it was compiled for.
        specialised: whether warps have different tasks. Loops are then those of four warps.
    """

    registers: int
    spills: int
    shared: int
    warps: int
    products: dict[str, int]
    half: bool
    columns: int
    loops: list[Loop]
    capability: int
    specialised: bool

    @property
    def programs(self) -> int:
        """Programs that run on one multiprocessor at the same time."""
        registers = -(-self.registers // 8) * 8 * 32 * self.warps  # allocated to warps in units of 256
        limits = [SM_REGISTERS // registers, SM_WARPS[self.capability] // self.warps]
        limits.append(SM_SHARED_KIB[self.capability] * 1024 // (self.shared + 1024))  # 1 KiB is reserved
        if self.columns:
            limits.append(TENSOR_COLUMNS // self.columns)
        return min(limits)


def compile_launch(launch: Launch, capability: int) -> CompiledKernel:
    """Compile for a GPU of ``capability`` 80, 90, ..; Triton must not be in interpreter mode.

    It is the first call on such a GPU up to the point where the kernel would be loaded. Therefore that call finds the
    result in Triton's cache on disk. This process cannot run kernels afterwards.
    """
    return compiled(launch.kernel, launch.grid, (), {**launch.arguments, **launch.options}, capability)


def resources(launch: Launch, capability: int) -> Resources:
    """The resources of a launch on a GPU of ``capability``, read from its machine code."""
    compiled = compile_launch(launch, capability)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    usage = {name: int(count) for name, count in re.findall(r"\b([A-Z]+):(\d+)", _dump("-res-usage", cubin))}
    specialised = "setmaxnreg" in ptx
    products = {name: len(re.findall(rf"\b{re.escape(name)}", ptx)) for name in TENSOR_CORES}
    return Resources(
        registers=usage["REG"],
        spills=usage["STACK"] + usage["LOCAL"],
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        products={name: count for name, count in products.items() if count},
        half="blockM = 64" in compiled.asm["ttgir"],
        columns=compiled.metadata.tmem_size or 0,
        loops=loops(_dump("-sass", cubin), 4 if specialised else compiled.metadata.num_warps, capability),
        capability=capability,
        specialised=specialised,
    )


def _dump(what: str, cubin: bytes) -> str:
    """Output of NVIDIA's cuobjdump."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, what, str(binary)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def example(
    capability: int,
    head: int,
    dtype: torch.dtype = torch.bfloat16,
    features: Collection[str] = (),
    fixed: Mapping[Pass, Blocks] | None = None,
    only: str | None = None,
    rows: int = 2**14,
) -> dict[str, Launch]:
    """Example launches, by pass: causal attention with 8 heads and 2 key heads.

    Args:
        features: names from ``triton_call.FEATURES``.
        fixed: block sizes to use.
        only: a pass; default: all.
        rows: tokens.
    """
    heads, key_heads = 8, 2

    def meta(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    mask = MaskFunction(lambda q, k: q >= k, Causal()) if "mask" in features else Causal()
    call = Call(
        meta(rows, 1, heads, head, kind=dtype),
        *(meta(rows, 1, key_heads, head, kind=dtype) for _ in range(2)),
        scale=head**-0.5,
        mask=mask,
        slopes=meta(heads) if "alibi" in features else None,
        softcap=30.0 if "softcap" in features else None,
        dropout=Dropout(0.1, seed=1) if "dropout" in features else None,
        fixed=fixed,
        capability=capability,
    )
    computed = tiles(((0, rows),), ((0, rows),), mask)
    of_query, of_key, row = meta(rows, 1, heads, head), meta(rows, 1, key_heads, head), meta(rows, 1, heads)
    dout = meta(rows, 1, heads, head, kind=dtype)
    first, *rest = call.backward(computed, dout, row, row, of_query, of_key, of_key)
    launches = dict(zip(("forward", "plain"), call.forward_launches(computed, of_query, row)))
    if "backward" in call.passes():
        launches |= {"ready": first, "backward": rest[0]}
    else:
        launches |= {"queries": first, **({"keys": rest[0]} if len(rest) == 1 else dict(zip(("dk", "dv"), rest)))}
    wanted = {"keys": {"keys", "dk", "dv"}, None: set(launches)}.get(only, {only})
    return {which: launch for which, launch in launches.items() if which in wanted}


def linear_example(keys: int, values: int, delta: bool, channels: bool) -> dict[str, Launch]:
    """Example launches for the states of linear attention: 8 heads, 16 blocks."""

    def meta(*shape: int) -> Tensor:
        return torch.empty((1, 8, *shape), device="meta")

    n, c = 16, KERNEL_BLOCK
    ready = Prepared(
        erase=meta(n, c, keys) if delta else None, own=meta(n, c, values), writes=meta(n, c, keys),
        reads=meta(n, c, keys), inside=meta(n, c, c),
        keep=meta(n, keys if channels else 1, 1) if delta else meta(n, 1, values),  # values of several heads
    )  # fmt: skip
    state, every = meta(keys, values), meta(n, keys, values)
    return {
        "states": states_launch(ready, state, every, state),
        "map": states_launch(ready, state, None, state),
        "grads": grads_launch(ready, ready.own, state, every, state),
    }


def decay_example(
    keys: int, values: int, skip: bool = True, dtype: torch.dtype = torch.bfloat16, group: int = 4
) -> dict[str, Launch]:
    """Example launches of the kernels for rules without a delta: 4 key heads for 4 * ``group`` heads, 1,024 tokens."""

    def meta(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((*shape,), dtype=kind, device="meta")

    n, heads = 1024, 4 * group
    q, v = meta(n, 1, 4, keys, kind=dtype), meta(n, 1, heads, values, kind=dtype)
    inputs = [q, q, v, *(meta(n, 1, heads) for _ in range(2 + skip))]
    every, state = decay_spans.no_states(inputs), meta(1, heads, keys, values)
    state_grads, products = decay_spans.state_grads_launch(inputs, v, every, state, every, state)
    states = {"every": every, "after": every}
    return {
        "states": decay_spans.states_launch(inputs, state, every, state),
        "outputs": decay_spans.outputs_launch(inputs, every, v),
        "state grads": state_grads,
        "value grads": decay_spans.value_grads_launch(inputs, v, states, products, inputs),
        "key grads": decay_spans.key_grads_launch(inputs, v, states, inputs),
    }


def chosen_example(
    heads: int, key_heads: int, shared: bool, dtype: torch.dtype = torch.bfloat16, rows: int = 64
) -> dict[str, Launch]:
    """Example launches of attention to 2,048 chosen keys: ``shared``: latents of 512 and 64 rotated entries, as in
    DeepSeek V3.2; otherwise keys and values of 128."""

    def meta(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    head, width, value, entries = (576, 576, 512, 2048) if shared else (128, 256, 128, 2048)
    q, kv = meta(rows, 1, heads, head, kind=dtype), meta(2**17, 1, key_heads, width, kind=dtype)
    out, numbers = meta(rows, 1, heads, value, kind=dtype), meta(rows, 1, heads)
    choice = Choice(meta(rows, 1, entries, kind=torch.int32), *(meta(rows, 1, kind=torch.int32) for _ in range(2)))
    parts, given = meta(rows, 1, entries, key_heads, width), (q, kv, choice, Form(head**-0.5, value))
    sums, order = meta(rows, 1, key_heads, entries), meta(1, rows * entries, kind=torch.int64)
    return {
        "forward": chosen_triton.forward_launch(*given, out, numbers),
        "queries": chosen_triton.query_grads_launch(*given, out, numbers, numbers, q),
        "keys": chosen_triton.key_grads_launch(*given, out, numbers, numbers, parts, None),
        "weights": chosen_triton.key_grads_launch(*given, None, numbers, None, None, sums),
        "index": chosen_triton.index_scores_launch(
            meta(128, 64, 128, kind=dtype), meta(2**14, 128, kind=dtype), meta(128, 64), meta(128, 2**14)
        ),
        "add": chosen_triton.add_parts_launch(parts, order.int(), order, meta(*kv.shape)),
    }
