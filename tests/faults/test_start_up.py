# SPDX-License-Identifier: Apache-2.0
"""Signals while a run starts or builds an index of its data: it ends at once, and no half index is believed."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.distributed.test_program import FLAGS, PROGRAM
from tests.faults.kills import ENVIRONMENT, text
from tests.patience import patience
from tests.program import run_ranks, start_forked
from tests.unit.test_data import write

HERE = Path(__file__).parent
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL)
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 100"


def data_flags(folder):
    write(folder / "corpus", high=99)
    data = f"--data-path {folder}/corpus --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 100"
    return f"{FLAGS.replace(MOCK, data)} --train-iters 2 --eval-iters 0"


def ended(process, number):
    """Send a signal; the seconds until the end."""
    begin = time.monotonic()
    os.kill(process.pid, number)
    process.join(patience(30))
    assert process.exitcode is not None, "it runs on"
    return time.monotonic() - begin


@pytest.mark.parametrize("number", [SIGNALS[0], *[pytest.param(one, marks=pytest.mark.full) for one in SIGNALS[1:]]])
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
    """At random moments from the start to the first steps, one after the other of the signals that one may send."""
    draw, flags, found = random.Random(1), f"{FLAGS} --train-iters 1000000 --eval-iters 0", []
    for turn in range(int(os.environ.get("SIGNALS", "30"))):
        number, logs = SIGNALS[turn % 3], tmp_path / f"logs{turn}"
        process = start_forked(PROGRAM, f"{flags} --save {tmp_path}/{turn}".split(), ENVIRONMENT, logs)
        while not (logs / "err").exists():
            time.sleep(0.01)
        time.sleep(patience(draw.uniform(0.3, 1.5)))  # before, it is Python's to answer, for 0.1 s
        seconds = ended(process, number)
        errors, said = text(logs / "err"), text(logs / "out")
        assert seconds < patience(10) and "Traceback" not in errors and len(errors.splitlines()) <= 1, errors
        saved = (tmp_path / str(turn) / "latest_checkpointed_iteration.txt").exists()
        assert saved == (process.exitcode == 0) == ("stopped after iteration" in said), (process.exitcode, said)
        assert process.exitcode in (0, -number, 128 + number), process.exitcode
        found.append("saved" if saved else "a line" if errors else "ended by the signal")
    print({what: found.count(what) for what in set(found)})
