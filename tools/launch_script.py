# SPDX-License-Identifier: Apache-2.0
"""Runs a launch script with every program replaced by a stand-in, to record the commands that it starts.

Bash runs the script, with its variables, loops and sourced files. PATH holds only programs that print (cat, grep,
date ...) and stand-ins that record their command line. All other programs that the script calls (wget, module,
nvidia-smi, rm ...) are recorded and not run. What the script writes with ``>`` goes to a temporary folder.

A malicious script could avoid the stand-ins. Therefore the kernel confines all of it (``launch_confined.py``): it
cannot write anywhere else, connect, or send signals.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron.training.refusal import Refusal
from tools.launch_confined import confine

# Programs that only read and print; scripts compute their settings with them.
READERS = """awk basename bc cat cut date dirname egrep expr fgrep gawk getconf getopt grep head hostname id join ls
mawk nproc od paste printf readlink realpath rev sed seq sort stat tac tail test tr true false uname uniq wc
whoami""".split()
# Programs that a script may start through another program (exec, xargs), which the shell does not see.
STARTERS = """torchrun deepspeed srun mpirun mpiexec aprun jsrun python python3 accelerate ft_launcher numactl nohup
timeout time nice ionice stdbuf docker podman singularity apptainer enroot sudo env tee sbatch""".split()
SECONDS = 60  # limit; a script that only starts stand-ins takes far less
WITHIN = "\x1f"  # in the record: between the words of the commands (srun, env ...) that a call was started by
EMPTY = ":empty"  # in the record: a flag, and the empty variable that follows it


class Call(NamedTuple):
    """One command that the script called, and its working directory."""

    words: list[str]
    cwd: Path
    tasks: int | None = None  # number of tasks of its Slurm job


@dataclass
class Record:
    """The commands that a script called, and the folder of the files that it wrote."""

    folder: Path  # a file /a/b that the script wrote is files/a/b in it
    calls: list[Call] = field(default_factory=list)
    empty: dict[str, str] = field(default_factory=dict)  # flags, and the variables without a value that follow them
    output: str = ""
    returncode: int | None = None  # None: it was stopped after SECONDS


def record(
    script: Path, arguments: list[str], cwd: Path, environment: dict[str, str], folder: Path, confined: bool = True
) -> Record:
    """Run ``script`` in ``cwd`` with stand-ins and record which commands it calls.

    Args:
        environment: variables of the script; PATH, BASH_ENV and TMPDIR are replaced.
        folder: an empty folder for the stand-ins and for what the script writes.
        confined: whether the kernel prevents writing anywhere else, connecting and signals.

    Raises:
        Refusal: the kernel did not confine the script, and nothing was run; or the script damaged the record.
    """
    programs, log, setup, files = folder / "bin", folder / "calls", folder / "setup", folder / "files"
    programs.mkdir(parents=True)
    (files / "tmp").mkdir(parents=True)
    log.touch()
    shutil.copy(Path(__file__).with_name("launch_setup.sh"), setup)
    bash = shutil.which("bash") or "/bin/bash"
    for name in READERS:
        if result := shutil.which(name):
            (programs / name).symlink_to(result)
    for name in STARTERS:
        _program(programs / name, f'#!{bash}\n_called "${{0##*/}}" "$@"\n')
    for name in ("bash", "sh"):
        _program(programs / name, f'#!{bash}\n_shell "$@"\n')
    python = [sys.executable, "-I", "-S"]
    environment = {
        **environment,
        "PATH": str(programs),
        "BASH_ENV": str(setup),
        "CHECK_LOG": str(log),
        "CHECK_FILES": str(files),
        "TMPDIR": str(files / "tmp"),  # for bash's here-documents
        "CHECK_BASH": bash,
        "CHECK_CHAIN": str(script),  # the scripts of jobs that submit one another
        "CHECK_BIN": str(programs),
        "CHECK_MKDIR": shutil.which("mkdir") or "/bin/mkdir",
        "CHECK_FILTER": shlex.join([*python, str(Path(__file__).with_name("launch_redirect.py").resolve())]),
        "CHECK_SBATCH": shlex.join([*python, str(Path(__file__).with_name("launch_sbatch.py").resolve())]),
        "CHECK_PYTHON": shlex.join(python) if confined else "",  # if unconfined, the script's Python code is not run
    }
    done = Record(folder)
    with (folder / "output").open("w+", errors="replace") as output:
        try:
            running = subprocess.Popen(
                [str(programs / "bash"), str(script), *arguments],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=(lambda: confine([files], [log, folder / "output"])) if confined else None,
            )
        except subprocess.SubprocessError:
            raise Refusal(f"{script}: this kernel did not confine the script's shell, so nothing was run") from None
        try:
            done.returncode = running.wait(SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also stop programs that the script left in the background
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    done.output = (folder / "output").read_text(errors="replace")
    try:
        _read(log, done)
    except (ValueError, IndexError):
        raise Refusal(f"{script} wrote into the record of its own calls: read it before you start it") from None
    return done


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _read(log: Path, done: Record) -> None:
    """Add the log's calls to ``done``; a call is the number of its words and the words, each ended by a zero byte."""
    parts = log.read_bytes().decode(errors="replace").split("\0")[:-1]
    while parts:
        size = int(parts[0])
        if not 4 <= size < len(parts):
            raise ValueError("not a record of calls")
        cwd, outer, tasks, *words = parts[1 : size + 1]
        parts = parts[size + 1 :]
        if words[0] == EMPTY:
            done.empty[words[1]] = words[2]
            continue
        words = [*(word for word in outer.split(WITHIN) if word), *words]
        done.calls.append(Call(words, Path(cwd), int(tasks) if tasks.isdecimal() and len(tasks) < 10 else None))
