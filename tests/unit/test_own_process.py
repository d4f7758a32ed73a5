# SPDX-License-Identifier: Apache-2.0
"""What a process of its own reads arrives unchanged; whatever ends it is one error; it does not outlive its parent."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time

import pytest

from megatron.system.own_process import Ended, in_own_process
from megatron.system.processes import started
from megatron.training.data import chat_dataset, chat_template
from megatron.training.data.chat_template import ChatTemplate
from megatron.training.data.text_files import Reader
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.refusal import Refusal
from megatron.training.settings.config import DataConfig
from tests.chats import make_tokenizer
from tests.patience import patience


def items(make, *, memory: int = 1 << 28, seconds: int = 1, errors=(Refusal, OSError, ValueError)) -> list:
    return list(in_own_process(make, memory=memory, seconds=seconds, errors=errors))


def test_items_arrive_unchanged():
    expected = [(1, "ä\n", b"\x00\xff", 0.5), (), (b"", b"x" * 3_000_000, -(2**70)), ("",)]
    assert items(lambda: iter(expected)) == expected


def raising(error: BaseException):
    yield (1,)
    raise error


@pytest.mark.parametrize("error, expected", [
    (Refusal("--a: no"), Refusal), (ValueError("no"), ValueError), (OSError(28, "full"), OSError),
    (UnicodeDecodeError("utf-8", b"x", 0, 1, "no"), ValueError), (KeyError("no"), Ended), (MemoryError(), Ended),
])  # fmt: skip
def test_errors_are_raised_here(error, expected):
    with pytest.raises(expected) as caught:
        items(lambda: raising(error))
    if expected is OSError:
        assert (caught.value.errno, caught.value.strerror) == (28, "full")
    else:
        assert "no" in str(caught.value) or "GiB of memory" in str(caught.value)


def spin():
    yield (1,)
    9 ** (9**9)  # not interrupted by a handler of Python


def abort():
    yield (1,)
    os.abort()


def fill():
    yield (len(bytearray(1 << 30)),)


@pytest.mark.parametrize("make, message", [
    pytest.param(spin, "takes more than 0 s of CPU time", marks=pytest.mark.lab),
    (abort, "ended by SIGABRT"), (fill, "takes more than 0.25 GiB of mem"),
])  # fmt: skip
def test_what_no_handler_can_end_is_ended(make, message):
    seen = []
    with pytest.raises(Ended, match=message):
        for item in in_own_process(make, memory=1 << 28, seconds=0):
            seen.append(item)
    assert len(seen) == (make is not fill)


def sleep():
    yield (os.getpid(),)
    time.sleep(1000)


def gone(pid: int) -> bool:
    end = time.monotonic() + patience(20)
    while started(pid) is not None and time.monotonic() < end:
        time.sleep(0.01)
    return started(pid) is None


def test_a_reader_that_is_left_ends():
    reader = in_own_process(sleep, memory=1 << 28, seconds=1)
    ((pid,)) = next(reader)
    assert started(pid) is not None
    reader.close()
    assert gone(pid)


def test_it_does_not_outlive_its_parent():
    receiving, sending = multiprocessing.Pipe()

    def body() -> None:
        sending.send(next(reader := in_own_process(sleep, memory=1 << 28, seconds=1))[0])
        next(reader)

    parent = multiprocessing.get_context("fork").Process(target=body)
    parent.start()
    assert receiving.poll(patience(20))
    pid = receiving.recv()
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    assert parent.exitcode == -signal.SIGKILL and gone(pid)


ENDLESS = {
    "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}": "more than 0 s of CPU time",
    "{{ 'a' * 10**12 }}": "the chat template fails: MemoryError",
    "{{ 'a' | center(10**10) }}": "the chat template fails: MemoryError",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "the chat template fails: maximum recursion depth exceeded",
    "{% for a in [[[]]] recursive %}{{ loop([a]) }}{% endfor %}": "the chat template fails: maximum recursion depth",
}


@pytest.mark.parametrize("template", ENDLESS)
@pytest.mark.usual(1, 2, 3, 4)  # the first takes the second that it may
def test_chat_templates_without_end_are_refused_in_one_line(tmp_path, monkeypatch, template):
    make_tokenizer(tmp_path)
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)), None)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (path := tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    monkeypatch.setattr(chat_template, "SECONDS", 0)
    with pytest.raises(Refusal) as refusal:
        chat_dataset.render(str(path), "--data-path", ChatTemplate(tokenizer.transformers, template, "t"), pairs=False)
    assert ENDLESS[template] in str(refusal.value) and f"{path}, line 1: the chat template" in str(refusal.value)


def test_a_table_that_aborts_pyarrow_is_refused_in_one_line(tmp_path, monkeypatch):
    """As the file parquet/aborts of the fuzz tests does: pyarrow throws a C++ exception in a destructor."""
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet, "ParquetFile", lambda *_, **__: os.abort())
    (path := tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(Refusal, match="a.parquet: cannot be read: the process that read it ended by SIGABRT$"):
        list(Reader([str(path)]))
