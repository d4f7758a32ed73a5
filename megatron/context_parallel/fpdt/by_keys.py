# SPDX-License-Identifier: Apache-2.0
"""The loops by keys: the outer loop is over key chunks (on a ring, of all ranks), the inner over query chunks."""

from __future__ import annotations

from torch import Tensor

from megatron.context_parallel.attention.kernels.base import Final
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.attention.ring import KeyBlock
from megatron.context_parallel.fpdt.chunk_pass import ChunkPass, attend_chunks, attend_chunks_grad
from megatron.context_parallel.fpdt.host_store import HiddenStates


def forward(run: ChunkPass, y: HiddenStates | None) -> None:
    """The forward pass into ``y``; without ``y``, only what the backward pass needs."""
    store, chunks, last = run.store, run.chunks, run.plan.last_keys()
    for chunk, x in enumerate(run.x.walk(run.spans)):
        q, kv = run.work.project(x, chunk)
        store.put(("q", chunk), q)
        store.put(("kv", chunk), kv)
    for key, loaded in zip(chunks, store.walk([[("kv", key)] for key in chunks])):
        for block in run.ring(key).blocks(*run.work.unpacked(loaded["kv", key])):
            queries = run.plan.queries_of(key, block.hop.source)
            for query, kept in zip(queries, store.walk([_forward_names(query) for query in queries])):
                q = kept["q", query]
                result = Accumulator(q, run.work.value_dim, kept.get(("sum", query)), kept.get(("sum_lse", query)))
                computed = run.plan.tiles_in_ring_rows(query, key, block.hop.source)
                attend_chunks(run.work.kernel, computed, q, block.k, block.v, result)
                # In the sum's dtype from the start, because the store writes later sums in the same memory.
                store.put(("sum", query), result.out_SBHD.to(result.sum_dtype))
                store.put(("sum_lse", query), result.lse_SBH)
        if not run.saving:
            store.drop(("kv", key))
        finished = [query for query in chunks if last[query] == key]
        for query, kept in zip(finished, store.walk([_forward_names(query) for query in finished])):
            store.drop(("sum", query), ("sum_lse", query))
            sums = kept.get(("sum", query)), kept.get(("sum_lse", query))
            result = Accumulator(kept["q", query], run.work.value_dim, *sums)
            run.finish(query, result, None, y)
            if not run.saving:
                store.drop(("q", query))


def _forward_names(query: int) -> list[tuple]:
    return [("q", query), ("sum", query), ("sum_lse", query)]


def backward(run: ChunkPass, dy: HiddenStates) -> None:
    """Key chunks from first to last: under a causal mask a chunk's queries are finished when its keys are."""
    store, last, chunks = run.store, run.plan.last_keys(), run.chunks
    outs = store.walk([[("out", chunk), *[("lse", chunk)] * (run.work.sinks is not None)] for chunk in chunks])
    for chunk, x, dy_chunk, loaded in zip(chunks, run.x.walk(run.spans), dy.walk(run.spans), outs):
        dout, residual = run.work.output_grad(loaded["out", chunk], x, dy_chunk, chunk)
        run.work.add_sinks_grad(dout, loaded["out", chunk], loaded.get(("lse", chunk)))
        store.put(("dout", chunk), dout)
        delta = run.work.kernel.final(dout, loaded["out", chunk], None).delta
        if delta is not None:  # then out is not needed any more
            store.put(("delta", chunk), delta)
            store.drop(("out", chunk))
        run.dx.write(run.spans[chunk], residual)
    for key, loaded in zip(chunks, store.walk([[("kv", key)] for key in chunks])):
        finished = [chunk for chunk in chunks if max(chunk, last[chunk]) == key]
        fresh = {("dkv", key): _key_grads(run, key, loaded.pop(("kv", key)))}
        if key not in finished:
            store.put(*fresh.popitem())
        run.finish_waiting(finished, fresh)
        done = [chunk for chunk in chunks if last[chunk] <= key]
        store.drop(*((name, chunk) for chunk in done for name in ("dout", "out", "delta", "lse")))


def _key_grads(run: ChunkPass, key: int, kv: Tensor) -> Tensor:
    """dk and dv of a key chunk. Adds dq of this rank's query chunks that meet it to the sums in the store."""
    k, v = run.work.unpacked(kv)
    own = KeyGradients(k, v)
    for block in run.ring(key).blocks(k, v, own):
        queries = run.plan.queries_of(key, block.hop.source)
        names = [[(name, query) for name in ("q", "dout", "out", "delta", "lse", "dq")] for query in queries]
        for query, loaded in zip(queries, run.store.walk(names)):
            _pair_grads(run, query, key, block, loaded)
    return own.packed()


def _pair_grads(run: ChunkPass, query: int, key: int, block: KeyBlock, loaded: dict) -> None:
    """The gradients of one pair of chunks; a separate function, so that its tensors are freed before the next pair."""
    q, dout, lse = (loaded.pop((name, query)) for name in ("q", "dout", "lse"))
    out, delta = (loaded.pop((name, query), None) for name in ("out", "delta"))
    dq = GradientSum(q, loaded.pop(("dq", query), None))
    computed = run.plan.tiles_in_ring_rows(query, key, block.hop.source)
    attend_chunks_grad(run.work.kernel, computed, q, block.k, block.v, Final(dout, out, lse, delta), dq, block.grads)
    run.store.put(("dq", query), dq.finish().to(dq.sum_dtype))  # in the sum's dtype, as in the forward pass
