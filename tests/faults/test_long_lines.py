# SPDX-License-Identifier: Apache-2.0
"""Lines of 100 MB: memory is bounded, and where it runs out nothing is left out in silence."""

import json
import resource
import subprocess
import sys

import pytest

from megatron.training.data import chat_template
from megatron.training.data.chat_template import read_chats
from megatron.training.data.encoding import Settings, encode, encode_all
from megatron.training.data.text_files import Reader, Record
from megatron.training.refusal import Refusal
from tests.distributed.test_program import ROOT
from tests.patience import patience

LONG = 100_000_000
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
sys.argv[:] = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def preprocess(folder, source, workers, most):
    """(exit code, its last line, GiB that the largest process took)."""
    argv = f"--input {source} --output-prefix {folder}/o --tokenizer-type ByteLevelTokenizer --workers {workers}"
    command = [sys.executable, "-c", LIMITED, str(most), str(ROOT / "tools" / "preprocess_data.py"), *argv.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(300))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, (done.stdout + done.stderr).strip().splitlines(), peak


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_a_line_of_100_mb(tmp_path, workers):
    words = "lorem ipsum dolor sit amet "
    long = json.dumps({"text": (words * (LONG // len(words) + 1))[:LONG]})
    files = {"text": f'{{"text": "a"}}\n{long}\n{{"text": "b"}}\n', "no json": "x" * LONG, "cut off": long[:-9]}
    for name, content in files.items():
        source = tmp_path / f"{name.replace(' ', '')}.jsonl"
        source.write_text(content)
        code, lines, peak = preprocess(tmp_path, source, workers, 1 << 40)
        print(f"\n{name}, {workers} workers: {code}, {peak:.2f} GiB, {lines[-1]}")
        if name == "text":
            assert code == 0 and "3 documents, 100,000,002 tokens" in lines[0] and peak < 3.0
            for path in tmp_path.glob("o_*"):
                path.unlink()
        else:
            assert code == 2 and "line 1: not JSON" in lines[-1]
    for most in (950, 1150, 1500):  # MiB of addresses
        code, lines, _ = preprocess(tmp_path, tmp_path / "text.jsonl", workers, most << 20)
        assert code == 2 and "memory ran out at " in lines[-1], lines
        assert not list(tmp_path.glob("o_*"))


def test_a_record_that_memory_has_no_room_for_is_not_a_bad_record(monkeypatch):
    """It would be left out with --skip-bad-lines."""
    from megatron.training.data import encoding

    class Full:
        kind = "Full"

        def array(self, text):
            raise MemoryError

    monkeypatch.setattr(encoding, "tokenizer_of", lambda *_: Full())
    settings = Settings((), None, "uint16", ("text",), False, 0)
    with pytest.raises(Refusal, match="memory ran out at f.jsonl, line 7, which has 13 bytes"):
        encode(settings, [Record("f.jsonl", 7, b'{"text": "a"}')])


def test_a_batch_that_memory_has_no_room_for_on_its_way(tmp_path, monkeypatch):
    from megatron.training.data import encoding

    (tmp_path / "f.txt").write_text("abc")
    monkeypatch.setattr(encoding, "encode", no_memory)
    settings = Settings((("tokenizer_type", "ByteLevelTokenizer"),), None, "uint16", ("text",), False, 0)
    with pytest.raises(Refusal, match="memory ran out at"):
        list(encode_all(settings, Reader([str(tmp_path / "f.txt")]), 2, "fork"))


def no_memory(*_):
    raise MemoryError


def test_a_conversation_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "LONGEST", 200)
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 100}]}
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(chat) + "\n")
    assert len(list(read_chats(str(file), "--data-path"))) == 1
    chat["messages"][0]["content"] = "a" * 100
    file.write_text(json.dumps(chat) + "\n")
    with pytest.raises(Refusal, match="chats.jsonl, line 1: a line of .* bytes; the limit is 200: split it"):
        list(read_chats(str(file), "--data-path"))
