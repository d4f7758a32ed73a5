# SPDX-License-Identifier: Apache-2.0
"""Text to .bin/.idx and back, with all compressions, any number of workers, and all errors."""

import errno
import gzip
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.training.data import encoding
from megatron.training.data.sources.token_files import TokenWriter
from tests.patience import patience

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import collect_text  # noqa: E402
import preprocess_data  # noqa: E402
import train_tokenizer  # noqa: E402

DOCUMENTS = [f"document {i}\n" + "größer als 数字 " * (i % 7) for i in range(40)]
TOKENS = [list(text.encode()) + [256] for text in DOCUMENTS]


def jsonl(documents, key="text"):
    return "".join(json.dumps({key: text, "n": i}) + "\n" for i, text in enumerate(documents)).encode()


def pack(path, content):
    """Write the content, compressed as the suffix says (.zst in two frames); returns the path."""
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        half, compress = len(content) // 2, zstandard.ZstdCompressor().compress
        content = compress(content[:half]) + compress(content[half:])
    path.write_bytes(content)
    return str(path)


def run(folder, *inputs, workers=1, extra=(), prefix="out"):
    """Run the tool in this process; returns the prefix."""
    argv = ["--input", *inputs, "--output-prefix", str(folder / prefix), "--tokenizer-type", "ByteLevelTokenizer"]
    preprocess_data.main([*argv, "--append-eod", "--workers", str(workers), *extra])
    return str(folder / f"{prefix}_text_document")


def refused(capsys, *args, **options):
    """The tool's error line."""
    with pytest.raises(SystemExit) as stop:
        run(*args, **options)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("preprocess_data.py: error: ") and all(" docs/s" in line for line in lines[:-1])
    return lines[-1]


def read(prefix):
    data = IndexedDataset(prefix)
    assert list(data.document_indices) == list(range(len(data) + 1))
    return [document.tolist() for document in data]


def outputs(folder):
    return sorted(path.name for path in folder.iterdir() if "_document" in path.name)


@pytest.fixture(autouse=True)
def restore_sigterm():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_RECORDS", 3)


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_round_trip(tmp_path, packing, suffix):
    if suffix == ".txt":
        inputs = [pack(tmp_path / f"{i:02}.txt{packing}", text.encode()) for i, text in enumerate(DOCUMENTS)]
    else:
        inputs = [pack(tmp_path / f"a.jsonl{packing}", jsonl(DOCUMENTS))]
    assert read(run(tmp_path, *inputs)) == TOKENS
    assert outputs(tmp_path) == ["out_text_document.bin", "out_text_document.idx"]


def test_the_same_bytes_over_any_workers(tmp_path, small_batches):
    inputs = [pack(tmp_path / f"{i}.jsonl{p}", jsonl(DOCUMENTS[i::3])) for i, p in enumerate(["", ".gz", ".zst"])]
    inputs.append(pack(tmp_path / "z.txt", b"the last one"))
    expected = [tokens for i in range(3) for tokens in TOKENS[i::3]] + [[*b"the last one", 256]]
    single = run(tmp_path, *inputs, prefix="one")
    several = run(tmp_path, *inputs, prefix="three", workers=3)
    assert read(single) == expected
    for end in ("bin", "idx"):
        assert Path(f"{single}.{end}").read_bytes() == Path(f"{several}.{end}").read_bytes()


@pytest.mark.parametrize("workers", [1, 3])
def test_the_tokenizer_is_built_once(tmp_path, monkeypatch, small_batches, workers):
    """The program builds the tokenizer once for itself and its forked workers, because it can take a minute."""
    built, build = tmp_path / "built", encoding.build_tokenizer

    def counted(*settings):
        with built.open("a") as file:
            file.write("x")
        return build(*settings)

    monkeypatch.setattr(encoding, "build_tokenizer", counted)
    encoding.tokenizer_of.cache_clear()
    run(tmp_path, pack(tmp_path / "x.jsonl", jsonl(DOCUMENTS)), workers=workers)
    assert built.read_text() == "x"


def test_spawned_workers_and_globs(tmp_path, capsys):
    for i in range(3):
        pack(tmp_path / f"{i}.jsonl", jsonl(DOCUMENTS[i::3]))
    argv = ["--input", str(tmp_path / "*.jsonl"), "--output-prefix", str(tmp_path / "out"), "--workers", "2"]
    argv += ["--tokenizer-type", "ByteLevelTokenizer", "--append-eod", "--log-interval", "10"]
    summary = preprocess_data.preprocess(preprocess_data.build_parser().parse_args(argv), method="spawn")
    assert "40 documents" in summary[0] and "docs/s" in summary[-1] and "docs/s" in capsys.readouterr().err
    assert read(str(tmp_path / "out_text_document")) == [tokens for i in range(3) for tokens in TOKENS[i::3]]


def test_keys_empty_documents_and_dtypes(tmp_path, capsys):
    records = [{"a": "1 2", "b": ""}, {"a": "70000", "b": "3"}]
    source = pack(tmp_path / "x.jsonl", b"\xef\xbb\xbf" + "".join(json.dumps(r) + "\n\n" for r in records).encode())
    argv = ["--input", source, "--output-prefix", str(tmp_path / "k"), "--json-keys", "a", "b", "--workers", "1"]
    preprocess_data.main([*argv, "--tokenizer-type", "ByteLevelTokenizer"])
    assert read(str(tmp_path / "k_a_document")) == [list(b"1 2"), list(b"70000")]
    assert read(str(tmp_path / "k_b_document")) == [list(b"3")]
    assert "skipped: 3 empty, 0 bad" in capsys.readouterr().out  # two blank lines, and "b" of the first record
    assert IndexedDataset(str(tmp_path / "k_b_document")).index.dtype.__name__ == "uint16"
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100000"]
    numbers = pack(tmp_path / "n.jsonl", jsonl(["1 2", "70000"]))
    run(tmp_path, numbers, extra=null)
    assert read(str(tmp_path / "out_text_document")) == [[1, 2, 100000], [70000, 100000]]
    assert IndexedDataset(str(tmp_path / "out_text_document")).index.dtype.__name__ == "int32"


BAD = {
    b'{"text": "cut': "not JSON",
    b'{"txt": "x"}': 'no key "text"',
    b'{"text": 3}': 'key "text" is not a string',
    b"[1]": "not a JSON object",
    b'{"text": "\xff"}': "not UTF-8 at byte 10",
    b'{"text": "\\ud800"}': 'key "text" has half of a surrogate pair',
}


@pytest.mark.parametrize("line", BAD)
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines(tmp_path, capsys, small_batches, line, workers):
    good = jsonl(DOCUMENTS).splitlines(keepends=True)
    source = pack(tmp_path / "x.jsonl", b"".join([*good[:20], line + b"\n", *good[20:30], line + b"\n", *good[30:]]))
    message = refused(capsys, tmp_path, source, workers=workers)
    assert f"{source}, line 21: {BAD[line]}" in message and "--skip-bad-lines" in message
    assert os.listdir(tmp_path) == ["x.jsonl"]
    assert read(run(tmp_path, source, workers=workers, extra=["--skip-bad-lines"])) == TOKENS
    assert "0 empty, 2 bad" in capsys.readouterr().out


def test_inputs_that_cannot_be_read(tmp_path, capsys):
    content = jsonl(DOCUMENTS * 50)
    for packing in (".gz", ".zst"):
        path = tmp_path / f"x.jsonl{packing}"
        pack(path, content)
        path.write_bytes(path.read_bytes()[:-20])
        assert f"{path}: cannot be read" in refused(capsys, tmp_path, str(path))
        path.write_bytes(content)
        assert f"{path}: cannot be read" in refused(capsys, tmp_path, str(path))
        path.unlink()
    latin = pack(tmp_path / "latin.txt", "é".encode("latin-1"))
    assert f"{latin}: not UTF-8 at byte 0" in refused(capsys, tmp_path, latin)
    assert "no such file" in refused(capsys, tmp_path, str(tmp_path / "*.jsonl"))
    (tmp_path / "empty").mkdir()
    assert "none of its files is of a kind that is read" in refused(capsys, tmp_path, str(tmp_path / "empty"))
    assert "named twice" in refused(capsys, tmp_path, latin, str(tmp_path / "l*.txt"))
    assert "no document with text" in refused(capsys, tmp_path, pack(tmp_path / "e.txt", b""))
    text = pack(tmp_path / "t.txt", b"x")
    assert "does not go with .txt" in refused(capsys, tmp_path, text, extra=["--json-keys", "a"])
    assert "--tokenizer-model /no/model: no such file" in refused(
        capsys, tmp_path, text, extra=["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "/no/model"]
    )
    assert outputs(tmp_path) == []


def test_existing_outputs_are_kept_without_overwrite(tmp_path, capsys):
    source = pack(tmp_path / "x.jsonl", jsonl(DOCUMENTS))
    before = read(run(tmp_path, source))
    other = pack(tmp_path / "y.jsonl", jsonl(["other"]))
    assert "--overwrite" in refused(capsys, tmp_path, other)
    bad = pack(tmp_path / "z.jsonl", jsonl(["fine"]) + b"{")
    refused(capsys, tmp_path, bad, extra=["--overwrite"])
    assert read(str(tmp_path / "out_text_document")) == before
    assert read(run(tmp_path, other, extra=["--overwrite"])) == [[*b"other", 256]]
    assert len(outputs(tmp_path)) == 2


@pytest.mark.parametrize("where", ["add", "finish"])
def test_full_disk(tmp_path, capsys, monkeypatch, where):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TokenWriter, where, full)
    message = refused(capsys, tmp_path, pack(tmp_path / "x.jsonl", jsonl(DOCUMENTS)), workers=2)
    assert message.endswith(f"cannot write {tmp_path / 'out_text_document.bin'}: the disk is full")
    assert outputs(tmp_path) == []


def start(folder, source, limit=None):
    """Start the tool in a forked process, which has nothing to import; its messages go to a file."""

    def body():
        os.dup2(os.open(folder / "messages", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w")
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        run(folder, str(source), workers=2)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    return process


def test_write_error(tmp_path):
    """The system refuses a write beyond the size limit: one line, and no files left."""
    source = pack(tmp_path / "x.jsonl", jsonl(DOCUMENTS * 200))
    process = start(tmp_path, source, limit=100_000)
    process.join(patience(60))
    lines = (tmp_path / "messages").read_text().splitlines()
    assert process.exitcode == 2 and lines[-1].endswith("out_text_document.bin: File too large")
    assert not any("Traceback" in line for line in lines) and outputs(tmp_path) == []


def test_a_pipe(tmp_path):
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    process = start(tmp_path, fifo)
    fifo.write_bytes(jsonl(DOCUMENTS))
    process.join(patience(60))
    assert process.exitcode == 0 and read(str(tmp_path / "out_text_document")) == TOKENS


def test_sigterm(tmp_path):
    """A signal during the work leaves no files."""
    fifo = tmp_path / "slow.jsonl"
    os.mkfifo(fifo)
    process = start(tmp_path, fifo)
    with open(fifo, "wb") as writer:
        writer.write(jsonl(DOCUMENTS))
        writer.flush()
        deadline = time.monotonic() + patience(60)
        while process.is_alive() and not outputs(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert outputs(tmp_path)
        while process.is_alive() and time.monotonic() < deadline:  # a signal just before a blocking read is lost
            process.terminate()
            process.join(0.5)
    assert process.exitcode == 143 and "Traceback" not in (tmp_path / "messages").read_text()
    assert outputs(tmp_path) == []


@pytest.mark.parametrize("flag", [["--split-sentences"], ["--keep-sequential-samples"], ["--find-optimal-num-workers"]])
def test_megatrons_flags_that_are_refused(tmp_path, capsys, flag):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, "x", extra=flag)
    assert stop.value.code == 2 and f"{flag[0]} is not supported" in capsys.readouterr().err


def test_collect_and_train_tokenizer(tmp_path, capsys):
    """A tokenizer trained on Python's sources: reproducible, and decoding restores any text."""
    for name in ("a", "b"):
        collected = tmp_path / f"{name}.jsonl"
        collect_text.main(["--output", str(collected), "--max-bytes", "300000"])
        argv = ["--input", str(collected), "--model-prefix", str(tmp_path / name), "--vocab-size", "600"]
        train_tokenizer.main(argv)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert 200_000 < sum(len(line["text"].encode()) for line in lines) <= 300_000
    assert not any("site-packages" in line["path"] or "/test/" in line["path"] for line in lines)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "a.model"))
    assert (model.vocab_size(), model.bos_id(), model.eos_id()) == (600, 1, 2)
    for text in [*DOCUMENTS, lines[0]["text"], "  x\t\r\n\n  y ", "\n"]:
        assert model.decode(model.encode(text)) == text
    capsys.readouterr()
    for tool, arguments in [
        (train_tokenizer, [*argv[:-1], "500000", "--overwrite"]),
        (train_tokenizer, argv),
        (train_tokenizer, ["--input", "/no/file", "--model-prefix", "x"]),
        (collect_text, ["--input", "/no/folder", "--output", "x"]),
        (collect_text, ["--output", str(tmp_path / "a.jsonl")]),
    ]:
        with pytest.raises(SystemExit) as stop:
            tool.main(arguments)
        assert stop.value.code == 2 and "error: " in capsys.readouterr().err
    assert not list(tmp_path.glob("*.tmp"))
