# SPDX-License-Identifier: Apache-2.0
"""Attention to chosen keys by the kernels of chosen_kernels.py; the functions are those of chosen_math.py.

Many queries choose the same key. Their parts of its gradient are written to memory, sorted by keys, and added by one
program for each key: results are deterministic. Atomic additions would move as many bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import gpu_reason
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import LOG2E, Launch, interpreted
from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import missing_triton
from megatron.context_parallel.sparse_attention.chosen_math import Choice, Form
from megatron.decisions.block_sizes import Blocks
from megatron.decisions.division import GATHERED
from megatron.decisions.kernel_order import too_old
from megatron.platform.hooks import replaceable

ENTRIES = GATHERED
LARGEST = 512  # entries of a value, and of the part of a key before it
SUM = Blocks(1, 512, 4, 1)
INDEX = Blocks(64, 128, 4, 2)


def why_not(device: torch.device, dtype: torch.dtype, d: int, width: int, value_size: int) -> str | None:
    """Why the kernels cannot compute with such tensors, or None."""
    if width not in (d, d + value_size) or width == value_size:
        return "needs values that are the last part of the key, or follow it"
    if max(width - value_size, value_size) > LARGEST:
        return f"needs values, and keys before them, of at most {LARGEST} entries"
    return cannot_run(device, dtype)


@replaceable
def on_gpu(x: Tensor) -> bool:
    """Whether a tensor is on a GPU, which a dry run may simulate."""
    return x.is_cuda


@replaceable
def cannot_run(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no kernel of this folder can compute on a device, or None."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "needs fp32, bf16 or fp16"
    if missing := missing_triton():
        return missing
    if interpreted():
        return None if device.type == "cpu" else "is interpreted (TRITON_INTERPRET), which needs tensors on the CPU"
    return gpu_reason(device) or too_old(torch.cuda.get_device_capability(device))


def forward(q: Tensor, kv: Tensor, choice: Choice, form: Form, out: Tensor, lse: Tensor, *, first: bool = True) -> None:
    if len(q):
        forward_launch(q, kv, choice, form, out, lse, first=first).run()


def mean_weights(q: Tensor, kv: Tensor, choice: Choice, form: Form, lse: Tensor) -> Tensor:
    s, b, entries = choice.at.shape
    sums = lse.new_zeros(s, b, kv.size(2), entries)
    if len(q) and entries:
        key_grads_launch(q, kv, choice, form, None, lse, None, None, sums).run()
    return sums.sum(2)


def grads(
    q: Tensor,
    kv: Tensor,
    choice: Choice,
    form: Form,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dkv: Tensor,
    *,
    first: bool = True,
) -> None:
    s, b, entries = choice.at.shape
    if not s or not entries:
        return
    query_grads_launch(q, kv, choice, form, dout, lse, delta, dq, first=first).run()
    parts = dkv.new_empty(s, b, entries, *kv.shape[2:])
    key_grads_launch(q, kv, choice, form, dout, lse, delta, parts, None).run()
    place = torch.arange(entries, device=q.device)
    read = (place >= choice.begin.unsqueeze(-1)) & (place < choice.end.unsqueeze(-1))
    target = choice.at.masked_fill(~read, -1).transpose(0, 1).flatten(1)
    target, order = target.sort(dim=1, stable=True)
    add_parts_launch(parts, target, order, dkv).run()


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """The indexer's scores in fp32 [r, n], from q [r, heads, d], k [n, d] and weights [r, heads]. A score does not
    depend on which other queries and keys are computed with it."""
    out = q.new_empty((len(q), len(k)), dtype=torch.float32)
    index_scores_launch(q, k, weights, out).run()
    return out


def forward_launch(
    q: Tensor, kv: Tensor, choice: Choice, form: Form, out: Tensor, lse: Tensor, *, first: bool = True
) -> Launch:
    blocks = _blocks("forward", q, kv, form)
    rows = {"q": q, "kv": kv, "out": out, "lse": lse}
    arguments = _arguments(rows, choice, form, blocks) | {"factor": form.scale * LOG2E, "FIRST": first}
    grid = (len(q), q.size(1) * kv.size(2) * arguments["BLOCKS"])
    return Launch(kernel_named("chosen_forward"), grid, arguments, blocks)


def query_grads_launch(
    q: Tensor,
    kv: Tensor,
    choice: Choice,
    form: Form,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    *,
    first: bool = True,
) -> Launch:
    blocks = _blocks("queries", q, kv, form)
    rows = {"q": q, "kv": kv, "dout": dout, "lse": lse, "delta": delta, "dq": dq}
    arguments = _arguments(rows, choice, form, blocks)
    arguments |= {"factor": form.scale * LOG2E, "scale": form.scale, "FIRST": first}
    grid = (len(q), q.size(1) * kv.size(2) * arguments["BLOCKS"])
    return Launch(kernel_named("chosen_query_grads"), grid, arguments, blocks)


def key_grads_launch(
    q: Tensor,
    kv: Tensor,
    choice: Choice,
    form: Form,
    dout: Tensor | None,
    lse: Tensor,
    delta: Tensor | None,
    parts: Tensor | None,
    sums: Tensor | None,
) -> Launch:
    """The launch for gradients in ``parts`` or, without them, softmax weights in ``sums``."""
    entries = choice.at.size(2)
    blocks = _blocks("keys", q, kv, form)
    rows = {"q": q, "kv": kv, "dout": dout, "lse": lse, "delta": delta}
    arguments = _arguments(rows, choice, form, blocks) | {"parts": parts, "sums": sums, "entries": entries}
    arguments |= {"factor": form.scale * LOG2E, "scale": form.scale, "GRADS": parts is not None}
    grid = (len(q), q.size(1) * kv.size(2) * -(-entries // blocks.step))
    return Launch(kernel_named("chosen_key_grads"), grid, arguments, blocks)


def index_scores_launch(q: Tensor, k: Tensor, weights: Tensor, out: Tensor) -> Launch:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    blocks = INDEX if q.element_size() == 2 else Blocks(32, 64, 4, 1)
    arguments = {
        "q": q, "k": k, "weights": weights, "out": out, "rows": len(q), "keys": len(k),
        "q_ss": q.stride(0), "q_sh": q.stride(1), "k_ss": k.stride(0), "weights_ss": weights.stride(0),
        "weights_sh": weights.stride(1), "out_ss": out.stride(0), "HEADS": q.size(1), "SIZE": q.size(2),
        "SIZE_BLOCK": _power(q.size(2)), "BLOCK": blocks.block, "STEP": blocks.step,
        "PRECISION": "interpreted" if interpreted() else "ieee",
    }  # fmt: skip
    grid = (-(-len(q) // blocks.block), -(-len(k) // blocks.step))
    return Launch(kernel_named("index_scores"), grid, arguments, blocks)


def add_parts_launch(parts: Tensor, target: Tensor, order: Tensor, dkv: Tensor) -> Launch:
    """Add parts to ``dkv``. ``target`` [b, s x entries]: their rows, ascending; ``order``: the parts' own numbers."""
    (b, size), width = target.shape, parts.size(3) * parts.size(4)
    stops = torch.searchsorted(target, target, right=True) if target.device.type != "meta" else order
    arguments = {
        "parts": parts, "target": target, "order": order, "stops": stops, "dkv": dkv, "dkv_ss": dkv.stride(0),
        "dkv_sb": dkv.stride(1), "size": size, "entries": parts.size(2), "WIDTH": width, "BLOCK": SUM.step,
    }  # fmt: skip
    return Launch(kernel_named("add_parts"), (size, b * -(-width // SUM.step)), arguments, SUM)


def _blocks(which: str, q: Tensor, kv: Tensor, form: Form) -> Blocks:
    """Heads and keys of a step. With these at most 40 bytes of a thread's registers are spilled, none by forward."""
    heads, small = _power(q.size(2) // kv.size(2)), q.element_size() == 2
    if max(form.value_size, kv.size(3) - form.value_size) > 256:  # latents: sums of 512 numbers for each head or key
        rows, step = {"forward": (32, 32), "queries": (32, 32), "keys": (32, 16)}[which]
        return Blocks(min(heads, rows), step, 8, 1 if which == "keys" else 2) if small else Blocks(16, 16, 8, 1)
    return Blocks(min(heads, 64), 64, 4, 2) if small else Blocks(16, 32, 4, 1)


def _arguments(rows: dict[str, Tensor | None], choice: Choice, form: Form, blocks: Blocks) -> dict[str, Any]:
    q, kv = rows["q"], rows["kv"]
    for name in ("q", "kv", "dout"):
        if rows.get(name) is not None and rows[name].stride(3) != 1:  # a program reads adjacent entries
            rows[name] = rows[name].contiguous()
    given = rows | {"at": choice.at, "begin": choice.begin, "end": choice.end}
    strides = {
        f"{name}_s{dim}": None if x is None else x.stride(index)
        for name, x in given.items()
        for index, dim in enumerate("sb" if name in ("at", "begin", "end") else "sbh")
    }
    group, key = q.size(2) // kv.size(2), kv.size(3) - form.value_size
    return given | strides | {
        "GROUPS": kv.size(2), "GROUP": group, "BLOCKS": -(-group // blocks.block), "WIDTH": kv.size(3), "KEY": key,
        "VALUE": form.value_size, "KEY_BLOCK": _power(key), "VALUE_BLOCK": _power(form.value_size),
        "SHARED": q.size(3) == kv.size(3), "BLOCK": blocks.block, "STEP": blocks.step,
        "PRECISION": "interpreted" if interpreted() else "ieee",
    }  # fmt: skip


def _power(size: int) -> int:
    """The smallest block of a tensor core's product that holds ``size``."""
    return max(16, 1 << (size - 1).bit_length())


@replaceable
def kernel_named(name: str) -> Any:
    """It is imported here because Triton takes a second to import and need not be installed."""
    from megatron.context_parallel.sparse_attention import chosen_kernels

    return getattr(chosen_kernels, name)
