# SPDX-License-Identifier: Apache-2.0
"""Check attention and an FPDT layer over gloo processes without megatron-core; test_rooms.py runs it.

Each argument is a grid: 2x1 is Ulysses 2 and Ring 1.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from importlib.abc import MetaPathFinder

LENGTH, HEADS, SIZE = 48, 4, 8


class NoCore(MetaPathFinder):
    """Hide megatron-core from imports."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "megatron.core" or name.startswith("megatron.core."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoCore())

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import megatron.context_parallel as cp  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(0)  # before forking: equal tensors on every process
X, DY = torch.randn(2, LENGTH, 1, HEADS * SIZE, dtype=torch.float64)
WEIGHTS = [torch.randn(HEADS * SIZE, n * HEADS * SIZE, dtype=torch.float64, requires_grad=True) for n in (3, 1)]
RULE = cp.AttentionRule(cp.Documents((10, LENGTH)), kernel="math")


def project(x: torch.Tensor, chunk: int) -> tuple[torch.Tensor, ...]:
    return tuple(part.unflatten(-1, (HEADS, SIZE)) / 6 for part in (x @ WEIGHTS[0]).chunk(3, dim=-1))


def output(out: torch.Tensor, x: torch.Tensor, chunk: int) -> torch.Tensor:
    return x + out.flatten(2) @ WEIGHTS[1] / 6


def compare(ulysses: int, ring: int) -> None:
    """Compare a layer on this grid, with and without chunks, with one process: output, gradients of x and weights."""
    alone = cp.SequenceLayout(LENGTH, cp.abstract_grid())
    whole = X.clone().requires_grad_()
    expected = output(cp.attention(*project(whole, 0), layout=alone, mask=RULE.mask, kernel="math"), whole, 0)
    dx_expected, *expected_grads = torch.autograd.grad(expected, [whole, *WEIGHTS], DY)

    grid = cp.initialize_grid(ulysses=ulysses, ring=ring)
    for chunks in (1, 3):
        layout = cp.SequenceLayout(LENGTH, grid, chunks=chunks)
        x = layout.shard(X).requires_grad_()
        if chunks == 1:
            y = output(cp.attention(*project(x, 0), layout=layout, mask=RULE.mask, kernel="math"), x, 0)
        else:
            y = cp.ChunkedLayer(project, output, WEIGHTS, layout, RULE, offload=cp.Offload(x.device))(x)
        dx, *grads = torch.autograd.grad(y, [x, *WEIGHTS], layout.shard(DY))
        for grad in grads:
            dist.all_reduce(grad, group=grid.context.group)
        pairs = [(y, layout.shard(expected)), (dx, layout.shard(dx_expected)), *zip(grads, expected_grads)]
        for mine, theirs in pairs:
            assert (mine - theirs).abs().max() < 1e-10 * theirs.abs().max(), (str(grid), chunks)
    assert not any(name.startswith("megatron.core") for name in sys.modules)


def rank_of(rank: int, store: str, ulysses: int, ring: int) -> int:
    """Run this rank in this process; returns its exit status."""
    try:
        world = ulysses * ring
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        compare(ulysses, ring)
        dist.destroy_process_group()
        return 0
    except BaseException:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    failed = False
    for words in sys.argv[1:]:
        sizes = tuple(map(int, words.split("x")))
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank in range(sizes[0] * sizes[1]):
                ranks.append(os.fork())
                if not ranks[-1]:
                    os._exit(rank_of(rank, os.path.join(folder, "store"), *sizes))
            failed |= any([os.waitpid(pid, 0)[1] for pid in ranks])
    sys.exit(failed)
