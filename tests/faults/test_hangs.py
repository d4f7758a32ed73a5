# SPDX-License-Identifier: Apache-2.0
"""SIGSTOP of a random rank under a real torchrun: the job ends in time, and the log names that rank."""

import ast
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.training.data import chat_template
from megatron.training.data.chat_template import read_chats
from megatron.training.data.datasets import build_datasets
from megatron.training.data.encoding import Settings, encode, encode_all
from megatron.training.data.text_files import Reader, Record
from megatron.training.refusal import Refusal
from tests.distributed.test_program import FLAGS, PROGRAM, ROOT
from tests.distributed.training_runs import damage
from tests.faults.kills import ENVIRONMENT, losses, text
from tests.patience import patience
from tests.program import run_ranks, start_forked
from tests.unit.test_data import NULL, configure, samples_of, write

HANGS = int(os.environ.get("HANGS", "0"))
TIMEOUT = 60  # seconds: the smallest --distributed-timeout-minutes
GRIDS = ("--ulysses-parallel-size 2 --ring-parallel-size 2", "--tensor-model-parallel-size 2 --ring-parallel-size 2",
         "--pipeline-model-parallel-size 2 --ulysses-parallel-size 2", "--zero-stage 2")  # fmt: skip


@pytest.mark.skipif(not HANGS, reason="each waits a minute for its timeout: bash tests/faults/run.sh")
@pytest.mark.parametrize("number", range(HANGS))
def test_the_rank_that_hangs_is_named(number):
    draw = random.Random(number)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(PROGRAM)]
    command += FLAGS.replace("--global-batch-size 2", "--global-batch-size 4").split()
    command += draw.choice(GRIDS).split() + "--train-iters 100000 --eval-iters 0".split()
    command += ["--distributed-timeout-minutes", str(TIMEOUT // 60)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    text, last = "", draw.randint(3, 12)
    for line in launcher.stdout:
        text += line
        if re.search(rf"iteration +{last}/", line):
            break
    ranks = {int(one.environ()["RANK"]): one for one in psutil.Process(launcher.pid).children()}
    assert len(ranks) == 4, text
    time.sleep(draw.uniform(0, 0.3))
    victim = draw.choice(sorted(ranks))
    ranks[victim].suspend()
    begin = time.monotonic()
    text += launcher.communicate(timeout=TIMEOUT + patience(60))[0]
    seconds = time.monotonic() - begin
    blamed = re.findall(r"error: rank (\d+) on \S+ does not answer", text)
    assert launcher.returncode and blamed == [str(victim)], text
    assert seconds < TIMEOUT + patience(10), text
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in ranks.values())
    print(f"\n{number + 1} of {HANGS}: rank {victim} named, ended after {seconds:.0f} s")


# The time of day may jump, and files may have future dates: durations use a monotonic clock.


HERE = Path(__file__).parent
TIME_OF_DAY = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}


@pytest.mark.full
def test_no_program_measures_by_the_time_of_day():
    uses = []
    for path in [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tools").glob("*.py"), *ROOT.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node).removeprefix("datetime.datetime") in TIME_OF_DAY:
                uses.append(f"{path}:{node.lineno}")
            elif isinstance(node, ast.ImportFrom) and node.module == "time":
                uses += [f"{path}:{node.lineno}" for name in node.names if name.name in ("time", "time_ns")]
    assert not uses


@pytest.mark.full
@pytest.mark.parametrize("more", ["", "--async-save --log-straggler --exit-duration-in-mins 5"])
def test_a_clock_that_jumps(tmp_path, more):
    runs = {}
    for name, program in (("jumping", HERE / "jumping_clock.py"), ("steady", PROGRAM)):
        flags = (
            f"{FLAGS} --ring-parallel-size 2 --train-iters 30 --eval-iters 0 --save-interval 3 "
            f"--save {tmp_path}/{name} --log-jsonl {tmp_path}/{name}/log.jsonl "
            f"--tensorboard-dir {tmp_path}/{name}/board --distributed-timeout-minutes 1 {more}"
        )
        done = run_ranks(program, flags.split(), ENVIRONMENT, 2)
        assert [one.returncode for one in done] == [0, 0], done[0].stderr
        runs[name] = losses(tmp_path / name)
        assert (tmp_path / name / "latest_checkpointed_iteration.txt").read_text() == "30"
    assert runs["jumping"] == runs["steady"] and len(runs["steady"]) == 30


@pytest.mark.parametrize("when", [0, 2**31 + 10**8, 2**32 + 10**8])
def test_data_of_another_time(tmp_path, when):
    """Files dated 1970, 2041 or 2109: the second run still uses the cached index."""
    prefix, _ = write(tmp_path / "corpus")
    for end in ("bin", "idx"):
        os.utime(f"{prefix}.{end}", (when, when))
    config = configure(data_path=[prefix], split="100,0,0")
    first = samples_of(build_datasets(config, NULL, (10, 0, 0))[0], 10)
    (folder,) = (tmp_path / "index-cache").iterdir()
    os.utime(folder, (when, when))
    for path in folder.iterdir():
        os.utime(path, (when, when))
    again = samples_of(build_datasets(config, NULL, (10, 0, 0))[0], 10)
    assert first == again and [path.name for path in (tmp_path / "index-cache").iterdir()] == [folder.name]
    assert all(path.stat().st_mtime == when for path in folder.iterdir())  # no file was written again
    os.utime(f"{prefix}.bin", (time.time(), time.time()))
    build_datasets(config, NULL, (10, 0, 0))
    assert len(list((tmp_path / "index-cache").iterdir())) == 1  # the same contents
    data = bytearray(Path(f"{prefix}.bin").read_bytes())
    data[0] ^= 1
    Path(f"{prefix}.bin").write_bytes(data)
    build_datasets(config, NULL, (10, 0, 0))
    assert len(list((tmp_path / "index-cache").iterdir())) == 2


# NaN, or no memory left, on one rank: all ranks end together, the rank is named, and checkpoints stay.


SCRIPT = Path(__file__).parent / "broken_rank.py"
ONE = f"{FLAGS} --train-iters 6 --eval-iters 0 --save-interval 1"
ONE_RANK_GRIDS = ("", "--ring-parallel-size 2", "--tensor-model-parallel-size 2", "--zero-stage 1", "--zero-stage 3",
         "--ulysses-parallel-size 2", "--pipeline-model-parallel-size 2")  # fmt: skip


def broken(folder, how, rank, more, ranks=2):
    flags = f"{ONE} --save {folder}/c --log-jsonl {folder}/log.jsonl {more}"
    done = run_ranks(SCRIPT, [how, str(rank), *flags.split()], ENVIRONMENT, ranks)
    return [one.returncode for one in done], [one.stdout for one in done], [one.stderr for one in done]


def whole(folder):
    """Iterations of the checkpoints, which must all be complete."""
    paths = sorted((folder / "c").glob("iter_*"))
    assert not any(map(damage, paths))
    return [int(path.name[5:]) for path in paths]


@pytest.mark.parametrize(
    "rank, more",
    [(1, ""), *[pytest.param(r, g, marks=pytest.mark.full) for g in ONE_RANK_GRIDS for r in (0, 1) if g or not r]],
)
@pytest.mark.lab
def test_nan_in_the_loss_of_one_rank(tmp_path, rank, more):
    codes, printed, errors = broken(tmp_path, "loss", rank, more)
    assert "Traceback" not in "".join(errors), errors
    if "pipeline" in more and rank == 0:  # the first stage has no loss
        assert codes == [0, 0]
        return
    assert codes == [1, 1] and list(losses(tmp_path)) == [1, 2] == whole(tmp_path), (printed, errors)
    (line,) = re.findall("error: .*", printed[0])
    assert re.match("error: the (loss|gradient norm) is nan at iteration 3", line), line  # TP ranks differ
    named = re.findall(r"in the loss of rank (\d+) on", line)
    assert named == ([] if "pipeline" in more else [str(rank)]), line


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_nan_in_one_ranks_part_of_the_summed_gradients(tmp_path, rank):
    codes, printed, errors = broken(tmp_path, "norm", rank, "")
    assert 0 not in codes and "Traceback" not in "".join(errors), errors
    assert whole(tmp_path) == [1, 2]
    lines = "".join(printed + errors)
    assert f"rank {rank} on" in lines and "the gradient norm is nan" in lines, lines


@pytest.mark.full
@pytest.mark.parametrize("ranks, rank", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("how, more", [("train", ""), ("save", ""), ("save", "--async-save")])
def test_memory_runs_out(tmp_path, how, more, ranks, rank):
    """One rank cannot allocate more memory; a wide MLP makes each step need much."""
    codes, printed, errors = broken(tmp_path, how, rank, f"--ffn-hidden-size 60000 {more}", ranks)
    reported, saved = [int(number) for number in re.findall(r"> saved \S+/iter_(\d+) ", printed[0])], whole(tmp_path)
    assert set(reported) <= set(saved) and "Traceback" not in "".join(errors), errors
    if any(codes):
        assert codes == [1] * ranks and "can't allocate memory" in "".join(errors), errors
    else:
        assert saved[-1] == 6 and how == "save"
    print(f"\n{how} {more}, rank {rank} of {ranks}: codes {codes}, reported {reported}, saved {saved}")


# Lines of 100 MB: memory is bounded, and if it runs out, no record is silently left out.


LONG = 100_000_000
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
sys.argv[:] = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def preprocess(folder, source, workers, most):
    """(exit code, last line, GiB of the largest process)."""
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
    for most in (950, 1150, 1500):  # MiB of address space
        code, lines, _ = preprocess(tmp_path, tmp_path / "text.jsonl", workers, most << 20)
        assert code == 2 and "memory ran out" in lines[-1], lines
        assert not list(tmp_path.glob("o_*"))


def test_a_record_too_large_for_memory_is_not_a_bad_record(monkeypatch):
    """If it were one, --skip-bad-lines would skip it."""
    from megatron.training.data import encoding

    class Full:
        kind, encode_many = "Full", None

        def array(self, text):
            raise MemoryError

    monkeypatch.setattr(encoding, "tokenizer_of", lambda *_: Full())
    settings = Settings((), None, "uint16", ("text",), False, 0)
    with pytest.raises(Refusal, match="memory ran out at f.jsonl, line 7, which has 13 bytes"):
        encode(settings, [Record("f.jsonl", 7, b'{"text": "a"}')])


def test_a_batch_that_does_not_fit_in_memory_while_it_is_copied(tmp_path, monkeypatch):
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


# Signals while a run starts or builds an index: it ends at once, and no incomplete index is used.


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL)
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 100"


def data_flags(folder):
    write(folder / "corpus", high=99)
    data = f"--data-path {folder}/corpus --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 100"
    return f"{FLAGS.replace(MOCK, data)} --train-iters 2 --eval-iters 0"


def ended(process, number):
    """Send a signal; returns the seconds until the end."""
    begin = time.monotonic()
    os.kill(process.pid, number)
    process.join(patience(30))
    assert process.exitcode is not None, "the process is still running"
    return time.monotonic() - begin


@pytest.mark.parametrize("number", [SIGNALS[0], *[pytest.param(one, marks=pytest.mark.full) for one in SIGNALS[1:]]])
@pytest.mark.lab
def test_a_signal_while_an_index_is_built(tmp_path, number):
    flags, mark = data_flags(tmp_path), tmp_path / "mark"
    process = start_forked(HERE / "slow_start.py", [str(mark), *flags.split()], ENVIRONMENT, tmp_path / "logs")
    end = time.monotonic() + patience(60)
    while not mark.exists():
        assert process.is_alive() and time.monotonic() < end, text(tmp_path / "logs" / "err")
        time.sleep(0.02)
    seconds = ended(process, number)
    errors = text(tmp_path / "logs" / "err")
    assert seconds < patience(10)
    if number == signal.SIGKILL:
        assert process.exitcode == -number
    else:
        assert process.exitcode == 128 + number and len(errors.splitlines()) == 1, errors
        assert ("interrupted" if number == signal.SIGINT else number.name) in errors
        assert not list((tmp_path / "index-cache").iterdir())
    done = run_ranks(PROGRAM, flags.split(), ENVIRONMENT, 1)[0]
    assert done.returncode == 0, done.stderr
    assert [path for path in (tmp_path / "index-cache").iterdir() if not path.name.endswith(".tmp")]


@pytest.mark.full
def test_signals_in_the_first_seconds(tmp_path):
    """At random moments from the start to the first steps, one signal after the other."""
    draw, flags, result = random.Random(1), f"{FLAGS} --train-iters 1000000 --eval-iters 0", []
    for attempt in range(int(os.environ.get("SIGNALS", "30"))):
        number, logs = SIGNALS[attempt % 3], tmp_path / f"logs{attempt}"
        process = start_forked(PROGRAM, f"{flags} --save {tmp_path}/{attempt}".split(), ENVIRONMENT, logs)
        while not (logs / "err").exists():
            time.sleep(0.01)
        time.sleep(patience(draw.uniform(0.3, 1.5)))  # in the first 0.1 s Python itself handles the signal
        seconds = ended(process, number)
        errors, printed = text(logs / "err"), text(logs / "out")
        assert seconds < patience(10) and "Traceback" not in errors and len(errors.splitlines()) <= 1, errors
        saved = (tmp_path / str(attempt) / "latest_checkpointed_iteration.txt").exists()
        assert saved == (process.exitcode == 0) == ("stopped after iteration" in printed), (process.exitcode, printed)
        assert process.exitcode in (0, -number, 128 + number), process.exitcode
        result.append("saved" if saved else "a line" if errors else "ended by the signal")
    print({what: result.count(what) for what in set(result)})
