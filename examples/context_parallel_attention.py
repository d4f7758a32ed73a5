#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention in your own program: each process holds only a part of the sequence.

    torchrun --nproc-per-node 4 examples/context_parallel_attention.py

Attention runs over Ulysses 2 x Ring 2, forward and backward, and is then compared with PyTorch's attention over the
complete sequence on one process. Also runs as a single process: python examples/context_parallel_attention.py
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import megatron.context_parallel as cp

SEQ_LENGTH, BATCH, HEADS, KV_HEADS, HEAD_DIM = 2048, 1, 8, 2, 64


def main(argv: list[str] | None = None) -> int:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ulysses", type=int, default=2 if world % 2 == 0 else 1, help="Ulysses degree")
    parser.add_argument("--ring", type=int, help="Ring degree; default: all other processes")
    parser.add_argument("--balance", choices=["zigzag", "contiguous"], default="zigzag")
    options = parser.parse_args(argv)
    device, dtype, tolerance = pick_device()

    # Three lines are needed: the grid of processes, the layout of tokens, and (below) attention.
    grid = cp.initialize_grid(ulysses=options.ulysses, ring=options.ring or world // options.ulysses)
    layout = cp.SequenceLayout(SEQ_LENGTH, grid, options.balance)

    # The complete sequence, equal on every process. A real program would make or load only its own part:
    # the tokens at layout.positions.
    generator = torch.Generator().manual_seed(1)
    whole = [
        torch.randn(SEQ_LENGTH, BATCH, heads, HEAD_DIM, generator=generator).to(device, dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    q, k, v, dout = (layout.shard(x) for x in whole)
    for x in (q, k, v):
        x.requires_grad_()

    out = cp.attention(q, k, v, layout=layout, mask=cp.Causal())
    out.backward(dout)

    expected = on_one_process(*whole)
    result = (out.detach(), q.grad, k.grad, v.grad)
    errors = torch.stack([largest_error(mine, layout.shard(all_)) for mine, all_ in zip(result, expected)])
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{grid}; {SEQ_LENGTH} tokens, {layout.local_length} per process; {dtype} on {device.type}")
        for r in range(grid.ring.size):
            for u in range(grid.ulysses.size):
                held = ", ".join(f"{start}..{stop - 1}" for start, stop in layout.spans(ulysses=u, ring=r))
                print(f"  Ulysses {u}, Ring {r} holds tokens {held}")
        for name, error in zip(("out", "dq", "dk", "dv"), errors.tolist()):
            print(f"  largest difference in {name:3}: {error:.1e} of its largest entry")
    dist.destroy_process_group()
    return int(not bool((errors < tolerance).all()))


def pick_device() -> tuple[torch.device, torch.dtype, float]:
    """This process's GPU with bf16, or the CPU with fp32; and the largest relative difference allowed."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, 3e-2
    return torch.device("cpu"), torch.float32, 1e-5


def on_one_process(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
    """PyTorch's attention over the complete sequence: out, dq, dk, dv as [s, b, heads, d]."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in leaves), is_causal=True, enable_gqa=True)
    out = out.permute(2, 0, 1, 3)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def largest_error(result: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return ((result - expected).abs().max() / expected.abs().max()).float()


if __name__ == "__main__":
    sys.exit(main())
