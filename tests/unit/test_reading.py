# SPDX-License-Identifier: Apache-2.0
"""Data files read without mapping them, ids that are checked, and index caches of several builders."""

import errno
import hashlib
import itertools
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron.context_parallel as cp
from megatron.training.data import read_tokens
from megatron.training.data.batches import shard_batch
from megatron.training.data.datasets import build_datasets
from megatron.training.data.read_tokens import DataError, OpenFile, check_ids, first_outside, unmapped
from megatron.training.features.bad_batches import skip_micro_batches
from megatron.training.job import spans_to_read
from megatron.training.ownership.atomic import atomic_folder
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Stage
from tests.pairs import also_in_full
from tests.patience import patience
from tests.properties import examples
from tests.token_files import batches_of, write_documents
from tests.unit.test_data import NULL, configure, samples_of, write

TYPES = (np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64)


@examples(100)
@given(data=st.data(), dtype=st.sampled_from(TYPES))
def test_the_first_id_outside_of_a_vocabulary(data, dtype):
    info = np.iinfo(dtype)
    size = data.draw(st.one_of(st.integers(1, 300), st.integers(1, 2**17), st.just(int(info.max)), st.just(2**40)))
    near = st.sampled_from([0, size - 1, size, -1, int(info.min), int(info.max)])
    inside = st.integers(0, min(size - 1, int(info.max)))
    drawn = data.draw(st.lists(st.one_of(inside, near.filter(lambda n: info.min <= n <= info.max)), max_size=20))
    outside = [place for place, token in enumerate(drawn) if not 0 <= token < size]
    ids = np.array(drawn, dtype)
    assert first_outside(ids, size) == (outside[0] if outside else None)
    if outside:
        with pytest.raises(DataError, match=rf"^here holds token id {drawn[outside[0]]}, outside the {size} ids of it"):
            check_ids(ids, size, "it", lambda: "here")


@examples(60)
@given(data=st.data(), rows=st.integers(0, 9), columns=st.sampled_from([(), (2,)]))
def test_an_array_that_is_read_from_a_file_equals_the_array(tmp_path_factory, data, rows, columns):
    path = tmp_path_factory.mktemp("array") / "a.npy"
    whole = np.arange(rows * (columns[0] if columns else 1), dtype=np.int32).reshape(rows, *columns)
    np.save(path, whole)
    result = unmapped(np.load(path, mmap_mode="r")) if rows else whole
    assert (np.asarray(result) == whole).all() and result.shape == whole.shape and result.dtype == whole.dtype
    a, b = (data.draw(st.one_of(st.none(), st.integers(-12, 12))) for _ in range(2))
    assert np.array_equal(result[a:b], whole[a:b])
    for row in range(-rows - 2, rows + 2):
        if -rows <= row < rows:
            assert np.array_equal(result[row], whole[row])
        else:
            with pytest.raises(IndexError):
                result[row]


def test_temporary_errors_of_a_file_server_are_retried(tmp_path, monkeypatch, caplog):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    file, read, pending_errors = OpenFile(str(path)), os.pread, []

    def failing(*args):
        if pending_errors:
            raise OSError(pending_errors.pop(0), "not now")
        return read(*args)

    monkeypatch.setattr(os, "pread", failing)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    pending_errors[:] = [errno.EIO] * len(read_tokens.PAUSES)
    assert file.read(4, 3) == b"3456" and "reading it again in 25 s" in caplog.text
    pending_errors[:] = [errno.EIO] * (len(read_tokens.PAUSES) + 1)
    with pytest.raises(DataError, match="file: cannot be read at byte 3: not now"):
        file.read(4, 3)
    pending_errors[:] = [errno.ESTALE]  # the file was replaced or removed: the error is permanent
    with pytest.raises(DataError, match="cannot be read"):
        file.read(4, 3)
    monkeypatch.setattr(os, "pread", lambda number, count, offset: read(number, min(count, 3), offset))
    assert file.read(10, 0) == b"0123456789"  # in pieces, like reads of more than 2 GiB
    with pytest.raises(DataError, match="ends before byte 12"):
        file.read(10, 2)
    with pytest.raises(DataError, match="gone: No such file"):
        OpenFile(str(tmp_path / "gone"))


@pytest.mark.parametrize("blend", [False, True])
@pytest.mark.parametrize("what", [".bin", ".idx", "document_index.npy", "sample_index.npy", "shuffle_index.npy"])
def test_files_that_become_shorter_after_the_start(tmp_path, what, blend):
    """With mapped files, this process would end by SIGBUS."""
    prefix, _ = write(tmp_path / "corpus")
    path = ["1", prefix, "2", prefix] if blend else [prefix]
    train, *_ = build_datasets(configure(data_path=path, split="1,0,0"), NULL, (50, 0, 0))
    first = train[0]["tokens"]
    for file in [f"{prefix}{what}"] if what.startswith(".") else tmp_path.glob(f"index-cache/*/*{what}"):
        os.truncate(file, 0)
    with pytest.raises(DataError, match=rf"{what} ends before byte \d+"):
        train[0]
    assert len(first) == 16


def test_files_that_are_deleted_or_replaced_after_the_start(tmp_path):
    prefix, _ = write(tmp_path / "corpus")
    train, *_ = build_datasets(configure(data_path=[prefix], split="1,0,0"), NULL, (50, 0, 0))
    before = samples_of(train)
    write(tmp_path / "other", seed=5)
    for file in (f"{prefix}.bin", f"{prefix}.idx", *tmp_path.glob("index-cache/*/*")):
        os.unlink(file)
    os.rename(tmp_path / "other.bin", f"{prefix}.bin")
    assert samples_of(train) == before


def write_with_token(prefix, token, document=70, documents=200, dtype=np.int32):
    """Like `write`, but one document consists of ``token``; the check at the start does not read that document."""
    texts = [np.full(17, token if number == document else number) for number in range(documents)]
    return write_documents(prefix, texts, dtype)


def bad_samples(dataset, count):
    """The unusable samples and their error lines."""
    result = {}
    for number in range(count):
        try:
            dataset[number]
        except DataError as error:
            result[number] = str(error)
    return result


@pytest.mark.parametrize("token", [1001, 70_000, -1, -100])
@pytest.mark.parametrize("form", ["plain", "blend", "portion", "in memory"])
def test_an_id_outside_of_the_vocabulary_is_reported_where_it_is_read(tmp_path, form, token):
    prefix = write_with_token(tmp_path / "corpus", token)
    data = {"data_path": [prefix], "split": "1,0,0"}
    if form == "blend":
        data["data_path"] = ["2", write_with_token(tmp_path / "right", 5), "1", prefix]
    elif form == "portion":
        data = {"train_weighted_split_paths": [f"A: 1 0.2:0.9 {prefix}"]}
    elif form == "in memory":
        (tmp_path / "file").write_text("")
        data["data_cache_path"] = str(tmp_path / "file" / "cache")
    config = configure(**data)
    train, *_ = build_datasets(config, NULL, (600, 0, 0))
    bad = bad_samples(train, 600)
    line = f"{prefix}.bin: document 70 holds token id {token}, outside the 1001 ids of NullTokenizer --vocab-size 1000"
    assert 1 < len(bad) < 50 and set(bad.values()) == {f"{line}: made with another tokenizer"}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usual(0)
def test_a_loader_reports_an_error_in_one_line_and_continues_after_it(tmp_path, workers):
    train, *_ = build_datasets(
        configure(data_path=[write_with_token(tmp_path / "a", 5000)], split="1,0,0"), NULL, (200, 0, 0)
    )
    bad = sorted(bad_samples(train, 200))

    read = batches_of(train, consumed_samples=bad[0] - 2, num_workers=workers)
    right = [batch["numbers"].item() for batch in itertools.islice(read, 2)]
    assert right == [bad[0] - 2, bad[0] - 1]
    with pytest.raises(DataError, match="^.*a.bin: document 70 holds token id 5000, .* another tokenizer$"):
        next(read)
    read = batches_of(train, consumed_samples=bad[0] - 2, num_workers=workers)
    skip_micro_batches(read, bad[-1] - bad[0] + 3)  # --iterations-to-skip
    assert next(read)["numbers"].item() == bad[-1] + 1


@pytest.mark.parametrize("what", ["sample_index", *also_in_full("document_index", "shuffle_index")])
def test_a_damaged_index_of_samples_is_noticed_where_it_is_read(tmp_path, what):
    """A damaged index of the right size and type, which the check at the start accepts."""
    prefix, _ = write(tmp_path / "corpus")
    train, *_ = build_datasets(configure(data_path=[prefix], split="1,0,0"), NULL, (20, 0, 0))
    (path,) = tmp_path.glob(f"index-cache/*/*{what}.npy")
    right = np.load(path)
    for value in (0, 7, 10**6, 2**31 - 1, *(() if what == "shuffle_index" else (-1, -(2**31)))):
        damaged = right.copy()
        damaged[...] = value
        np.save(path, damaged)
        try:
            assert len(train[3]["tokens"]) == 16
        except DataError as error:
            assert "damaged" in str(error) or "no document" in str(error), error
    assert np.load(path).shape == right.shape


# --- index caches


def build_in_a_fork(prefix, after):
    """A process that after some seconds builds an index or reads a finished one, and sends its samples' hash."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def work():
        time.sleep(after)
        data = samples_of(build_datasets(configure(data_path=[prefix], split="8,2"), NULL, (400, 20, 0))[0])
        send.send(hashlib.sha256(repr(data).encode()).hexdigest())

    process = context.Process(target=work)
    process.start()
    send.close()
    return process, receive


@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=pytest.mark.full)])
def test_two_builders_of_one_index(tmp_path, rounds):
    """Started at about the same time, both read the same samples, and one complete cache remains."""
    draw, right = random.Random(1), set()
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        prefix, _ = write(folder / "corpus", documents=300)
        running = [build_in_a_fork(prefix, draw.uniform(0, 0.02)) for _ in range(2)]
        for process, receive in running:
            assert receive.poll(patience(60))
            right.add(receive.recv())
            process.join()
            assert process.exitcode == 0
        (cache,) = (folder / "index-cache").iterdir()
        assert {"files.json"} < {path.name for path in cache.iterdir()}
    assert len(right) == 1, right


@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=pytest.mark.full)])
def test_a_builder_that_is_killed_leaves_no_cache_that_is_accepted(tmp_path, rounds):
    draw, right, interrupted = random.Random(2), set(), 0
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        prefix, _ = write(folder / "corpus", documents=300)
        process, _ = build_in_a_fork(prefix, 0)
        end = time.monotonic() + patience(30)
        while not (folder / "index-cache").exists() and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.01))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        interrupted += bool(list(folder.glob("index-cache/*.tmp")))
        process, receive = build_in_a_fork(prefix, 0)
        assert receive.poll(patience(60))
        right.add(receive.recv())
        process.join()
    assert len(right) == 1, right
    assert interrupted or rounds < 10, "no kill came in the middle"


def test_folders_of_killed_builders_are_removed_by_the_next(tmp_path):
    """Not that of a builder that still works, nor any other folder."""
    folder, (receive, send) = tmp_path / "cache", multiprocessing.get_context("fork").Pipe()

    def build():
        with atomic_folder(str(folder)) as temporary:
            send.send(os.path.basename(temporary))
            time.sleep(1000)

    builders = [multiprocessing.get_context("fork").Process(target=build) for _ in range(2)]
    names = []
    for builder in builders:
        builder.start()
        names.append(receive.recv())
    builders[0].kill()
    builders[0].join()
    for name in ("cache.mine.tmp", f"other{names[0].removeprefix('cache')}"):
        (tmp_path / name).mkdir()
    with atomic_folder(str(folder)) as temporary:
        Path(temporary, "whole").write_text("all")
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert left == {"cache", "cache.mine.tmp", f"other{names[0].removeprefix('cache')}", names[1]}
    builders[1].kill()
    builders[1].join()
    assert sum(path.name.startswith(".") for path in tmp_path.iterdir()) == 1  # the lock of the second builder


@pytest.mark.parametrize("lost", ["description.txt", "document_index.npy", "files.json"])
def test_a_cache_with_deleted_files_is_refused(tmp_path, lost):
    """megatron-core would write missing files in place, where another run could read incomplete ones."""
    prefix, _ = write(tmp_path / "corpus")
    config = configure(data_path=[prefix], split="1,0,0")
    build_datasets(config, NULL, (10, 0, 0))
    (file,) = tmp_path.glob(f"index-cache/*/*{lost}")
    file.unlink()
    with pytest.raises(Refusal, match=rf"is no longer complete \(.*{lost}.*\): remove it, and it is built again"):
        build_datasets(config, NULL, (10, 0, 0))
    assert not file.exists()


# A rank reads its span of a sample.


@pytest.mark.parametrize("kind", ["greedy", "best-fit", "blend", "stages"])
@pytest.mark.parametrize(
    ("ulysses", "ring", "options"),
    [(1, 2, {}), (2, 2, {}), (4, 1, {"chunks": 2}), (2, 2, {"balance": "contiguous"})],
)
def test_a_rank_reads_its_span_alone(tmp_path, monkeypatch, kind, ulysses, ring, options):
    """Its part of each batch is that of the whole batch; the bytes are those of its tokens and of one label a span."""
    data = {"data_path": [write(tmp_path / "a", documents=60)[0]], "split": "1,0,0", "global_batch_size": 2}
    if kind == "blend":
        data["data_path"] = ["1", *data["data_path"], "2", write(tmp_path / "b", documents=60, seed=1)[0]]
    config = configure(**data, packing="best-fit" if kind == "best-fit" else "greedy", packing_window=4)
    first = 0
    if kind == "stages":
        config.stage, first = Stage(2, 1, 3, ((0, 8, 2), (1, 16, 2))), 2
    dataset, *_ = build_datasets(config, NULL, (4, 0, 0))
    read, plain = [], OpenFile.read

    def counted(file, count, offset):
        read.append(count if file.path.endswith(".bin") else 0)
        return plain(file, count, offset)

    monkeypatch.setattr(OpenFile, "read", counted)

    def batch(spans):
        return next(batches_of(dataset, consumed_samples=first, micro_batch_size=4, spans=spans))

    whole, every = batch(None), sum(read)
    assert every == 2 * int((whole["loss_mask"].sum(1) + 1).sum())  # 2 bytes a token; padding is not read
    grid, total = cp.abstract_grid(ulysses=ulysses, ring=ring), 0
    for u, r in itertools.product(range(ulysses), range(ring)):
        layout = cp.SequenceLayout(16, grid.at(ulysses=u, ring=r, tensor=0), **options)
        spans, before = spans_to_read(layout, 0), sum(read)
        mine = batch(spans)
        here = [position for begin, end in spans for position in range(begin, end)]
        present = torch.cat([whole["loss_mask"], torch.zeros(4, 1)], 1)
        present[:, 1:].clamp_(min=whole["loss_mask"])  # the last token of a padded sample has no loss
        assert sum(read) - before == 2 * int(present[:, here].sum()) < every
        assert sum(read) - before <= 2 * 4 * (layout.local_length + len(layout.local_spans))
        total += sum(read) - before
        expected, part = shard_batch(whole, layout, "cpu"), shard_batch(mine, layout, "cpu")
        assert all(part[key].equal(expected[key]) for key in expected)
        assert not mine["tokens"].equal(whole["tokens"])
    assert every <= total <= 2 * every


def test_which_spans_a_rank_reads():
    grid = cp.abstract_grid(ring=2)
    assert spans_to_read(cp.SequenceLayout(16, grid.at(ulysses=0, ring=0, tensor=0)), 0) == ((0, 5), (12, 17))
    assert spans_to_read(cp.SequenceLayout(16, grid.at(ulysses=0, ring=1, tensor=0)), 2) == ((4, 15),)
    assert spans_to_read(cp.SequenceLayout(16, cp.abstract_grid()), 0) is None


def test_an_id_outside_is_found_by_the_rank_that_reads_it(tmp_path):
    text = np.zeros(17, np.uint16)
    text[13] = 5000
    write_documents(tmp_path / "a", [text])
    (tmp_path / "a.bin").write_bytes(np.zeros(17, np.uint16).tobytes())
    dataset, *_ = build_datasets(configure(data_path=[f"{tmp_path}/a"], split="1,0,0"), NULL, (1, 0, 0))
    (tmp_path / "a.bin").write_bytes(text.tobytes())
    assert dataset.part(0, ((0, 13), (14, 17)))["tokens"].tolist() == [0] * 16
    with pytest.raises(DataError, match="document 0 holds token id 5000"):
        dataset.part(0, ((12, 14),))


# Memory.


MANY = int(os.environ.get("MANY_SAMPLES", "30000"))


@pytest.mark.full
@pytest.mark.parametrize("packing", ["greedy", "best-fit"])
def test_memory_is_flat_over_many_samples(tmp_path, packing):
    """Resident memory of the trainer and of a loader's process, over the last nine tenths of ``MANY_SAMPLES``."""
    write(tmp_path / "a", documents=MANY // 2)
    config = configure(data_path=[f"{tmp_path}/a"], split="1,0,0", packing=packing, global_batch_size=32)
    dataset, *_ = build_datasets(config, NULL, (MANY, 0, 0))
    batches, rows, seen = batches_of(dataset, micro_batch_size=32, num_workers=1, drop_last=False), [], 0
    me, warm = psutil.Process(), MANY // 10
    for batch in batches:
        seen += len(batch["tokens"])
        if seen >= warm + len(rows) * (MANY - warm) // 20:
            worker, *_ = me.children()
            rows.append([one.memory_info().rss for one in (me, worker)])  # pages that a fork shares count in both
    assert seen >= MANY and len(rows) >= 20
    grown = (np.max(rows[10:], 0) - np.max(rows[:10], 0)) / 2**20
    print(f"\n{seen:,} samples, {packing}: {np.max(rows, 0) / 2**20} MiB, grown by {grown} MiB")
    assert grown.max() < 1
