# SPDX-License-Identifier: Apache-2.0
"""Many steps and many saves take no more memory, threads or files at the end than at the beginning."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.distributed.test_program import FLAGS, PROGRAM, ROOT
from tests.patience import patience

STEPS = int(os.environ.get("SOAK", "0"))
EVERY = 20  # steps between saves
RANKS = 2


def count(process: psutil.Process) -> dict[str, int]:
    """What a process holds, from /proc."""
    folder = Path("/proc", str(process.pid))
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return {
        "memory, MiB": int(status["VmRSS"].split()[0]) // 1024,
        "threads": int(status["Threads"]),
        "files": len(list((folder / "fd").iterdir())),
        "children": len(process.children(recursive=True)),
    }


@pytest.mark.skipif(not STEPS, reason="minutes: bash tests/faults/run.sh")
def test_nothing_grows(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(PROGRAM), *FLAGS.split(), *"--ring-parallel-size 2 --zero-stage 1 --eval-iters 0".split()]
    command += f"--train-iters {STEPS} --save-interval {EVERY} --save-retain-interval {10 * STEPS}".split()
    command += f"--save {tmp_path}/c --log-jsonl {tmp_path}/log.jsonl".split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    rows: list[tuple[int, list[dict[str, int]]]] = []
    text, begin = "", time.monotonic()
    for line in launcher.stdout:
        text = (text + line)[-20000:]
        found = re.search(r"iteration +(\d+)/", line)
        if found and int(found[1]) % EVERY == EVERY // 2 and int(found[1]) > 3 * EVERY:  # between two saves
            workers = sorted(psutil.Process(launcher.pid).children(), key=lambda one: one.environ()["RANK"])
            rows.append((int(found[1]), [count(worker) for worker in workers]))
        assert time.monotonic() - begin < patience(STEPS), text
    assert launcher.wait() == 0, text
    tenth = max(1, len(rows) // 10)
    said = []
    for rank in range(RANKS):
        for name in rows[0][1][rank]:
            first = max(counts[rank][name] for _, counts in rows[:tenth])
            last = max(counts[rank][name] for _, counts in rows[-tenth:])
            said.append(f"rank {rank} {name}: {first} at first, {last} at last")
            allowed = first + 16 if "memory" in name else first  # MiB: an allocator's own habits
            assert last <= allowed, "\n".join(said)
    assert [path.name for path in (tmp_path / "c").glob("iter_*")] == [f"iter_{STEPS:07d}"]
    print(f"\n{STEPS} steps, {STEPS // EVERY} saves in {time.monotonic() - begin:.0f} s: {'; '.join(said)}")
