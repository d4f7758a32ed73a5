# SPDX-License-Identifier: Apache-2.0
"""Tools that write data remove only what they made, continue only the same work, and do not mix two jobs."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.training.data.datasets import build_datasets
from megatron.training.data.sources.token_files import TokenWriter
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config, DataConfig
from tests.patience import patience
from tools import collect_text, data, preprocess_data, train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
RACES = 50 if os.environ.get("RACES") else 2
KILLS = 20 if os.environ.get("KILLS") else 1
CONTEXT = multiprocessing.get_context("fork")
LINES = [json.dumps({"text": f"document {i} " + "abc " * (i % 9), "n": i}) + "\n" for i in range(40)]


@pytest.fixture(autouse=True)
def restore_signals():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def preprocess(folder: Path, *extra: object, prefix: str = "o", lines: list[str] = LINES, workers: int = 1) -> None:
    source = folder / "a.jsonl"
    if not source.exists():
        source.write_text("".join(lines))
    argv = ["--input", source, "--output-prefix", folder / prefix, "--tokenizer-type", "ByteLevelTokenizer"]
    preprocess_data.main([*map(str, argv), "--append-eod", "--workers", str(workers), *map(str, extra)])


def shards(folder: Path, *extra: object, chosen: tuple[int, ...] = (0, 1)) -> None:
    for number in chosen:
        preprocess(folder, "--engine", "slurm", "--of", 2, "--shard", number, *extra)


def merge(folder: Path, *extra: str) -> None:
    data.main(["merge", "--input", f"{folder}/o.parts", "--output-prefix", f"{folder}/o", *extra])


def samples(folder: Path, packing: str = "greedy", url: str = "") -> list[list[int]]:
    config = Config()
    folders = {"data_cache_path": f"{folder}/caches", "object_storage_cache_path": f"{folder}/copies"}
    config.data = DataConfig(seq_length=16, data_path=[url or f"{folder}/w"], split="1,0,0", packing=packing, **folders)
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 1000)
    train = build_datasets(config, tokenizer, (9, 0, 0))[0]
    return [train[i]["tokens"].tolist() for i in range(9)]


def write(folder: Path, name: str = "w", first: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    writer = TokenWriter(str(folder / f"{name}.bin"), np.uint16)
    lengths = np.random.default_rng(first).permutation(np.arange(10, 40))
    writer.add((np.arange(lengths.sum()) + first) % 999, lengths.tolist())
    writer.finish(str(folder / f"{name}.idx"))


def merge_after_shards(folder: Path, *extra: str) -> None:
    shards(folder, "--keep-metadata", "n")
    merge(folder, *extra)


def changed_settings(folder: Path) -> None:
    shards(folder)
    preprocess(folder, "--partitions", 2, "--overwrite", "--filter", "n > 3")


def text_tools(folder: Path) -> None:
    (folder / "below").mkdir(exist_ok=True)
    (folder / "below" / "a.txt").write_text("".join(LINES) * 9)
    collect_text.main(["--input", str(folder / "below"), "--output", str(folder / "c.jsonl"), "--overwrite"])
    argv = ["--input", str(folder / "c.jsonl"), "--model-prefix", str(folder / "t"), "--vocab-size", "300"]
    train_tokenizer.main([*argv, "--overwrite"])


def of_files(folder: Path) -> None:
    for words in (["split", "w", "--shares", "1", "1", "--output-prefix", "s", "--overwrite"],
                  ["dedup-exact", "w", "--output-prefix", "d", "--overwrite"],
                  ["lengths", "w", "--plot", "l.png"],
                  ["merge", "--input", "s_0", "s_1", "--output-prefix", "m", "--overwrite"]):  # fmt: skip
        data.main(
            [f"{folder}/{word}" if word in ("w", "s", "d", "l.png", "s_0", "s_1", "m") else word for word in words]
        )


TOOLS: dict[str, Callable[[Path], object]] = {
    "whole": lambda folder: preprocess(folder, "--overwrite", "--keep-metadata"),
    "partitions": lambda folder: preprocess(folder, "--partitions", 2),
    "partitions again": lambda folder: [preprocess(folder, "--partitions", 2, "--overwrite") for _ in range(2)],
    "changed settings": changed_settings,
    "merge": merge_after_shards,
    "merge and keep": lambda folder: merge_after_shards(folder, "--keep-parts", "--overwrite"),
    "text": text_tools,
    "files": lambda folder: [write(folder), of_files(folder)],
    "index cache": lambda folder: [write(folder), samples(folder)],
    "packing plan": lambda folder: [write(folder), samples(folder, "best-fit")],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_files_of_others_stay(tmp_path, tool):
    """In every folder that a tool writes to, next to its files and under names that are almost its own."""
    folders = [tmp_path, *(tmp_path / name for name in ("o.parts", "caches", "copies", "below"))]
    names = ("thesis.tex", "notes.json", ".hidden", "00000-of-00002.txt", "o_text_document.bin.tmp", "o.parts.tmp",
             "w.0123.tmp", ".o.owner.json")  # fmt: skip
    planted = [folder / name for folder in folders for name in names]
    for path in planted:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    TOOLS[tool](tmp_path)
    assert all(path.read_text() == "mine" for path in planted)
    left = [path for path in tmp_path.rglob("*") if path not in planted and path.name.endswith((".tmp", ".json"))]
    assert not [path for path in left if "owner" in path.name or path.suffix == ".tmp"]
    if tool not in ("merge and keep", "index cache", "packing plan"):
        assert {path.name for path in (tmp_path / "o.parts").iterdir()} == set(names)


def test_a_merge_says_which_folder_it_keeps(tmp_path, capsys):
    shards(tmp_path)
    (tmp_path / "o.parts" / "thesis.tex").write_text("mine")
    capsys.readouterr()
    merge(tmp_path)
    assert f"{tmp_path}/o.parts is kept: it has other files than these parts: thesis.tex" in capsys.readouterr().out
    shards(tmp_path, "--overwrite")
    for path in (tmp_path / "o.parts").glob("0000?-of-00002.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"keys": []}))
    with pytest.raises(SystemExit):
        merge(tmp_path, "--overwrite")
    assert "not the manifest of a part" in capsys.readouterr().err and (tmp_path / "o.parts" / "thesis.tex").exists()


def test_whole_folders_are_removed_only_under_random_names():
    """Everywhere else, files are removed by a list. The two places remove a cache folder that was never finished."""
    found = []
    for place in ("megatron", "tools", "scripts", "benchmarks", "examples"):
        for path in (ROOT / place).rglob("*.py"):
            source = path.read_text()
            if re.search(r"\b(rmtree|removedirs|remove_tree)\b|rm -r", source):
                found += [(str(path.relative_to(ROOT)), source.count("rmtree("))]
    assert found == [("megatron/training/ownership/atomic.py", 2)]


# The same change of one byte, at equal size and time, in everything with which work is continued.


def change(path: Path, at: int | None = None) -> None:
    content, status = bytearray(path.read_bytes()), path.stat()
    at = len(content) // 2 if at is None else at
    content[at] = ord("7") if content[at] != ord("7") else ord("8")
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def tokenizer(folder: Path, name: str) -> list[str]:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.WordLevel({"document": 0, "abc": 1, "[UNK]": 2}, "[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="[UNK]").save_pretrained(folder / "hf")
    if name == "folder":
        return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "hf")]
    return ["--tokenizer-type", "TokenizerFromFile", "--tokenizer-model", str(folder / "hf" / "tokenizer.json")]


@pytest.mark.parametrize("what", ["input", "file", "folder"])
def test_parts_of_changed_work_are_not_continued(tmp_path, capsys, what):
    extra = [] if what == "input" else tokenizer(tmp_path, what)
    shards(tmp_path, *extra, chosen=(0,))
    preprocess_data.tokenizer_of.cache_clear()  # the next task of an array is another process
    if what == "input":
        change(tmp_path / "a.jsonl", len(LINES[0]) + 12)
    else:
        change(path := tmp_path / "hf" / "tokenizer.json", path.read_bytes().index(b"abc") + 1)
    for number in (0, 1):
        with pytest.raises(SystemExit):
            shards(tmp_path, *extra, chosen=(number,))
        assert "made of other inputs, or with other settings" in capsys.readouterr().err
    assert not list((tmp_path / "o.parts").glob("00001*"))


def test_parts_of_which_a_byte_changed_are_not_merged(tmp_path, capsys):
    """Or the byte does not matter: the result is the same."""
    preprocess(tmp_path, "--keep-metadata", "n", prefix="whole")
    ends = ("bin", "idx", "metadata.jsonl")
    expected = [(tmp_path / f"whole_text_document.{end}").read_bytes() for end in ends]
    shards(tmp_path, "--keep-metadata", "n")
    refused = 0
    for path in sorted((tmp_path / "o.parts").iterdir()):
        content = path.read_bytes()
        for at in range(3, len(content), max(1, len(content) // 12)):
            change(path, at)
            try:
                merge(tmp_path, "--keep-parts", "--overwrite")
                assert [(tmp_path / f"o_text_document.{end}").read_bytes() for end in ends] == expected, (path, at)
                assert path.suffix == ".json"
            except SystemExit:
                refused += 1
            path.write_bytes(content)
    assert refused >= 2 * 3 * 12
    merge(tmp_path, "--overwrite")


@pytest.mark.parametrize("packing", ["greedy", "best-fit"])
def test_indices_and_plans_of_changed_data_or_with_a_changed_byte(tmp_path, packing):
    write(tmp_path)
    first = samples(tmp_path, packing)
    for path in sorted((tmp_path / "caches").rglob("*.npy")):
        content = path.read_bytes()
        change(path, len(content) - 3)
        with pytest.raises(Refusal, match="its content was changed.*remove it, and it is built again"):
            samples(tmp_path, packing)
        path.write_bytes(content)
    assert samples(tmp_path, packing) == first
    status = [os.stat(tmp_path / f"w.{end}") for end in ("bin", "idx")]
    write(tmp_path, first=1)  # documents of other lengths, in files of the same size
    for end, one in zip(("bin", "idx"), status):
        assert os.path.getsize(tmp_path / f"w.{end}") == one.st_size
        os.utime(tmp_path / f"w.{end}", ns=(one.st_atime_ns, one.st_mtime_ns))
    second = samples(tmp_path, packing)
    shutil.rmtree(tmp_path / "caches")
    assert second == samples(tmp_path, packing) != first


@pytest.mark.parametrize("version", [True, False], ids=["versions", "no versions"])
def test_copies_of_indices_at_a_url(tmp_path, monkeypatch, version):
    fsspec = pytest.importorskip("fsspec")
    from megatron.training.data.sources import remote

    if not version:
        monkeypatch.setattr(remote, "VERSIONS", ())
    system, url = fsspec.filesystem("memory"), f"memory://{tmp_path.name}/w"

    def put(first: int) -> list[list[int]]:
        write(tmp_path, first=first)
        for end in ("bin", "idx"):
            system.put(str(tmp_path / f"w.{end}"), f"{tmp_path.name}/w.{end}")
        return samples(tmp_path)

    expected = put(0)
    assert samples(tmp_path, url=url) == expected
    (copy,) = (tmp_path / "copies").glob("*.idx")
    change(copy)
    assert samples(tmp_path, url=url) == expected
    copy.write_bytes(copy.read_bytes()[:-8])
    assert samples(tmp_path, url=url) == expected
    expected = put(1)
    assert samples(tmp_path, url=url) == expected


def test_a_url_without_a_version_is_not_divided(tmp_path, capsys, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    from megatron.training.data.sources import remote

    monkeypatch.setattr(remote, "VERSIONS", ())
    fsspec.filesystem("memory").pipe(f"{tmp_path.name}/a.jsonl", "".join(LINES).encode())
    with pytest.raises(SystemExit):
        preprocess(tmp_path, "--input", f"memory://{tmp_path.name}/a.jsonl", "--partitions", 2)
    assert "a URL without a version (ETag), so that parts made at different times could be" in capsys.readouterr().err


def test_an_input_that_changes_between_two_parts_of_one_run(tmp_path, capsys, monkeypatch):
    make = preprocess_data.Parts.make

    def changing(self, part, workers):
        totals = make(self, part, workers)
        change(tmp_path / "a.jsonl", 12)
        return totals

    monkeypatch.setattr(preprocess_data.Parts, "make", changing)
    with pytest.raises(SystemExit):
        preprocess(tmp_path, "--partitions", 2)
    assert "a.jsonl: changed while parts of it were made" in capsys.readouterr().err


# Two jobs with one target.


def started(body: Callable[[], object], messages: Path) -> multiprocessing.Process:
    def run() -> None:
        for number in (1, 2):
            os.dup2(os.open(messages, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which may have started the tests, ignores it
        body()

    process = CONTEXT.Process(target=run)
    process.start()
    return process


def seen(folder: Path, *how: str) -> None:
    """Each job must see the samples that one job alone sees."""
    write(alone := folder / f"alone-{os.getpid()}")
    assert samples(folder, *how) == samples(alone, how[0])


RACING = {
    "whole": (lambda folder: preprocess(folder, "--overwrite", workers=2), "o_text_document"),
    "partitions": (lambda folder: preprocess(folder, "--partitions", 3, "--overwrite"), "o_text_document"),
    "merge": (lambda folder: merge(folder, "--overwrite"), "o_text_document"),
    "split": (lambda folder: of_files(folder), "m"),
    "index cache": (lambda folder: seen(folder, "greedy"), ""),
    "packing plan": (lambda folder: seen(folder, "best-fit"), ""),
    "copies": (lambda folder: seen(folder, "greedy", f"file://{folder}/w"), ""),
}


@pytest.mark.parametrize("what", RACING)
def test_of_two_jobs_each_is_complete_or_refused(tmp_path, what):
    """In one line, and the files are those of one job. RACES=1 tries 50 random delays of each."""
    body, output = RACING[what]
    draw, refused, expected = random.Random(what), 0, None
    for number in range(RACES):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "a.jsonl").write_text("".join(LINES) * 20)
        write(folder)
        if what == "merge":
            shards(folder)
        first = started(lambda: body(folder), folder / "first")  # noqa: B023
        time.sleep(draw.uniform(0, 0.1))
        second = started(lambda: body(folder), folder / "second")  # noqa: B023
        for process, name in ((first, "first"), (second, "second")):
            process.join(patience(60))
            text = (folder / name).read_text()
            assert process.exitcode in (0, 2), text
            assert "Traceback" not in text
            if process.exitcode == 2:
                refused += 1
                last = text.strip().splitlines()[-1]
                assert "is in use by process" in last or "no such file" in last or "no complete part" in last, text
        assert 0 in (first.exitcode, second.exitcode)
        if output:
            data.main(["verify", f"{folder}/{output}"])
            content = [(folder / f"{output}.{end}").read_bytes() for end in ("bin", "idx")]
            assert content == (expected := expected or content)
        left = [path.name for path in folder.rglob("*") if ".owner." in path.name or path.name.endswith(".tmp")]
        assert not left
    print(f"{what}: {RACES} races, {refused} refused")


# Signals: no process, no temporary file and no half result is left.


def slow(folder: Path, fifo: Path, workers: int) -> None:
    preprocess(folder, "--input", fifo, workers=workers)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_outlives_a_tool_that_is_ended(tmp_path, number):
    fifo = tmp_path / "pipe.jsonl"
    os.mkfifo(fifo)
    process = started(lambda: slow(tmp_path, fifo, 2), tmp_path / "messages")
    with open(fifo, "wb") as writer:
        writer.write("".join(LINES * 100).encode())
        writer.flush()
        end = time.monotonic() + patience(60)
        workers: list[int] = []
        while time.monotonic() < end and len(workers) < 2:
            workers = list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))
            time.sleep(0.02)
        assert len(workers) == 2
        while process.is_alive() and time.monotonic() < end:  # a signal just before a blocking read is lost
            os.kill(process.pid, number)
            process.join(0.5)
    while any(map(running, workers)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [worker for worker in workers if running(worker)]
    assert process.exitcode == (-9 if number == signal.SIGKILL else 130 if number == signal.SIGINT else 128 + number)
    assert "Traceback" not in (tmp_path / "messages").read_text()
    if number == signal.SIGKILL:
        assert len(list(tmp_path.glob("*.tmp"))) == 1 == len(list(tmp_path.glob(".*owner*")))
        preprocess(tmp_path)  # the next run removes what is left
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*owner*"))
    assert bool(list(tmp_path.glob("o_*"))) == (number == signal.SIGKILL)


# The same for each way to work with processes, at random times. KILLS=1 tries 20 of each signal.
PARALLEL: dict[str, tuple[object, ...]] = {
    "whole": (),
    "metadata": ("--keep-metadata", "n"),
    "partitions": ("--partitions", 3),
    "task of an array": ("--engine", "slurm", "--of", 2, "--shard", 1),
    "table": (),  # of Parquet, which a process of each reader reads
}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("what", PARALLEL)
@pytest.mark.lab
def test_tools_that_are_ended_at_random_times(tmp_path, what):
    """Nothing is left but complete parts, which the next run continues; after SIGKILL it first removes the rest."""
    flags, draw, ended = PARALLEL[what], random.Random(what), 0
    name = "a.parquet" if what == "table" else "a.jsonl"
    if what == "table":
        pytest.importorskip("pyarrow.parquet").write_table(table_of(LINES * 200), tmp_path / name, row_group_size=500)
    else:
        (tmp_path / name).write_text("".join(LINES) * 200)

    def run(folder: Path) -> None:
        preprocess(folder, "--input", tmp_path / name, "--overwrite", *flags, workers=2)

    expected = whole(tmp_path / "expected", run)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP) * KILLS:
        (folder := tmp_path / "f").mkdir()
        foreign = [folder / place for place in ("thesis.tex", "o.parts/thesis.tex", "o_text_document.bin.0.tmp")]
        for path in foreign:
            path.parent.mkdir(exist_ok=True)
            path.write_text("mine")
        process = started(lambda: run(folder), folder / "messages")  # noqa: B023
        children: set[int] = set()
        end = time.monotonic() + patience(60)
        until = end
        while process.is_alive() and time.monotonic() < until:
            children |= set(descendants(process.pid))
            if until == end and children:
                until = time.monotonic() + draw.uniform(0, 0.5)
            time.sleep(0.005)
        ended += process.is_alive()
        while process.is_alive() and time.monotonic() < end:
            children |= set(descendants(process.pid))
            os.kill(process.pid, number)
            process.join(patience(3))  # then again: one just before a blocking read is lost
        while any(map(running, children)) and time.monotonic() < end:
            time.sleep(0.01)
        messages = (folder / "messages").read_text()
        assert not [child for child in children if running(child)], (number, messages)
        codes = {-9} if number == signal.SIGKILL else {130 if number == signal.SIGINT else 128 + number}
        assert process.exitcode in codes | {0} and "Traceback" not in messages, (number, process.exitcode, messages)
        if number != signal.SIGKILL:
            assert not unfinished(folder, foreign), (number, messages)
        assert whole(folder, run) == expected
        assert not unfinished(folder, foreign) and all(path.read_text() == "mine" for path in foreign)
        shutil.rmtree(folder)
    print(f"{what}: {4 * KILLS} runs, {ended} ended before they were done")
    assert KILLS == 1 or ended > 2 * KILLS


def whole(folder: Path, run: Callable[[Path], None]) -> dict[str, bytes]:
    """The content of all files that a complete run writes, by name."""
    folder.mkdir(exist_ok=True)
    run(folder)
    return {path.name: path.read_bytes() for path in folder.rglob("0*-of-*") if path.suffix != ".json"} | {
        path.name: path.read_bytes() for path in folder.glob("o_*") if path.suffix in (".bin", ".idx", ".jsonl")
    }


def unfinished(folder: Path, foreign: list[Path]) -> list[str]:
    """Temporary files, locks, and files of an output of which others are missing."""
    paths = [path for path in folder.rglob("*") if path not in foreign]
    left = [path.name for path in paths if ".tmp" in path.name or "owner" in path.name]
    ends = {path.suffix for path in folder.glob("o_text_document.*") if path not in foreign}
    return left + ([f"only {sorted(ends)}"] if ends and not {".bin", ".idx"} <= ends else [])


def table_of(lines: list[str]) -> object:
    import pyarrow

    return pyarrow.Table.from_pylist([json.loads(line) for line in lines])


def descendants(pid: int) -> list[int]:
    try:
        tasks = [Path(f"/proc/{pid}/task/{task}/children").read_text() for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
    children = [int(child) for text in tasks for child in text.split()]
    return children + [one for child in children for one in descendants(child)]


def running(worker: int) -> bool:
    try:
        return Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_workers_are_limited_by_the_machine(tmp_path, capsys):
    with pytest.raises(SystemExit):
        preprocess(tmp_path, workers=100_000)
    assert "--workers 100000: this machine has " in (line := capsys.readouterr().err) and "give at most" in line


SHAPE = (
    "--hidden-size 64 --num-layers 4 --num-attention-heads 4 --ffn-hidden-size 128 --vocab-size 301 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --bf16 --pipeline-model-parallel-size 4"
)
WITH_WORKERS = {
    "dry run": f"pretrain_llama.py {SHAPE} --dry-run --world-size 4 --gpu H100-80G",
    "kernels": f"tools/compile_kernels.py --gpus 4 --processes 2 -- {SHAPE} --attention-kernel triton",
    "measurement": "tools/measure_hardware.py --device cpu --processes 2 --quick --output {folder}/m.json",
}


@pytest.mark.lab
@pytest.mark.parametrize("what", WITH_WORKERS)
def test_processes_of_other_tools_end_with_a_killed_parent(tmp_path, what):
    words = WITH_WORKERS[what].format(folder=tmp_path).split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / words[0], *words[1:]]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    children, end = set(), time.monotonic() + patience(90)
    while len(children) < 2 and process.poll() is None and time.monotonic() < end:
        children |= set(descendants(process.pid))
        time.sleep(0.005)
    time.sleep(0.3)
    children |= set(descendants(process.pid))
    assert process.poll() is None and len(children) >= 2
    process.kill()
    process.wait()
    while any(map(running, children)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not [child for child in children if running(child)]
