# SPDX-License-Identifier: Apache-2.0
"""A program of the repository, run as by its command line, in a fork of a process that has imported everything."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.distributed.pool import fork_server


def run_forked(
    script: Path, argv: Sequence[str], environment: Mapping[str, str], timeout: float = 100
) -> subprocess.CompletedProcess:
    """What ``python script *argv`` does, without the seconds that its imports take."""
    command = [str(script), *argv]
    with tempfile.TemporaryDirectory() as folder:
        process = fork_server().Process(target=_main, args=(command, dict(environment), folder))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(command, process.exitcode, out, err)


def _main(command: list[str], environment: dict[str, str], folder: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = command
    sys.path.insert(0, os.path.dirname(command[0]))
    runpy.run_path(command[0], run_name="__main__")
