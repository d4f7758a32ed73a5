# SPDX-License-Identifier: Apache-2.0
"""The loops by queries: the outer loop is over query chunks, the inner over key chunks (on a ring, of all ranks)."""

from __future__ import annotations

from torch import Tensor

from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.fpdt.chunk_pass import ChunkPass, attend_chunks, attend_chunks_grad
from megatron.context_parallel.fpdt.host_store import HiddenStates


def forward(run: ChunkPass, y: HiddenStates | None) -> None:
    """The forward pass; writes the result to ``y``. Without ``y``, computes only what the backward pass needs."""
    store, chunks = run.store, run.chunks
    needs = [run.plan.keys_of(query) for query in chunks]
    # A query chunk is computed after the projection of chunk ready[query].
    ready = [max([query, *needs[query]]) for query in chunks]
    for chunk, x in enumerate(run.x.walk(run.spans)):
        q, kv = run.work.project(x, chunk)
        fresh = {("q", chunk): q, ("kv", chunk): kv}
        queries = [query for query in chunks if ready[query] == chunk]
        if chunk + 1 < len(chunks) or run.saving:
            store.put(("kv", chunk), kv)
        if run.saving or queries != [chunk]:
            store.put(("q", chunk), q)
        del q, kv
        for query in queries:
            keys = sorted(needs[query], key=lambda key: key != chunk)  # first this chunk, which is on the device
            q = store.load([("q", query)], fresh)[0].wait()
            result = Accumulator(q, run.work.value_dim)
            for key, loaded in zip(keys, store.walk([[("kv", key)] for key in keys], fresh)):
                for block in run.ring(key, query).blocks(*run.work.unpacked(loaded["kv", key])):
                    attend_chunks(run.work.kernel, block.hop.tiles, q, block.k, block.v, result)
            run.finish(query, result, x if query == chunk else None, y)
            if not run.saving:
                store.drop(("q", query))


def backward(run: ChunkPass, dy: HiddenStates) -> None:
    """Query chunks from last to first: under a causal mask a chunk's keys are finished when its queries are."""
    store, queries = run.store, run.chunks[::-1]
    needs = [run.plan.keys_of(query) for query in run.chunks]
    done = [min([key, *(query for query in queries if key in needs[query])]) for key in run.chunks]
    spans = [run.spans[query] for query in queries]
    saved = store.walk([[("q", query), ("out", query), ("lse", query)] for query in queries])
    for query, x, dy_chunk, loaded in zip(queries, run.x.walk(spans), dy.walk(spans), saved):
        finished = [chunk for chunk in run.chunks if done[chunk] == query]
        dq, dkv, residual = _query_grads(run, query, x, dy_chunk, loaded, needs[query], last=query in finished)
        if query in finished:
            run.finish_grad(query, x, dq, dkv, residual)
        else:
            store.put(("dq", query), dq)
            run.dx.write(run.spans[query], residual)
        del dq, dkv, residual
        run.finish_waiting([chunk for chunk in finished if chunk != query])


def _query_grads(
    run: ChunkPass, query: int, x: Tensor, dy: Tensor, loaded: dict, keys: list[int], *, last: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dq of a query chunk, dk and dv of the same chunk or None, gradient of x that does not go through attention).

    dk and dv of the other keys are added to the sums in the store. ``last``: dk and dv of this chunk are complete now;
    they are returned and not stored.
    """
    store = run.store
    keys = sorted(keys, key=lambda key: key == query)  # the query chunk's own keys last
    coming = store.walk([[("kv", key), ("dkv", key)] for key in keys])
    q, out, lse = (loaded.pop((name, query)) for name in ("q", "out", "lse"))
    dout, residual = run.work.output_grad(out, x, dy, query)
    run.work.add_sinks_grad(dout, out, lse)
    final, dq, own = run.work.kernel.final(dout, out, lse), GradientSum(q), None
    for key, pair in zip(keys, coming):
        k, v = run.work.unpacked(pair.pop(("kv", key)))
        dkv = KeyGradients(k, v, pair.pop(("dkv", key), None))
        attend_chunks_grad(run.work.kernel, run.plan.tiles_of_chunks(query, key, 0), q, k, v, final, dq, dkv)
        if last and key == query:
            own = dkv.packed()
        else:
            store.put(("dkv", key), dkv.packed())
    store.drop(("out", query), ("lse", query))
    if last and own is None:
        own = store.pop(("dkv", query))
    return dq.finish(), own, residual
