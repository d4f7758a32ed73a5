# SPDX-License-Identifier: Apache-2.0
"""Rows from Arrow, Parquet, WebDataset and URLs; filters and metadata; parts on every engine; tools/data.py."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.training.data import read_tokens
from megatron.training.data.chat_template import row_of
from megatron.training.data.datasets import build_datasets
from megatron.training.data.read_tokens import DataError
from megatron.training.data.sources import columnar, partitions, tar_files
from megatron.training.data.sources.filters import Filter
from megatron.training.data.sources.token_files import TokenWriter
from megatron.training.data.text_files import Reader, expand
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config, DataConfig
from tests.patience import patience
from tests.token_files import write_documents
from tools import data, preprocess_data

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"text": f"row {i} " + "größer " * (i % 5), "lang": ["en", "de"][i % 2], "n": i} for i in range(50)]
TOKENS = [[*row["text"].encode(), 256] for row in ROWS]
BYTES = ["--tokenizer-type", "ByteLevelTokenizer", "--append-eod"]


@pytest.fixture(autouse=True)
def restore_sigterm():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def lines(rows=ROWS) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows=ROWS) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream, row_group_size=7)
    return stream.getvalue()


def arrow(stream_format: bool, rows=ROWS) -> bytes:
    table, stream = pyarrow.Table.from_pylist(rows), io.BytesIO()
    make = pyarrow.ipc.new_stream if stream_format else pyarrow.ipc.new_file
    with make(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return stream.getvalue()


def tar(rows=ROWS, extra: bytes = b"") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for i, row in enumerate(rows):
            others = {key: value for key, value in row.items() if key != "text"}
            files = {"txt": row["text"].encode(), "json": json.dumps(others).encode(), "jpg": b"\xff" * 700}
            for ending, content in files.items():
                member = tarfile.TarInfo(f"{'long' * (40 * (i % 2))}/{i:04}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return stream.getvalue() + extra


FORMS = {
    "a.jsonl": lines, "a.parquet": parquet, "a.arrow": lambda: arrow(False), "b.arrow": lambda: arrow(True),
    "a.tar": tar, "a.tar.gz": lambda: gzip.compress(tar()),
}  # fmt: skip


def run(*inputs, prefix: Path, extra: tuple | list = (), workers: int = 1) -> str:
    argv = ["--input", *map(str, inputs), "--output-prefix", str(prefix), *BYTES, "--workers", str(workers)]
    preprocess_data.main([*argv, *map(str, extra)])
    return f"{prefix}_text_document"


def read(prefix: str) -> list[list[int]]:
    return [document.tolist() for document in IndexedDataset(prefix)]


def refused(capsys, *args, **options) -> str:
    with pytest.raises(SystemExit) as stop:
        run(*args, **options)
    assert stop.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("name", FORMS)
def test_each_form_has_the_same_documents(tmp_path, name):
    (tmp_path / name).write_bytes(FORMS[name]())
    prefix = run(tmp_path / name, prefix=tmp_path / "out", extra=["--filter", "lang == 'de' and n > 9"])
    assert read(prefix) == [tokens for row, tokens in zip(ROWS, TOKENS) if row["lang"] == "de" and row["n"] > 9]


def test_every_record_is_in_one_part(tmp_path):
    for name, make in FORMS.items():
        (tmp_path / name).write_bytes(make())
    (tmp_path / "z.txt").write_text("the last")
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    whole = [record.content for record in Reader(paths)]
    assert len(whole) == len(FORMS) * len(ROWS) + 1
    size = sum(map(os.path.getsize, paths))
    for count in (2, 3, 7, 40):
        bounds = [size * part // count for part in range(count)] + [float("inf")]
        parts = [[r.content for r in Reader(paths, span=span)] for span in zip(bounds, bounds[1:])]
        assert [content for part in parts for content in part] == whole, count


def test_a_broken_row_group(tmp_path, capsys):
    path = tmp_path / "a.parquet"
    content = bytearray(parquet())
    group = pyarrow.parquet.ParquetFile(io.BytesIO(content)).metadata.row_group(2)
    column = group.column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + 30] = b"\xff" * 30
    path.write_bytes(content)
    message = refused(capsys, path, prefix=tmp_path / "out")
    assert f"{path}, row group 3: cannot be read: " in message and "--skip-bad" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.parquet"]
    assert read(run(path, prefix=tmp_path / "out", extra=["--skip-bad"])) == TOKENS[:14] + TOKENS[21:]
    assert ", 1 bad; " in capsys.readouterr().out
    with pytest.raises(Refusal, match="row group 3: cannot be read"):  # chats are read by the same reader
        for record in Reader([str(path)]):
            row_of(record if record.error else record._replace(content=b""))


def test_arrow_with_offsets_outside_of_its_data(tmp_path, capsys):
    """Arrow follows offsets without looking: they are checked before a row is read."""
    content = arrow(True, [{"text": "abcdefgh" * 4} for _ in range(8)])
    offsets = np.arange(9, dtype=np.int32) * 32
    assert content.count(offsets.tobytes()) == 2 or offsets.tobytes()[:32] in content
    wrong = content.replace(offsets[:8].tobytes(), np.array([0, 2**30, *offsets[2:8]], np.int32).tobytes())
    assert wrong != content
    (tmp_path / "a.arrow").write_bytes(wrong)
    assert "row group 1: cannot be read: " in refused(capsys, tmp_path / "a.arrow", prefix=tmp_path / "out")


def test_folders_of_datasets(tmp_path, capsys):
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    state = {"_data_files": [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}], "_indices_data_files": None}
    (saved / "state.json").write_text(json.dumps(state))
    (saved / "data-0.arrow").write_bytes(arrow(True, ROWS[:20]))
    (saved / "data-1.arrow").write_bytes(arrow(True, ROWS[20:]))
    assert read(run(saved, prefix=tmp_path / "out")) == TOKENS
    (saved.parent / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert f"holds several splits: name one, for example {saved}" in refused(
        capsys, saved.parent, prefix=tmp_path / "x"
    )
    for name in ("../../outside", "/etc/passwd", ".."):
        (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        assert "is not a file of this folder" in refused(capsys, saved, prefix=tmp_path / "x")
    (saved / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    assert "a selection of rows" in refused(capsys, saved, prefix=tmp_path / "x")


def test_archives_that_are_not_whole(tmp_path, capsys):
    path, content = tmp_path / "a.tar", tar()
    path.write_bytes(content[:-20_000])
    assert "cut off in the middle of an archive" in refused(capsys, path, prefix=tmp_path / "x")
    path.write_bytes(content[:1000] + b"\xff" * 1000 + content[2000:])
    assert "checksum" in refused(capsys, path, prefix=tmp_path / "x")
    path.write_bytes(tar([{"text": "x", "n": 1}]).replace(b'{"n": 1}', b'{"n": 1,'))
    assert f"{path}, sample 1: '0000.json' is not JSON" in refused(capsys, path, prefix=tmp_path / "x")
    assert list(tar_files.tar_rows(io.BytesIO(b""), 1)) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.tar"]


def test_urls(tmp_path, capsys):
    import fsspec

    memory = fsspec.filesystem("memory")
    for name, make in FORMS.items():
        memory.pipe(f"/sources/{name}", make())
    try:
        for name in FORMS:
            assert read(run(f"memory://sources/{name}", prefix=tmp_path / name)) == TOKENS
        assert expand(["memory://sources/*.arrow"]) == ["memory:///sources/a.arrow", "memory:///sources/b.arrow"]
        assert "no such file" in refused(capsys, "memory://sources/c.jsonl", prefix=tmp_path / "x")
        assert "unknown://a" in refused(capsys, "unknown://a", prefix=tmp_path / "x")
    finally:
        memory.rm("/sources", recursive=True)


@pytest.fixture
def s3(monkeypatch):
    """A local S3 server. Its attributes: every how many requests one fails, and the paths of those that failed."""
    pytest.importorskip("s3fs")
    server_of = pytest.importorskip("moto.server")
    from werkzeug.serving import make_server

    application, count = server_of.DomainDispatcherApplication(server_of.create_backend_app), itertools.count(1)
    state = SimpleNamespace(every=5, failed=[])

    def flaky(environment, start_response):
        if next(count) % state.every == 0:
            state.failed.append(environment["PATH_INFO"])
            start_response("503 Slow Down", [("Content-Type", "text/plain")])
            return [b"slow down"]
        return application(environment, start_response)

    server = make_server("127.0.0.1", 0, flaky, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
                        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    importlib.import_module("s3fs").S3FileSystem.clear_instance_cache()  # its addresses are those of earlier servers
    yield state
    server.shutdown()


@pytest.mark.full
def test_an_s3_server_that_fails_every_fifth_request(tmp_path, s3):
    import fsspec

    system = fsspec.filesystem("s3")
    system.mkdir("bucket")
    for name in ("a.jsonl", "a.parquet", "a.tar"):
        system.pipe(f"bucket/{name}", FORMS[name]())
    assert read(run("s3://bucket/a.*", prefix=tmp_path / "out")) == TOKENS * 3
    assert read(run("s3://bucket/a.*", prefix=tmp_path / "parts", extra=["--partitions", 5])) == TOKENS * 3
    assert len(s3.failed) > 3


# --- training data at a URL


@pytest.fixture
def stored(tmp_path, s3):
    """(a prefix of .bin/.idx in the file system, the same files in S3, the options for a copy of the index)."""
    import fsspec

    s3.every = 10**9
    random = np.random.default_rng(0)
    texts = [random.integers(0, 1000, size) for size in random.integers(5, 60, 40)]
    local = write_documents(tmp_path / "corpus", texts)
    system = fsspec.filesystem("s3")
    system.makedirs("data", exist_ok=True)
    for end in ("bin", "idx"):
        system.put(f"{local}.{end}", f"data/corpus.{end}")
    return local, "s3://data/corpus", system, str(tmp_path / "copies")


def datasets_of(prefix, cache, seq_length=16, **options):
    config = Config()
    config.data = DataConfig(seq_length=seq_length, data_path=[prefix], object_storage_cache_path=cache, **options)
    return build_datasets(config, build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 1000), (60, 6, 0))


@pytest.mark.parametrize("packing", ["greedy", pytest.param("best-fit", marks=pytest.mark.full)])
@pytest.mark.lab
def test_samples_of_files_at_a_url(stored, s3, packing):
    """The same as those of local files, also in the processes of a loader, while every fifth request fails."""
    local, remote, _, copies = stored
    expected, found = datasets_of(local, None, packing=packing), datasets_of(remote, copies, packing=packing)
    s3.every = 5
    for ours, other in zip(found[:2], expected[:2]):
        chosen = range(0, len(other), max(1, len(other) // 8))
        loader = torch.utils.data.DataLoader(torch.utils.data.Subset(ours, chosen), batch_size=None, num_workers=2)
        for sample, i in zip(loader, chosen, strict=True):
            assert all(torch.equal(sample[name], other[i][name]) for name in ("tokens", "labels", "loss_mask"))
    assert s3.failed
    assert len([name for name in os.listdir(copies) if name.endswith(".idx")]) == 1
    assert os.listdir(os.path.join(copies, "index-cache"))


def test_a_rank_requests_its_span_alone(stored, monkeypatch):
    """Of a long sample, the pieces that one rank needs; all in one round of requests."""
    local, remote, _, copies = stored
    rounds, read = [], read_tokens.read_ranges
    monkeypatch.setattr(read_tokens, "read_ranges", lambda path, parts: rounds.append(parts) or read(path, parts))
    dataset, expected = (datasets_of(*given, seq_length=256)[0] for given in ((remote, copies), (local, None)))
    rounds.clear()
    part = dataset.part(3, [(64, 97)])
    assert torch.equal(part["tokens"][64:96], expected[3]["tokens"][64:96])
    assert len(rounds) == 1 and sum(end - begin for begin, end in rounds[0]) == 2 * 33


def test_a_replaced_file_at_a_url_has_a_new_index(stored):
    local, remote, system, copies = stored
    before = datasets_of(remote, copies)[0]
    write_documents(local, [np.arange(900)])
    for end in ("bin", "idx"):
        system.put(f"{local}.{end}", f"data/corpus.{end}")
    after = datasets_of(remote, copies)[0]
    assert len(os.listdir(os.path.join(copies, "index-cache"))) == 2
    assert torch.equal(after[0]["tokens"], datasets_of(local, None)[0][0]["tokens"])
    with pytest.raises(DataError, match="s3://data/corpus.bin"):  # or ids that are those of other documents
        for i in range(len(before)):
            before[i]


def test_errors_of_files_at_a_url(stored, tmp_path, monkeypatch, caplog):
    local, remote, system, copies = stored
    with pytest.raises(Refusal, match="--data-path s3://data/corpus: give --object-storage-cache-path FOLDER"):
        datasets_of(remote, None)
    with pytest.raises(Refusal, match="--data-path s3://data/other: no such file: s3://data/other.bin"):
        datasets_of("s3://data/other", copies)
    (tmp_path / "file").touch()
    with pytest.raises(Refusal, match="--object-storage-cache-path .*file/copies: .* cannot be copied there"):
        datasets_of(remote, str(tmp_path / "file" / "copies"))
    with pytest.raises(Refusal, match="s3://data/corpus.bin: no document ends with token"):
        datasets_of(remote, copies, reset_attention_mask=True)
    with pytest.raises(Refusal, match="unknown://data/corpus.bin: "):
        datasets_of("unknown://data/corpus", copies)
    read, errors = read_tokens.read_ranges, [OSError("slow"), TimeoutError("late")]
    monkeypatch.setattr(read_tokens, "PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(
        read_tokens, "read_ranges", lambda path, parts: [errors.pop()] * len(parts) if errors else read(path, parts)
    )
    dataset = datasets_of(remote, copies)[0]
    assert not errors and "s3://data/corpus.bin: late; reading it again" in caplog.text
    system.rm("data/corpus.bin")
    with pytest.raises(DataError, match="^s3://data/corpus.bin: cannot be read: "):
        dataset[0]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("n >= 2", [2, 3]), ("a.b == 'x'", [1]), ("lang in ('en', 'fr')", [0, 1]), ("not lang", [3]),
        ("len(text) > 2 or n == 0", [0, 2]), ("lower(text) == 'ab'", [1]), ("n * 2 + 1 == 5", [2]),
        ("missing > 3", []), ("missing is None", [0, 1, 2, 3]), ("'b' in text", []), ("0 < n < 2", [1]),
        ("-n == -3", [3]), ("text + 'a' == None", [0, 1, 2, 3]), ("n / 0 == None", [0, 1, 2, 3]),
    ],
)  # fmt: skip
def test_filters(text, kept):
    rows = [{"n": 0, "lang": "en", "text": "a"}, {"n": 1, "lang": "fr", "text": "AB", "a": {"b": "x"}},
            {"n": 2, "lang": "de", "text": "ccc"}, {"n": 3, "text": ""}]  # fmt: skip
    assert [row["n"] for row in rows if Filter(text)(row)] == kept


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "n.__class__()", "[x for x in n]", "lambda: 1", "n ** 9", "f'{n}'", "n[0]", "x := 1", "(",
     "open('a')", "len(n, n)", "b'a' == n", "n" + " or n" * 2000],
)  # fmt: skip
def test_expressions_that_are_no_filters(text):
    with pytest.raises(Refusal, match="^--filter .*; it may have names of columns"):
        Filter(text)


def test_metadata_of_each_document(tmp_path):
    rows = [*ROWS[:3], {"text": " "}, ROWS[4]]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    (tmp_path / "a.parquet").write_bytes(parquet(rows[:2]))
    inputs = [tmp_path / "a.jsonl", tmp_path / "a.parquet"]
    extra = ["--keep-metadata", "n"]
    prefix = run(*inputs, prefix=tmp_path / "out", extra=extra)
    kept = [json.loads(line) for line in open(f"{prefix}.metadata.jsonl")]
    assert [one["length"] for one in kept] == list(map(len, read(prefix)))
    assert [one["n"] for one in kept] == [0, 1, 2, 4, 0, 1]
    assert kept[1]["source"] == str(inputs[0]) and kept[1]["byte"] == lines(rows[:1]).__len__() and kept[5]["row"] == 2
    parts = run(*inputs, prefix=tmp_path / "parts", extra=[*extra, "--partitions", "4"])
    assert Path(f"{parts}.metadata.jsonl").read_bytes() == Path(f"{prefix}.metadata.jsonl").read_bytes()


def test_metadata_that_json_does_not_have(tmp_path, capsys):
    for name, value in {"nan": "NaN", "deep": "[" * 20_000 + "]" * 20_000}.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(f'{{"text": "a", "n": {value}}}\n')
        line = refused(capsys, path, prefix=tmp_path / name, extra=["--keep-metadata", "n"])
        assert "a column of --keep-metadata is N" in line or "nested too deep" in line or "not JSON" in line
    assert not list(tmp_path.glob("*_document*"))


def test_a_folder_as_input(tmp_path, capsys):
    """All readable files of a folder, in alphabetical order; others are named, hidden ones are left alone."""
    folder = tmp_path / "texts"
    (folder / "below" / ".git").mkdir(parents=True)
    (folder / "b.md").write_text("of b")
    (folder / "below" / "a.jsonl").write_bytes(lines(ROWS[:2]))
    (folder / "below" / ".git" / "x.txt").write_text("hidden")
    (folder / "a.txt").write_text("of a")
    (folder / "c.pdf").write_text("x")
    one = run(folder, prefix=tmp_path / "one")
    assert f"{folder}: files read: 1 .jsonl, 1 .md, 1 .txt; not read: 1 .pdf" in capsys.readouterr().err
    named = run(folder / "a.txt", folder / "b.md", folder / "below" / "a.jsonl", prefix=tmp_path / "named")
    assert read(one) == read(named) and len(read(one)) == 4
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.pdf").write_text("x")
    assert "none of its files is of a kind that is read" in refused(capsys, tmp_path / "none", prefix=tmp_path / "x")


def test_rows_of_parquet_are_read_few_at_a_time_if_they_may_be_long(tmp_path, monkeypatch):
    """A value in the dictionary of a column is small in the file, however many rows have it."""
    rows = []
    monkeypatch.setattr("megatron.system.own_process.FORK", False)  # so that the patches below see the calls
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * 4000] * 100}), tmp_path / "a.parquet")
    read = pyarrow.parquet.ParquetFile.iter_batches
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches",
                        lambda file, size, **given: rows.append(size) or read(file, size, **given))  # fmt: skip
    size = pyarrow.parquet.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).column(0).total_uncompressed_size
    for most, expected in ((columnar.DECODED, columnar.BATCH_ROWS), (10 * size, 10), (10, 1)):
        monkeypatch.setattr(columnar, "DECODED", most)
        assert len(list(Reader([str(tmp_path / "a.parquet")]))) == 100
        assert rows.pop() == expected
    monkeypatch.setattr(columnar, "MOST_VALUES", 99)
    (row,) = Reader([str(tmp_path / "a.parquet")])
    assert row.error == "cannot be read: it has 100 values: write smaller row groups"


# Parts.


@pytest.fixture
def texts(tmp_path):
    """Files of three forms; and what one process makes of them."""
    for name in ("a.jsonl", "b.parquet", "c.tar"):
        (tmp_path / name).write_bytes({"a.jsonl": lines, "b.parquet": parquet, "c.tar": tar}[name]())
    paths = sorted(tmp_path.iterdir())
    prefix = run(*paths, prefix=tmp_path / "whole")
    return paths, [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx")]


def made(prefix: Path) -> list[bytes]:
    assert not os.path.exists(f"{prefix}.parts")
    assert data.main(["verify", f"{prefix}_text_document"]) is None
    return [Path(f"{prefix}_text_document.{end}").read_bytes() for end in ("bin", "idx")]


def test_the_files_are_those_that_megatron_core_writes(tmp_path):
    lengths = [3, 0, 5, 1]
    tokens = np.arange(9, dtype=np.uint16)
    writer = TokenWriter(str(tmp_path / "ours.bin"), np.uint16)
    writer.add(tokens, lengths)
    writer.finish(str(tmp_path / "ours.idx"))
    write_documents(tmp_path / "core", np.split(tokens, np.cumsum(lengths)[:-1]))
    for end in ("bin", "idx"):
        assert (tmp_path / f"ours.{end}").read_bytes() == (tmp_path / f"core.{end}").read_bytes()


@pytest.mark.parametrize(("parts", "workers"), [(2, 1), (9, 2), (400, 1)])
@pytest.mark.usual(0, 1)
def test_the_same_bytes_from_any_parts(tmp_path, texts, parts, workers):
    run(*texts[0], prefix=tmp_path / "p", extra=["--partitions", parts], workers=workers)
    assert made(tmp_path / "p") == texts[1]


def test_an_array_whose_third_task_dies(tmp_path, texts, capsys, monkeypatch):
    def task(number):
        run(*texts[0], prefix=tmp_path / "p", extra=["--engine", "slurm", "--shard", number, "--of", 4])

    merge = ["merge", "--input", f"{tmp_path}/p.parts", "--output-prefix", f"{tmp_path}/p"]
    finish = TokenWriter.finish
    for number in range(4):
        if number == 2:
            monkeypatch.setattr(TokenWriter, "finish", lambda *_: os._exit(1) if os.fork() == 0 else os.wait()[1] / 0)
            with pytest.raises(ZeroDivisionError):
                task(number)
            monkeypatch.setattr(TokenWriter, "finish", finish)
        else:
            task(number)
    with pytest.raises(SystemExit):
        data.main(merge)
    assert "part 2 is not complete, and 1 of 4 are missing" in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "p_text_document.bin")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "p.parts").iterdir()}
    for number in range(4):  # a restarted array
        task(number)
    assert {name: time for name, time in before.items() if (tmp_path / "p.parts" / name).stat().st_mtime_ns == time
            } == before  # fmt: skip
    data.main(merge)
    assert made(tmp_path / "p") == texts[1]


def test_a_part_that_is_damaged_or_of_other_work(tmp_path, texts, capsys):
    argv = ["--engine", "slurm", "--of", 2, "--shard"]
    for number in range(2):
        run(*texts[0], prefix=tmp_path / "p", extra=[*argv, number])
    path = next((tmp_path / "p.parts").glob("00000*.bin"))
    content = path.read_bytes()
    merge = ["merge", "--input", f"{tmp_path}/p.parts", "--output-prefix", f"{tmp_path}/p"]
    for wrong, line in ((content[:-7], "and its manifest says"), (content[:-2] + b"\0\0", "its SHA-256 is not that")):
        path.write_bytes(wrong)
        with pytest.raises(SystemExit):
            data.main(merge)
        assert f"{path}" in (message := capsys.readouterr().err) and line in message
        assert not list(tmp_path.glob("p_text*"))
    path.write_bytes(content[:-7])
    run(*texts[0], prefix=tmp_path / "p", extra=[*argv, 0])  # is made again
    assert path.read_bytes() == content
    other = [*argv, 0, "--filter", "n > 3"]
    assert "made of other inputs, or with other settings" in refused(
        capsys, *texts[0], prefix=tmp_path / "p", extra=other
    )
    run(*texts[0], prefix=tmp_path / "p", extra=[*other, "--overwrite"])
    assert len(list((tmp_path / "p.parts").glob("0000?-of-00002.json"))) == 1


@pytest.mark.full  # Ray takes ten seconds to start
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed")
def test_ray_with_a_worker_that_is_killed(tmp_path, texts):
    """Two workers; the first is killed in the middle of a part."""
    killer = tmp_path / "site" / "sitecustomize.py"
    killer.parent.mkdir()
    killer.write_text(
        f"""
import os, signal, sys
class Found:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron.training.data.sources.partitions" and "default_worker.py" in " ".join(sys.argv):
            try:
                os.close(os.open({str(tmp_path / "killed")!r}, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)
sys.meta_path.insert(0, Found())
"""
    )
    argv = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", *map(str, texts[0]), *BYTES,
            "--output-prefix", str(tmp_path / "r"), "--engine", "ray", "--partitions", "4",
            "--workers", "2"]  # fmt: skip
    path = os.pathsep.join([str(killer.parent), str(ROOT)])
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
                          timeout=patience(180))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists() and made(tmp_path / "r") == texts[1]


def test_engines_that_are_not_possible(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines())
    for extra, line in {
        ("--engine", "slurm"): "needs --shard I --of N",
        ("--engine", "slurm", "--shard", "2", "--of", "2"): "needs --shard I --of N",
        ("--engine", "slurm", "--shard", "0", "--of", "2", "--partitions", "3"): "--of says how many parts",
        ("--shard", "1", "--of", "2"): "need --engine slurm, not local",
        ("--partitions", "0"): "--partitions 0: must be from 1 to",
        ("--engine", "slurm", "--shard", "0", "--of", "100001"): "--of 100001: must be from 1 to",
        ("--json-keys", "a/b"): "must have no slash",
    }.items():
        assert line in refused(capsys, tmp_path / "a.jsonl", prefix=tmp_path / "x", extra=extra)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "needs the package ray" in refused(
        capsys, tmp_path / "a.jsonl", prefix=tmp_path / "x", extra=["--engine", "ray"]
    )
    for name in ("fsspec.core", "fsspec"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "needs the package s3fs" in refused(capsys, "s3://a/b", prefix=tmp_path / "x")


def test_a_full_disk_leaves_no_part(tmp_path, texts, capsys, monkeypatch):
    import errno

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(partitions.TokenWriter, "finish", full)
    assert "the disk is full" in refused(capsys, *texts[0], prefix=tmp_path / "p", extra=["--partitions", 3])
    assert os.listdir(tmp_path / "p.parts") == []


# tools/data.py


def test_split_merge_and_show(tmp_path, texts, capsys):
    whole = str(tmp_path / "whole_text_document")
    data.main(["split", whole, "--shares", "3", "1", "1", "--output-prefix", f"{tmp_path}/s"])
    data.main(["merge", "--input", *(f"{tmp_path}/s_{i}" for i in range(3)), "--output-prefix", f"{tmp_path}/m"])
    assert [(tmp_path / f"m.{end}").read_bytes() for end in ("bin", "idx")] == texts[1]
    sizes = [sum(map(len, read(f"{tmp_path}/s_{i}"))) for i in range(3)]
    assert np.allclose(np.array(sizes) / sum(sizes), [0.6, 0.2, 0.2], atol=0.02)
    data.main(["dedup-exact", whole, "--output-prefix", f"{tmp_path}/d"])
    assert read(f"{tmp_path}/d") == TOKENS  # the three files have the same documents
    capsys.readouterr()
    data.main(["inspect", whole, "--documents", "1", "--tokenizer-type", "ByteLevelTokenizer"])
    shown = capsys.readouterr().out
    assert "150 documents" in shown and "manifest: none" in shown and "--- document 0, 7 tokens\nrow 0" in shown
    data.main(["sample", whole, "--documents", "2", "--tokens", "4"])
    assert capsys.readouterr().out.count("114 111 119 32") == 2
    data.main(["verify", f"{tmp_path}/m", "--tokenizer-type", "ByteLevelTokenizer"])
    assert "all ids are among the 257" in capsys.readouterr().out
    data.main(["lengths", whole, "--plot", f"{tmp_path}/l.png"])
    table = capsys.readouterr().out
    assert "| 4 to 8 | 6 | 4.00 % |" in table and (tmp_path / "l.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("verify {0}/x", "no such file"),
        ("merge --input {0}/w {0}/w --output-prefix {0}/w", "is an input too"),
        ("merge --input {0} {0}/w --output-prefix {0}/y", "merge the parts of one folder at a time"),
        ("merge --input {0} --output-prefix {0}/y", "no complete part"),
        ("split {0}/w --shares 1 0 --output-prefix {0}/y", "must be positive"),
        ("split {0}/w --shares 1 1e-9 --output-prefix {0}/y", "one part would have none"),
        ("verify {0}/w --tokenizer-type NullTokenizer --vocab-size 9", "outside the 10 ids"),
        ("inspect {0}/w --tokenizer-type NullTokenizer --vocab-size 9", "outside the 10 ids"),
        ("merge --input {0}/w {0}/v --output-prefix {0}/y", "do not go into one"),
        ("split {0}/w --shares 1 1 --output-prefix {0}/y", "exists: give --overwrite"),
    ],
)
def test_refusals_of_the_tool(tmp_path, capsys, argv, line):
    for name, dtype in (("w", np.uint16), ("v", np.int32), ("y_0", np.uint16)):
        writer = TokenWriter(str(tmp_path / f"{name}.bin"), dtype)
        writer.add(np.arange(20), [10, 10])
        writer.finish(str(tmp_path / f"{name}.idx"))
    with pytest.raises(SystemExit) as stop:
        data.main(argv.format(tmp_path).split())
    assert stop.value.code == 2 and line in capsys.readouterr().err
