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
timeout time nice ionice stdbuf docker podman singularity apptainer enroot sudo env tee""".split()
SECONDS = 60  # a script that only starts something takes far less
WITHIN = "\x1f"


class Call(NamedTuple):
    """One command that the script called, and where."""

    words: list[str]
    cwd: Path


@dataclass
class Record:
    """What a script did: the commands it called, and where its files went."""

    folder: Path  # what was written: a file /a/b is there as files/a/b
    calls: list[Call] = field(default_factory=list)
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
    setup.write_text(SETUP)
    bash = shutil.which("bash") or "/bin/bash"
    for name in READERS:
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    for name in STARTERS:
        _program(programs / name, f'#!{bash}\n_called "${{0##*/}}" "$@"\n')
    for name in ("bash", "sh"):
        _program(programs / name, f'#!{bash}\n_shell "$@"\n')
    environment = {
        **environment,
        "PATH": str(programs),
        "BASH_ENV": str(setup),
        "CHECK_LOG": str(log),
        "CHECK_FILES": str(files),
        "TMPDIR": str(files / "tmp"),  # of bash's own here-documents
        "CHECK_BASH": bash,
        "CHECK_BIN": str(programs),
        "CHECK_MKDIR": shutil.which("mkdir") or "/bin/mkdir",
        "CHECK_FILTER": shlex.join(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("launch_redirect.py").resolve())]
        ),
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
        done.calls = _read(log)
    except (ValueError, IndexError):
        raise Refusal(f"{script} wrote into the record of its own calls: read it before you start it") from None
    return done


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _read(log: Path) -> list[Call]:
    """The log holds, for each call, the number of its words and the words, all ended by a zero byte."""
    parts = log.read_bytes().decode(errors="replace").split("\0")[:-1]
    found = []
    while parts:
        size = int(parts[0])
        if not 2 <= size < len(parts):
            raise ValueError("not a record of calls")
        cwd, outer, *words = parts[1 : size + 1]
        found.append(Call([*(word for word in outer.split(WITHIN) if word), *words], Path(cwd)))
        parts = parts[size + 1 :]
    return found


# A newline follows upon what $(...) has read, which cuts it off: a backslash at a script's end goes on to nothing then.
# The shell's side. Functions step in before programs; what is no program ends in command_not_found_handle.
SETUP = r"""
set -CT
_log() { { printf '%s\0' "$(( $# + 2 ))" "$PWD" "${CHECK_OUTER:-}" "$@"; } >> "$CHECK_LOG"; }
_called() {
    _log "$@"
    case "${1##*/}" in
        nvidia-smi|rocm-smi) for _gpu in 0 1 2 3 4 5 6 7; do echo "GPU $_gpu"; done ;;
        scontrol) echo localhost ;;
        tee) cat ;;
        srun|mpirun|mpiexec|docker|podman|singularity|apptainer|enroot) _within "$@" ;;
        numactl|nohup|timeout|time|nice|ionice|stdbuf|sudo|env) _within "$@" ;;
    esac
    return 0
}
_within() {
    local outer="" word
    while [ $# -gt 0 ]; do
        case "${1##*/}" in
            bash|sh) shift; CHECK_OUTER="${CHECK_OUTER:-}$outer" _shell "$@"; return 0 ;;
            *.sh) if [ -f "$1" ]; then CHECK_OUTER="${CHECK_OUTER:-}$outer" _shell "$@"; return 0; fi ;;
        esac
        outer="$outer$1"$'\x1f'
        shift
    done
}
_filter() { builtin eval "command $CHECK_FILTER \"\$@\""; }
_shell() {
    export CHECK_OUTER
    local text flags=()
    while [ $# -gt 0 ]; do
        case "$1" in
            -c|-lc|-ic|-exc|-xc|-ec) text=$(printf '%s\n' "$2" | _filter); shift 2
                command "$CHECK_BASH" "${flags[@]}" -c "$text"$'\n' "$@"; return ;;
            -l|-i|--login|-) shift ;;
            -o) flags+=("$1" "$2"); shift 2 ;;
            -*) flags+=("$1"); shift ;;
            *) break ;;
        esac
    done
    [ $# -gt 0 ] || return 0
    text=$(_filter < "$1") || return 0
    command "$CHECK_BASH" "${flags[@]}" -c "$text"$'\n' "$@"
}
_elsewhere() {
    case "$1" in
        /dev/null|/dev/std*|/dev/fd/*|/dev/tty|"$CHECK_FILES"*|"") printf '%s' "$1"; return ;;
        /*) set -- "$CHECK_FILES$1" ;;
        *) set -- "$CHECK_FILES$PWD/$1" ;;
    esac
    command "$CHECK_MKDIR" -p "${1%/*}"
    printf '%s' "$1"
}
_back() { case "$1" in /*) [ -f "$CHECK_FILES$1" ] && echo "$CHECK_FILES$1" || echo "$1" ;;
          *) [ -f "$CHECK_FILES$PWD/$1" ] && echo "$CHECK_FILES$PWD/$1" || echo "$1" ;; esac; }
cat() {
    local words=() word
    for word in "$@"; do words+=("$(_back "$word")"); done
    command cat "${words[@]}"
}
sed() { case " $* " in *" -i"*|*" --in-place"*) _called sed "$@" ;; *) command sed "$@" ;; esac; }
command_not_found_handle() { _called "$@"; }
_by_path() {
    case "$1" in
        */bash|*/sh) shift; _shell "$@" ;;
        */*) if [ -L "$CHECK_BIN/${1##*/}" ]; then
                 command "$CHECK_BIN/${1##*/}" "${@:2}"
                 return
             fi ;;&
        *) if [ -f "$1" ] && IFS= read -r -n 2 _mark < "$1" && [ "$_mark" = "#!" ] && [[ "$1" == *.sh ]]; then
               _shell "$@"
           else
               _called "$@"
           fi ;;
    esac
}
_exec() { "$@"; builtin exit $?; }
# A command that is named with its path is no matter of PATH: a function of that name steps in before it runs.
_before() {
    { local -; set +x; } 2> /dev/null
    local word text=$1 assigned="^[A-Za-z_][A-Za-z_0-9]*=([^[:space:]\"']*|'[^']*'|\"[^\"]*\")[[:space:]]+(.*)$"
    while [[ $text =~ $assigned ]]; do text=${BASH_REMATCH[2]}; done
    word=${text%%[[:space:]]*}
    [[ "$word" =~ ^\"?[A-Za-z0-9_.+/@*\$\{\}-]+\"?$ && "${word%\"}" == "${word#\"}" || "$word" == \"*\" ]] || return 0
    case "$word" in _*|command|builtin) return 0 ;; */*|*'$'*) ;; *) return 0 ;; esac
    set -- "${CHECK_ARGS[@]}"
    builtin eval "word=($word)" 2> /dev/null || return 0
    [[ "$word" =~ ^[A-Za-z0-9_.+/-]*/[A-Za-z0-9_.+-]+$ ]] || return 0
    builtin eval "function $word { _by_path $word \"\$@\"; }"
}
trap '{ CHECK_ARGS=("$@"); _before "$BASH_COMMAND"; } 2> /dev/null' DEBUG
eval() { builtin eval "$(printf '%s\n' "$*" | _filter)"; }
source() {
    [ -f "$1" ] || { _called source "$@"; return 0; }
    builtin eval "$(_filter "$1" < "$1")"$'\n'
}
.() { source "$@"; }
cd() { builtin cd "$@" 2> /dev/null || _log cd "$@"; }
pushd() { cd "$@"; }
popd() { :; }
kill() { :; }
sleep() { :; }
ulimit() { :; }
"""
