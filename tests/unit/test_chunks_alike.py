# SPDX-License-Identifier: Apache-2.0
"""Replayed chunks of a dry run have exactly the events and bytes of chunks that run."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron.platform.simulated_cluster import UNKNOWN, Collectives, OperationCache, fake_tensors
from megatron.simulator.cost.trace import Kernel, Transfer, Wait
from megatron.simulator.dry_run import dry_run
from megatron.simulator.dry_run.call_replay import CallCache, ReplayMismatch
from megatron.simulator.dry_run.dry_run import run_job
from megatron.simulator.dry_run.one_rank import run_rank
from megatron.simulator.dry_run.recording.recorder import Recorder
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.parser import parse
from tests.distributed.flags import LLAMA

TINY = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 8 --seq-length 640 --max-position-embeddings 672 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 300 "
    "--fpdt --fpdt-chunk-size 64"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
GQA = "--bf16 --group-query-attention --num-query-groups 2"
CASES = {  # name: (processes, flags)
    "by queries": (1, GQA),
    "by keys": (1, "--bf16"),
    "ulysses, streamed, ZeRO 3": (4,
     f"{GQA} --ulysses-parallel-size 4 --zero-stage 3 --fpdt-stream-hidden {RECOMPUTE}"),
    "two layers, streamed": (1, f"{GQA} --num-layers 2 --zero-stage 1 --fpdt-stream-hidden"),
    "zigzag": (2, f"{GQA} --ring-parallel-size 2 {RECOMPUTE}"),
    "contiguous": (2, f"{GQA} --ring-parallel-size 2 --context-parallel-balance contiguous {RECOMPUTE}"),
    "usp on the device": (4, "--bf16 --ring-parallel-size 2 --ulysses-parallel-size 2 --no-fpdt-offload"),
    "on the device": (1, f"{GQA} --no-fpdt-offload {RECOMPUTE}"),
    "TP": (
        4,
        "--bf16 --tensor-model-parallel-size 2 --sequence-parallel --ulysses-parallel-size 2 --zero-stage 1 "
        f"--offload-checkpoints {RECOMPUTE}",
    ),
    "window": (1, "--bf16 --window-size 200,0"),
    "dropout": (2, "--bf16 --hidden-dropout 0.1 --attention-dropout 0.1 --ulysses-parallel-size 2"),
    "dropout of hidden states": (2, "--bf16 --hidden-dropout 0.1 --ulysses-parallel-size 2"),
    "documents": (2, "--bf16 --reset-attention-mask --reset-position-ids --ulysses-parallel-size 2"),
    "fp32": (1, ""),
    "uneven": (3,
     "--bf16 --num-attention-heads 6 --hidden-size 96 --ring-parallel-size 3 --seq-length 672 --fpdt-chunk-size 96"),
    "pipeline": (
        4,
        f"--bf16 --num-layers 2 --ring-parallel-size 2 --pipeline-model-parallel-size 2 {RECOMPUTE} "
        "--global-batch-size 4",
    ),
    "more ranks than keys": (8, f"{GQA} --ulysses-parallel-size 8 --micro-batch-size 2 --global-batch-size 2"),
}  # fmt: skip
USUAL = [("zigzag", "A100-80G")]


def without_times(step):
    """Everything about a step except the times of memory changes, which depend on this machine."""
    changes = [change for _, *change in step.profile["events"]]
    phases = [name for name, _ in step.profile["phases"]]
    memory = step.peaks, step.host_peak, step.profile["start"], changes, phases
    return step.trace.events, step.allocations, memory


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        pytest.param(name, gpu, marks=() if (name, gpu) in USUAL else pytest.mark.full)
        for name in CASES
        for gpu in ("A100-80G", None)
    ],
)
@pytest.mark.lab
def test_replayed_chunks_equal_chunks_that_run(name, gpu, monkeypatch):
    replays = []
    replay = CallCache._replay
    monkeypatch.setattr(CallCache, "_replay", lambda *args: (replays.append(args[1]), replay(*args))[1])
    ranks, flags = CASES[name]
    machine = gpu and load(gpu)
    if "--zero-stage 3" in flags:  # the first run adds a mesh of eight bytes to PyTorch's caches
        run_rank(config_of(flags, ranks), ranks, ranks - 1, 301, machine=machine)
    few, every = (
        run_rank(config_of(flags, ranks), ranks, ranks - 1, 301, machine=machine, every_chunk=every)
        for every in (False, True)
    )
    assert len(replays) > 10
    assert without_times(few) == without_times(every)


def config_of(flags, ranks):
    return parse(f"{TINY} {flags}".split(), LLAMA, ranks)


@pytest.fixture
def recorder():
    with fake_tensors() as answer:
        recorder = Recorder({}, before=torch._subclasses.fake_tensor.FakeTensor)
        recorder.answer = answer
        with recorder:
            yield recorder


class Owner:
    """Owns calls that the cache may replay."""


def state_of(recorder):
    """The events of a recorder, and the live bytes."""
    changes = [change for _, *change in recorder.history.events]
    live = sorted((block.number, block.size) for block in recorder.live.values())
    return recorder.trace.events, changes, live, recorder.peak, recorder.tickets


def calls(recorder, count, *, cached):
    """Make calls, through the cache if ``cached``. Each call replaces a sum. Returns the tensors."""
    owner, cache = Owner(), CallCache(recorder)
    state, x = [torch.empty(8, dtype=torch.bfloat16)], torch.empty(4, 8)
    seen = []

    def run():
        state[0] = (state[0].float() + x.exp().sum(0)).to(torch.bfloat16)
        return state[0], x, x[1:3], None

    def put(outs):
        state[0] = outs[0]

    for _ in range(count):
        outs = cache.call(owner, (), [state[0], x], run, put) if cached else run()
        assert outs[0] is state[0] and outs[1] is x and outs[3] is None
        assert outs[2].untyped_storage()._cdata == x.untyped_storage()._cdata and outs[2].shape == (2, 8)
        assert outs[2].storage_offset() == 8 and state[0].dtype == torch.bfloat16
        seen.append(outs[0].untyped_storage().nbytes())
        del outs
    assert seen == [16] * count
    return state, x


def test_a_replay_has_the_effects_of_the_calls(recorder, monkeypatch):
    ran = []
    exp = torch.Tensor.exp
    monkeypatch.setattr(torch.Tensor, "exp", lambda x: (ran.append(1), exp(x))[1])
    result = []
    for cached in (True, False):
        begin = recorder.counts()
        kept = calls(recorder, 6, cached=cached)
        first, events, changes, tickets = begin
        counts = recorder.counts()
        result.append(
            (
                recorder.trace.events[events:],
                [(number - first, change) for _, number, change in recorder.history.events[changes:]],
                [now - then for now, then in zip(counts, begin)],
                sum(block.size for block in recorder.live.values()),
            )
        )
        del kept
    assert result[0] == result[1]
    assert len(ran) == 2 + 6  # with the cache the first two of six calls, without it all
    assert not recorder.live


def test_a_tensor_that_should_have_been_freed_is_noticed(recorder):
    cache, owner = CallCache(recorder), Owner()
    state, kept = [torch.empty(8)], []

    def run():
        state[0] = state[0].exp()
        return (state[0],)

    def put(outs):
        state[0] = outs[0]

    for _ in range(4):
        cache.call(owner, (), [state[0]], run, put)
    kept.append(state[0])
    with pytest.raises(ReplayMismatch, match="freed other tensors"):
        cache.call(owner, (), [state[0]], run, put)


def test_calls_that_differ_are_run(recorder):
    """Calls that are not replayed: another shape, tensor or owner, or a call that keeps a new tensor."""
    cache, owners = CallCache(recorder), [Owner(), Owner()]
    ran, kept = [], []

    def run(x, keeps):
        ran.append(1)
        kept.extend([x.exp()] * keeps)
        return (x + 1,)

    def runs(x, owner=owners[0], keeps=False, times=3):
        del ran[:]
        for _ in range(times):
            cache.call(owner, (keeps,), [x], lambda: run(x, keeps))
        return len(ran)

    x = torch.empty(4, 8)
    assert runs(x) == 2
    assert runs(x) == 0
    assert runs(x[1:]) == 2
    assert runs(x[:3]) == 0  # its offset does not matter
    assert runs(x, owners[1]) == 2
    assert runs(x, keeps=True) == 3
    with recorder.muted():
        assert runs(x) == 3


def test_views_of_an_argument_are_replayed_as_views(recorder):
    cache, owner, x = CallCache(recorder), Owner(), torch.empty(9, 8)

    def begins(*given):
        """Elements from the beginning of the last given tensor to the view of it that the call returns."""
        (out,) = cache.call(owner, (), list(given), lambda: (given[-1][1:, 2:],))
        assert out.untyped_storage()._cdata == x.untyped_storage()._cdata and out.shape == (1, 6)
        return out.storage_offset() - given[-1].storage_offset()

    assert [begins(x[row : row + 2]) for row in range(6)] == [10] * 6
    assert [begins(x[row : row + 2], x[row + 2 : row + 4]) for row in range(5)] == [10] * 5
    assert [begins(x[row : row + 2], x[7:9]) for row in range(5)] == [10] * 5  # another distance between the views


def test_tickets_are_numbered_on_through_replays(recorder):
    cache, owner = CallCache(recorder), Owner()

    def run():
        ticket = recorder.copy("to_host", 5)
        recorder.price(Kernel("other", "memory", 0.0, 1.0))
        recorder.wait(ticket)
        return ()

    for _ in range(4):
        cache.call(owner, (), [], run)
    events = recorder.trace.events
    assert [event.ticket for event in events if hasattr(event, "ticket")] == [1, 2, 3, 4] and recorder.tickets == 4
    assert [event.tickets for event in events if isinstance(event, Wait)] == [(1,), (2,), (3,), (4,)]
    assert not any(isinstance(event, Transfer) for event in events)

    def waits():
        recorder.wait(1)
        return ()

    for _ in range(3):  # these calls wait for the transfer of an earlier call
        cache.call(owner, ("waits",), [], waits)
    assert [event.tickets for event in events[-3:]] == [(1,)] * 3


@pytest.mark.full
def test_every_chunk_runs_if_chunks_do_not_repeat(monkeypatch):
    machine = load("A100-80G")
    job = config_of(GQA, 1), 1, 0, 301, machine, False
    expected = run_job(job)[0]
    again, held = CallCache._replay, []

    def holds(self, effect, given, *others):
        held.extend(x for x in given if x is not None)  # keep alive all tensors that a call frees
        return again(self, effect, given, *others)

    monkeypatch.setattr(CallCache, "_replay", holds)
    tried = []

    def noting(*args, every_chunk, **how):
        tried.append(every_chunk)
        held.clear()
        return run_rank(*args, every_chunk=every_chunk, **how)

    monkeypatch.setattr(dry_run, "run_rank", noting)
    result = run_job(job)[0]
    assert tried == [False, True]
    assert result == expected


# The cache of operations on fake tensors: it gives PyTorch's result, as a new tensor each time.


aten = torch.ops.aten

OPERATIONS = {
    "sum": lambda x: x + x,
    "other dtype": lambda x: x.to(torch.float32),
    "view of rows": lambda x: x[2:5],
    "view of a view": lambda x: x[1:].permute(1, 0, 2)[:, 3:],
    "views of views that begin elsewhere": lambda x: (x[1][2:], x[3][2:]),
    "several views": lambda x: x.unbind(0),
    "several tensors": lambda x: aten._scaled_dot_product_flash_attention(*[x[None].permute(0, 2, 1, 3)] * 3)[:2],
    "numbers": lambda x: torch.full((3, x.size(1)), 1.0),
}


def recorded(out):
    """All properties of tensors, and which of them share memory."""
    tensors = [out] if isinstance(out, torch.Tensor) else list(out)
    storages = [x.untyped_storage() for x in tensors]
    return [
        (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, s.nbytes(), str(torch._C._dispatch_key_set(x)))
        for x, s in zip(tensors, storages)
    ], [[a._cdata == b._cdata for a in storages] for b in storages]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_cached_result_equals_pytorchs(name, monkeypatch):
    misses = []
    with fake_tensors():
        # Fake tensors of two shapes in turn, whose cache entries must not be mixed.
        x, y = (torch.empty(8, rows, 16, dtype=torch.bfloat16) for rows in (8, 12))
        run = OPERATIONS[name]
        with monkeypatch.context() as without:
            without.setattr(OperationCache, "answer", lambda *_: UNKNOWN)
            without.setattr(OperationCache, "keep", lambda *_: None)
            expected = [recorded(run(z)) for z in (x, y)]
        first = [run(z) for z in (x, y)]
        keep = OperationCache.keep
        monkeypatch.setattr(OperationCache, "keep", lambda *args: (misses.append(args[1]), keep(*args)))
        second = [run(z) for z in (x, y)]
    assert not misses  # all results were cached
    assert [recorded(out) for out in first] == [recorded(out) for out in second] == expected
    for a, b in zip(first, second):
        for p, q in zip(*([z] if isinstance(z, torch.Tensor) else z for z in (a, b))):
            assert p is not q and isinstance(q, FakeTensor)
            shares = p.untyped_storage()._cdata == q.untyped_storage()._cdata
            assert shares == ("view" in name)


def test_slices_of_equal_sizes_share_a_cache_entry(monkeypatch):
    """The slices have different offsets, and some are cut off at the end of the tensor."""
    misses, keep = [], OperationCache.keep
    cuts = [(0, 2), (1, 3), (4, 6), (-3, -1), (6, 100), (5, 7), (7, 100), (3, 4), (7, 3), (8, 9)]

    def result():
        return [(x[a:b].shape, x[a:b].stride(), x[a:b].storage_offset()) for x in (y, y[1:]) for a, b in cuts]

    with fake_tensors():
        y = torch.empty(8, 3, 4)
        monkeypatch.setattr(OperationCache, "keep", lambda *args: (misses.append(args[1]), keep(*args)))
        result_with_cache = result()
    assert misses.count(aten.slice.Tensor) <= 8  # for each tensor: three sizes, and the slice at its beginning
    assert result_with_cache == [
        (x[a:b].shape, x[a:b].stride(), x[a:b].storage_offset())
        for z in [torch.empty(8, 3, 4)]
        for x in (z, z[1:])
        for a, b in cuts
    ]


def test_numbers_of_other_types_have_other_cache_entries():
    with fake_tensors():
        x = torch.empty(4, dtype=torch.int64)
        for _ in range(2):
            result = [(x + number).dtype for number in (1, 1.0, True)]
    assert result == [torch.int64, torch.float32, torch.int64]


def test_functions_with_side_effects_are_called_each_time():
    with fake_tensors() as answer:
        assert isinstance(answer.__self__, Collectives)
        x = torch.empty(8)
        for _ in range(2):
            storage = x.untyped_storage()
            storage.resize_(0)
            storage.resize_(32)
            x.resize_(4)
            x.resize_(8)
            assert x.shape == (8,)
            assert answer(aten.resize_.default, (x, [4]), {}) is UNKNOWN
