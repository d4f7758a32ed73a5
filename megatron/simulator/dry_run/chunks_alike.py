# SPDX-License-Identifier: Apache-2.0
"""A few chunks for all: under FPDT, chunks go through the same projections, and pairs of chunks meet in the same tiles.

Here is what is alike, and by what it is told; alike.py does the rest. What waits in host memory, comes back and is sent
on a ring is recorded each time: its order is what the loops over chunks are about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.context_parallel.attention.merge import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.attention.ring import KeyBlock
from megatron.context_parallel.attention.tile import TileKernel
from megatron.context_parallel.fpdt import by_keys, by_queries, chunked_loss
from megatron.context_parallel.fpdt.chunk_work import ChunkWork
from megatron.context_parallel.layout.tiles import Tile
from megatron.simulator.dry_run.alike import Alike
from megatron.simulator.dry_run.recorder import Recorder


@contextmanager
def chunks_alike(recorder: Recorder) -> Iterator[None]:
    """Within, what a chunk or a pair of chunks does is run a few times, and written down from then on."""
    alike = Alike(recorder)
    with ExitStack() as stack:
        for loops in (by_queries, by_keys):
            stack.enter_context(patch.object(loops, "attend", _attend(alike, loops.attend)))
            stack.enter_context(patch.object(loops, "attend_grad", _attend_grad(alike, loops.attend_grad)))
        for name, work in WORK.items():
            stack.enter_context(patch.object(ChunkWork, name, work(alike, getattr(ChunkWork, name))))
        stack.enter_context(patch.object(chunked_loss, "_loss", _loss(alike, chunked_loss._loss)))
        yield


def _attend(alike: Alike, attend: Callable) -> Callable:
    @wraps(attend)
    def run(tiles: Iterable[Tile], q: Tensor, k: Tensor, v: Tensor, *, kernel: TileKernel, result: Accumulator) -> None:
        tiles = tuple(tiles)
        if _asks(kernel, tiles):
            attend(tiles, q, k, v, kernel=kernel, result=result)
            return

        def really() -> tuple[Tensor | None, Tensor | None]:
            attend(tiles, q, k, v, kernel=kernel, result=result)
            return result.out_SBHD, result.lse_SBH

        def put(outs: Sequence[Tensor | None]) -> None:
            result.out_SBHD, result.lse_SBH = outs

        key = "attend", _shapes(tiles), result.shape
        alike.call(kernel, key, [q, k, v, result.out_SBHD, result.lse_SBH], really, put)

    return run


def _attend_grad(alike: Alike, attend_grad: Callable) -> Callable:
    @wraps(attend_grad)
    def run(
        tiles: Iterable[Tile],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        kernel: TileKernel,
        dq: GradientSum,
        dkv: KeyGradients | KeyBlock,
        **final: Tensor | None,
    ) -> None:
        tiles = tuple(tiles)
        sums = dkv.grads if isinstance(dkv, KeyBlock) else dkv
        if _asks(kernel, tiles):
            attend_grad(tiles, q, k, v, kernel=kernel, dq=dq, dkv=dkv, **final)
            return

        def really() -> tuple[Tensor | None, ...]:
            attend_grad(tiles, q, k, v, kernel=kernel, dq=dq, dkv=dkv, **final)
            return dq.total, sums.total, sums.dk.total, sums.dv.total

        def put(outs: Sequence[Tensor | None]) -> None:
            dq.total, sums.total, sums.dk.total, sums.dv.total = outs

        held = dkv.hop.held if isinstance(dkv, KeyBlock) else None
        key = "attend_grad", _shapes(tiles), dq.rows, sums.rows, held, *final
        given = [q, k, v, *final.values(), dq.total, sums.total, sums.dk.total, sums.dv.total]
        alike.call(kernel, key, given, really, put)

    return run


def _asks(kernel: TileKernel, tiles: Sequence[Tile]) -> bool:
    """Whether pairs have something of their own, which depends on where they are."""
    return kernel.slopes is not None or kernel.dropout is not None or any(tile.masked for tile in tiles)


def _shapes(tiles: Sequence[Tile]) -> tuple:
    return tuple((tile.q, tile.k, tile.kind) for tile in tiles)


def _project(alike: Alike, project: Callable) -> Callable:
    @wraps(project)
    def run(work: ChunkWork, x: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        if work.kernel is None or torch.is_grad_enabled():  # the first one learns the shapes
            return project(work, x, chunk)
        return tuple(alike.call(work, ("project", _spans(work, chunk)), [x], lambda: project(work, x, chunk)))

    return run


def _project_grad(alike: Alike, project_grad: Callable) -> Callable:
    @wraps(project_grad)
    def run(work: ChunkWork, x: Tensor, dq: Tensor | None, dkv: Tensor | None, chunk: int) -> Tensor:
        key = "project_grad", _spans(work, chunk)
        return alike.call(work, key, [x, dq, dkv], lambda: (project_grad(work, x, dq, dkv, chunk),))[0]

    return run


def _output(alike: Alike, output: Callable) -> Callable:
    @wraps(output)
    def run(work: ChunkWork, out: Tensor, x: Tensor, chunk: int) -> Tensor:
        if work.layer.replay or torch.is_grad_enabled():
            return output(work, out, x, chunk)
        key = "output", _spans(work, chunk)
        return alike.call(work, key, [out, x], lambda: (output(work, out, x, chunk),))[0]

    return run


def _output_grad(alike: Alike, output_grad: Callable) -> Callable:
    @wraps(output_grad)
    def run(work: ChunkWork, out: Tensor, x: Tensor, dy: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        if work.layer.replay:
            return output_grad(work, out, x, dy, chunk)
        key = "output_grad", _spans(work, chunk)
        return tuple(alike.call(work, key, [out, x, dy], lambda: output_grad(work, out, x, dy, chunk)))

    return run


def _ffn(alike: Alike, ffn: Callable) -> Callable:
    @wraps(ffn)
    def run(work: ChunkWork, hidden: Tensor, chunk: int, start: int) -> Tensor:
        if work.layer.replay or torch.is_grad_enabled():
            return ffn(work, hidden, chunk, start)
        key = "ffn", _spans(work, chunk), start
        return alike.call(work, key, [hidden], lambda: (ffn(work, hidden, chunk, start),))[0]

    return run


def _loss(alike: Alike, loss: Callable) -> Callable:
    """Of the loss in chunks, which goes with FPDT."""

    @wraps(loss)
    def run(tokens: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, *others: Any) -> tuple[Tensor, ...]:
        vocab_size, _, spans, needs_grad = others
        key = "loss", vocab_size, tuple(spans), needs_grad
        given = [tokens, weight, targets, scale]
        return tuple(alike.call(weight, key, given, lambda: loss(tokens, weight, targets, scale, *others)))

    return run


def _spans(work: ChunkWork, chunk: int) -> tuple[Any, ...]:
    """How many rows, and in how many stretches of positions, a chunk has."""
    return tuple(stop - start for start, stop in work.layer.layout.local_chunk_spans(chunk))


WORK = {
    "project": _project,
    "project_grad": _project_grad,
    "_output": _output,
    "output_grad": _output_grad,
    "_ffn": _ffn,
}
