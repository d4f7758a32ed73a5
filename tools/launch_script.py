# SPDX-License-Identifier: Apache-2.0
"""Runs a launch script with every program replaced by a stand-in, to learn which command it would start.

Bash runs the script, so variables, loops and sourced files mean what they mean. But PATH holds only programs that
print (cat, grep, date ...) and stand-ins that write their own command line down; all else that the script calls (wget,
module, nvidia-smi, rm ...) is written down and not run. What the script writes with ``>`` goes to a folder of its own.

Stand-ins are for scripts that mean well: bash has a hundred ways around them. What holds against the others is the
kernel (``launch_confined.py``): the whole of it runs without the right to write elsewhere, to connect, or to signal.
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

# Programs that only read and print; a script works out its settings with them.
READERS = """awk basename bc cat cut date dirname egrep expr fgrep gawk getconf getopt grep head hostname id join ls
mawk nproc od paste printf readlink realpath rev sed seq sort stat tac tail test tr true false uname uniq wc
whoami""".split()
# Programs that a script may start by way of another program (exec, xargs), where the shell cannot step in.
STARTERS = """torchrun deepspeed srun mpirun mpiexec aprun jsrun python python3 accelerate ft_launcher numactl nohup
timeout time nice ionice stdbuf docker podman singularity apptainer enroot sudo env tee sbatch""".split()
SECONDS = 60  # a script that only starts something takes far less
WITHIN = "\x1f"
EMPTY = ":empty"  # in the record: a flag, and the empty variable that follows it


class Call(NamedTuple):
    """One command that the script called, and where."""

    words: list[str]
    cwd: Path
    tasks: int | None = None  # of the Slurm job that it belongs to


@dataclass
class Record:
    """What a script did: the commands it called, and where its files went."""

    folder: Path  # what was written: a file /a/b is there as files/a/b
    calls: list[Call] = field(default_factory=list)
    empty: dict[str, str] = field(default_factory=dict)  # flags, and the variables without a value that follow them
    output: str = ""
    returncode: int | None = None  # None: it was stopped after SECONDS


def record(
    script: Path, arguments: list[str], cwd: Path, environment: dict[str, str], folder: Path, confined: bool = True
) -> Record:
    """Run ``script`` in ``cwd`` with stand-ins and say which commands it called.

    Args:
        environment: its variables; PATH, BASH_ENV and TMPDIR are replaced.
        folder: empty; stand-ins and what the script writes go there.
        confined: whether the kernel keeps it from writing anywhere else, from connecting and from signals.

    Raises:
        Refusal: the kernel did not confine it, and nothing was run; or the script damaged the record of its calls.
    """
    programs, log, setup, files = folder / "bin", folder / "calls", folder / "setup", folder / "files"
    programs.mkdir(parents=True)
    (files / "tmp").mkdir(parents=True)
    log.touch()
    shutil.copy(Path(__file__).with_name("launch_setup.sh"), setup)
    bash = shutil.which("bash") or "/bin/bash"
    for name in READERS:
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
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
        "TMPDIR": str(files / "tmp"),  # of bash's own here-documents
        "CHECK_BASH": bash,
        "CHECK_CHAIN": str(script),  # of jobs that are submitted within one another
        "CHECK_BIN": str(programs),
        "CHECK_MKDIR": shutil.which("mkdir") or "/bin/mkdir",
        "CHECK_FILTER": shlex.join([*python, str(Path(__file__).with_name("launch_redirect.py").resolve())]),
        "CHECK_SBATCH": shlex.join([*python, str(Path(__file__).with_name("launch_sbatch.py").resolve())]),
        "CHECK_PYTHON": shlex.join(python) if confined else "",  # nobody's code runs where the kernel does not hold it
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
        finally:  # and whatever it left in the background
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
    """The log holds, for each call, the number of its words and the words, all ended by a zero byte."""
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
